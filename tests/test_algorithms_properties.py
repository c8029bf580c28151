"""Invariances of the losses, over drawn batches: every algorithm, every ratio level and every reduction."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo import algorithms as alg
from gspo.algorithms import CATALOG, LEVELS, REDUCTIONS, RULES, Algorithm, LossInputs, padded_inputs, policy_loss

NAMES = sorted(CATALOG)
TOKEN_RULES = [rule for rule in RULES if rule != "clip_inside_mean"]
B, T = 6, 9


def batch(seed: int, drift: float = 0.1) -> dict[str, Tensor]:
    """Random [B, T] tensors with a mask of every length, one row empty."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(B, T, generator=g, dtype=torch.float64)

    proximal = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    lengths = torch.tensor([1, 2, 4, 7, T, 0])
    return {
        "current": proximal + normal(drift),
        "proximal": proximal,
        "sampled": proximal + normal(drift / 2),
        "reference": proximal + normal(drift),
        "advantages": torch.randn(B, generator=g, dtype=torch.float64),
        "mask": torch.arange(T) < lengths.unsqueeze(1),
    }


def inputs_of(parts: dict[str, Tensor], current: Tensor) -> LossInputs:
    return padded_inputs(
        current,
        parts["proximal"],
        parts["advantages"],
        parts["mask"],
        sampled_logprobs=parts["sampled"],
        reference_logprobs=parts["reference"],
    )


