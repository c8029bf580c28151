"""ms-swift 4.6's GRPO losses in our terms, and the readings that ours does not follow."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithms import Algorithm, policy_loss
from gspo.algorithms.ratios import mean_log_ratio
from gspo.algorithms.segments import Segments
from reference.vectors import Case, LeftOut, Outcome, finish, flat_inputs, leaf

REDUCTION = {
    "grpo": "sequence_mean_token_mean",
    "sapo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant_length",
}
LEFT_OUT = {"real": "a classification loss over the group", "fipo": "a future-KL weight"}
KL_LIMIT = 10.0


def algorithm_of(case: Case) -> Algorithm:
    """ms-swift's settings on our axes, without correction and KL. Its CISPO bound is raw: ours is 1 + epsilon_high."""
    s = case.settings
    kind = s.get("loss_type", "grpo")
    if kind in LEFT_OUT:
        raise LeftOut(f"{kind}: {LEFT_OUT[kind]}")
    if s.get("top_entropy_quantile", 1.0) < 1.0:
        raise LeftOut("entropy mask")
    epsilon = s.get("epsilon", 0.2)
    high = s.get("epsilon_high")
    high = epsilon if high is None else high
    return Algorithm(
        name=kind,
        importance_sampling_level=s.get("importance_sampling_level", "token"),
        rule={"cispo": "stop_gradient_clip", "sapo": "soft_gate"}.get(kind, "clip"),
        reduction=REDUCTION[kind],
        epsilon=None if kind == "cispo" else epsilon,
        epsilon_high=high - 1.0 if kind == "cispo" else high,
        delta=s.get("delta"),
        tau_positive=s.get("tau_pos", 1.0),
        tau_negative=s.get("tau_neg", 1.05),
        loss_constant=float(s.get("max_completion_length", 16)) if kind == "dr_grpo" else None,
    )


def totals_of(case: Case, mask: Tensor) -> dict[str, float]:
    """Rows count whether empty or not; dapo and cispo divide by the token count of the whole rollout batch."""
    s = case.settings
    tokens = float(mask.sum())
    if s.get("loss_type", "grpo") in ("dapo", "cispo"):
        tokens = s.get("num_items_in_batch") or float(case.mask.sum())
        tokens /= s.get("num_processes", 1)
        if s.get("mode", "train") == "train":
            tokens /= s.get("gradient_accumulation_steps", 1)
    return {"total_sequences": float(mask.shape[0]), "total_tokens": tokens}


def run(case: Case) -> Outcome:
    """The case by our functions under ms-swift's settings; where it reads otherwise, by its reading."""
    algorithm, mask = algorithm_of(case), case.mask
    s = case.settings
    if s.get("overlong_filter"):
        mask = mask & ~torch.tensor(case.inputs["truncated"]).bool().unsqueeze(1)
    totals = totals_of(case, mask)
    if s.get("off_policy_sequence_mask_delta") is not None:
        mask = off_policy_mask(case, mask)
        if REDUCTION[s.get("loss_type", "grpo")] == "token_mean" and s.get("loss_type") == "bnpo":
            totals["total_tokens"] = float(mask.sum())
    if s.get("chunk_size"):
        return chunked(case, algorithm, mask)
    advantages = case.tensor("advantages")
    if s.get("has_teacher"):
        difference = case.tensor("teacher_logprobs") - case.tensor("proximal_logprobs")
        advantages = advantages.unsqueeze(1) + s["teacher_kl_coef"] * torch.where(mask, difference, 0.0)
    return assembled(case, algorithm, {"mask": mask, "advantages": advantages, **totals})


def assembled(case: Case, algorithm: Algorithm, changes: dict) -> Outcome:
    """Policy term and KL, both multiplied by the correction's weights: ms-swift weights the KL too, ours does not."""
    s, current = case.settings, leaf(case)
    inputs = flat_inputs(case, current, **changes)
    weights = torch.ones_like(inputs.current_logprobs)
    if s.get("rollout_importance_sampling_mode"):
        weights = weights_of(case, inputs, changes["mask"])
    plain = replace(inputs, sampled_logprobs=None)
    output = policy_loss(plain, algorithm)
    loss = token_weighted(plain, algorithm, weights)
    if s.get("beta", 0.0) > 0 and not s.get("kl_in_reward"):
        d = (inputs.reference_logprobs - inputs.current_logprobs).clamp(-20, 20)
        k3 = (d.exp() - d - 1).clamp(-KL_LIMIT, KL_LIMIT)
        carrier = replace(plain, current_logprobs=-k3 * weights.detach(), advantages=torch.ones_like(k3))
        loss = loss + s["beta"] * policy_loss(carrier, replace(algorithm, rule="reinforce")).loss
    return finish(loss, current, output)


def token_weighted(inputs, algorithm: Algorithm, weights: Tensor) -> Tensor:
    """Weights on token losses: multiplied into the advantages, whose sign they do not change."""
    return policy_loss(replace(inputs, advantages=inputs.advantages * weights), algorithm).loss


def weights_of(case: Case, inputs, mask: Tensor) -> Tensor:
    """[N]: token ratios, or the geometric mean; its sequence_mask keeps the token ratios of the rows it accepts."""
    s = case.settings
    mode, limit = s["rollout_importance_sampling_mode"], s.get("rollout_importance_sampling_threshold", 2.0)
    segments = Segments.from_mask(mask)
    log_ratio = (inputs.proximal_logprobs - inputs.sampled_logprobs).clamp(-20, 20)
    tokens, geometric = log_ratio.exp(), segments.mean(log_ratio).exp()[segments.ids]
    if mode == "token_truncate":
        return tokens.clamp(max=limit)
    if mode == "token_mask":
        return torch.where(tokens <= limit, tokens, 0.0)
    if mode == "sequence_truncate":
        return geometric.clamp(max=limit)
    return torch.where(geometric <= limit, tokens, 0.0)


def off_policy_mask(case: Case, mask: Tensor) -> Tensor:
    """Rows that drifted leave the mask, and with it their KL; ours keeps their KL and every denominator."""
    sampled = case.tensor("sampled_logprobs")
    old = case.tensor("proximal_logprobs") if sampled is None else sampled
    current = case.tensor("current_logprobs")
    old = current if old is None else old
    drift = mean_log_ratio(old[mask], current[mask], Segments.from_mask(mask))
    dropped = (case.tensor("advantages") < 0) & (drift > case.settings["off_policy_sequence_mask_delta"])
    return mask & ~dropped.unsqueeze(1)


def chunked(case: Case, algorithm: Algorithm, mask: Tensor) -> Outcome:
    """Chunks weighted by their rows: right for means over sequences, wrong for token means."""
    current, rows = leaf(case), case.mask.shape[0]
    total = torch.zeros((), dtype=case.dtype)
    for part in torch.arange(rows).split(case.settings["chunk_size"]):
        part_mask = torch.zeros_like(mask)
        part_mask[part] = mask[part]
        totals = totals_of(case, part_mask) | {"total_sequences": float(len(part))}
        inputs = flat_inputs(case, current, mask=part_mask, **totals)
        total = total + policy_loss(inputs, algorithm).loss * len(part) / rows
    return finish(total, current)
