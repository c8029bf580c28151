"""Hand-computed values of the losses: the public functions on [B, T], and ``policy_loss`` with its options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gspo import algorithms as alg
from gspo.algorithms import CATALOG, LossOutput, padded_inputs, policy_loss

NEW = [-1.0, -2.0, -3.0]
OLD = [-1.2, -1.9, -3.3]
RATIO = math.exp(0.4 / 3)  # 1.142631


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(values: list[float], grad: bool = False) -> Tensor:
    return f64([values]).requires_grad_(grad)


def loss_and_grad(output: LossOutput, current: Tensor) -> tuple[float, Tensor]:
    (grad,) = torch.autograd.grad(output.loss, current)
    return float(output.loss.detach()), grad


def gspo_of(new: list[float], old: list[float], advantage: list, epsilons: tuple[float, float]) -> tuple[float, list]:
    current = row(new, grad=True)
    output = alg.gspo(
        current, row(old), f64(advantage), torch.ones(1, 3), epsilon=epsilons[0], epsilon_high=epsilons[1]
    )
    loss, grad = loss_and_grad(output, current)
    return loss, grad[0].tolist()


def test_value_and_gradient_by_hand() -> None:
    loss, grad = gspo_of(NEW, OLD, [1.0], (0.2, 0.2))
    assert loss == pytest.approx(-1.142631, abs=1e-6)
    assert grad == pytest.approx([-0.380877] * 3, abs=1e-6)


@pytest.mark.parametrize(
    ("new", "old", "advantage", "loss", "grad"),
    [
        (NEW, OLD, 1.0, -1.0004, 0.0),
        (NEW, OLD, -1.0, RATIO, RATIO / 3),
        (OLD, NEW, 1.0, -1 / RATIO, -1 / RATIO / 3),
        (OLD, NEW, -1.0, 0.9997, 0.0),
    ],
)
def test_the_papers_range_clips_by_sign(
    new: list[float], old: list[float], advantage: float, loss: float, grad: float
) -> None:
    value, gradient = gspo_of(new, old, [advantage], (3e-4, 4e-4))
    assert value == pytest.approx(loss, abs=1e-12)
    assert gradient == [0.0] * 3 if grad == 0.0 else gradient == pytest.approx([grad] * 3, abs=1e-12)


@pytest.mark.parametrize("log_s", [-1e-3, -2e-4, 0.0, 2e-4, 1e-3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clip_sign_table(log_s: float, sign: float) -> None:
    current = row([-1.0 + log_s] * 3, grad=True)
    output = alg.gspo(current, row([-1.0] * 3), f64([sign]), torch.ones(1, 3))
    _, grad = loss_and_grad(output, current)
    dead = (sign > 0 and log_s == 1e-3) or (sign < 0 and log_s == -1e-3)
    clipped = output.per_sequence["clipped_high" if sign > 0 else "clipped_low"]
    assert float(grad.sum()) == (0.0 if dead else pytest.approx(-sign * math.exp(log_s), rel=1e-9))
    assert clipped.tolist() == [3.0 if dead else 0.0]


def test_padding_with_garbage_or_nan_changes_no_bit() -> None:
    current = row(NEW, grad=True)
    clean = alg.gspo(current, row(OLD), f64([1.0]), torch.ones(1, 3), epsilon=0.2, epsilon_high=0.2)
    _, clean_grad = loss_and_grad(clean, current)
    for pad in (50.0, -50.0, math.nan, math.inf, -math.inf):
        current = row([*NEW, pad, pad], grad=True)
        old = row([*OLD, 0.0, math.nan])
        mask = torch.tensor([[1, 1, 1, 0, 0]])
        output = alg.gspo(current, old, f64([1.0]), mask, epsilon=0.2, epsilon_high=0.2)
        _, grad = loss_and_grad(output, current)
        assert torch.equal(output.loss, clean.loss)
        assert torch.equal(grad[:, :3], clean_grad) and grad[0, 3:].tolist() == [0.0, 0.0]


def test_infinity_under_the_mask_is_selected_away() -> None:
    mean = alg.sequence_mean_log_ratio(f64([[-1.0, -math.inf]]), f64([[0.0, 0.0]]), torch.tensor([[1, 0]]))
    assert mean.tolist() == [-1.0]


def test_sequences_weigh_alike_whatever_their_length() -> None:
    logprobs, mask = f64([[-1.0] * 4] * 2), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    assert float(alg.gspo(logprobs, logprobs, f64([1.0, -1.0]), mask).loss) == 0.0
    assert float(alg.dapo(logprobs, logprobs, f64([1.0, -1.0]), mask).loss) == pytest.approx(0.6)  # by length


def test_gspo_token_by_hand() -> None:
    current = row(NEW, grad=True)
    output = alg.gspo_token(current, row(OLD), f64([[1.0, 1.0, 1.0]]), torch.ones(1, 3), epsilon=0.2, epsilon_high=0.2)
    loss, grad = loss_and_grad(output, current)
    assert (loss, grad[0].tolist()) == (pytest.approx(-RATIO), pytest.approx([-RATIO / 3] * 3))
    output = alg.gspo_token(current, row(OLD), f64([[1.0, 0.0, -1.0]]), torch.ones(1, 3), epsilon=0.2, epsilon_high=0.2)
    loss, grad = loss_and_grad(output, current)
    assert loss == pytest.approx(0.0, abs=1e-12)
    assert grad[0].tolist() == pytest.approx([-0.380877, 0.0, 0.380877], abs=1e-6)


@pytest.mark.parametrize(
    ("tokens", "difference", "mean", "product"),
    [(100, 0.012, 1.012072, 3.320117), (9000, -0.001, 0.999000, 1.234e-4)],
)
def test_mean_form_and_sum_form(tokens: int, difference: float, mean: float, product: float) -> None:
    current = torch.full((1, tokens), -1.0 + difference, dtype=torch.float64)
    inputs = padded_inputs(current, current - difference, f64([-1.0]), torch.ones(1, tokens))
    wide = replace(CATALOG["gspo"], epsilon=1.0, epsilon_high=1e9)
    assert float(policy_loss(inputs, wide).loss) == pytest.approx(mean, rel=1e-6)
    whole = replace(wide, importance_sampling_level="sequence_product")
    assert float(policy_loss(inputs, whole).loss) == pytest.approx(product, rel=1e-3)


def test_the_range_lives_under_autocast_and_bfloat16_inputs() -> None:
    assert torch.tensor(1.0003, dtype=torch.bfloat16) == 1.0  # what would erase the clip range
    old = torch.full((2, 8), -1.0)
    current = (old + torch.tensor([[5e-4], [2e-4]])).requires_grad_(True)
    plain = alg.gspo(current, old, torch.ones(2), torch.ones(2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = alg.gspo(current, old, torch.ones(2), torch.ones(2, 8))
    assert inside.loss.dtype == torch.float32
    assert abs(float(inside.loss.detach()) - float(plain.loss.detach())) < 1e-6
    assert inside.per_sequence["clipped_high"].tolist() == [8.0, 0.0]
    half = alg.gspo(current.to(torch.bfloat16), old.to(torch.bfloat16), torch.ones(2), torch.ones(2, 8))
    assert half.loss.dtype == torch.float32


def losses_as_advantages(values: list[list[float]], mask: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """On-policy, a token's clipped loss is minus its advantage."""
    zeros = torch.zeros(len(values), len(values[0]), dtype=torch.float64)
    return zeros, -f64(values), torch.tensor(mask)


