"""The embedded engine: poll, interrupt, failures, weights, and the Engine contract."""

import copy
import time

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_helpers import SIZES, VOCABULARY, CharacterTokenizer, build, request, run, worst_difference
from gspo.engines import causal
from gspo.engines.check import check_engine, drain
from gspo.engines.local import LocalEngine
from gspo.errors import EngineDied, EngineError
from gspo.policy.logprobs import logit_transform_of, logprobs_of
from gspo.types import FinishReason


@pytest.fixture(scope="module")
def model():
    return build()


# --- poll, interrupt, failures -------------------------------------------------------------------------------


def test_poll_returns_completions_as_they_finish(model):
    engine = LocalEngine(model)
    assert engine.poll() == []
    engine.submit([request("long", max_new_tokens=9), request("short", max_new_tokens=2)])
    assert [c.request_id for c in engine.poll()] == ["short"]
    assert [c.request_id for c in engine.poll()] == ["long"]
    assert engine.poll(0.0) == []


def test_poll_keeps_its_time_limit(model):
    engine = LocalEngine(model)
    engine.submit([request("r", max_new_tokens=80)])
    assert engine.poll(timeout_s=0.0) == []  # one step was made
    deadline = time.monotonic() + 60
    while not (finished := engine.poll(timeout_s=0.001)) and time.monotonic() < deadline:
        pass
    assert [len(c.token_ids) for c in finished] == [80]


def test_interrupt_returns_prefixes_that_can_be_resumed(model):
    requests = [request(f"{n}", (5, 6, n), seed=n, max_new_tokens=20) for n in range(6)]
    whole = run(model, requests)
    engine = LocalEngine(model, max_batch_size=4, version=7)
    engine.submit(requests)
    for _ in range(5):
        assert engine.poll(0.0) == []
    partial = {c.request_id: c for c in engine.interrupt()}
    assert {c.finish_reason for c in partial.values()} == {FinishReason.INTERRUPTED}
    assert sorted(len(c.token_ids) for c in partial.values()) == [0, 0, 6, 6, 6, 6]
    engine.load_weights((), 8)
    engine.submit(
        [
            request(f"{r.id} again", [*r.token_ids, *partial[r.id].token_ids], seed=r.seed, max_new_tokens=left)
            for r in requests
            if (left := 20 - len(partial[r.id].token_ids))
        ]
    )
    for name, rest in drain(engine).items():
        start = partial[name.removesuffix(" again")]
        joined = np.concatenate([start.token_ids, rest.token_ids])
        assert np.array_equal(joined, whole[name.removesuffix(" again")].token_ids)
        assert set(start.versions.tolist()) <= {7} and set(rest.versions.tolist()) == {8}


