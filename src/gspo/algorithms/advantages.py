"""From rewards to advantages: baselines, scales and whitenings, by name.

Computed in float64; only usable members (``valid``) enter any statistic, and the others get exactly 0. No epsilon is
added to a standard deviation: a group whose rewards differ by at most 1e-6 * max(1, |r|) is degenerate and gets
exactly 0 instead. Standard deviations are sample ones (n - 1). Groups go by id, never by position.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from gspo.algorithms.segments import Segments
from gspo.errors import NumericsError

EQUAL_TOLERANCE = 1e-6
"""Rewards that differ by at most this times max(1, |r|) are equal: 0.1 + 0.2 and 0.3 are."""


class AdvantageEstimator(Protocol):
    """Rewards [S], group ids [S], usable members [S] bool, tokens of each [S], token rewards [N] or None."""

    def __call__(
        self, rewards: Tensor, group_ids: Tensor, valid: Tensor, lengths: Tensor, token_rewards: Tensor | None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Members:
    """The V usable members, in float64, with their groups."""

    rewards: Tensor  # [V]
    lengths: Tensor  # [V]
    groups: Segments  # of the V members
    where: Tensor  # [V] their places among the S sequences
    num_sequences: int

    def scatter(self, advantages: Tensor) -> Tensor:
        """[V] back to [S], 0 elsewhere."""
        out = torch.zeros(self.num_sequences, dtype=advantages.dtype, device=advantages.device)
        return out.scatter(0, self.where, advantages)

    def of_group(self, values: Tensor) -> Tensor:
        """A group's value [groups] on each of its members [V]."""
        return values[self.groups.ids]


