"""Training-inference mismatch: weights between the learner's policy and the engine that sampled, and the off-policy
mask.

Weights are detached, multiply the policy term alone (never the KL) and never leave a denominator. Leaves the choice
of bounds to ``catalog`` and recipes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithms.ratios import TOKEN_LOG_RATIO_LIMIT, cut, log_ratio, ratio_of
from gspo.algorithms.segments import Segments

JOINT = "token_truncate_joint"
"""MiniRL's: the weight current / sampled, truncated as one; it takes the place of the rule's own ratio."""
CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_geometric_truncate",
    "sequence_geometric_mask",
    "sequence_product_truncate",
    "sequence_product_mask",
    JOINT,
)


def mismatch_log_ratio(numerator: Tensor, sampled: Tensor) -> Tensor:
    """log numerator/sampled [N], detached; 0 where the engine's log-prob is missing (NaN)."""
    difference = log_ratio(numerator.detach(), sampled.detach())
    return torch.where(sampled.isnan(), torch.zeros_like(difference), difference)


def correction_weights(
    proximal: Tensor,
    sampled: Tensor,
    segments: Segments,
    *,
    kind: str,
    maximum: float,
    minimum: float | None = None,
) -> Tensor:
    """Weights [N], detached, for the mismatch rho_t = proximal_t / sampled_t.

    ``token_*``: rho_t. ``sequence_geometric_*``: exp(mean_t log rho_t) on every token of the sequence.
    ``sequence_product_*``: prod_t rho_t. ``*_truncate``: brought into [minimum, maximum] (TIS). ``*_mask``: kept where
    it lies inside, both ends included, else 0 (IcePop, arXiv 2510.18855). ``token_truncate_joint``: as
    ``token_truncate``; the caller passes the current policy for ``proximal``.
    """
    if kind not in CORRECTIONS or kind == "none":
        raise ValueError(f"correction is {kind!r}; use one of {', '.join(CORRECTIONS[1:])}")
    log_rho = mismatch_log_ratio(proximal, sampled)
    if kind.startswith("sequence_geometric"):
        log_rho = segments.mean(log_rho)[segments.ids]
    elif kind.startswith("sequence_product"):
        log_rho = segments.sum(log_rho)[segments.ids]
    weights = ratio_of(cut(log_rho, TOKEN_LOG_RATIO_LIMIT)[0])
    low = 0.0 if minimum is None else minimum
    if kind.endswith("_mask"):
        outside = (weights < low) | (weights > maximum)  # NaN is neither: it must reach the learner's guard
        return torch.where(outside, torch.zeros_like(weights), weights)
    return weights.clamp(low, maximum)


def is_token_level(kind: str) -> bool:
    """Whether the weights of ``kind`` vary inside a sequence."""
    return kind.startswith("token_")


def off_policy_keep(
    current: Tensor, sampled: Tensor, advantages: Tensor, segments: Segments, *, delta: float
) -> Tensor:
    """Which tokens stay, [N] bool: all but those of sequences to be learned against that drifted too far.

    A sequence goes when its mean advantage is negative and 1/|y| sum_t log(sampled_t / current_t) > delta
    (DeepSeek-V3.2, arXiv 2512.02556, Eq. 9).
    """
    drift = -segments.mean(mismatch_log_ratio(current, sampled))
    dropped = (segments.mean(advantages.detach()) < 0) & (drift > delta)
    return ~dropped[segments.ids]
