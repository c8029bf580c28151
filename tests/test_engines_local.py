"""The embedded engine: agreement with a full forward, independence of the batch, ends, interruption, weights."""

import copy
import time

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gspo.engines import causal, local, rows
from gspo.engines.check import check_engine, drain
from gspo.engines.kv import RowCache
from gspo.engines.local import LocalEngine
from gspo.errors import EngineDied, EngineError
from gspo.policy.logprobs import logit_transform_of, logprobs_of, selected_logprobs
from gspo.types import FinishReason, Request, Sampling

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **IDS))


def qwen3_moe():
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=5, final_logit_softcapping=4.0))


def llama4():
    """Chunked attention: the family that cannot join."""
    sizes = {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 32}
    return Llama4ForCausalLM(Llama4TextConfig(**SIZES, **sizes, **IDS))


FAMILIES = {
    "qwen3": qwen3,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3_moe": qwen3_moe,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "llama4": llama4,
}


def build(family="qwen3", seed=0):
    """A model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return build()


def request(name, ids=(5, 6, 7), seed=1, **sampling):
    return Request(name, np.array(ids, dtype=np.int64), Sampling(**sampling), seed=seed)


def run(model, requests, **options):
    engine = LocalEngine(model, **options)
    engine.submit(requests)
    return drain(engine)


def mixed_requests(groups=4, members=3):
    """Groups of equal prompts; prompt lengths, budgets and temperatures all differ."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length) for length in (3, 14, 1, 8, 5)[:groups]]
    return [
        request(
            f"{group}.{member}",
            prompts[group],
            seed=100 * group + member,
            temperature=(1.0, 0.7, 0.0)[member % 3],
            max_new_tokens=4 + 5 * member + group,
            eos_token_ids=(3, 4),
        )
        for group in range(groups)
        for member in range(members)
    ]


def worst_difference(left, right):
    """Largest log-prob difference; infinite where the ids differ."""
    assert left.keys() == right.keys()
    if any(not np.array_equal(left[name].token_ids, right[name].token_ids) for name in left):
        return float("inf")
    return max(float(np.abs(left[name].logprobs - right[name].logprobs).max(initial=0)) for name in left)


