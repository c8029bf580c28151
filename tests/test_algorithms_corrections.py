"""Mismatch corrections, the off-policy mask and the KL estimators: values by hand, gradients by enumeration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gspo.algorithms import (
    CATALOG,
    CORRECTIONS,
    KL_ESTIMATORS,
    Segments,
    correction_weights,
    kl_terms,
    off_policy_keep,
    padded_inputs,
    policy_loss,
)

KINDS = [kind for kind in CORRECTIONS if kind not in ("none", "token_truncate_joint")]


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weights(
    kind: str, rows: list[list[float]], maximum: float, minimum: float | None = None, sampled: Tensor | None = None
) -> list[float]:
    """Weights for ratios given row by row."""
    flat = torch.cat([f64(ratios).log() for ratios in rows])
    ids = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(ratios) for ratios in rows]))
    engine = torch.zeros_like(flat) if sampled is None else sampled
    segments = Segments.from_ids(ids, len(rows))
    return correction_weights(flat, engine, segments, kind=kind, maximum=maximum, minimum=minimum).tolist()


ROWS = [[5.0, 0.2, 2.0], [1.1, 1.0]]  # products 2 and 1.1, geometric means 1.259921 and 1.048809


@pytest.mark.parametrize(
    ("kind", "maximum", "minimum", "expected"),
    [
        ("token_truncate", 2.0, None, [2.0, 0.2, 2.0, 1.1, 1.0]),
        ("token_truncate", 2.0, 0.5, [2.0, 0.5, 2.0, 1.1, 1.0]),
        ("token_mask", 2.5, None, [0.0, 0.2, 2.0, 1.1, 1.0]),
        ("token_mask", 2.5, 0.5, [0.0, 0.0, 2.0, 1.1, 1.0]),
        ("sequence_geometric_truncate", 1.1, None, [1.1] * 3 + [1.048809] * 2),
        ("sequence_geometric_mask", 1.1, 0.9, [0.0] * 3 + [1.048809] * 2),
        ("sequence_product_truncate", 1.5, None, [1.5] * 3 + [1.1] * 2),
        ("sequence_product_mask", 1.5, None, [0.0] * 3 + [1.1] * 2),
        ("sequence_product_mask", 3.0, 1.2, [2.0] * 3 + [0.0] * 2),
    ],
)
def test_weights_by_hand(kind: str, maximum: float, minimum: float | None, expected: list[float]) -> None:
    assert weights(kind, ROWS, maximum, minimum) == pytest.approx(expected, abs=1e-6)


def test_the_bounds_of_a_mask_are_inside() -> None:
    assert weights("token_mask", [[1.0, 1.0]], 1.0, 1.0) == [1.0, 1.0]


def test_ratio_of_five_with_a_cap_of_two() -> None:
    assert weights("token_truncate", [[5.0]], 2.0) == pytest.approx([2.0])
    assert weights("token_mask", [[5.0]], 2.0) == [0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_weigh_one(kind: str) -> None:
    assert weights(kind, [[1.0] * 3, [1.0]], 1.0, 1.0) == [1.0] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_and_missing_log_probs(kind: str) -> None:
    sampled = f64([0.0, math.nan, -math.inf, 0.0])
    actual = weights(kind, [[1.0, 3.0], [0.5, 0.5]], 2.0, 0.1, sampled=sampled)
    assert all(math.isfinite(w) for w in actual)
    assert actual[:2] == [1.0, 1.0]  # missing: that token's log-ratio is 0
    assert actual[2] == (0.0 if kind.endswith("mask") else 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_carry_no_gradient(kind: str) -> None:
    proximal = f64([-1.0, -2.0]).requires_grad_(True)
    segments = Segments.from_ids(torch.zeros(2, dtype=torch.int64), 1)
    assert not correction_weights(proximal, f64([-1.1, -1.9]), segments, kind=kind, maximum=2.0).requires_grad


def corrected(correction: str, **changes: float) -> tuple[float, Tensor, dict[str, Tensor]]:
    """GSPO on two rows with weights 1.5 and 0.5 on the first row's tokens, 1 on the second's."""
    current = f64([[-1.0, -2.0], [-1.5, -0.5]]).requires_grad_(True)
    proximal = f64([[-1.1, -2.0], [-1.5, -0.5]])
    sampled = proximal - f64([[math.log(1.5), math.log(0.5)], [0.0, 0.0]])
    inputs = padded_inputs(current, proximal, f64([1.0, -1.0]), torch.ones(2, 2), sampled_logprobs=sampled)
    algorithm = replace(CATALOG["gspo"], epsilon=0.2, epsilon_high=0.2, correction=correction, **changes)
    output = policy_loss(inputs, algorithm)
    return float(output.loss.detach()), torch.autograd.grad(output.loss, current)[0], output.per_sequence


def test_a_token_correction_weights_each_tokens_gradient() -> None:
    s = math.exp(0.05)
    loss, grad, sums = corrected("token_truncate", correction_max=2.0)
    assert loss == pytest.approx((-s * (1.5 + 0.5) / 2 + 1) / 2)
    assert grad[0].tolist() == pytest.approx([-s * 1.5 / 4, -s * 0.5 / 4])
    assert sums["correction_weight_sum"].tolist() == pytest.approx([2.0, 2.0])
    assert sums["correction_weight_sq_sum"].tolist() == pytest.approx([2.5, 2.0])


def test_a_masked_token_stays_in_the_denominators() -> None:
    s = math.exp(0.05)
    loss, grad, sums = corrected("token_mask", correction_max=1.2)
    assert loss == pytest.approx((-s * 0.5 / 2 + 1) / 2)
    assert grad[0].tolist() == [0.0, pytest.approx(-s * 0.5 / 4)]
    assert sums["correction_dropped"].tolist() == [1.0, 0.0] and sums["tokens"].tolist() == [2.0, 2.0]


def test_a_sequence_correction_weights_the_sequence() -> None:
    s, w = math.exp(0.05), math.sqrt(0.75)
    loss, grad, _ = corrected("sequence_geometric_truncate", correction_max=2.0)
    assert loss == pytest.approx((-s * w + 1) / 2)
    assert grad[0].tolist() == pytest.approx([-s * w / 4] * 2)


def test_a_correction_leaves_the_kl_alone() -> None:
    current = f64([[-1.0, -2.0]])
    zero = f64([0.0])
    inputs = padded_inputs(
        current, current, zero, torch.ones(1, 2), sampled_logprobs=current - 1.0, reference_logprobs=current - 0.5
    )
    base = replace(CATALOG["gspo"], beta=1.0, kl_estimator="k3")
    plain = float(policy_loss(inputs, base).loss)
    assert plain == pytest.approx(math.exp(-0.5) - 0.5)
    for change in ({"correction": "token_mask", "correction_max": 1.0}, {"off_policy_mask_delta": 1e-9}):
        assert float(policy_loss(inputs, replace(base, **change)).loss) == plain


def test_gmpo_under_a_token_correction_weights_each_token() -> None:
    current = f64([[-1.0, -2.0]]).requires_grad_(True)
    sampled = current.detach() - f64([[math.log(1.5), math.log(0.5)]])
    inputs = padded_inputs(current, None, f64([1.0]), torch.ones(1, 2), sampled_logprobs=sampled)
    loss = policy_loss(inputs, replace(CATALOG["gmpo"], correction="token_truncate")).loss
    (grad,) = torch.autograd.grad(loss, current)
    assert float(loss.detach()) == pytest.approx(-1.0) and grad[0].tolist() == pytest.approx([-0.75, -0.25])


def keep(advantages: list[list[float]], drift: list[list[float]], delta: float) -> list[bool]:
    flat = torch.cat([f64(row) for row in drift])
    ids = torch.repeat_interleave(torch.arange(len(drift)), torch.tensor([len(row) for row in drift]))
    values = torch.cat([f64(row) for row in advantages])
    segments = Segments.from_ids(ids, len(drift))
    return off_policy_keep(torch.zeros_like(flat), flat, values, segments, delta=delta).tolist()


def test_off_policy_mask_takes_whole_negative_sequences() -> None:
    assert keep([[-0.5, 0.25, -0.25]], [[1.0, 1.0, 1.0]], 0.1) == [False] * 3
    drift = [[0.2, 0.2], [0.2, 0.2], [0.2, -0.2]]
    assert keep([[-1.0] * 2, [1.0] * 2, [-1.0] * 2], drift, 0.1) == [False, False, True, True, True, True]
    assert keep([[-1.0]], [[0.1]], 0.1) == [True]  # strictly beyond
    assert keep([[-1.0]], [[5.0]], math.inf) == [True]
    assert keep([[0.0]], [[5.0]], 0.1) == [True]
    assert keep([[-1.0, -1.0]], [[math.nan, 0.4]], 0.1) == [False, False]  # missing counts as no drift: mean 0.2


def test_dropped_sequences_are_counted_and_still_counted_as_clipped() -> None:
    current = f64([[-2.0, -2.0], [-1.0, -1.0]]).requires_grad_(True)
    proximal = f64([[-1.0, -1.0], [-1.0, -1.0]])
    inputs = padded_inputs(current, proximal, f64([-1.0, -1.0]), torch.ones(2, 2))
    output = policy_loss(inputs, replace(CATALOG["gspo"], off_policy_mask_delta=0.5))
    (grad,) = torch.autograd.grad(output.loss, current)
    assert float(output.loss.detach()) == pytest.approx(0.5)  # 1/B with B = 2
    assert output.per_sequence["off_policy_dropped"].tolist() == [2.0, 0.0]
    assert output.per_sequence["clipped_low"].tolist() == [2.0, 0.0]
    assert grad[0].tolist() == [0.0, 0.0] and grad[1].tolist() == pytest.approx([0.25, 0.25])


def test_decoupled_with_one_engine_is_plain_gspo() -> None:
    """Proximal = sampled: every weight is 1."""
    current, proximal = f64([[-1.0, -2.0]]), f64([[-1.1, -2.2]])
    inputs = padded_inputs(current, proximal, f64([1.0]), torch.ones(1, 2), sampled_logprobs=proximal)
    plain = policy_loss(inputs, CATALOG["gspo"]).loss
    for kind in KINDS:
        algorithm = replace(CATALOG["gspo"], correction=kind, correction_max=1.5, correction_min=0.5)
        assert float(policy_loss(inputs, algorithm).loss) == pytest.approx(float(plain), abs=1e-15)


@pytest.mark.parametrize(("d", "expected"), [(0.5, 0.148721), (-0.5, 0.106531)])
def test_k3_by_hand(d: float, expected: float) -> None:
    values, clamped = kl_terms(f64([-1.0]), f64([-1.0 + d]), estimator="k3")
    assert values.tolist() == pytest.approx([expected], abs=1e-6) and clamped.tolist() == [False]


def test_k3_of_a_huge_log_ratio_is_finite_and_counted() -> None:
    for estimator in KL_ESTIMATORS:
        current = f64([-101.0]).requires_grad_(True)
        values, clamped = kl_terms(current, f64([-1.0]), estimator=estimator)
        (grad,) = torch.autograd.grad(values.sum(), current)
        assert bool(values.isfinite().all()) and bool(grad.isfinite().all()) and clamped.tolist() == [True]


def test_small_k3_is_exact_in_float32() -> None:
    values, _ = kl_terms(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]), estimator="k3")
    assert float(values) >= 0.0 and float(values) == pytest.approx(2**-25, rel=1e-3)


def test_the_reference_gets_no_gradient() -> None:
    current, reference = f64([-1.0]).requires_grad_(True), f64([-1.5]).requires_grad_(True)
    for estimator in KL_ESTIMATORS:
        kl_terms(current, reference, estimator=estimator)[0].sum().backward()
    assert reference.grad is None and current.grad is not None


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="kl_estimator"):
        kl_terms(f64([0.0]), f64([0.0]), estimator="k4")


def expected_gradient(estimator: str, policy: str) -> tuple[Tensor, Tensor, Tensor]:
    """Exact expectations over a 5-way choice: the estimator's gradient, the reverse KL's and the forward KL's.

    ``policy`` says who samples: the current policy, or an older one.
    """
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=g, dtype=torch.float64).requires_grad_(True)
    reference = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
    older = (logits.detach() + 0.3 * torch.randn(5, generator=g, dtype=torch.float64)).log_softmax(0)
    current = logits.log_softmax(0)
    proximal = current.detach() if policy == "current" else older
    terms, _ = kl_terms(current, reference, estimator=estimator, proximal=proximal)
    (ours,) = torch.autograd.grad((proximal.exp() * terms).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - current)).sum(), logits)
    return ours, reverse, forward


def test_gradients_of_the_estimators_on_policy() -> None:
    """k1 none, k2 and the unbiased ones the reverse KL's, k3 the forward KL's."""
    for estimator in ("k2", "k1_unbiased", "k3_unbiased", "k3_with_k2_gradient", "k1_with_k2_gradient"):
        ours, reverse, _ = expected_gradient(estimator, "current")
        assert torch.allclose(ours, reverse, atol=1e-12), estimator
    assert torch.allclose(expected_gradient("k1", "current")[0], torch.zeros(5, dtype=torch.float64), atol=1e-12)
    ours, reverse, forward = expected_gradient("k3", "current")
    assert torch.allclose(ours, forward, atol=1e-12) and not torch.allclose(ours, reverse, atol=1e-3)


def test_only_the_unbiased_ones_stay_right_off_policy() -> None:
    for estimator in KL_ESTIMATORS:
        ours, reverse, _ = expected_gradient(estimator, "older")
        assert torch.allclose(ours, reverse, atol=1e-12) == estimator.endswith("_unbiased"), estimator


def test_values_of_the_estimators_on_policy() -> None:
    """k1 and k3 are unbiased for the reverse KL, k2 is not; a k2 gradient changes no value."""
    g = torch.Generator().manual_seed(1)
    current, reference = (torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = float((current.exp() * (current - reference)).sum())
    for estimator in KL_ESTIMATORS:
        value = float((current.exp() * kl_terms(current, reference, estimator=estimator)[0]).sum())
        assert (abs(value - exact) < 1e-12) == (estimator != "k2"), estimator


def test_the_unbiased_kl_starts_from_the_proximal_policy() -> None:
    current, proximal = f64([[-1.0, -2.0]]), f64([[-1.5, -1.75]])
    inputs = padded_inputs(current, proximal, f64([0.0]), torch.ones(1, 2), reference_logprobs=current + 0.5)
    loss = policy_loss(inputs, replace(CATALOG["gspo"], beta=1.0)).loss
    assert float(loss) == pytest.approx((math.exp(0.5) + math.exp(-0.25)) / 2 * (math.exp(0.5) - 1.5))


def test_the_kl_is_reduced_like_the_policy_term() -> None:
    current = f64([[-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    inputs = padded_inputs(current, current, f64([0.0, 0.0]), mask, reference_logprobs=current + f64([[0.5], [-0.5]]))
    up, down = math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5
    for name, expected in (("gspo", (up + down) / 2), ("dapo", (up + 3 * down) / 4), ("luspo", (up + 3 * down) / 2)):
        algorithm = replace(CATALOG[name], beta=2.0, kl_estimator="k3")
        assert float(policy_loss(inputs, algorithm).loss) == pytest.approx(2 * expected)