def parts_of(logprobs: Tensor, advantages: Tensor, mask: Tensor, algorithm: alg.Algorithm) -> list[float]:
    """The loss of each row as a micro-batch of its own, with the update's totals."""
    whole = padded_inputs(logprobs, logprobs, advantages, mask)
    out = []
    for b in range(len(mask)):
        part = padded_inputs(logprobs[b : b + 1], logprobs[b : b + 1], advantages[b : b + 1], mask[b : b + 1])
        part = replace(part, total_sequences=whole.total_sequences, total_tokens=whole.total_tokens)
        out.append(float(policy_loss(part, algorithm).loss))
    return out


def test_token_mean_over_micro_batches() -> None:
    values = [[1.0] * 2 + [9.0] * 4, [3.0] * 6]
    logprobs, advantages, mask = losses_as_advantages(values, [[1, 1, 0, 0, 0, 0], [1] * 6])
    assert sum(parts_of(logprobs, advantages, mask, CATALOG["dapo"])) == pytest.approx(2.5)


def test_sequence_mean_over_micro_batches() -> None:
    logprobs, advantages, mask = losses_as_advantages([[4.0], [0.0], [0.0], [0.0]], [[1]] * 4)
    assert sum(parts_of(logprobs, advantages, mask, CATALOG["gspo_token"])) == pytest.approx(1.0)


