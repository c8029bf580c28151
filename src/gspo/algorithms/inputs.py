"""What a loss takes and gives, and the bridge from ``[B, T]`` tensors with a mask.

Leaves the denominators' meaning to whoever fills them: they belong to the whole update, over all its micro-batches
and ranks, so that any split gives the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The N scored tokens of a micro-batch, flat. Log-probs are natural logarithms of any float dtype."""

    current_logprobs: Tensor  # [N] of the policy being trained, with gradient
    advantages: Tensor  # [N]
    sequence_ids: Tensor  # [N] int64, dense 0 .. num_sequences-1, in any order
    num_sequences: int  # sequences of this micro-batch; some may have no token
    total_sequences: float  # B: sequences of the whole update with at least one scored token
    total_tokens: float  # N of the whole update
    proximal_logprobs: Tensor | None = None  # [N] the ratio's denominator; None = current, detached
    sampled_logprobs: Tensor | None = None  # [N] of the engine; NaN = it did not return this one
    reference_logprobs: Tensor | None = None  # [N] of the frozen reference

    def __post_init__(self) -> None:
        """Refuse shapes that broadcasting would accept in silence."""
        shape = self.current_logprobs.shape
        if len(shape) != 1:
            raise ValueError(f"current_logprobs must be flat, [N]; they are {list(shape)} (see padded_inputs)")
        others = {
            "advantages": self.advantages,
            "sequence_ids": self.sequence_ids,
            "proximal_logprobs": self.proximal_logprobs,
            "sampled_logprobs": self.sampled_logprobs,
            "reference_logprobs": self.reference_logprobs,
        }
        for name, tensor in others.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, but current_logprobs is {list(shape)}")


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and its detached diagnostics.

    ``loss``: scalar; summed over the micro-batches of an update it is the update's loss. ``per_sequence``: sums over
    the tokens of each sequence, [num_sequences] each, meant to be added and divided once:

    - ``tokens``; ``log_ratio_sum``, ``log_ratio_sq_sum`` of log current/proximal, ``kl_proximal_sum`` of its k3
    - ``clipped_low``, ``clipped_high``: tokens whose gradient the clip zeroed, aware of the advantage's sign; at
      sequence level all or none. ``clipped_delta``: those that ``delta`` zeroed besides
    - ``outside_low``, ``outside_high``: tokens whose ratio is outside the range, whatever the sign
    - ``kl_reference_sum``: k3 of current and reference
    - ``mismatch_sum``, ``mismatch_abs_sum``, ``mismatch_sq_sum`` of log proximal/sampled, ``mismatch_missing``
    - ``correction_weight_sum``, ``correction_weight_sq_sum``, ``correction_dropped``, ``off_policy_dropped``
    - ``clamped``: tokens whose log-ratio was cut at its bound to stay finite
    """

    loss: Tensor
    per_sequence: dict[str, Tensor]


def padded_inputs(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    sampled_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> LossInputs:
    """Select the scored tokens of ``[B, T]`` tensors. What is under the mask, NaN included, has no effect.

    ``mask`` [B, T]: non-zero = scored. ``advantages`` [B] or [B, T]. ``proximal_logprobs`` None = current, detached.
    The totals are those of this batch: when it is one micro-batch of several, put the update's own in with
    ``dataclasses.replace(inputs, total_sequences=..., total_tokens=...)``.
    """
    shape = current_logprobs.shape
    if len(shape) != 2 or mask.shape != shape:
        raise ValueError(f"current_logprobs and mask must both be [B, T]: {list(shape)} and {list(mask.shape)}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(f"advantages must be [B] or [B, T] = {list(shape)}, not {list(advantages.shape)}")
    scored = mask != 0
    ids = scored.nonzero()[:, 0]

    def select(name: str, values: Tensor | None) -> Tensor | None:
        if values is not None and values.shape != shape:
            raise ValueError(f"{name} is {list(values.shape)}, but current_logprobs is {list(shape)}")
        return None if values is None else values[scored]

    return LossInputs(
        current_logprobs=current_logprobs[scored],
        advantages=advantages[ids] if advantages.dim() == 1 else advantages[scored],
        sequence_ids=ids,
        num_sequences=shape[0],
        total_sequences=float(scored.any(1).sum()),
        total_tokens=float(ids.shape[0]),
        proximal_logprobs=select("proximal_logprobs", proximal_logprobs),
        sampled_logprobs=select("sampled_logprobs", sampled_logprobs),
        reference_logprobs=select("reference_logprobs", reference_logprobs),
    )


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision to float32 (bfloat16 rounds 1.0003 to 1.0, which erases GSPO's range); float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
