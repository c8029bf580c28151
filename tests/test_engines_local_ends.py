"""The embedded engine: why completions end, and requests that it refuses."""

import numpy as np
import pytest
import torch

from engine_helpers import VOCABULARY, CharacterTokenizer, build, request, run
from gspo.engines.check import drain
from gspo.engines.local import LocalEngine
from gspo.errors import EngineError
from gspo.types import FinishReason


@pytest.fixture(scope="module")
def model():
    return build()


# --- why a completion ends -----------------------------------------------------------------------------------


def test_every_end_of_sequence_id_ends_it_and_stays(model):
    free = run(model, [request("free", max_new_tokens=20)])["free"]
    assert free.finish_reason is FinishReason.LENGTH and len(free.token_ids) == 20
    for wanted in {int(token) for token in free.token_ids}:
        first = int(np.flatnonzero(free.token_ids == wanted)[0])
        for ends in ((wanted,), (60_000, wanted), (wanted, 60_000)):
            ended = run(model, [request("r", max_new_tokens=20, eos_token_ids=ends)])["r"]
            assert np.array_equal(ended.token_ids, free.token_ids[: first + 1])
            assert ended.finish_reason is FinishReason.STOP


def test_an_end_of_sequence_id_in_the_prompt_ends_nothing(model):
    free = run(model, [request("r", (5, 7, 7), max_new_tokens=3)])["r"]
    others = tuple(token for token in range(VOCABULARY) if token not in free.token_ids)
    assert 7 in others or 5 in others
    ended = run(model, [request("r", (5, 7, 7), max_new_tokens=3, eos_token_ids=others)])["r"]
    assert np.array_equal(ended.token_ids, free.token_ids)


def test_the_last_token_of_the_budget_may_be_the_end(model):
    free = run(model, [request("free", max_new_tokens=20)])["free"]
    last = next(i for i in range(1, 20) if free.token_ids[i] not in free.token_ids[:i])
    sampling = {"max_new_tokens": last + 1, "eos_token_ids": (int(free.token_ids[last]),)}
    assert run(model, [request("r", **sampling)])["r"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "budget", "tokens", "reason"),
    [
        (3, 5, 5, FinishReason.LENGTH),
        (5, 5, 5, FinishReason.LENGTH),  # both limits at once: the request's own is named
        (6, 5, 4, FinishReason.CONTEXT_LENGTH),
        (9, 5, 1, FinishReason.CONTEXT_LENGTH),
    ],
)
def test_length_and_context_length_are_told_apart(model, prompt, budget, tokens, reason):
    completion = run(model, [request("r", range(prompt), max_new_tokens=budget)], max_model_len=10)["r"]
    assert (len(completion.token_ids), completion.finish_reason) == (tokens, reason)


def test_learned_positions_reach_the_end_of_the_window_beside_finished_rows():
    model = build("gpt2")
    ids = [token % VOCABULARY for token in range(95)]
    requests = [request("short", ids[:94], max_new_tokens=1)]
    requests += [request(f"r{seed}", ids[:29], seed=seed, max_new_tokens=67) for seed in range(8)]
    requests += [request("long", ids[:89], seed=9, max_new_tokens=7)]
    completions = run(model, requests)
    assert [len(completions[r.id].token_ids) for r in requests] == [1, *[67] * 8, 7]
    assert completions["long"].finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_it_and_its_tokens_stay(model):
    free = run(model, [request("free", max_new_tokens=20)])["free"]
    text = CharacterTokenizer().decode(free.token_ids)
    stop = text[6:9]
    first = text.index(stop) + 3
    requests = [request("r", max_new_tokens=20, stop=("never", stop)), request("other", max_new_tokens=20)]
    completions = run(model, requests, tokenizer=CharacterTokenizer())
    assert completions["r"].finish_reason is FinishReason.STOP_STRING
    assert np.array_equal(completions["r"].token_ids, free.token_ids[:first])
    assert np.array_equal(completions["other"].token_ids, free.token_ids)


def test_a_stop_string_may_be_complete_with_the_first_token(model):
    free = run(model, [request("free", max_new_tokens=2)])["free"]
    stop = CharacterTokenizer().decode(free.token_ids[:1])
    completion = run(model, [request("r", stop=(stop,))], tokenizer=CharacterTokenizer())["r"]
    assert (len(completion.token_ids), completion.finish_reason) == (1, FinishReason.STOP_STRING)


# --- requests that cannot be sampled -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (request("bad", ()), "empty"),
        (request("bad", (5, VOCABULARY)), "outside the vocabulary"),
        (request("bad", (-1,)), "outside the vocabulary"),
        (request("bad", range(60)[:20]), "context window holds 20"),
        (request("bad", max_new_tokens=0), "max_new_tokens"),
        (request("bad", temperature=-0.1), "temperature"),
        (request("bad", temperature=float("nan")), "temperature"),
        (request("bad", seed=-1), "seed"),
        (request("bad", stop=("x",)), "tokenizer"),
    ],
)
def test_a_refused_request_is_an_error_and_harms_no_other(model, bad, said):
    good = request("good", max_new_tokens=4)
    completions = run(model, [good, bad], max_model_len=20)
    assert completions["bad"].finish_reason is FinishReason.ERROR
    assert said in completions["bad"].error and len(completions["bad"].token_ids) == 0
    assert len(completions["good"].token_ids) == 4 and completions["good"].error is None


def test_an_empty_stop_string_is_refused(model):
    completion = run(model, [request("r", stop=("",))], tokenizer=CharacterTokenizer())["r"]
    assert completion.finish_reason is FinishReason.ERROR


def test_a_duplicate_id_in_flight_is_an_error(model):
    engine = LocalEngine(model)
    with pytest.raises(EngineError, match="own id"):
        engine.submit([request("a"), request("a")])
    engine.submit([request("a", max_new_tokens=2)])
    with pytest.raises(EngineError, match="own id"):
        engine.submit([request("a")])
    assert set(drain(engine)) == {"a"}
    engine.submit([request("a", max_new_tokens=2)])
    assert set(drain(engine)) == {"a"}


def test_logits_that_are_not_finite_end_only_in_errors():
    model = build()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    completion = run(model, [request("r", max_new_tokens=4)])["r"]
    assert completion.finish_reason is FinishReason.ERROR
    assert "not finite" in completion.error and len(completion.token_ids) == len(completion.logprobs) == 0


def test_tokens_of_minus_infinity_are_never_sampled(model):
    def only_even(logits):
        logits = logits.clone()
        logits[:, 1::2] = -float("inf")
        return logits

    requests = [request(str(seed), seed=seed, max_new_tokens=10) for seed in range(20)]
    for completion in run(model, requests, logit_transform=only_even).values():
        assert not np.any(completion.token_ids % 2)
        assert np.all(np.isfinite(completion.logprobs))