def group_advantages(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """GRPO's and GSPO's advantage, (r - mean) / std over the members of a group (arXiv 2507.18071, Eq. 6).

    ``rewards`` [S] any float dtype, ``group_ids`` [S] int64, ``valid`` [S] bool (None: the finite ones). Returns [S]
    in the rewards' dtype, at least float32. Exactly 0 for degenerate groups, groups of one and members not valid.
    """
    usable = rewards.isfinite() if valid is None else valid
    return estimate_advantages("group", rewards, group_ids, usable, lengths=torch.ones_like(group_ids))


def estimate_advantages(
    name: str | AdvantageEstimator,
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    lengths: Tensor,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Advantages by the estimator ``name`` of ``ADVANTAGES``, or by one's own: [S], or [N] from ``token_rewards`` [N].

    ``rewards`` [S], ``group_ids`` [S], ``valid`` [S] bool, ``lengths`` [S] scored tokens of each sequence (one
    without any is not usable); ``token_rewards`` in sequence order. ValueError for an unknown name, wrong shapes, or
    token rewards that the estimator does not read; NumericsError for a valid reward that is not finite.
    """
    for label, tensor in {"group_ids": group_ids, "valid": valid, "lengths": lengths}.items():
        if tensor.shape != rewards.shape or rewards.dim() != 1:
            raise ValueError(f"{label} is {list(tensor.shape)}, but rewards are {list(rewards.shape)}, not [S]")
    estimator = _by_name(name, token_rewards is not None) if isinstance(name, str) else name
    usable = valid.bool() & (lengths > 0)
    advantages = estimator(rewards, group_ids, usable, lengths, token_rewards)
    if advantages.shape[0] not in (rewards.shape[0], int(lengths.sum())) or advantages.dim() != 1:
        raise ValueError(f"advantages are {list(advantages.shape)}; they must be [S] = [{rewards.shape[0]}], or [N]")
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def _by_name(name: str, with_token_rewards: bool) -> AdvantageEstimator:
    if name not in ADVANTAGES:
        near = difflib.get_close_matches(name, ADVANTAGES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown advantage {name!r}{hint}; use one of {', '.join(sorted(ADVANTAGES))}")
    if with_token_rewards and name not in TOKEN_ESTIMATORS:
        raise ValueError(f"advantage {name!r} does not read token_rewards; use one of {sorted(TOKEN_ESTIMATORS)}")
    return ADVANTAGES[name]


def degenerate_groups(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Which sequences sit in a group that teaches nothing: [S] bool.

    True where the group's usable rewards differ by at most 1e-6 * max(1, |r|) or it has fewer than two of them.
    """
    ids = torch.unique(group_ids, return_inverse=True)[1]
    if ids.numel() == 0:
        return torch.zeros_like(valid)
    members = _members(rewards, ids, valid, torch.ones_like(ids), num_groups=int(ids.max()) + 1)
    return _equal_groups(members)[ids]


def multi_reward_advantages(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """GDPO: normalise each reward in its group, sum with weights, then over the batch's std (arXiv 2601.05242).

    ``rewards`` [S, F], NaN where a function does not apply: it leaves that function's statistics and that member's
    sum. ``weights`` [F], 1 by default. Returns [S]; 0 where nothing applied.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [S, F], one column a function; they are {list(rewards.shape)}")
    scale = rewards.new_ones(rewards.shape[1]) if weights is None else weights
    applies = valid.unsqueeze(1) & ~rewards.isnan()
    columns = [
        scale[f].double() * group_advantages(rewards[:, f].double(), group_ids, applies[:, f])
        for f in range(rewards.shape[1])
    ]
    total, usable = torch.stack(columns).sum(0), applies.any(1)
    members = _members(total, group_ids, usable, torch.ones_like(group_ids))
    # The mean over the batch is 0 already; taking it off would put rounding where 0 belongs.
    scaled = members.scatter(_by_centred_std(members, members.rewards))
    return scaled.to(torch.promote_types(rewards.dtype, torch.float32))


def discounted_returns(token_rewards: Tensor, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Returns R_t = sum_{u >= t} gamma^(u-t) r_u inside each sequence: [N] in sequence order to [N].

    ``lengths`` [S] sum to N. Log-depth: after k rounds a token has summed its next 2^k rewards.
    """
    ids = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
    segments = Segments.from_ids(ids, lengths.shape[0])
    returns, step = segments.padded(token_rewards.double()), 1
    while step < segments.width:
        shifted = torch.nn.functional.pad(returns[:, step:], (0, step))
        returns, step = returns + gamma**step * shifted, step * 2
    return returns.reshape(-1).gather(0, segments.cells)


def _members(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, lengths: Tensor, *, num_groups: int | None = None
) -> _Members:
    usable = valid.bool()
    chosen = rewards[usable].double()
    if not bool(chosen.isfinite().all()):
        raise NumericsError(
            "a reward that counts as valid is NaN or infinite; mark such rollouts as not valid (ungraded)"
        )
    ids = group_ids[usable]
    if num_groups is None:
        uniques, ids = torch.unique(ids, return_inverse=True)
        num_groups = uniques.shape[0]
    where = usable.nonzero()[:, 0]
    segments = Segments.from_ids(ids, num_groups)
    return _Members(chosen, lengths[usable].double(), segments, where, rewards.shape[0])


def _equal_groups(members: _Members) -> Tensor:
    """[groups] bool: fewer than two members, or rewards equal within the tolerance."""
    groups, rewards = members.groups, members.rewards
    if groups.width == 0:
        return torch.ones_like(groups.counts, dtype=torch.bool)
    highest = groups.padded(rewards, fill=-torch.inf).amax(1)
    lowest = groups.padded(rewards, fill=torch.inf).amin(1)
    size = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return (groups.counts < 2) | (highest - lowest <= EQUAL_TOLERANCE * size)


def _spread_of(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and sample std (sum of weights - 1) of [V] values; std 0 where they are equal or too few."""
    total = weights.sum()
    mean = (weights * values).sum() / total.clamp(min=1.0)
    variance = (weights * (values - mean).square()).sum() / (total - 1.0).clamp(min=1.0)
    counted = values[weights > 0]
    if counted.numel() < 1 or total < 2 or bool(_equal(counted)):
        return mean, torch.zeros_like(variance)
    return mean, variance.sqrt()


def _equal(values: Tensor) -> Tensor:
    return values.max() - values.min() <= EQUAL_TOLERANCE * values.abs().max().clamp(min=1.0)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale, exactly 0 where the scale is 0."""
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.where(scale > 0, values / safe, torch.zeros_like(values))


def _whiten(values: Tensor, weights: Tensor) -> Tensor:
    mean, std = _spread_of(values, weights)
    return _divide(values - mean, std)


Baseline = Callable[[_Members], Tensor]  # rewards minus a baseline, [V]
Scale = Callable[[_Members, Tensor], Tensor]  # centred [V] to advantages [V]


def _from_nothing(members: _Members) -> Tensor:
    return members.rewards


def _from_group_mean(members: _Members) -> Tensor:
    centred = members.rewards - members.of_group(members.groups.mean(members.rewards))
    return _zero_equal(members, centred)


def _from_others_mean(members: _Members) -> Tensor:
    """r_i - mean of the others = n/(n-1) (r_i - mean)."""
    counts = members.groups.counts.double()
    return _from_group_mean(members) * members.of_group(counts / (counts - 1.0).clamp(min=1.0))


def _from_length_weighted_mean(members: _Members) -> Tensor:
    weighted = members.groups.sum(members.lengths * members.rewards)
    total = members.groups.sum(members.lengths)
    mean = weighted / total.clamp(min=1.0)  # usable members have tokens
    return _zero_equal(members, members.rewards - members.of_group(mean))


def _best_minus_second(members: _Members) -> Tensor:
    """The best member of a group gets its lead over the second, the others 0."""
    padded = members.groups.padded(members.rewards, fill=-torch.inf)
    if members.groups.width < 2:
        return torch.zeros_like(members.rewards)
    best = padded.topk(2, dim=1)
    lead = best.values[:, 0] - best.values[:, 1]
    cells = torch.zeros_like(padded).scatter(1, best.indices[:, :1], lead.unsqueeze(1))
    return _zero_equal(members, cells.reshape(-1).gather(0, members.groups.cells))


def _zero_equal(members: _Members, advantages: Tensor) -> Tensor:
    equal = members.of_group(_equal_groups(members))
    return torch.where(equal, torch.zeros_like(advantages), advantages)


def _unscaled(members: _Members, centred: Tensor) -> Tensor:
    return centred


def _by_group_std(members: _Members, centred: Tensor) -> Tensor:
    mean = members.of_group(members.groups.mean(members.rewards))
    squares = members.groups.sum((members.rewards - mean).square())
    std = (squares / (members.groups.counts - 1).clamp(min=1)).sqrt()
    std = torch.where(_equal_groups(members), torch.zeros_like(std), std)
    return _divide(centred, members.of_group(std))


def _by_reward_std(members: _Members, centred: Tensor) -> Tensor:
    return _divide(centred, _spread_of(members.rewards, torch.ones_like(centred))[1])


def _by_centred_std(members: _Members, centred: Tensor) -> Tensor:
    return _divide(centred, _spread_of(centred, torch.ones_like(centred))[1])


def _whiten_sequences(members: _Members, centred: Tensor) -> Tensor:
    return _whiten(centred, torch.ones_like(centred))


def _whiten_tokens(members: _Members, centred: Tensor) -> Tensor:
    return _whiten(centred, members.lengths)


def _by_share_of_rewarded(members: _Members, centred: Tensor) -> Tensor:
    """GPG: times the number of sequences over the number with a reward that is not 0."""
    return centred * (members.rewards.shape[0] / max(int(members.rewards.count_nonzero()), 1))


def _estimator(baseline: Baseline, scale: Scale) -> AdvantageEstimator:
    def estimate(
        rewards: Tensor, group_ids: Tensor, valid: Tensor, lengths: Tensor, token_rewards: Tensor | None
    ) -> Tensor:
        members = _members(rewards, group_ids, valid, lengths)
        return members.scatter(scale(members, baseline(members)))

    return estimate


def reinforce_pp_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    lengths: Tensor,
    token_rewards: Tensor | None,
    *,
    gamma: float = 1.0,
) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): returns, whitened over all tokens of the valid sequences.

    Without ``token_rewards`` and with gamma 1 every token's return is the sequence's reward: [S]. Else [N]: the
    sequence's reward counts at its last token, added to ``token_rewards``.
    """
    if token_rewards is None and gamma == 1.0:
        return _estimator(_from_nothing, _whiten_tokens)(rewards, group_ids, valid, lengths, None)
    ids = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
    scored = valid.bool() & (lengths > 0)
    last = (lengths.cumsum(0) - 1)[scored]
    total = torch.zeros(ids.shape[0], dtype=torch.float64, device=ids.device)
    total = total.index_put((last,), _members(rewards, group_ids, scored, lengths).rewards)
    if token_rewards is not None:
        total = total + torch.where(scored[ids], token_rewards.double(), 0.0)
    returns, counted = discounted_returns(total, lengths, gamma=gamma), scored[ids].double()
    return torch.where(scored[ids], _whiten(returns, counted), torch.zeros_like(returns))


ADVANTAGES: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        # (r - mean) / std in the group: GRPO, GSPO.
        "group": _estimator(_from_group_mean, _by_group_std),
        # r - mean: Dr. GRPO, MiniRL.
        "group_mean": _estimator(_from_group_mean, _unscaled),
        # r - group mean, over the std of all rewards of the batch (TRL's and ms-swift's "batch").
        "group_mean_reward_std": _estimator(_from_group_mean, _by_reward_std),
        # r - group mean, over the std of these differences over the batch (ScaleRL, arXiv 2510.13786).
        "group_mean_batch_std": _estimator(_from_group_mean, _by_centred_std),
        # r - mean of the others: RLOO; then over the same three scales.
        "rloo": _estimator(_from_others_mean, _unscaled),
        "rloo_group_std": _estimator(_from_others_mean, _by_group_std),
        "rloo_reward_std": _estimator(_from_others_mean, _by_reward_std),
        "rloo_batch_std": _estimator(_from_others_mean, _by_centred_std),
        # Whitened rewards, without a group: moments over tokens, or over sequences.
        "reinforce_pp": reinforce_pp_advantages,
        "reinforce_pp_sequence": _estimator(_from_nothing, _whiten_sequences),
        # r - group mean, whitened over tokens, or over sequences (whose mean is 0 already).
        "reinforce_pp_baseline": _estimator(_from_group_mean, _whiten_tokens),
        "reinforce_pp_baseline_sequence": _estimator(_from_group_mean, _by_centred_std),
        # r - length-weighted mean: OPO (arXiv 2505.23585).
        "opo": _estimator(_from_length_weighted_mean, _unscaled),
        # The best of a group gets its lead over the second: pass@k training; plain, or over the group's std.
        "passk": _estimator(_best_minus_second, _unscaled),
        "passk_group_std": _estimator(_best_minus_second, _by_group_std),
        # (r - mean) over the share of sequences with a reward: GPG (arXiv 2504.02546).
        "gpg": _estimator(_from_group_mean, _by_share_of_rewarded),
    }
)

TOKEN_ESTIMATORS = frozenset({"reinforce_pp"})
"""Estimators that read token rewards and may then vary inside a sequence."""