def test_constant_divisor_ignores_the_padded_width() -> None:
    for width in (4, 16):
        mask = [[1] * 2 + [0] * (width - 2), [1] * 4 + [0] * (width - 4)]
        logprobs, advantages, scored = losses_as_advantages([[1.0] * width] * 2, mask)
        loss = alg.dr_grpo(logprobs, logprobs, advantages, scored, loss_constant=8).loss
        assert float(loss) == pytest.approx(0.375)


def test_a_constant_divisor_must_be_given() -> None:
    inputs = padded_inputs(row(NEW), row(OLD), f64([1.0]), torch.ones(1, 3))
    with pytest.raises(ValueError, match="loss_constant"):
        policy_loss(inputs, CATALOG["dr_grpo"])


def test_a_masked_sequence_leaves_every_denominator() -> None:
    logprobs, advantages, mask = losses_as_advantages([[1.0] * 4] * 2, [[1] * 4, [0] * 4])
    assert float(alg.dapo(logprobs, logprobs, advantages, mask).loss) == 1.0
    assert float(alg.gspo(logprobs, logprobs, f64([-1.0, -5.0]), mask).loss) == 1.0


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_nothing_scored_is_zero_with_a_graph(name: str) -> None:
    current = torch.full((2, 3), math.nan, dtype=torch.float64, requires_grad=True)
    algorithm = replace(CATALOG[name], beta=0.1, loss_constant=4.0)
    inputs = padded_inputs(
        current, current.detach(), f64([1.0, -1.0]), torch.zeros(2, 3), reference_logprobs=current.detach()
    )
    output = policy_loss(inputs, algorithm)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert current.grad is not None and torch.equal(current.grad, torch.zeros(2, 3, dtype=torch.float64))
    assert all(bool((sums == 0).all()) for sums in output.per_sequence.values())


def test_clip_fractions_by_sequence_and_by_token() -> None:
    mask = torch.tensor([[1, 1] + [0] * 6, [1] * 8])
    old = torch.full((2, 8), -1.0, dtype=torch.float64)
    output = alg.gspo(old + f64([[0.1], [0.0]]), old, f64([1.0, 1.0]), mask)
    clipped, tokens = output.per_sequence["clipped_high"], output.per_sequence["tokens"]
    assert float((clipped > 0).double().mean()) == 0.5
    assert float(clipped.sum() / tokens.sum()) == 0.2


def test_zero_advantage_is_outside_and_not_clipped() -> None:
    output = alg.grpo(row([-1.0, -1.0, -1.0]), row([-2.0, -1.0, 0.0]), f64([0.0]), torch.ones(1, 3))
    sums = output.per_sequence
    assert (sums["outside_high"].item(), sums["outside_low"].item()) == (1.0, 1.0)
    assert (sums["clipped_high"].item(), sums["clipped_low"].item()) == (0.0, 0.0)