def evaluate(parts: dict[str, Tensor], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Loss and gradient by the padded current log-probs."""
    current = parts["current"].clone().requires_grad_(True)
    loss = policy_loss(inputs_of(parts, current), algorithm).loss
    return loss.detach(), torch.autograd.grad(loss, current)[0]


def full(name: str) -> Algorithm:
    """The entry with a KL and, where it has none, a correction and the off-policy mask."""
    entry = CATALOG[name]
    kind = "token_truncate" if entry.correction == "none" else entry.correction
    return replace(
        entry, beta=0.05, loss_constant=8.0, correction=kind, correction_max=1.02, off_policy_mask_delta=0.03
    )


def any_algorithm() -> st.SearchStrategy[Algorithm]:
    """A point on the axes."""
    return st.builds(
        Algorithm,
        name=st.just("any"),
        importance_sampling_level=st.sampled_from(LEVELS),
        rule=st.sampled_from(RULES),
        reduction=st.sampled_from(REDUCTIONS),
        epsilon=st.sampled_from([3e-4, 0.05, 0.2]),
        epsilon_high=st.sampled_from([4e-4, 0.05, 0.28]),
        delta=st.sampled_from([None, 1.3]),
        loss_constant=st.just(7.0),
        correction=st.sampled_from([k for k in alg.CORRECTIONS if k != "token_truncate_joint"]),
        correction_max=st.just(1.05),
        correction_min=st.sampled_from([None, 0.96]),
        off_policy_mask_delta=st.sampled_from([None, 0.0]),
        beta=st.sampled_from([0.0, 0.1]),
        kl_estimator=st.sampled_from(alg.KL_ESTIMATORS),
    )


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_on_policy_it_is_reinforce_over_length(name: str) -> None:
    """Ratio 1: loss -mean A, gradient -A / (B |y|), nothing clipped."""
    parts = batch(0)
    parts["current"] = parts["proximal"]
    loss, grad = evaluate(parts, CATALOG[name])
    mask, counted = parts["mask"], parts["mask"].any(1)
    assert float(loss) == pytest.approx(-float(parts["advantages"][counted].mean()), abs=1e-14)
    expected = -parts["advantages"].unsqueeze(1) * mask / (counted.sum() * mask.sum(1, keepdim=True).clamp(min=1))
    assert close(grad, expected)
    sums = policy_loss(inputs_of(parts, parts["current"]), CATALOG[name]).per_sequence
    assert all(float(sums[key].sum()) == 0.0 for key in ("clipped_low", "clipped_high", "outside_low", "log_ratio_sum"))


@pytest.mark.parametrize("drift", [1e-4, 1e-3, 0.3])
def test_off_policy_gradient_in_closed_form(drift: float) -> None:
    """-(1 - c) s A / (B |y|)."""
    parts = batch(1, drift)
    _, grad = evaluate(parts, CATALOG["gspo"])
    mask, advantages = parts["mask"], parts["advantages"]
    s = alg.sequence_mean_log_ratio(parts["current"], parts["proximal"], mask).exp()
    clipped = ((advantages > 0) & (s > 1 + 4e-4)) | ((advantages < 0) & (s < 1 - 3e-4))
    weight = torch.where(clipped, 0.0, -s * advantages) / mask.any(1).sum()
    assert close(grad, weight.unsqueeze(1) * mask / mask.sum(1, keepdim=True).clamp(min=1))
    assert bool((grad[clipped] == 0).all())


@pytest.mark.parametrize("drift", [1e-4, 0.01, 3.0])
def test_gspo_token_is_gspo_for_constant_advantages(drift: float) -> None:
    parts = batch(2, drift)
    loss, grad = evaluate(parts, CATALOG["gspo"])
    token_loss, token_grad = evaluate(parts, CATALOG["gspo_token"])
    assert close(token_loss, loss) and close(token_grad, grad)


@pytest.mark.parametrize("drift", [1e-3, 0.5])
def test_one_token_makes_gspo_grpo(drift: float) -> None:
    parts = batch(3, drift)
    parts["mask"] = torch.arange(T) < torch.tensor([1, 1, 1, 1, 1, 0]).unsqueeze(1)
    grpo = replace(CATALOG["grpo"], epsilon=3e-4, epsilon_high=4e-4)
    for ours, theirs in zip(evaluate(parts, CATALOG["gspo"]), evaluate(parts, grpo), strict=True):
        assert close(ours, theirs)


def test_cancelling_tokens_are_inside_for_gspo_and_outside_for_grpo() -> None:
    proximal = torch.full((1, 2), -2.0, dtype=torch.float64)
    current, ones = proximal + torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    for advantage, side in ((1.0, "clipped_high"), (-1.0, "clipped_low")):
        advantages = torch.tensor([advantage], dtype=torch.float64)
        gspo = alg.gspo(current, proximal, advantages, ones)
        assert float(gspo.loss) == -advantage and float(gspo.per_sequence[side]) == 0.0
        assert float(alg.grpo(current, proximal, advantages, ones).per_sequence[side]) == 1.0


@settings(max_examples=25, deadline=None)
@given(delta=st.floats(-0.3, 0.3), length=st.integers(1, 60), seed=st.integers(0, 99))
def test_sequence_ratio(delta: float, length: int, seed: int) -> None:
    """A constant log-ratio is s whatever the length; order inside a sequence is nothing; s^|y| is the product."""
    proximal = -torch.rand(1, length, dtype=torch.float64)
    mask = torch.ones(1, length)
    log_s = alg.sequence_mean_log_ratio(proximal + delta, proximal, mask)
    assert float(log_s) == pytest.approx(delta, abs=1e-14)
    g = torch.Generator().manual_seed(seed)
    noisy = proximal + torch.randn(1, length, generator=g, dtype=torch.float64)
    order = torch.randperm(length, generator=g)
    log_s = alg.sequence_mean_log_ratio(noisy, proximal, mask)
    assert float(log_s) == pytest.approx(
        float(alg.sequence_mean_log_ratio(noisy[:, order], proximal[:, order], mask)), abs=1e-13
    )
    inputs = padded_inputs(noisy, proximal, torch.tensor([-1.0]).double(), mask)
    product, _ = alg.importance_log_ratio(noisy[0], proximal[0], alg.Segments.from_mask(mask != 0), "sequence_product")
    assert inputs.num_sequences == 1
    assert float(product[0]) == pytest.approx(max(-20.0, min(20.0, float(log_s) * length)), abs=1e-10)


def test_the_product_is_an_importance_weight_and_the_mean_is_not() -> None:
    """Over all sequences of 4 tokens from 3: E[W] = 1 and E[s] < 1 under the old policy."""
    g = torch.Generator().manual_seed(4)
    old, new = (torch.randn(4, 3, generator=g, dtype=torch.float64).log_softmax(1) for _ in range(2))
    paths = torch.tensor(list(itertools.product(range(3), repeat=4)))
    steps = torch.arange(4)
    old_lp, new_lp = old[steps, paths], new[steps, paths]
    probability = old_lp.sum(1).exp()
    log_s = alg.sequence_mean_log_ratio(new_lp, old_lp, torch.ones(81, 4))
    assert float((probability * (4 * log_s).exp()).sum()) == pytest.approx(1.0, abs=1e-12)
    assert float((probability * log_s.exp()).sum()) < 0.99


def test_gspo_token_gradient_follows_each_advantage() -> None:
    parts = batch(5, 1e-4)
    parts["advantages"] = torch.randn(B, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = replace(CATALOG["gspo_token"], epsilon=0.5, epsilon_high=0.5)
    _, grad = evaluate(parts, wide)
    s = alg.sequence_mean_log_ratio(parts["current"], parts["proximal"], parts["mask"]).exp().unsqueeze(1)
    lengths = parts["mask"].sum(1, keepdim=True).clamp(min=1)
    assert close(grad, -parts["advantages"] * parts["mask"] * s / lengths / 5)
    turns = torch.zeros(2, B, T, dtype=torch.float64)
    turns[0, :, :3], turns[1, :, 3:] = parts["advantages"][:, :3], parts["advantages"][:, 3:]
    by_turn = [evaluate(parts | {"advantages": turn}, wide)[1] for turn in turns]
    assert close(by_turn[0] + by_turn[1], grad)


def test_mirrored_advantages_mirror_the_gradient() -> None:
    """With a range that is symmetric in log space, (A, log s) -> (-A, -log s) turns the gradient of log s around."""
    parts = batch(6, 0.05)
    width = 0.01
    algorithm = replace(CATALOG["gspo"], epsilon=1 - math.exp(-width), epsilon_high=math.exp(width) - 1)
    mirrored = parts | {"advantages": -parts["advantages"], "current": 2 * parts["proximal"] - parts["current"]}
    _, grad = evaluate(parts, algorithm)
    _, other = evaluate(mirrored, algorithm)
    s = alg.sequence_mean_log_ratio(parts["current"], parts["proximal"], parts["mask"]).exp().unsqueeze(1)
    assert bool((grad != 0).any()) and close(grad / s, -other * s)


def test_relations_between_algorithms() -> None:
    parts = batch(7, 0.05)
    lengths, on_policy = parts["mask"].sum(1, keepdim=True), parts | {"current": parts["proximal"]}
    gspo = replace(CATALOG["gspo"], epsilon=2e-3, epsilon_high=2.5e-3)
    assert close(evaluate(parts, CATALOG["luspo"])[1], evaluate(parts, gspo)[1] * lengths)
    open_gspo = replace(CATALOG["gspo"], epsilon=1.0, epsilon_high=1e9)
    open_gmpo = replace(CATALOG["gmpo"], epsilon=1e9, epsilon_high=1e9)
    for a, b in zip(evaluate(parts, open_gmpo), evaluate(parts, open_gspo), strict=True):
        assert close(a, b)
    dapo, grpo = evaluate(on_policy, CATALOG["dapo"])[1], evaluate(on_policy, CATALOG["grpo"])[1]
    assert close(evaluate(on_policy, CATALOG["cispo"])[1], dapo)
    assert close(evaluate(on_policy, replace(CATALOG["sapo"], tau_negative=1.3))[1], grpo)
    truly = on_policy | {"sampled": parts["proximal"]}
    reinforce = evaluate(truly, CATALOG["rloo"])[1]
    assert close(evaluate(truly, CATALOG["minirl"])[1], reinforce)
    product = replace(CATALOG["rloo"], rule="clip", importance_sampling_level="sequence_product")
    assert close(evaluate(truly, replace(product, reduction="sequence_mean_token_mean"))[1], reinforce)
    share = lengths.double() * 5 / float(lengths.sum())
    assert close(dapo, grpo * share)


@settings(max_examples=80, deadline=None)
@given(algorithm=any_algorithm(), seed=st.integers(0, 1000), drift=st.sampled_from([1e-3, 0.05, 0.4]))
def test_padding_has_no_effect_on_any_point_of_the_axes(algorithm: Algorithm, seed: int, drift: float) -> None:
    parts = batch(seed, drift)
    loss, grad = evaluate(parts, algorithm)
    wider = {}
    for i, (name, values) in enumerate(parts.items()):
        if name == "mask":
            wider[name] = torch.nn.functional.pad(values, (0, 5))
        elif values.dim() == 2:
            pad = [math.nan, math.inf, -math.inf, 1e30][i % 4]
            dirty = torch.where(parts["mask"], values, pad)
            wider[name] = torch.nn.functional.pad(dirty, (0, 5), value=pad)
        else:
            wider[name] = values
    padded_loss, padded_grad = evaluate(wider, algorithm)
    assert torch.equal(padded_loss, loss) and torch.equal(padded_grad[:, :T], grad)
    assert bool((padded_grad[:, T:] == 0).all()) and bool(loss.isfinite())


@settings(max_examples=80, deadline=None)
@given(algorithm=any_algorithm(), seed=st.integers(0, 1000), data=st.data())
def test_any_split_into_micro_batches(algorithm: Algorithm, seed: int, data: st.DataObject) -> None:
    """Rows drawn into up to four parts, empty parts and parts of empty rows included; parts permuted."""
    parts = batch(seed, 0.05)
    loss, grad = evaluate(parts, algorithm)
    where = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=B, max_size=B)))
    current = parts["current"].clone().requires_grad_(True)
    whole = inputs_of(parts, current)
    total = torch.zeros((), dtype=torch.float64)
    for part in data.draw(st.permutations(range(4))):
        rows = (where == part).nonzero()[:, 0].flip(0)
        piece = inputs_of({name: values[rows] for name, values in parts.items()}, current[rows])
        piece = replace(piece, total_sequences=whole.total_sequences, total_tokens=whole.total_tokens)
        total = total + policy_loss(piece, algorithm).loss
    assert close(total.detach(), loss) and close(torch.autograd.grad(total, current)[0], grad)


@settings(max_examples=50, deadline=None)
@given(algorithm=any_algorithm(), seed=st.integers(0, 1000))
def test_tokens_may_come_in_any_order(algorithm: Algorithm, seed: int) -> None:
    parts = batch(seed, 0.05)
    expected_grad = evaluate(parts, algorithm)[1]
    current = parts["current"].clone().requires_grad_(True)
    inputs = inputs_of(parts, current)
    expected = policy_loss(inputs, algorithm)
    order = torch.randperm(inputs.advantages.shape[0], generator=torch.Generator().manual_seed(seed))
    names = ("current_logprobs", "advantages", "sequence_ids", "proximal_logprobs", "sampled_logprobs")
    moved = replace(
        inputs,
        **{name: getattr(inputs, name)[order] for name in (*names, "reference_logprobs")},
    )
    actual = policy_loss(moved, algorithm)
    assert close(actual.loss.detach(), expected.loss.detach())
    assert close(torch.autograd.grad(actual.loss, current)[0], expected_grad)
    for name, value in expected.per_sequence.items():
        assert close(actual.per_sequence[name], value), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_micro_batches_of_one_for_the_whole_catalogue(name: str, seed: int) -> None:
    parts, algorithm = batch(seed, 0.05), full(name)
    loss, grad = evaluate(parts, algorithm)
    current = parts["current"].clone().requires_grad_(True)
    whole = inputs_of(parts, current)
    losses = []
    for b in range(B):
        piece = inputs_of({key: values[b : b + 1] for key, values in parts.items()}, current[b : b + 1])
        piece = replace(piece, total_sequences=whole.total_sequences, total_tokens=whole.total_tokens)
        losses.append(policy_loss(piece, algorithm).loss)
    total = torch.stack(losses).sum()
    assert close(total.detach(), loss) and close(torch.autograd.grad(total, current)[0], grad)


@pytest.mark.parametrize("name", NAMES)
def test_finite_differences(name: str) -> None:
    """Central differences of a toy policy's parameters. Weights that are detached by design stay fixed."""
    g = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 7, (B, T), generator=g)
    features = torch.randn(B, T, 5, generator=g, dtype=torch.float64)
    first = (0.5 * torch.randn(5, 6, generator=g, dtype=torch.float64)).requires_grad_(True)
    second = (0.5 * torch.randn(6, 7, generator=g, dtype=torch.float64)).requires_grad_(True)
    parts = batch(8)

    def logprobs(scale: float = 1.0) -> Tensor:
        logits = torch.tanh(features @ first) @ second * scale
        return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    parts["proximal"] = logprobs(0.97).detach()
    algorithm = replace(CATALOG[name], loss_constant=8.0, beta=0.1, kl_estimator="k3")
    detached = name in ("cispo", "minirl")
    # With its weight held the loss is linear in log pi, with these coefficients.
    coefficients = evaluate(parts | {"current": logprobs().detach()}, replace(algorithm, beta=0.0))[1]

    def value() -> Tensor:
        with torch.no_grad():
            if not detached:
                return policy_loss(inputs_of(parts, logprobs()), algorithm).loss
            kl_part = policy_loss(inputs_of(parts | {"advantages": torch.zeros(B)}, logprobs()), algorithm).loss
            return (coefficients * logprobs()).sum() + kl_part

    loss = policy_loss(inputs_of(parts, logprobs()), algorithm).loss
    gradients = torch.autograd.grad(loss, (first, second))
    step = 1e-6
    for parameter, gradient in zip((first, second), gradients, strict=True):
        for index in ((0, 0), (2, 3), (4, 5)):
            with torch.no_grad():
                parameter[index] += step
                up = float(value())
                parameter[index] -= 2 * step
                down = float(value())
                parameter[index] += step
            assert (up - down) / (2 * step) == pytest.approx(float(gradient[index]), abs=1e-6)


