"""What the losses do with extreme, missing or wrong inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gspo import algorithms as alg
from gspo.algorithms import CATALOG, LossInputs, padded_inputs, policy_loss

NEW = [-1.0, -2.0, -3.0]
OLD = [-1.2, -1.9, -3.3]


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(values: list[float], grad: bool = False) -> Tensor:
    return f64([values]).requires_grad_(grad)


def loss_and_grad(output: alg.LossOutput, current: Tensor) -> tuple[float, Tensor]:
    (grad,) = torch.autograd.grad(output.loss, current)
    return float(output.loss.detach()), grad


@pytest.mark.parametrize("name", sorted(CATALOG))
@pytest.mark.parametrize("extreme", [800.0, -800.0, math.inf])
def test_extreme_log_ratios_stay_finite(name: str, extreme: float) -> None:
    low = -extreme if extreme > 0 else extreme
    current, old = [-1.0, -2.0, -1.5], [-1.1, -2.0, -1.5]
    if extreme > 0:
        old[1] = low
    else:
        current[1] = low
    for advantage in (1.0, -1.0):
        leaf = row(current, grad=True)
        inputs = padded_inputs(leaf, row(old), f64([advantage]), torch.ones(1, 3), reference_logprobs=row(old))
        algorithm = replace(CATALOG[name], beta=0.1, loss_constant=3.0)
        output = policy_loss(inputs, algorithm)
        loss, grad = loss_and_grad(output, leaf)
        assert math.isfinite(loss) and bool(grad.isfinite().all())
        assert all(bool(sums.isfinite().all()) for sums in output.per_sequence.values())
        assert output.per_sequence["clamped"].item() >= 1


def test_both_policies_at_minus_infinity() -> None:
    current = row([-1.0, -math.inf], grad=True)
    output = alg.gspo(current, row([-1.0, -math.inf]), f64([1.0]), torch.ones(1, 2))
    loss, grad = loss_and_grad(output, current)
    assert loss == -1.0 and bool(grad.isfinite().all())


def test_nan_under_a_scored_token_is_not_hidden() -> None:
    for proximal in (OLD, [math.nan, -1.0, -1.0]):
        current = row(NEW if proximal is not OLD else [math.nan, -1.0, -1.0])
        inputs = padded_inputs(current, row(proximal), f64([1.0]), torch.ones(1, 3), sampled_logprobs=row(OLD))
        for correction in ("none", "token_mask"):
            assert policy_loss(inputs, replace(CATALOG["gspo"], correction=correction)).loss.isnan()


def test_shapes_are_checked() -> None:
    current, ones = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="advantages must be"):
        alg.gspo(current, current, torch.zeros(3), ones)
    with pytest.raises(ValueError, match="mask"):
        alg.gspo(current, current, torch.zeros(2), torch.ones(2, 4))
    with pytest.raises(ValueError, match="proximal_logprobs is"):
        alg.gspo(current, torch.zeros(2, 4), torch.zeros(2), ones)
    with pytest.raises(ValueError, match="flat"):
        LossInputs(
            current_logprobs=current,
            advantages=current,
            sequence_ids=current.long(),
            num_sequences=2,
            total_sequences=2,
            total_tokens=6,
        )
    with pytest.raises(ValueError, match="num_sequences"):
        inputs = padded_inputs(current, None, torch.zeros(2), ones)
        policy_loss(replace(inputs, num_sequences=1), CATALOG["gspo"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rule": "clamp"}, "rule"),
        ({"importance_sampling_level": "turn"}, "importance_sampling_level"),
        ({"reduction": "mean"}, "reduction"),
        ({"correction": "tis"}, "correction"),
        ({"correction": "token_mask"}, "sampled_logprobs"),
        ({"correction": "token_truncate_joint"}, "sign_mask"),
        ({"beta": 0.1}, "reference_logprobs"),
        ({"epsilon": None}, "epsilon"),
    ],
)
def test_what_cannot_be_computed_is_named(change: dict, match: str) -> None:
    inputs = padded_inputs(row(NEW), row(OLD), f64([1.0]), torch.ones(1, 3))
    with pytest.raises(ValueError, match=match):
        policy_loss(inputs, replace(CATALOG["gspo"], **change))