def test_dapo_and_luspo_weigh_by_length() -> None:
    old = torch.full((2, 4), -1.0, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    advantages = f64([1.0, -2.0])
    assert float(alg.luspo(old, old, advantages, mask).loss) == pytest.approx(-(1 * 1.0 + 4 * -2.0) / 2)
    assert float(alg.dapo(old, old, advantages, mask).loss) == pytest.approx(-(1 * 1.0 + 4 * -2.0) / 5)


def test_cispo_weights_at_most_five_and_keeps_every_gradient() -> None:
    current = row([-1.0, -1.0, -1.0], grad=True)
    ratios = [math.log(8.0), math.log(2.0), math.log(0.01)]
    output = alg.cispo(current, f64([[-1.0 - r for r in ratios]]), f64([1.0]), torch.ones(1, 3))
    loss, grad = loss_and_grad(output, current)
    assert grad[0].tolist() == pytest.approx([-5 / 3, -2 / 3, -0.01 / 3])
    assert loss == pytest.approx((5 + 2 + 0.01) / 3)  # the value holds the log-prob, -1
    assert output.per_sequence["outside_high"].item() == 1 and output.per_sequence["clipped_high"].item() == 0


def test_gmpo_clips_inside_the_mean() -> None:
    current = row([-1.0, -1.0], grad=True)
    old = row([-1.9, -0.9])  # log-ratios 0.9, -0.1; 0.9 is cut to 0.4
    output = alg.gmpo(current, old, f64([2.0]), torch.ones(1, 2))
    loss, grad = loss_and_grad(output, current)
    s = math.exp((0.4 - 0.1) / 2)
    assert loss == pytest.approx(-2 * s)
    assert grad[0].tolist() == [0.0, pytest.approx(-2 * s / 2)]
    assert output.per_sequence["clipped_high"].item() == 1.0


def test_sapo_value_and_gradient_at_one() -> None:
    current = row([-1.0, -1.0], grad=True)
    loss, grad = loss_and_grad(alg.sapo(current, None, f64([1.5]), torch.ones(1, 2), tau_positive=2.0), current)
    assert loss == pytest.approx(-2 * 1.5 / 2.0)
    assert grad[0].tolist() == pytest.approx([-0.75, -0.75])


def test_sapo_takes_tau_by_sign() -> None:
    old, ratio, tau = row([-1.0]), 1.5, 1.05
    current = row([-1.0 + math.log(ratio)])
    gate = 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    assert float(alg.sapo(current, old, f64([-1.0]), torch.ones(1, 1)).loss) == pytest.approx(gate, rel=1e-12)


def test_rloo_sums_log_probs() -> None:
    current = f64([[-1.0, -2.0], [-3.0, 7.0]]).requires_grad_(True)
    loss, grad = loss_and_grad(alg.rloo(current, f64([1.0, -2.0]), torch.tensor([[1, 1], [1, 0]])), current)
    assert loss == pytest.approx(-(1.0 * -3.0 + -2.0 * -3.0) / 2)
    assert grad.tolist() == [[-0.5, -0.5], [1.0, 0.0]]


def test_minirl_masks_by_one_ratio_and_weights_by_another() -> None:
    current = row([-1.0, -1.0, -1.0], grad=True)
    proximal = row([-1.0 - math.log(1.3), -1.0 - math.log(1.1), -1.0 - math.log(1.2)])  # the first lies above 1.27
    sampled = row([-1.0, -1.0 - math.log(2.0), -1.0 - math.log(9.0)])  # current/sampled = 1, 2, 9
    output = alg.minirl(current, proximal, f64([1.0]), torch.ones(1, 3), sampled_logprobs=sampled)
    _, grad = loss_and_grad(output, current)
    assert grad[0].tolist() == pytest.approx([0.0, -2.0, -5.0])
    assert output.per_sequence["clipped_high"].item() == 1.0


def test_minirl_without_correction_weights_by_its_own_ratio() -> None:
    current = row([-1.0, -1.0], grad=True)
    inputs = padded_inputs(current, row([-1.0 - math.log(1.1), -1.0]), f64([1.0]), torch.ones(1, 2))
    for correction, weight in (("none", 1.0), ("token_truncate", 0.5)):
        sampled = None if correction == "none" else inputs.proximal_logprobs + math.log(2.0)
        algorithm = replace(CATALOG["minirl"], correction=correction)
        output = policy_loss(replace(inputs, sampled_logprobs=sampled), algorithm)
        (grad,) = torch.autograd.grad(output.loss, current, retain_graph=True)
        assert grad[0].tolist() == pytest.approx([-1.1 * weight, -weight])


def test_delta_inside_the_range_cuts_positive_advantages_too() -> None:
    current = row([-1.0, -1.0, -1.0], grad=True)
    old = row([-1.0 - math.log(r) for r in (1.2, 1.05, 1.5)])
    algorithm = replace(CATALOG["grpo"], epsilon_high=0.27, delta=1.1)
    for advantage, expected, apart in ((1.0, [0.0, -1.05 / 3, 0.0], 1.0), (-1.0, [0.4, 0.35, 0.0], 1.0)):
        output = policy_loss(padded_inputs(current, old, f64([advantage]), torch.ones(1, 3)), algorithm)
        (grad,) = torch.autograd.grad(output.loss, current)
        assert grad[0].tolist() == pytest.approx(expected)
        assert output.per_sequence["clipped_delta"].item() == apart


def test_two_sided_clip_bounds_negative_advantages() -> None:
    current = row([-1.0, -1.0], grad=True)
    old = row([-1.0 - math.log(9.0), -1.0 - math.log(3.0)])
    inputs = padded_inputs(current, old, f64([-1.0]), torch.ones(1, 2))
    output = policy_loss(inputs, replace(CATALOG["grpo"], delta=4.0))
    loss, grad = loss_and_grad(output, current)
    assert loss == pytest.approx((4 + 3) / 2)
    assert grad[0].tolist() == [0.0, pytest.approx(1.5)]
    assert (output.per_sequence["clipped_delta"].item(), output.per_sequence["clipped_high"].item()) == (1.0, 0.0)


def test_diagnostics_by_hand() -> None:
    current, proximal, sampled = row([-1.0, -2.0]), row([-1.5, -2.25]), row([-1.25, -2.5])
    inputs = padded_inputs(
        current, proximal, f64([1.0]), torch.ones(1, 2), sampled_logprobs=sampled, reference_logprobs=row([-1.5, -2.0])
    )
    sums = {name: value.item() for name, value in policy_loss(inputs, CATALOG["gspo"]).per_sequence.items()}
    assert sums["tokens"] == 2
    assert sums["log_ratio_sum"] == pytest.approx(0.75)
    assert sums["log_ratio_sq_sum"] == pytest.approx(0.5**2 + 0.25**2)
    assert sums["kl_proximal_sum"] == pytest.approx(math.exp(0.5) - 1.5 + math.exp(0.25) - 1.25)
    assert sums["kl_reference_sum"] == pytest.approx(math.exp(-0.5) - 0.5)
    assert sums["mismatch_sum"] == pytest.approx(-0.25 + 0.25)
    assert sums["mismatch_abs_sum"] == pytest.approx(0.5)
    assert sums["mismatch_sq_sum"] == pytest.approx(0.125)
    assert sums["clipped_high"] == 2 and sums["clipped_low"] == 0
    assert sums["correction_weight_sum"] == 2 and sums["correction_dropped"] == 0


def test_diagnostics_carry_no_graph() -> None:
    current = row(NEW, grad=True)
    output = alg.gspo(current, row(OLD), f64([1.0]), torch.ones(1, 3))
    assert output.loss.requires_grad
    assert not any(value.requires_grad for value in output.per_sequence.values())
    assert all(value.shape == (1,) for value in output.per_sequence.values())