def test_the_sequence_term_is_added_last() -> None:
    """In float32, (lp - lp.detach()) + seq keeps 3e-4 exactly, (seq + lp) - lp.detach() does not."""
    current = torch.linspace(-20, -1e-3, 64).requires_grad_(True)
    means = torch.full((1,), 3e-4)
    segments = alg.Segments.from_ids(torch.zeros(64, dtype=torch.int64), 1)
    proximal = current.detach() - 3e-4
    exact = alg.ratios.attach_tokens(current, means, segments)
    assert torch.equal(exact.detach(), means.expand(64))
    other = (means + current) - current.detach()
    assert not torch.equal(other.detach(), means.expand(64))
    log_s, _ = alg.importance_log_ratio(current, proximal, segments, "sequence_token")
    assert bool((log_s.detach() == log_s.detach()[0]).all())


def test_float32_agrees_with_float64() -> None:
    for name in NAMES:
        parts = batch(9, 2e-4)
        algorithm = full(name)
        loss, grad = evaluate(parts, algorithm)
        single = {key: values if values.dtype == torch.bool else values.float() for key, values in parts.items()}
        loss32, grad32 = evaluate(single, algorithm)
        assert loss32.dtype == torch.float32
        assert close(loss32.double(), loss, 2e-5) and close(grad32.double(), grad, 2e-5)


def test_the_same_bits_twice() -> None:
    parts = batch(10, 0.05)
    for name in NAMES:
        one, two = evaluate(parts, full(name)), evaluate(parts, full(name))
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_a_bandit_learns_its_best_arm() -> None:
    """Two arms, known rewards: group advantages and every clip-free-at-first algorithm raise the better arm."""
    for name in ("gspo", "grpo", "rloo", "gspo_token", "dapo", "sapo", "luspo", "minirl"):
        logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        g = torch.Generator().manual_seed(3)
        for _ in range(60):
            arms = torch.multinomial(logits.detach().softmax(0), 16, replacement=True, generator=g)
            rewards = arms.double()
            advantages = alg.group_advantages(rewards, torch.arange(16) // 8)
            current = logits.log_softmax(0)[arms].unsqueeze(1)
            inputs = padded_inputs(current, None, advantages, torch.ones(16, 1), sampled_logprobs=current.detach())
            (grad,) = torch.autograd.grad(policy_loss(inputs, CATALOG[name]).loss, logits)
            with torch.no_grad():
                logits -= 0.5 * grad
        assert float(logits.detach().softmax(0)[1]) > 0.95, name
