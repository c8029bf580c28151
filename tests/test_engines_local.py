"""The embedded engine: log-probs that agree with the learner's and do not depend on the batch."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from engine_helpers import FAMILIES, VOCABULARY, build, learner_logprobs, mixed_requests, request, run, worst_difference
from gspo.engines import causal, local, rows
from gspo.engines.kv import RowCache
from gspo.policy.logprobs import logprobs_of
from gspo.types import Request


@pytest.fixture(scope="module")
def model():
    return build()


# --- log-probs and the batch ---------------------------------------------------------------------------------


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


# --- the model is left as it was -----------------------------------------------------------------------------


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
