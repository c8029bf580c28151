"""Reads the folder of numbers that other trainers' own code produced, and compares with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.algorithms import Algorithm, LossInputs, LossOutput, policy_loss

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "vectors"


@dataclass(frozen=True)
class Case:
    """One case of a topic; tensors have the file's dtype."""

    topic: str
    id: str
    settings: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    dtype: torch.dtype

    def tensor(self, name: str) -> Tensor | None:
        """An input as a tensor, None where it is absent or null."""
        value = self.inputs.get(name)
        return None if value is None else to_tensor(value, self.dtype)

    @property
    def mask(self) -> Tensor:
        """[B, T] bool."""
        return torch.tensor(self.inputs["mask"]).bool()

    @property
    def tolerance(self) -> float:
        """1e-10 in float64, 1e-5 where the case is float32."""
        return 1e-10 if self.dtype == torch.float64 else 1e-5


class LeftOut(Exception):
    """The case belongs to something the catalogue leaves out; the message says what."""


def to_tensor(value: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists in which NaN and infinities may be strings."""

    def number(x: Any) -> Any:
        if isinstance(x, list):
            return [number(y) for y in x]
        return float("nan") if x is None else float(x)

    return torch.tensor(number(value), dtype=torch.float64).to(dtype)


def load(topic: str) -> list[Case]:
    """All cases of a topic; none where the folder does not exist."""
    path = FOLDER / f"{topic}.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    cases = []
    for case in data["cases"]:
        name = case["settings"].get("dtype", data["dtype"])
        dtype = torch.float32 if name == "float32" else torch.float64
        cases.append(Case(topic, case["id"], case["settings"], case["inputs"], case["expected"], dtype))
    return cases


def topics(peer: str) -> list[str]:
    """Topics of one peer, or none where the folder does not exist."""
    return sorted(path.stem for path in FOLDER.glob(f"{peer}_*.json"))


def flat_inputs(case: Case, current: Tensor, **changes: Any) -> LossInputs:
    """The case as ``LossInputs``; ``changes`` put the peer's mask, advantages and denominators in."""
    mask = changes.pop("mask", case.mask)
    advantages = changes.pop("advantages", None)
    if advantages is None:
        advantages = case.tensor("advantages")
    ids = mask.nonzero()[:, 0]
    optional = {
        name: None if case.tensor(name) is None else case.tensor(name)[mask]
        for name in ("proximal_logprobs", "sampled_logprobs", "reference_logprobs")
    }
    inputs = LossInputs(
        current_logprobs=current[mask],
        advantages=advantages[ids] if advantages.dim() == 1 else advantages[mask],
        sequence_ids=ids,
        num_sequences=mask.shape[0],
        total_sequences=float(mask.any(1).sum()),
        total_tokens=float(mask.sum()),
        **optional,
    )
    return replace(inputs, **changes)


@dataclass(frozen=True)
class Outcome:
    """Loss, its gradient with respect to the padded current log-probs, and the diagnostics."""

    loss: Tensor
    grad: Tensor
    output: LossOutput | None = None


def leaf(case: Case) -> Tensor:
    """The current log-probs as a leaf."""
    current = case.tensor("current_logprobs")
    assert current is not None
    return current.requires_grad_(True)


def outcome(case: Case, algorithm: Algorithm, **changes: Any) -> Outcome:
    """Our loss on the case."""
    current = leaf(case)
    output = policy_loss(flat_inputs(case, current, **changes), algorithm)
    return finish(output.loss, current, output)


def finish(loss: Tensor, current: Tensor, output: LossOutput | None = None) -> Outcome:
    """Backward."""
    (grad,) = torch.autograd.grad(loss, current)
    return Outcome(loss.detach(), grad, output)


def error(actual: Tensor, expected: Any) -> float:
    """Largest difference over max(1, |expected|), where the expected value is finite."""
    wanted = to_tensor(expected)
    finite = wanted.isfinite()
    assert actual.shape == wanted.shape
    assert bool(actual.isfinite().all())
    difference = ((actual.double() - wanted).abs() / wanted.abs().clamp(min=1.0))[finite]
    return float(difference.max()) if difference.numel() else 0.0