def test_a_step_that_raises_loses_no_request(model, monkeypatch):
    requests = [request(f"{n}", (5, 6, n), seed=n, max_new_tokens=10) for n in range(3)]
    whole = run(model, requests)
    engine = LocalEngine(model, max_batch_size=2)
    engine.submit(requests)
    engine.poll(0.0)
    with monkeypatch.context() as broken:
        broken.setattr(causal.CausalModel, "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            engine.poll()
    with pytest.raises(EngineError, match="interrupt"):
        engine.poll()
    partial = {c.request_id: c for c in engine.interrupt()}
    assert sorted(len(c.token_ids) for c in partial.values()) == [0, 2, 2]
    engine.submit(requests)
    assert worst_difference(whole, drain(engine)) < 1e-5


def test_a_prefill_that_raises_loses_no_request(model, monkeypatch):
    engine = LocalEngine(model)
    engine.submit([request("a"), request("b")])
    with monkeypatch.context() as broken:
        broken.setattr(causal.CausalModel, "prefill", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):
            engine.poll()
    assert sorted(c.request_id for c in engine.interrupt()) == ["a", "b"]


# --- weights -------------------------------------------------------------------------------------------------


def test_shared_parameters_are_sampled_as_they_are_now():
    model = build()
    engine = LocalEngine(model, version=3)
    engine.submit([request("r", max_new_tokens=6)])
    first = drain(engine)["r"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.load_weights((), 4)
    engine.submit([request("r", max_new_tokens=6)])
    second = drain(engine)["r"]
    assert first.versions.tolist() == [3] * 6 and second.versions.tolist() == [4] * 6
    assert abs(float(first.logprobs[0] - second.logprobs[0])) > 1e-4
    assert worst_difference({"r": second}, run(model, [request("r", max_new_tokens=6)])) < 1e-6


def test_weights_are_refused_with_requests_in_flight(model):
    engine = LocalEngine(model)
    engine.submit([request("r", max_new_tokens=4)])
    with pytest.raises(EngineError, match="in flight"):
        engine.load_weights((), 1)
    drain(engine)
    engine.load_weights((), 1)
    assert engine.version == 1


def test_a_copy_takes_a_complete_set():
    source, engine_model = build(seed=1), build(seed=2)
    engine = LocalEngine(engine_model, shared=False)
    assert engine.capabilities.weight_sources == ("tensors",)
    engine.load_weights(iter(list(source.named_parameters())), 9)
    engine.submit([request("r", max_new_tokens=6)])
    completion = drain(engine)["r"]
    assert completion.versions.tolist() == [9] * 6
    assert worst_difference({"r": completion}, run(source, [request("r", max_new_tokens=6)])) == 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pairs: pairs[:-1], "missing"),
        (lambda pairs: [*pairs, ("model.extra", torch.zeros(1))], "unknown"),
        (lambda pairs: [(n, t[:-1] if n.endswith("norm.weight") else t) for n, t in pairs], "shape"),
        (lambda pairs: [(n, t.bfloat16()) for n, t in pairs], "precision"),
        (lambda pairs: "folder", "path"),
    ],
)
def test_a_set_that_does_not_fit_changes_nothing_and_fails_the_engine(spoil, said):
    source, engine_model = build(seed=1), build(seed=2)
    before = copy.deepcopy(engine_model.state_dict())
    engine = LocalEngine(engine_model, shared=False)
    pairs = list(source.state_dict().items())
    with pytest.raises(EngineError, match=said):
        engine.load_weights(spoil(pairs), 1)
    for name, tensor in engine_model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(EngineError, match="complete set"):
        engine.submit([request("r")])
    engine.load_weights(pairs, 2)
    engine.submit([request("r", max_new_tokens=2)])
    assert drain(engine)["r"].versions.tolist() == [2, 2]


def test_float32_weights_may_go_into_a_bfloat16_copy_and_tied_names_count_once():
    torch.manual_seed(0)
    source = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    engine_model = copy.deepcopy(source).bfloat16()
    with torch.no_grad():
        engine_model.model.embed_tokens.weight.zero_()
    pairs = list(source.named_parameters())
    assert "lm_head.weight" not in dict(pairs)
    LocalEngine(engine_model, shared=False).load_weights(pairs, 1)
    assert torch.equal(engine_model.lm_head.weight, source.lm_head.weight.bfloat16())


# --- construction and the contract ---------------------------------------------------------------------------


def test_wrong_use_is_named(model):
    with pytest.raises(EngineError, match="max_batch_size"):
        LocalEngine(model, max_batch_size=0)
    with pytest.raises(EngineError, match="max_model_len"):
        LocalEngine(model, max_model_len=97)
    with pytest.raises(EngineError, match="transformers causal LM"):
        LocalEngine(torch.nn.Linear(2, 2))
    gemma = build("gemma2")
    with pytest.raises(EngineError, match="logit_transform"):
        LocalEngine(gemma, logit_transform=logit_transform_of(gemma.config))
    engine = LocalEngine(model)
    engine.close()
    with pytest.raises(EngineDied):
        engine.submit([request("r")])


def test_capabilities(model):
    capabilities = LocalEngine(model).capabilities
    assert (capabilities.vocab_size, capabilities.max_model_len) == (VOCABULARY, 96)
    assert capabilities.seeds and capabilities.resume_seed == "continues" and not capabilities.routes
    assert not capabilities.stop_strings
    assert LocalEngine(build("gpt2")).capabilities.max_model_len == 96
    assert LocalEngine(model, tokenizer=CharacterTokenizer(), max_model_len=50).capabilities.stop_strings


@pytest.mark.parametrize("shared", [True, False])
def test_the_engine_contract(model, shared):
    def score(prompt, completion, temperature):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return logprobs_of(logits, torch.tensor(completion), temperature).tolist()

    found = check_engine(
        lambda: LocalEngine(model, max_batch_size=4, shared=shared),
        [[5, 6, 7], [9, 8, 7, 6, 5], [3]],
        score=score,
        weights=None if shared else list(model.named_parameters()),
        tolerance=1e-5,
    )
    assert [check for check in found if not check.passed or check.skipped] == []
