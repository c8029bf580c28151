"""The scripted engine, the stop watch, and check_engine: it passes a right engine and finds each wrong one."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from engine_helpers import CharacterTokenizer, request
from gspo.engines.base import Engine
from gspo.engines.check import check_engine, drain
from gspo.engines.scripted import Reply, ScriptedEngine, uniform
from gspo.engines.stops import StopWatch, TokenTexts
from gspo.errors import EngineDied, EngineError
from gspo.types import FinishReason

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def ask(engine, *requests):
    engine.submit(requests)
    completions = drain(engine)
    return [completions[r.id] for r in requests]


# --- scripted -----------------------------------------------------------------------------------------------


def test_a_table_hands_out_replies_in_turn():
    engine = ScriptedEngine({(5, 6, 7): [[1, 2], Reply([3], [-0.5])]}, version=4)
    first, second, third = ask(engine, request("a"), request("b"), request("c"))
    assert [c.token_ids.tolist() for c in (first, second, third)] == [[1, 2], [3], [1, 2]]
    assert first.logprobs.tolist() == [-1.0, -1.0] and second.logprobs.tolist() == [-0.5]
    assert first.versions.tolist() == [4, 4] and first.finish_reason is FinishReason.STOP
    assert not engine.capabilities.seeds


def test_a_function_sees_the_request_and_the_version():
    engine = ScriptedEngine(lambda r, version: [version, len(r.token_ids)])
    assert ask(engine, request("a"))[0].token_ids.tolist() == [0, 3]
    engine.load_weights("anything", 9)
    assert ask(engine, request("b"))[0].token_ids.tolist() == [9, 3]
    assert engine.loads == [9] and [r.id for r in engine.requests] == ["a", "b"]


def test_an_unknown_prompt_is_named():
    with pytest.raises(EngineError, match=r"\(5, 6, 7\)"):
        ScriptedEngine({(1,): [[2]]}).submit([request("a")])


@pytest.mark.parametrize(
    ("sampling", "ids", "reason"),
    [
        ({"max_new_tokens": 9}, [1, 2, 3, 2, 4], FinishReason.STOP),
        ({"max_new_tokens": 9, "eos_token_ids": (8, 2)}, [1, 2], FinishReason.STOP),
        ({"max_new_tokens": 3}, [1, 2, 3], FinishReason.LENGTH),
        ({"max_new_tokens": 2, "eos_token_ids": (2,)}, [1, 2], FinishReason.STOP),
        ({"max_new_tokens": 9, "stop": ("cd",)}, [1, 2, 3], FinishReason.STOP_STRING),
    ],
)
def test_replies_are_cut_like_a_models_text(sampling, ids, reason):
    engine = ScriptedEngine(lambda *_: [1, 2, 3, 2, 4], tokenizer=CharacterTokenizer())
    (completion,) = ask(engine, request("a", **sampling))
    assert (completion.token_ids.tolist(), completion.finish_reason) == (ids, reason)


def test_the_context_window_and_a_reason_of_the_scripts_own():
    engine = ScriptedEngine(lambda *_: [1, 2, 3], max_model_len=5)
    (completion,) = ask(engine, request("a"))
    assert (len(completion.token_ids), completion.finish_reason) == (2, FinishReason.CONTEXT_LENGTH)
    engine = ScriptedEngine(lambda *_: Reply([1], finish_reason=FinishReason.LENGTH))
    assert ask(engine, request("a"))[0].finish_reason is FinishReason.LENGTH


def test_an_empty_reply_is_a_completion_without_tokens():
    (completion,) = ask(ScriptedEngine(lambda *_: []), request("a"))
    assert len(completion.token_ids) == 0 and completion.finish_reason is FinishReason.STOP


def test_interrupt_cuts_where_polling_stood():
    engine = ScriptedEngine({(5, 6, 7): [[1, 2, 3, 4, 5, 6]]}, tokens_per_poll=2)
    engine.submit([request("a"), request("b")])
    assert engine.poll(0.0) == [] and engine.poll(0.0) == []
    engine.submit([request("c")])
    partial = {c.request_id: c.token_ids.tolist() for c in engine.interrupt()}
    assert partial == {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4], "c": []}
    assert engine.poll() == []


def test_uniform_continues_a_resubmitted_prefix():
    engine = ScriptedEngine(uniform(50), vocab_size=50)
    (whole,) = ask(engine, request("a", max_new_tokens=9))
    (rest,) = ask(engine, request("b", [5, 6, 7, *whole.token_ids[:4]], max_new_tokens=5))
    assert rest.token_ids.tolist() == whole.token_ids[4:].tolist()
    assert whole.logprobs.tolist() == pytest.approx([-math.log(50)] * 9)


def test_it_needs_no_torch():
    code = "import sys, gspo.engines.scripted, gspo.engines.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_is_an_engine():
    assert isinstance(ScriptedEngine({}), Engine)


# --- stop strings -------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Every id is a byte, as in byte-level vocabularies; pieces of characters decode to U+FFFD. 256 is "ab"."""

    calls = 0

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        ByteTokenizer.calls += 1
        return b"".join(b"ab" if i == 256 else bytes([i]) for i in ids).decode("utf-8", errors="replace")


