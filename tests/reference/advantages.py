"""The peers' advantages: their epsilons, their treatment of missing rewards and of groups of one.

Each function takes the epsilon; with 0 it must be ours, with the peer's own it must be the peer's numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithms import estimate_advantages, multi_reward_advantages
from reference.trl import summed_rewards
from reference.vectors import Case, LeftOut

OURS = {
    ("grpo", "group"): "group",
    ("grpo", "batch"): "group_mean_reward_std",
    ("grpo", "none"): "group_mean",
    ("rloo", "group"): "rloo_group_std",
    ("rloo", "batch"): "rloo_reward_std",
    ("rloo", "none"): "rloo",
    ("reinforce_plus_plus", "group"): "group",
    ("reinforce_plus_plus", "batch"): "group_mean_batch_std",
    ("reinforce_plus_plus", "none"): "group_mean",
}


def by_name(name: str, rewards: Tensor, groups: Tensor, valid: Tensor | None = None) -> Tensor:
    """Ours, for sequences of one token."""
    usable = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    return estimate_advantages(name, rewards, groups, usable, lengths=torch.ones_like(groups))


def group_std(values: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Sample standard deviation of each member's group, [S]."""
    out = torch.zeros_like(values)
    for g in groups.unique():
        members = (groups == g) & valid
        out[groups == g] = values[members].std() if members.sum() > 1 else 0.0
    return out


def shrink(ours: Tensor, std: Tensor, epsilon: float) -> Tensor:
    """x / std to x / (std + epsilon)."""
    return ours * std / (std + epsilon) if epsilon else ours


