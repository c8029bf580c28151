"""The contract of reward functions, TRL's signature, and the built-ins other than math."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import RewardError
from gspo.rewards import Grader, RewardSpec, check_reward, example, load_reward
from gspo.rewards.calls import as_number, as_outcome, combine, trl_columns
from gspo.rewards.contract import Outcome, derived_name, dotted_path, unique_names
from gspo.rewards.gym import EVALUATED, may_be_scored, reasoning_gym_reward
from gspo.rewards.text import exact_reward, format_reward, length_reward
from gspo.types import FinishReason, Grading, Prompt, Rollout, TokenRow


def chat(text: str, **metadata: object) -> Rollout:
    row = TokenRow(np.array([1, 2, 3]), np.array([False, True, True]), np.zeros(3, np.float32), np.zeros(3, int))
    messages = ({"role": "user", "content": "hi"},)
    prompt = Prompt(id=f"chat {text}", messages=messages, answer="7", metadata=metadata)
    return Rollout(prompt=prompt, index=0, rows=(row, row), finish_reason=FinishReason.STOP, text=text)


def lengths(completions, **kwargs):
    return [None if text == "skip" else float(len(text)) for text in completions]


def plain(r: Rollout) -> float:
    return float(len(r.text))


# ------------------------------------------------------------------------------------------------------- returns


def test_numbers_of_every_kind_become_floats():
    torch = pytest.importorskip("torch")
    ones = [1, 1.0, True, Fraction(1), np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), np.array([1.0])]
    ones += [torch.tensor(1.0), torch.tensor([1]), torch.tensor(True), torch.tensor(1.0, requires_grad=True)]
    assert [as_number(one) for one in ones] == [1.0] * len(ones)
    assert all(type(as_number(one)) is float for one in ones)
    assert as_number(None) is None


@pytest.mark.parametrize("value", ["1", (1,), [1.0], {"a": 1}, np.array([1, 2]), 1j, object(), b"1", Decimal(1)])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="returned a"):
        as_number(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), 10**400])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="returned"):
        as_number(value)


def test_dicts():
    assert as_outcome({"a": 0.25, "b": 1}) == Outcome(1.25, {"a": 0.25, "b": 1.0})
    assert as_outcome({"a": None, "b": 1}).value == 1.0
    assert as_outcome({"a": None}).value is None and as_outcome({}).value is None
    assert as_outcome({"reward": 2, "parsed": 0}) == Outcome(2.0, {"parsed": 0.0})
    assert as_outcome({"reward": None, "parsed": 0}).value is None
    with pytest.raises(TypeError, match="key"):
        as_outcome({1: 1.0})


@given(st.lists(st.tuples(st.floats(-5, 5), st.none() | st.floats(-5, 5)), min_size=1, max_size=5))
def test_the_reward_is_the_weighted_sum_over_what_applies(pairs):
    specs = [RewardSpec(plain, weight=weight) for weight, _ in pairs]
    verdict = combine(specs, unique_names(specs), [Outcome(value=value) for _, value in pairs])
    applied = [weight * value for weight, value in pairs if value is not None]
    if applied:
        assert verdict.grading is Grading.GRADED
        assert verdict.reward == pytest.approx(sum(applied), abs=1e-12)
    else:
        assert (verdict.reward, verdict.grading) == (None, Grading.NOT_APPLICABLE)
    assert list(verdict.parts.values()) == [value for _, value in pairs]


# ------------------------------------------------------------------------------------------------------ contract


def test_names_paths_and_loading():
    assert [derived_name(f) for f in ("math", "my.module:Score.f", plain, lambda r: 1.0)] == [
        "math",
        "f",
        "plain",
        "reward",
    ]
    assert unique_names([RewardSpec("math"), RewardSpec("math"), RewardSpec(plain)]) == ("math", "math_2", "plain")
    assert dotted_path(plain) == "test_rewards_builtin:plain" and dotted_path(lambda r: 1.0) is None
    assert load_reward("test_rewards_builtin:plain") is plain
    assert load_reward("exact", {"marker": "A:"})(example("A: 7", answer="7"))["reward"] == 1.0
    with pytest.raises(RewardError, match='no option "markr": did you mean "marker"'):
        load_reward("exact", {"markr": "A:"})


def test_importing_rewards_imports_neither_torch_nor_sympy():
    heavy = ("torch", "transformers", "sympy", "math_verify", "reasoning_gym")
    script = f"import sys, gspo.rewards; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


# --------------------------------------------------------------------------------------------------- signature trl


def test_trl_columns_of_texts_and_of_chats():
    columns = trl_columns([example("a", prompt="p", answer="7", metadata={"level": 3}), example("b")])
    assert columns["prompts"] == ["p", ""] and columns["completions"] == ["a", "b"]
    assert columns["level"] == [3, None]
    assert columns["answer"] == columns["solution"] == ["7", None]
    columns = trl_columns([chat("yes", solution="mine")])
    assert columns["prompts"] == [[{"role": "user", "content": "hi"}]]
    assert columns["completions"] == [[{"role": "assistant", "content": "yes"}]]
    assert columns["completion_ids"] == [[2, 3, 2, 3]]
    assert columns["solution"] == ["mine"] and columns["answer"] == ["7"]


def test_trl_functions_see_the_whole_batch_once():
    calls = []

    def batch(completions, answer, **kwargs):
        calls.append(len(completions))
        return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    specs = [RewardSpec(batch, signature="trl", weight=2.0), RewardSpec(plain)]
    with Grader(specs, in_process=True) as grader:
        verdicts = grader.grade([chat("7"), chat("no")])
    assert calls == [2]
    assert [v.reward for v in verdicts] == [3.0, 2.0]
    with Grader([RewardSpec(lengths, signature="trl")]) as grader:
        verdicts = grader.grade([example(t) for t in ("ab", "skip", "")])
        assert grader.grade([]) == []
    assert [v.reward for v in verdicts] == [2.0, None, 0.0]
    assert verdicts[1].grading is Grading.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, 2.0, 3.0], "3 values for 4 completions: they part at index 3"),
        ([1.0] * 5, "5 values for 4 completions"),
        ((1.0,) * 4, "returned a tuple"),
        ({"a": 1.0}, "returned a dict"),
        ("1111", "returned a str"),
        (1.0, "returned a float"),
        (None, "returned a NoneType"),
        ([1.0, 2.0, "1", 2.0], "at index 2: returned a str"),
    ],
)
@pytest.mark.parametrize("in_process", [True, False])
def test_a_wrong_shape_from_trl_functions_names_function_and_index(returned, words, in_process):
    spec = RewardSpec(lambda **columns: returned, signature="trl", name="batchwise")
    with Grader([spec], workers=1, in_process=in_process) as grader:
        for _ in range(2):  # the grader stays usable
            with pytest.raises(RewardError, match=words) as caught:
                grader.grade([example(t) for t in "abcd"])
    assert '"batchwise"' in str(caught.value)


def test_trl_functions_that_fail_leave_the_batch_ungraded_and_nan_its_own_rollout():
    def broken(completions, **kwargs):
        return [1 / 0]

    with Grader([RewardSpec(broken, signature="trl")], in_process=True) as grader:
        verdicts = grader.grade([example("a"), example("b")])
    assert [v.grading for v in verdicts] == [Grading.FAILED] * 2
    assert "ZeroDivisionError" in verdicts[0].error
    nan = RewardSpec(lambda **columns: np.array([1.0, np.nan]), signature="trl")
    with Grader([nan], in_process=True) as grader:
        verdicts = grader.grade([example("a"), example("b")])
    assert [(v.reward, v.grading) for v in verdicts] == [(1.0, Grading.GRADED), (None, Grading.FAILED)]


def test_an_empty_completion_is_graded_like_any_other():
    with Grader([RewardSpec(plain), RewardSpec("math"), RewardSpec("format")]) as grader:
        (verdict,) = grader.grade([example("", answer="1", num_tokens=0)])
    assert verdict.reward == 0.0 and verdict.parts["math/parsed"] == 0.0


# ------------------------------------------------------------------------------------------------------- built-ins


@pytest.mark.parametrize(
    ("text", "answer", "options", "expected"),
    [
        ("work\n#### 72", "72", {}, 1.0),
        ("work\n#### 1,072.", "#### 1072", {}, 1.0),
        ("work\n#### $72", "48+24\n#### 72", {}, 1.0),
        ("#### 71\n#### 72", "72", {}, 1.0),
        ("<think>#### 72</think> #### 71", "72", {}, 0.0),
        ("7+5=12;#132", "132", {"marker": "#"}, 1.0),
        ("#### Paris", "paris", {}, 0.0),
        ("#### Paris", "paris", {"ignore_case": True}, 1.0),
        (" New \n York ", "New York", {"marker": None}, 1.0),
        (r"\boxed{1/2}", "1/2", {"marker": "boxed"}, 1.0),
        (r"\boxed{0.5}", "1/2", {"marker": "boxed"}, 0.0),
    ],
)
def test_exact(text, answer, options, expected):
    assert exact_reward(example(text, answer=answer), **options) == {"reward": expected, "parsed": 1.0}


def test_exact_without_marker_or_reference():
    assert exact_reward(example("72", answer="72")) == {"reward": 0.0, "parsed": 0.0}
    for answer in (None, " "):
        with pytest.raises(RewardError, match="no reference answer"):
            exact_reward(example("#### 72", answer=answer))


def test_format():
    good = "<think>\nwhy\n</think>\n<answer>4</answer>"
    assert format_reward(example(good)) == 1.0
    assert [format_reward(example(t)) for t in (good + "!", "<answer>4</answer>", "")] == [0.0] * 3
    assert format_reward(example(r"so \boxed{4}"), pattern=r"\\boxed\{", search=True) == 1.0
    with pytest.raises(RewardError, match="no regular expression"):
        format_reward(example(""), pattern="(")


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)]
)
def test_soft_overlong_punishment(tokens, expected):
    reward = length_reward(example("x", num_tokens=tokens), max_length=100, cache_length=20)
    assert reward == pytest.approx(expected, abs=1e-15)


def test_soft_overlong_punishment_refuses_impossible_lengths():
    for cache in (0, 101):
        with pytest.raises(RewardError, match="cache_length"):
            length_reward(example("x"), max_length=100, cache_length=cache)


ENTRY = {"question": "3 + 4?", "answer": "7", "metadata": {"source_dataset": "basic_arithmetic", "source_index": 0}}


def gym(text: str, entry: object = ENTRY, **options: object) -> dict[str, float]:
    return reasoning_gym_reward(example(text, metadata={"entry": entry}), **options)  # type: ignore[arg-type]


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    assert gym("<answer>7</answer>") == {"reward": 1.0, "parsed": 1.0, "unresolved": 0.0}
    assert gym("<answer>8</answer>")["reward"] == 0.0
    assert gym("7") == {"reward": 0.0, "parsed": 0.0, "unresolved": 0.0}
    assert gym("7", answer_format="text")["reward"] == 1.0
    for entry in (None, {}, {"question": "?"}):
        with pytest.raises(RewardError, match="no reasoning-gym entry"):
            gym("7", entry)
    with pytest.raises(RewardError, match='no generator "nothing"'):
        gym("7", {**ENTRY, "metadata": {"source_dataset": "nothing"}})


def test_a_scorer_that_stumbles_over_an_answer_scores_zero_with_a_reason():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for name, answer in (("game_of_life", "{}"), ("prime_factorization", "x"), ("prime_factorization", "9" * 5000)):
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
        assert gym(f"<answer>{answer}</answer>", entry) == {"reward": 0.0, "parsed": 1.0, "unresolved": 1.0}
        assert gym(f"<answer>{entry['answer']}</answer>", entry)["reward"] == 1.0
    with pytest.raises(KeyError):  # a broken entry is the task's fault, not the answer's
        gym("<answer>7</answer>", {"answer": "7", "metadata": {"source_dataset": "sudoku"}})


def test_scorers_that_evaluate_see_no_code(tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    planted = tmp_path / "planted"
    attacks = [
        f"__import__('os').system('touch {planted}')",
        f"open('{planted}', 'w')",
        f"[open('{planted}', 'w')]",
        f"(lambda: open('{planted}', 'w'))()",
        "().__class__.__base__.__subclasses__()",
        "9**9**9**9",
    ]
    for name in EVALUATED:
        data = reasoning_gym.create_dataset(name, size=2, seed=3)
        assert all(may_be_scored(name, entry["answer"]) for entry in data if entry["answer"])
        for attack in attacks:
            if name in ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens") and "9**" in attack:
                continue  # refused as well, by its characters
            assert gym(f"<answer>{attack}</answer>", data[0])["reward"] == 0.0
            assert not may_be_scored(name, attack)
    assert not planted.exists()


# ------------------------------------------------------------------------------------------------------ check_reward


def test_check_reward_says_what_is_wrong():
    good = check_reward(RewardSpec("math"), [example(r"\boxed{3}", answer="3"), example("no", answer="3")])
    assert good.ok and [v.reward for v in good.verdicts] == [1.0, 0.0]
    assert "math: 2 examples" in str(good) and "math/parsed 0.0" in str(good)

    calls = []

    def erratic(r: Rollout) -> float:
        calls.append(1)
        return float(len(calls))

    report = check_reward(RewardSpec(erratic), [example("a")], in_process=True)
    assert not report.ok and "got 1.0, then 2.0" in report.problems[0]
    report = check_reward(RewardSpec(lambda r: 0.5), [example("a"), example("b")])
    assert "every example got 0.5" in report.problems[0]
    report = check_reward(RewardSpec(lambda r: int(r.text)), [example("x"), example("1")])
    assert "example 0 is failed" in report.problems[0] and "ValueError" in str(report)
    with pytest.raises(RewardError, match="at least one example"):
        check_reward(RewardSpec("math"), [])
