"""TRL 1.16's GRPO and RLOO losses in our terms, and the readings that ours does not follow."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithms import CATALOG, Algorithm, LossInputs, estimate_advantages, policy_loss
from reference.vectors import Case, LeftOut, Outcome, finish, flat_inputs, leaf, outcome

REDUCTION = {
    "grpo": "sequence_mean_token_mean",
    "sapo": "sequence_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant_length",
    "luspo": "sequence_mean_token_sum",
}
SCALED_BY_ACCUMULATION = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo")
EPSILON = 1e-4  # added to every standard deviation


def algorithm_of(case: Case) -> Algorithm:
    """TRL's settings as a point on our axes. Its CISPO bound is raw: ours is 1 + epsilon_high."""
    s, kind = case.settings, case.settings["loss_type"]
    if kind == "vespo":
        raise LeftOut("vespo: a kernel on the product ratio")
    if "top_entropy_quantile" in s or s.get("entropy_coef"):
        raise LeftOut("entropy mask and bonus")
    rule = {"cispo": "stop_gradient_clip", "sapo": "soft_gate"}.get(kind, "clip")
    algorithm = Algorithm(
        name=kind,
        importance_sampling_level=s["importance_sampling_level"],
        rule=rule,
        reduction=REDUCTION[kind],
        epsilon=None if kind == "cispo" else s.get("epsilon_low", 0.2),
        epsilon_high=s["epsilon_high"] - 1.0 if kind == "cispo" else s.get("epsilon_high", 0.2),
        delta=s.get("delta"),
        tau_positive=s.get("sapo_temperature_pos", 1.0),
        tau_negative=s.get("sapo_temperature_neg", 1.05),
        loss_constant=s.get("max_completion_length") if kind == "dr_grpo" else None,
        off_policy_mask_delta=s.get("off_policy_mask_threshold"),
        beta=s.get("beta", 0.0),
        kl_estimator="k3_unbiased" if s.get("use_bias_correction_kl", True) else "k3",
    )
    mode = s.get("vllm_importance_sampling_mode")
    if mode is None:
        return algorithm
    return replace(
        algorithm,
        correction=mode.replace("sequence_", "sequence_product_"),
        correction_max=s["vllm_importance_sampling_clip_max"],
        correction_min=s["vllm_importance_sampling_clip_min"],
    )


def totals_of(case: Case, mask: Tensor, rows: int) -> dict[str, float]:
    """TRL counts empty rows in B, and divides some losses by the accumulation steps itself."""
    s, kind = case.settings, case.settings["loss_type"]
    steps = s.get("gradient_accumulation_steps", 1) if s.get("mode", "train") == "train" else 1
    scale = float(steps) if kind in SCALED_BY_ACCUMULATION else 1.0
    tokens = float(mask.sum()) * scale
    if kind in ("dapo", "cispo"):
        tokens = s["num_items_in_batch"] / s.get("num_processes", 1)
        if s.get("mode", "train") == "train":
            tokens *= steps / s.get("steps_per_generation", 1)
    return {"total_sequences": rows * scale, "total_tokens": max(tokens, 1.0)}


def run(case: Case) -> Outcome:
    """The case by our functions under TRL's settings; where TRL reads otherwise, by its reading."""
    algorithm, mask, advantages = algorithm_of(case), case.mask, case.tensor("advantages")
    if case.topic == "trl_sampler_correction":
        advantages = torch.tensor(case.expected["advantages"], dtype=case.dtype)
        if case.settings.get("mask_truncated_completions"):
            mask = mask & ~torch.tensor(case.inputs["truncated"]).bool().unsqueeze(1)
    changes = {"advantages": advantages, "mask": mask, **totals_of(case, mask, mask.shape[0])}
    if is_broadcast_correction(algorithm):
        return broadcast_correction(case, algorithm, changes)
    sequence_kl = algorithm.importance_sampling_level == "sequence" and algorithm.kl_estimator == "k3_unbiased"
    if algorithm.beta > 0 and sequence_kl:
        return sequence_ratio_times_kl(case, algorithm, changes)
    return outcome(case, algorithm, **changes)


def is_broadcast_correction(algorithm: Algorithm) -> bool:
    """Whether TRL would multiply one sequence ratio by token weights."""
    return algorithm.importance_sampling_level == "sequence" and algorithm.correction in (
        "token_truncate",
        "token_mask",
    )


def broadcast_correction(case: Case, algorithm: Algorithm, changes: dict) -> Outcome:
    """TRL's reading: the sequence's loss times each token's weight, so the mean weight scales every token's gradient.

    Ours (and verl's) gives each token's gradient its own weight. The values agree.
    """
    current = leaf(case)
    inputs = flat_inputs(case, current, **changes)
    weighted = policy_loss(inputs, algorithm)
    weight_sums = weighted.per_sequence["correction_weight_sum"]
    mean_weight = weight_sums / weighted.per_sequence["tokens"].clamp(min=1)
    scaled = replace(inputs, advantages=inputs.advantages * mean_weight[inputs.sequence_ids])
    loss = policy_loss(scaled, replace(algorithm, correction="none")).loss
    return finish(loss, current, weighted)