def scaled(kind: tuple[str, str], rewards: Tensor, groups: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """``kind`` = (estimator, scale), as TRL and ms-swift name them."""
    ours = by_name(OURS[kind], rewards, groups, valid)
    if kind[1] == "group":
        return shrink(ours, group_std(rewards, groups, valid), epsilon)
    if kind == ("reinforce_plus_plus", "batch"):
        return shrink(ours, by_name("group_mean", rewards, groups, valid)[valid].std(), epsilon)
    return shrink(ours, rewards[valid].std(), epsilon) if kind[1] == "batch" else ours


def trl(case: Case, epsilon: float) -> Tensor:
    """A missing reward adds 0; a completion that nothing scored is left out, as ours leaves out ungraded ones."""
    s = case.settings
    rewards, valid = summed_rewards(case)
    groups = torch.arange(len(rewards)) // s["num_generations"]
    if s["multi_objective_aggregation"] == "normalize_then_sum":
        return normalize_then_sum(case.tensor("rewards_per_function").T, case.tensor("reward_weights"), groups, epsilon)
    return scaled(("grpo", s["scale_rewards"]), rewards, groups, valid, epsilon)


def normalize_then_sum(rewards: Tensor, weights: Tensor, groups: Tensor, epsilon: float) -> Tensor:
    """GDPO with TRL's epsilon, [S, F]."""
    valid = torch.ones_like(groups, dtype=torch.bool)
    if epsilon == 0.0:
        return multi_reward_advantages(rewards, groups, valid, weights=weights)
    total = torch.zeros(len(groups), dtype=rewards.dtype)
    for f in range(rewards.shape[1]):
        applies = ~rewards[:, f].isnan()
        column = rewards[:, f].nan_to_num(0.0)
        total += weights[f] * scaled(("grpo", "group"), column, groups, applies, epsilon)
    usable = ~rewards.isnan().all(1)
    chosen = total[usable]
    out = torch.zeros_like(total)
    out[usable] = (chosen - chosen.mean()) / (chosen.std() + epsilon)
    return out


def swift(case: Case, epsilon: float) -> Tensor:
    """A missing reward is 0, and so is an all-missing row: it enters its group. A group of one gets 0."""
    s = case.settings
    raw, weights = case.tensor("rewards"), case.tensor("reward_weights")
    rewards = (raw.nan_to_num(0.0) * weights).sum(1)
    names = case.inputs["group_ids"]
    groups = torch.tensor([sorted(set(names)).index(name) for name in names])
    if s.get("kl_in_reward"):
        kl = torch.where(case.mask, case.tensor("proximal_logprobs") - case.tensor("reference_logprobs"), 0.0)
        rewards = rewards - s["beta"] * kl.sum(1)
    rows = torch.arange(len(rewards))
    if s.get("dynamic"):
        last = {request: i for i, request in enumerate(case.inputs["request_ids"])}
        rows = torch.tensor([last[request] for request in case.inputs["request_ids"]])
    estimator, scale = s["advantage_estimator"], s["scale_rewards"]
    valid = torch.ones(len(rewards), dtype=torch.bool)
    if scale == "gdpo":
        if estimator == "reinforce_plus_plus" or s.get("dynamic"):
            scale = "none"
        else:
            return gdpo(raw, weights, groups, epsilon)
    keep = torch.unique(rows)
    chosen = scaled((estimator, scale), rewards[keep], groups[keep], valid[keep], epsilon)
    out = torch.zeros(len(rewards), dtype=chosen.dtype)
    out[keep] = chosen
    return out[rows]


def gdpo(rewards: Tensor, weights: Tensor, groups: Tensor, epsilon: float) -> Tensor:
    """ms-swift's GDPO: a missing entry is 0 after normalisation; epsilon 1e-8 twice."""
    if epsilon == 0.0:
        valid = torch.ones_like(groups, dtype=torch.bool)
        return multi_reward_advantages(rewards, groups, valid, weights=weights)
    total = torch.zeros(len(groups), dtype=rewards.dtype)
    for f in range(rewards.shape[1]):
        applies = ~rewards[:, f].isnan()
        column = scaled(("grpo", "group"), rewards[:, f].nan_to_num(0.0), groups, applies, 1e-8)
        total += weights[f] * column
    return (total - total.mean()) / (total.std() + 1e-8)


def verl(case: Case, epsilon: float) -> Tensor:
    """[B, T]. A group of one keeps its raw reward; a row without tokens counts in its group and gets 0."""
    s, mask = case.settings, case.mask
    kind, lengths = s["adv_estimator"], case.mask.sum(1)
    left_out = {
        "remax": "ReMax needs a greedy rollout of each prompt",
        "gae": "GAE needs a critic",
        "optimal_token_baseline": "needs the sum of squared probabilities at each token",
        "tir_optimal_token_baseline": "needs the sum of squared probabilities at each token",
    }
    if kind in left_out:
        raise LeftOut(left_out[kind])
    if kind == "gdpo":
        return verl_gdpo(case, epsilon)
    groups = torch.tensor(case.inputs["group_ids"])
    valid = torch.ones(len(mask), dtype=torch.bool)
    if kind == "reinforce_plus_plus":
        return verl_returns(case, epsilon)
    rewards = case.tensor("rewards")
    if kind == "opo":
        rows = estimate_advantages("opo", rewards, groups, valid, lengths=lengths)
    else:
        rows = verl_rows(kind, rewards, groups, s.get("norm_adv_by_std_in_grpo", True), epsilon)
    if epsilon and kind != "rloo_vectorized" and kind != "grpo_passk":
        alone = torch.tensor([int((groups == g).sum()) == 1 for g in groups])
        factor = float(torch.tensor(1.0 + 1e-6)) if kind.startswith("grpo") and s["norm_adv_by_std_in_grpo"] else 1.0
        if kind == "gpg":
            factor = float(rewards.count_nonzero()) / len(rewards)
        rows = torch.where(alone, rewards / factor, rows)
    if kind == "reinforce_plus_plus_baseline":
        return whiten(rows.unsqueeze(1).expand(mask.shape), mask, epsilon)
    return torch.where(mask, rows.unsqueeze(1), 0.0)


def verl_rows(kind: str, rewards: Tensor, groups: Tensor, by_std: bool, epsilon: float) -> Tensor:
    """One advantage a row."""
    valid = torch.ones_like(groups, dtype=torch.bool)
    if kind in ("grpo", "grpo_vectorized"):
        return scaled(("grpo", "group" if by_std else "none"), rewards, groups, valid, 1e-6 if epsilon else 0.0)
    if kind == "grpo_passk":
        plain = by_name("passk_group_std" if by_std else "passk", rewards, groups)
        return shrink(plain, group_std(rewards, groups, valid), 1e-6 if epsilon else 0.0) if by_std else plain
    name = {
        "rloo": "rloo",
        "rloo_vectorized": "rloo",
        "gpg": "gpg",
        "reinforce_plus_plus_baseline": "group_mean",
    }[kind]
    return by_name(name, rewards, groups)


def whiten(values: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Over the scored tokens; verl adds 1e-8 inside the root."""
    chosen = values[mask]
    out = (values - chosen.mean()) / (chosen.var() + (1e-8 if epsilon else 0.0)).sqrt()
    return torch.where(mask, out, 0.0)


def verl_returns(case: Case, epsilon: float) -> Tensor:
    """Discounted returns, by a plain backward walk over the scored tokens of each row."""
    mask, rewards = case.mask, case.tensor("token_level_rewards")
    if rewards is None:
        rewards = torch.zeros(mask.shape, dtype=case.dtype)
        last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
        rewards[torch.arange(len(mask)), last] = case.tensor("rewards")
    returns = torch.zeros_like(rewards)
    for row in range(mask.shape[0]):
        running = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                running = float(rewards[row, t]) + case.settings["gamma"] * running
                returns[row, t] = running
    return whiten(returns, mask, epsilon)


def verl_gdpo(case: Case, epsilon: float) -> Tensor:
    """Each component in its group, summed, then whitened over tokens (ours: over sequences)."""
    groups, mask = torch.tensor(case.inputs["group_ids"]), case.mask
    parts = case.inputs["reward_components"]
    total = torch.zeros(len(groups), dtype=torch.float64)
    valid = torch.ones_like(groups, dtype=torch.bool)
    for key in case.settings["gdpo_reward_keys"]:
        column = torch.tensor(parts[key], dtype=torch.float64)
        total += scaled(("grpo", "group"), column, groups, valid, 1e-6 if epsilon else 0.0)
    return whiten(total.unsqueeze(1).expand(mask.shape), mask, epsilon)