def first_stop(ids, stops, tokenizer=None):
    watch = StopWatch(TokenTexts(tokenizer or ByteTokenizer()), stops)
    return next((index for index, token in enumerate(ids) if watch.push(token)), None)


@pytest.mark.parametrize(
    ("text", "stops", "end"),
    [
        ("one\n\ntwo", ("\n\n",), "one\n\n"),
        ("say é now", ("é",), "say é"),
        ("日本語です", ("語で",), "日本語で"),
        ("no stop here", ("Stop",), None),
        ("a b c", ("b ",), "a b "),
        ("xyz first", ("z", "y"), "xy"),
    ],
)
def test_a_stop_string_ends_at_its_last_byte(text, stops, end):
    found = first_stop(text.encode(), stops)
    assert found == (None if end is None else len(end.encode()) - 1)


def test_a_stop_string_may_end_inside_a_token_or_span_tokens():
    assert first_stop([*b"xx", 256], ("xa",)) == 2
    assert first_stop([256, *b"c"], ("bc",)) == 1


def test_most_tokens_are_not_decoded_again():
    ids = b"the quick brown fox" * 20
    first_stop(ids, ("!",))
    ByteTokenizer.calls = 0
    assert first_stop(ids, ("!",)) is None
    assert ByteTokenizer.calls == len(set(ids))  # each token's own text, once


def test_the_window_holds_a_long_stop_string():
    stop = "終わり" * 10
    assert first_stop(("前" * 50 + stop).encode(), (stop,)) == len(("前" * 50 + stop).encode()) - 1


# --- check_engine -------------------------------------------------------------------------------------------


def make():
    return ScriptedEngine(uniform(50), vocab_size=50, max_model_len=40, tokens_per_poll=3)


def failures(make_engine, **options):
    return [check.name for check in check_engine(make_engine, PROMPTS, **options) if not check.passed]


def score(prompt, completion, temperature):
    return [-math.log(50)] * len(completion)


def test_a_right_engine_passes_every_check():
    checks = check_engine(make, PROMPTS, score=score)
    assert all(check.passed and not check.skipped for check in checks), checks
    assert len({check.name for check in checks}) == 15


def test_what_an_engine_does_not_claim_is_skipped():
    checks = check_engine(lambda: ScriptedEngine({tuple(p): [range(8)] for p in PROMPTS}), PROMPTS)
    skipped = {check.name for check in checks if check.skipped}
    assert any("seed" in name for name in skipped) and any("context" in name for name in skipped)


class Wrapped:
    """The right engine with one thing made wrong."""

    def __init__(self, **wrong):
        self.engine, self.wrong = make(), wrong
        self.memory = []

    @property
    def capabilities(self):
        return self.engine.capabilities

    def submit(self, requests):
        self.engine.submit([self.wrong.get("request", lambda r: r)(r) for r in requests])

    def poll(self, timeout_s=None):
        change = self.wrong.get("completion", lambda c: c)
        return [change(c) for c in self.engine.poll(timeout_s)][: self.wrong.get("most")]

    def interrupt(self):
        return self.engine.interrupt()[: self.wrong.get("most")]

    def load_weights(self, weights, version):
        if self.wrong.get("impatient"):
            self.engine.interrupt()
        self.engine.load_weights(weights, 0 if self.wrong.get("deaf") else version)

    def close(self):
        if not self.wrong.get("immortal"):
            self.engine.close()


def alter(**changes):
    return lambda c: dataclasses.replace(c, **{name: change(c) for name, change in changes.items()})


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"completion": alter(logprobs=lambda c: c.logprobs[:-1])}, "shapes"),
        ({"completion": alter(logprobs=lambda c: c.logprobs.astype(np.float64))}, "shapes"),
        ({"completion": alter(logprobs=lambda c: c.logprobs * np.nan)}, "shapes"),
        ({"completion": alter(token_ids=lambda c: c.token_ids + 50)}, "shapes"),
        ({"completion": alter(finish_reason=lambda c: FinishReason.STOP)}, "reason length"),
        ({"completion": alter(error=lambda c: None)}, "bad requests"),
        ({"completion": alter(logprobs=lambda c: c.logprobs - 0.01)}, "agree with another"),
        ({"most": 2}, "interrupt returns"),
        ({"impatient": True}, "refused with requests in flight"),
        ({"deaf": True}, "carry the version"),
        ({"immortal": True}, "close is"),
        (
            {"request": lambda r: dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, eos_token_ids=()))},
            "end-of-sequence",
        ),
        ({"request": lambda r: dataclasses.replace(r, seed=len(r.id))}, "seed fixes"),
        (
            {"request": lambda r: dataclasses.replace(r, seed=r.seed + len(r.token_ids))},
            "resubmitted prefix",
        ),
        (
            {"request": lambda r: dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0))},
            "greedy",
        ),
    ],
)
def test_a_wrong_engine_is_found(wrong, found):
    assert any(found in name for name in failures(lambda: Wrapped(**wrong), score=score))


def test_an_engine_that_raises_fails_the_check_and_not_the_caller():
    class Dead(Wrapped):
        def poll(self, timeout_s=None):
            raise EngineDied("gone")

    checks = check_engine(Dead, PROMPTS)
    assert not checks[0].passed and "gone" in checks[0].detail


def test_two_prompts_are_needed():
    with pytest.raises(ValueError, match="two prompts"):
        check_engine(make, PROMPTS[:1])
