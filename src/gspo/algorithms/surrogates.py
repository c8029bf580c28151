"""Trust-region rules: what a token's loss is, given its ratio and advantage, before any reduction.

Each rule is a function over [N] tensors that returns a ``Surrogate``: losses to be minimised and which tokens lost
their gradient. Leaves ratios to ``ratios``, weights to ``corrections`` and averages to ``reductions``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithms.ratios import LOGPROB_FLOOR


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Token losses [N] and boolean masks [N] of what the rule did."""

    losses: Tensor
    clipped_low: Tensor  # gradient zeroed below the range (negative advantage)
    clipped_high: Tensor  # gradient zeroed above it (positive advantage)
    clipped_delta: Tensor  # gradient zeroed by delta, not by the range
    outside_low: Tensor  # ratio below the range, whatever the sign
    outside_high: Tensor  # ratio above it


def hard_clip(
    ratio: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) (arXiv 2507.18071, Eq. 2 and 5).

    ``delta`` bounds the ratio of the unclipped term, min(r, delta) (INTELLECT-2, arXiv 2505.07291): with
    delta > 1 + epsilon_high it binds for negative advantages alone and equals the dual clip.
    """
    low, high = 1.0 - epsilon, 1.0 + epsilon_high
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    losses = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    below, above = ratio.detach() < low, ratio.detach() > high
    positive, negative = advantages > 0, advantages < 0
    clipped_delta = torch.zeros_like(below)
    if delta is not None:
        clipped_delta = (ratio.detach() > delta) & ((positive & ~above) | (negative & above))
    return Surrogate(losses, negative & below, positive & above, clipped_delta, below, above)


def stop_gradient_clip(
    ratio: Tensor, advantages: Tensor, current_logprobs: Tensor, *, epsilon: float | None, epsilon_high: float
) -> Surrogate:
    """CISPO, -sg[clip(r, 1 - epsilon, 1 + epsilon_high)] A log pi (MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5).

    Every token keeps its gradient; only the weight is bounded, at most 1 + epsilon_high. ``epsilon`` None: no lower
    bound. The loss value holds the log-prob itself.
    """
    low = 0.0 if epsilon is None else 1.0 - epsilon
    weight = ratio.detach()
    below, above = weight < low, weight > 1.0 + epsilon_high
    losses = -weight.clamp(low, 1.0 + epsilon_high) * advantages * current_logprobs.clamp(min=LOGPROB_FLOOR)
    never = torch.zeros_like(below)
    return Surrogate(losses, never, never, never, below, above)


def sign_mask(
    ratio: Tensor, weight: Tensor, advantages: Tensor, current_logprobs: Tensor, *, bounds: tuple[float, float]
) -> Surrogate:
    """MiniRL, -M sg[w] A log pi (arXiv 2512.01374, Eq. 7).

    M drops a token where PPO's clip would zero it: A > 0 and r > 1 + epsilon_high, or A < 0 and r < 1 - epsilon,
    with ``bounds`` = (1 - epsilon, 1 + epsilon_high). ``weight`` [N] is detached here.
    """
    below, above = ratio.detach() < bounds[0], ratio.detach() > bounds[1]
    low, high = (advantages < 0) & below, (advantages > 0) & above
    terms = -weight.detach() * advantages * current_logprobs.clamp(min=LOGPROB_FLOOR)
    losses = torch.where(low | high, torch.zeros_like(terms), terms)
    return Surrogate(losses, low, high, torch.zeros_like(low), below, above)


def soft_gate(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """SAPO, -4/tau sigmoid(tau (r - 1)) A, tau by the advantage's sign (arXiv 2511.20347).

    The gradient at r = 1 is GRPO's; the value there is -2 A / tau. Nothing is clipped.
    """
    plus, minus = ratio.new_full((), tau_positive), ratio.new_full((), tau_negative)  # not torch.where's float32
    tau = torch.where(advantages > 0, plus, minus)
    losses = -torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * advantages
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(losses, never, never, never, never, never)


def reinforce(advantages: Tensor, current_logprobs: Tensor) -> Surrogate:
    """REINFORCE, -A log pi: no ratio, so right for one update per rollout batch alone (arXiv 2402.14740)."""
    losses = -advantages * current_logprobs.clamp(min=LOGPROB_FLOOR)
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(losses, never, never, never, never, never)


def clip_log_ratio(
    log_ratios: Tensor, advantages: Tensor, *, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """GMPO's clip of token log-ratios before their mean (arXiv 2507.20673): clipped values and (below, above).

    q = sgn min(sgn d, sgn clip(d, -epsilon, epsilon_high)), sgn = sign(A): one-sided, in log space, 0 where A is 0.
    """
    sign = advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratios, sign * log_ratios.clamp(-epsilon, epsilon_high))
    raw = log_ratios.detach()
    return clipped, raw < -epsilon, raw > epsilon_high


def unclipped(ratio: Tensor, advantages: Tensor, below: Tensor, above: Tensor) -> Surrogate:
    """-r A for a ratio that was clipped inside (GMPO); ``below`` and ``above`` are its tokens outside the range."""
    never = torch.zeros_like(below)
    low, high = (advantages < 0) & below, (advantages > 0) & above
    return Surrogate(-ratio * advantages, low, high, never, below, above)
