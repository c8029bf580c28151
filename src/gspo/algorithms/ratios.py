"""Importance ratios between two policies over the same tokens: by token, by sequence, and GSPO-token's.

Everything is computed in log space and cut at bounds that keep every result finite; cut tokens get no gradient and
are counted. Leaves clipping to ``surrogates`` and engine mismatch to ``corrections``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithms.segments import Segments

LOGPROB_FLOOR = -1e4
"""Log-probs below it count as it, so that the difference of two -inf is 0 and not NaN."""
TOKEN_LOG_RATIO_LIMIT = 20.0
"""Bound of a token's log-ratio, and of a product's, on both sides: exp(20) is 5e8."""
SEQUENCE_LOG_RATIO_MAX = 10.0
"""Upper bound of a length-normalised log-ratio; below, exp goes to 0 by itself."""


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Difference of two log-prob tensors of any equal shape, finite for infinite ones."""
    return numerator_logprobs.clamp(min=LOGPROB_FLOOR) - denominator_logprobs.clamp(min=LOGPROB_FLOOR)


def mean_log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor, segments: Segments) -> Tensor:
    """Mean log-ratio of each sequence from flat log-probs [N]: [S]; 0 where a sequence is empty.

    log s = 1/|y| sum_t log(p_t / q_t), the logarithm of GSPO's ratio (arXiv 2507.18071, Eq. 7) for the current and
    the proximal policy; its negative, for the sampling and the current policy, is DeepSeek-V3.2's off-policy measure.
    """
    return segments.mean(log_ratio(numerator_logprobs, denominator_logprobs))


def sequence_mean_log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean log-ratio of each row over its scored tokens: [B, T] log-probs and mask to [B], differentiable.

    The one statistic under GSPO's clip, the off-policy mask and the geometric corrections. Masked positions are
    selected away, whatever they hold; a row without scored tokens gives 0.
    """
    scored = mask != 0
    numerator, denominator = numerator_logprobs[scored], denominator_logprobs[scored]
    return mean_log_ratio(numerator, denominator, Segments.from_mask(scored))


def importance_log_ratio(current: Tensor, proximal: Tensor, segments: Segments, level: str) -> tuple[Tensor, Tensor]:
    """Log importance ratio of each token at ``level``, and which tokens were cut at a bound: [N], [N] bool.

    ``token``: log(pi/pi_old). ``sequence``: GSPO's log s_i on every token, gradient through the mean (Eq. 7).
    ``sequence_token``: the same value, gradient through the token's own log-prob (GSPO-token, Eq. 14).
    ``sequence_product``: the sum over the sequence, the true sequence ratio.
    """
    if level == "token":
        return cut(log_ratio(current, proximal), TOKEN_LOG_RATIO_LIMIT)
    if level == "sequence_product":
        sums = segments.sum(log_ratio(current, proximal))
        return cut(segments.spread(sums), TOKEN_LOG_RATIO_LIMIT)
    means = mean_log_ratio(current, proximal, segments)
    if level == "sequence":
        return cut_above(segments.spread(means), SEQUENCE_LOG_RATIO_MAX)
    if level == "sequence_token":
        return cut_above(attach_tokens(current, means, segments), SEQUENCE_LOG_RATIO_MAX)
    raise ValueError(f"importance_sampling_level is {level!r}; use token, sequence, sequence_token or sequence_product")


def attach_tokens(tokens: Tensor, sequence_values: Tensor, segments: Segments) -> Tensor:
    """Give each token its sequence's value [S], with the gradient of its own entry in ``tokens`` [N].

    The small sequence term is added last: ``(seq + lp) - lp.detach()`` would lose it to rounding.
    """
    floored = tokens.clamp(min=LOGPROB_FLOOR)
    return (floored - floored.detach()) + sequence_values.detach()[segments.ids]


def cut(values: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """``values`` within +-limit, and which were outside (those get no gradient)."""
    return values.clamp(-limit, limit), values.detach().abs() > limit


def cut_above(values: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """``values`` up to limit, and which were above (those get no gradient)."""
    return values.clamp(max=limit), values.detach() > limit


def ratio_of(log_ratios: Tensor) -> Tensor:
    """exp, kept apart so that every ratio of the room is made in one place and precision."""
    return torch.exp(log_ratios)