def sequence_ratio_times_kl(case: Case, algorithm: Algorithm, changes: dict) -> Outcome:
    """TRL's reading of the unbiased KL at sequence level: the sequence ratio times each token's k3.

    Ours takes the token ratio, for which alone the estimator is unbiased.
    """
    current = leaf(case)
    inputs = flat_inputs(case, current, **changes)
    policy = policy_loss(inputs, replace(algorithm, beta=0.0))
    mask = changes["mask"]
    proximal = case.tensor("proximal_logprobs")
    proximal = current.detach() if proximal is None else proximal
    drift = torch.where(mask, current - proximal, 0.0)
    ratio = (drift.sum(1) / mask.sum(1).clamp(min=1)).exp().unsqueeze(1)
    d = torch.where(mask, case.tensor("reference_logprobs") - current, 0.0)
    kl = ratio * (d.exp() - d - 1.0)
    # Any token values go through our reduction as REINFORCE with advantage 1.
    carrier = replace(inputs, advantages=torch.ones_like(inputs.advantages), current_logprobs=-kl[mask])
    plain = replace(algorithm, rule="reinforce", beta=0.0, off_policy_mask_delta=None)
    loss = policy.loss + algorithm.beta * policy_loss(carrier, plain).loss
    return finish(loss, current, policy)


def accumulation(case: Case) -> tuple[list[Tensor], Tensor]:
    """The losses of the micro-batches and the gradient of each row from its own."""
    algorithm, current = algorithm_of(case), leaf(case)
    parts = case.settings["steps_per_generation"]
    losses = []
    for rows in torch.arange(case.mask.shape[0]).chunk(parts):
        mask = torch.zeros_like(case.mask)
        mask[rows] = case.mask[rows]
        totals = totals_of(case, mask, len(rows))
        losses.append(policy_loss(flat_inputs(case, current, mask=mask, **totals), algorithm).loss)
    grad = torch.autograd.grad(sum(losses), current)[0]
    return [loss.detach() for loss in losses], grad


def packed(case: Case) -> Outcome:
    """The asynchronous trainer: flat tokens, token mean."""
    s, lengths = case.settings, torch.tensor(case.inputs["lengths"])
    current = leaf(case)
    steps = s["gradient_accumulation_steps"]
    inputs = LossInputs(
        current_logprobs=current,
        proximal_logprobs=case.tensor("proximal_logprobs"),
        advantages=case.tensor("advantages"),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        num_sequences=len(lengths),
        total_sequences=float(len(lengths)),
        total_tokens=s["global_n_tokens"] / s["num_processes"] * steps,
    )
    algorithm = replace(CATALOG["dapo"], epsilon=s["epsilon_low"], epsilon_high=s["epsilon_high"])
    output = policy_loss(inputs, algorithm)
    return finish(output.loss, current, output)


def gmpo(case: Case) -> Outcome:
    """TRL's GMPO: ours, but an empty row has ratio 1 and adds -advantage / B to the value."""
    s = case.settings
    algorithm = replace(
        CATALOG["gmpo"],
        epsilon=s["epsilon_low"],
        epsilon_high=s["epsilon_high"],
        beta=s.get("beta", 0.0),
        kl_estimator="k3",
    )
    steps = s.get("gradient_accumulation_steps", 1)
    result = outcome(case, algorithm, total_sequences=float(case.mask.shape[0] * steps))
    empty = ~case.mask.any(1)
    return replace(result, loss=result.loss - case.tensor("advantages")[empty].sum() / (case.mask.shape[0] * steps))


def rloo(case: Case) -> tuple[Tensor, Outcome]:
    """TRL's RLOO: a clip on the product ratio, where ours is REINFORCE; on-policy the gradients agree.

    Its KL goes into the reward, a missing reward adds 0, and an empty row adds -advantage / B to the value.
    """
    s, mask = case.settings, case.mask
    advantages = torch.tensor(case.expected["advantages"], dtype=case.dtype)  # with its rounding around 0
    algorithm = Algorithm(
        name="rloo",
        importance_sampling_level="sequence_product",
        epsilon=s["epsilon_low"],
        epsilon_high=s["epsilon_high"],
    )
    result = outcome(case, algorithm, advantages=advantages, total_sequences=float(mask.shape[0]))
    loss = result.loss - advantages[~mask.any(1)].sum() / mask.shape[0]
    return rloo_advantages(case), replace(result, loss=loss)


def rloo_advantages(case: Case) -> Tensor:
    """Its rewards, then our leave-one-out; its whitening has an epsilon."""
    s, mask = case.settings, case.mask
    rewards, valid = summed_rewards(case)
    if s["reward_clip_range"] is not None:
        rewards = rewards.clamp(*s["reward_clip_range"])
    if s["beta"] > 0:
        kl = torch.where(mask, case.tensor("proximal_logprobs") - case.tensor("reference_logprobs"), 0.0)
        rewards = rewards - s["beta"] * kl.sum(1)
    groups = torch.arange(len(rewards)) // s["num_generations"]
    advantages = estimate_advantages("rloo", rewards, groups, valid, lengths=torch.ones_like(groups))
    if s["normalize_advantages"]:
        chosen = advantages[valid]
        scaled = (chosen - chosen.mean()) / (chosen.std() + EPSILON)
        advantages = torch.zeros_like(advantages).masked_scatter(valid, scaled)
    return advantages


def summed_rewards(case: Case) -> tuple[Tensor, Tensor]:
    """Weighted sums in which a missing reward adds 0, and which completions any function scored."""
    per_function = case.tensor("rewards_per_function")
    weights = case.tensor("reward_weights")
    valid = ~per_function.isnan().all(0)
    return (per_function.nan_to_num(0.0) * weights.unsqueeze(1)).sum(0), valid
