"""How token losses become one number. The denominators are the whole update's, so the parts of any split add up.

B sequences with at least one scored token, N scored tokens, |y_i| those of sequence i, C a constant.
"""

from __future__ import annotations

from torch import Tensor

from gspo.algorithms.segments import Segments

REDUCTIONS = (
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "length_weighted",
    "constant_length",
    "token_mean",
    "token_sum",
)


def reduce_tokens(
    values: Tensor,
    segments: Segments,
    *,
    reduction: str,
    total_sequences: float,
    total_tokens: float,
    loss_constant: float | None = None,
) -> Tensor:
    """Reduce ``values`` [N] to a scalar; 0 with a graph where the denominator is 0.

    ``sequence_mean_token_mean``: 1/B sum_i 1/|y_i| sum_t (GRPO, GSPO). ``sequence_mean_token_sum`` and
    ``length_weighted`` (LUSPO's name for it): 1/B sum_i sum_t. ``constant_length``: 1/(B C) sum_i sum_t (Dr. GRPO),
    C = ``loss_constant``. ``token_mean``: 1/N sum (DAPO). ``token_sum``: sum.
    """
    sequences, tokens = max(float(total_sequences), 1.0), max(float(total_tokens), 1.0)
    if reduction == "sequence_mean_token_mean":
        return (values / segments.counts.clamp(min=1)[segments.ids]).sum() / sequences
    if reduction in ("sequence_mean_token_sum", "length_weighted"):
        return values.sum() / sequences
    if reduction == "constant_length":
        if loss_constant is None:
            raise ValueError("constant_length needs loss_constant, the length that every sequence is divided by")
        return values.sum() / (sequences * loss_constant)
    if reduction == "token_mean":
        return values.sum() / tokens
    if reduction == "token_sum":
        return values.sum()
    raise ValueError(f"reduction is {reduction!r}; use one of {', '.join(REDUCTIONS)}")