def learner_logprobs(model, requests, completions):
    """The learner's way: one right-padded forward over all rows, hidden states, chunked head."""
    full = [np.concatenate([r.token_ids, completions[r.id].token_ids]) for r in requests]
    ids = torch.zeros((len(full), max(map(len, full))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(full):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
        mask[row, : len(tokens)] = 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        backbone = model.transformer if isinstance(model, GPT2LMHeadModel) else model.model
        hidden = backbone(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        found = {}
        for row, r in enumerate(requests):
            start, tokens = len(r.token_ids), completions[r.id].token_ids
            found[r.id], _ = selected_logprobs(
                hidden[row, start - 1 : start - 1 + len(tokens)],
                model.get_output_embeddings(),
                torch.as_tensor(tokens),
                temperature=r.sampling.temperature or 1.0,
                chunk_size=4,
                logit_transform=logit_transform_of(model.config),
            )
    return found


# --- log-probs and the batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_does_not_depend_on_its_batch_and_agrees_with_the_learner(family):
    model, requests = build(family), mixed_requests()
    together = run(model, requests)
    few_at_a_time = run(model, requests[::-1], max_batch_size=3)
    alone = {r.id: run(model, [r])[r.id] for r in requests}
    assert worst_difference(together, few_at_a_time) < 1e-5
    assert worst_difference(together, alone) < 1e-5
    lengths = {len(completion.token_ids) for completion in together.values()}
    assert len(lengths) > 4  # rows did leave at different times
    wanted = learner_logprobs(model, requests, together)
    for name, completion in together.items():
        np.testing.assert_allclose(completion.logprobs, wanted[name].numpy(), rtol=0, atol=1e-5)


def test_control_noise_by_row_number_would_be_found(model, monkeypatch):
    by_seed = rows._noise

    def by_row(batch, room, device):
        moved = [
            rows.Row(Request(r.request.id, r.request.token_ids, r.request.sampling, seed=index), 9, "length")
            for index, r in enumerate(batch)
        ]
        for row, source in zip(moved, batch, strict=True):
            row.token_ids = source.token_ids
        return by_seed(moved, room, device)

    monkeypatch.setattr(rows, "_noise", by_row)
    requests = mixed_requests()
    assert worst_difference(run(model, requests), run(model, requests[::-1], max_batch_size=3)) == float("inf")


def test_control_a_missing_mask_would_be_found(model, monkeypatch):
    requests = mixed_requests()
    right = run(model, requests)
    monkeypatch.setattr(RowCache, "mask", lambda self: None)
    assert worst_difference(right, run(model, requests)) > 1e-3


def test_left_padding_does_not_move_absolute_positions():
    model = build("gpt2")
    short = request("short", max_new_tokens=10)
    long = request("long", range(2, 22), seed=2, max_new_tokens=10)
    padded, alone = run(model, [short, long])["short"], run(model, [short])["short"]
    assert np.array_equal(padded.token_ids, alone.token_ids)
    np.testing.assert_allclose(padded.logprobs, alone.logprobs, rtol=0, atol=1e-5)


def test_long_completions_cross_several_stretches(model, monkeypatch):
    requests = [request(str(seed), seed=seed, max_new_tokens=40) for seed in range(3)]
    wanted = run(model, requests)
    monkeypatch.setattr(local, "STRETCH", 7)
    assert worst_difference(wanted, run(model, requests)) < 1e-5


def test_equal_prompts_are_prefilled_once(model, monkeypatch):
    seen = []
    prefill = causal.CausalModel.prefill

    def counted(self, prompts, **options):
        seen.extend(tuple(prompt.tolist()) for prompt in prompts)
        return prefill(self, prompts, **options)

    monkeypatch.setattr(causal.CausalModel, "prefill", counted)
    requests = [
        request(f"{prompt}.{seed}", prompt, seed=seed, max_new_tokens=3 + seed)
        for prompt in ((5, 6, 7), (8, 9))
        for seed in range(6)
    ]
    run(model, requests, max_batch_size=4)  # groups of 6 do not fit: their rows are admitted at different times
    assert sorted(seen) == [(5, 6, 7), (8, 9)]


def test_the_sampling_distribution_is_the_models(model):
    requests = [request(str(seed), seed=seed, max_new_tokens=1, temperature=0.7) for seed in range(3000)]
    completions = run(model, requests, max_batch_size=3000)
    counts = np.bincount([int(c.token_ids[0]) for c in completions.values()], minlength=VOCABULARY)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7, -1).double().numpy()
    likely = probs > 0.01
    error = (counts / 3000 - probs)[likely] / np.sqrt(probs * (1 - probs) / 3000)[likely]
    assert np.abs(error).max() < 4.5


@pytest.mark.parametrize("prefix", [1, 4, 9])
def test_a_resubmitted_prefix_continues_its_stream(model, prefix):
    whole = run(model, [request("whole", max_new_tokens=12)])["whole"]
    ids = [5, 6, 7, *whole.token_ids[:prefix]]
    rest = run(model, [request("rest", ids, max_new_tokens=12 - prefix)])["rest"]
    assert np.array_equal(rest.token_ids, whole.token_ids[prefix:])
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[prefix:], rtol=0, atol=1e-5)


def test_greedy_takes_the_largest_logit_and_scores_at_temperature_one(model):
    completion = run(model, [request("greedy", temperature=0.0, max_new_tokens=6)])["greedy"]
    ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == completion.token_ids.tolist()
    wanted = logprobs_of(logits, torch.tensor(completion.token_ids))
    np.testing.assert_allclose(completion.logprobs, wanted.numpy(), rtol=0, atol=1e-5)


def test_bfloat16_models_report_float32_logprobs():
    model = build().bfloat16()
    completions = run(model, [request(str(seed), seed=seed, max_new_tokens=8) for seed in range(4)])
    for completion in completions.values():
        ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
        with torch.no_grad():
            wanted = logprobs_of(model(ids).logits[0, 2:-1], torch.tensor(completion.token_ids))
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, wanted.numpy(), rtol=0, atol=0.25)  # bfloat16 noise
        assert np.any(completion.logprobs != torch.tensor(completion.logprobs).bfloat16().float().numpy())


def test_an_adapter_is_part_of_what_is_sampled():
    base = build()
    plain = run(base, [request("r", max_new_tokens=8)])["r"]
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(base), lora)
    completion = run(adapted, [request("r", max_new_tokens=8)])["r"]
    adapted.eval()
    with torch.no_grad():
        logits = adapted(torch.tensor([[5, 6, 7, *completion.token_ids]])).logits[0, 2:-1]
    wanted = logprobs_of(logits, torch.tensor(completion.token_ids))
    np.testing.assert_allclose(completion.logprobs, wanted.numpy(), rtol=0, atol=1e-5)
    assert abs(float(completion.logprobs[0] - plain.logprobs[0])) > 1e-4


# --- the model is left as it was ----------------------------------------------------------------------------


def test_training_flags_and_gradients_come_back():
    model = build()
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    before = [module.training for module in model.modules()]
    with torch.enable_grad():
        run(model, [request("r", max_new_tokens=3)])
        assert torch.is_grad_enabled()
        model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
    assert [module.training for module in model.modules()] == before
    assert model.model.embed_tokens.weight.grad is not None


def test_dropout_is_off_while_sampling():
    model = build("gpt2")
    wanted = run(model, [request("r", max_new_tokens=8)])
    model.transformer.drop.p = 0.5
    model.train()
    assert worst_difference(wanted, run(model, [request("r", max_new_tokens=8)])) < 1e-5


# --- why a completion ends ----------------------------------------------------------------------------------


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


class CharacterTokenizer:
    """Id n is the character chr(97 + n); id 60 is a special token."""

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        return "".join("<end>" if token == 60 else chr(97 + token) for token in ids)


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


# --- requests that cannot be sampled ------------------------------------------------------------------------


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


# --- poll, interrupt, failures ------------------------------------------------------------------------------


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


# --- weights ------------------------------------------------------------------------------------------------


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


# --- construction and the contract --------------------------------------------------------------------------


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
