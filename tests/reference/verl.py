"""verl 0.9's policy losses in our terms, and the readings that ours does not follow."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithms import CATALOG, Algorithm, correction_weights, policy_loss, reduce_tokens
from gspo.algorithms.segments import Segments
from reference.vectors import Case, LeftOut, Outcome, finish, flat_inputs, leaf, outcome

REDUCTION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "constant_length",
    "token-sum": "token_sum",
}
LEFT_OUT = {
    "dppo_tv": "dppo: a mask on probability differences",
    "dppo_kl": "dppo: a mask on probability differences",
    "clip_cov": "covariance clipping draws tokens at random",
    "kl_cov": "covariance penalty",
    "dro": "a squared log-ratio penalty in place of a clip",
}
KL = {
    "k1": "k1",
    "kl": "k1",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
    "k1+": "k1_with_k2_gradient",
    "k3+": "k3_with_k2_gradient",
    "low_var_kl+": "k3_with_k2_gradient",
}


def algorithm_of(case: Case) -> Algorithm:
    """verl's settings on our axes. Its gspo is GSPO-token's form; its geo_mean is GMPO."""
    s, mode = case.settings, case.settings.get("loss_mode", "vanilla")
    if mode in LEFT_OUT:
        raise LeftOut(LEFT_OUT[mode])
    base = Algorithm(
        name=mode,
        reduction=REDUCTION[s.get("loss_agg_mode", "token-mean")],
        loss_constant=loss_constant(case),
        epsilon=s.get("clip_ratio_low", 0.2),
        epsilon_high=s.get("clip_ratio_high", 0.2),
    )
    if mode == "gspo":
        return replace(base, importance_sampling_level="sequence_token")
    if mode == "cispo":
        return replace(base, rule="stop_gradient_clip")
    if mode == "geo_mean":
        mean = "sequence_mean_token_mean"
        return replace(base, rule="clip_inside_mean", importance_sampling_level="sequence", reduction=mean)
    if mode == "sapo":
        taus = {"tau_positive": s["tau_pos"], "tau_negative": s["tau_neg"]}
        return replace(base, rule="soft_gate", reduction="sequence_mean_token_mean", **taus)
    if mode == "gpg":
        return replace(base, rule="reinforce")
    return replace(base, delta=s.get("clip_ratio_c"))


def loss_constant(case: Case) -> float | None:
    """The padded width, where no constant is given: it varies from batch to batch."""
    if REDUCTION[case.settings.get("loss_agg_mode", "token-mean")] != "constant_length":
        return None
    info = case.settings | case.settings.get("global_batch_info", {})
    return float(info.get("loss_scale_factor") or case.mask.shape[1])


def totals_of(case: Case, mask: Tensor) -> dict[str, float]:
    """Local counts of non-empty rows and of tokens, or the global ones over the data-parallel ranks."""
    info = case.settings | case.settings.get("global_batch_info", {})
    ranks = info.get("dp_size", 1)
    sequences, tokens = info.get("global_batch_size"), info.get("batch_num_tokens")
    return {
        "total_sequences": float(mask.any(1).sum()) if sequences is None else sequences / ranks,
        "total_tokens": float(mask.sum()) if tokens is None else tokens / ranks,
    }


def run(case: Case) -> Outcome:
    """The case by our functions under verl's settings."""
    algorithm, mask = algorithm_of(case), case.mask
    totals = totals_of(case, mask)
    if case.settings.get("loss_mode") == "geo_mean":
        totals["total_sequences"] = float(mask.shape[0])  # empty rows count, global counts do not
    if algorithm.reduction == "token_sum":
        scale = float(case.settings.get("global_batch_info", {}).get("dp_size", 1))
        result = outcome(case, algorithm, **totals)
        return replace(result, loss=result.loss * scale, grad=result.grad * scale)
    return outcome(case, algorithm, **totals)


def agg_loss(case: Case) -> Outcome:
    """A reduction alone."""
    values = case.tensor("loss_mat").requires_grad_(True)
    mask = case.mask
    reduction = REDUCTION[case.settings["loss_agg_mode"]]
    loss = reduce_tokens(
        values[mask],
        Segments.from_mask(mask),
        reduction=reduction,
        loss_constant=loss_constant(case),
        **totals_of(case, mask),
    )
    if reduction == "token_sum":
        loss = loss * case.settings.get("dp_size", 1)
    return finish(loss, values)


def kl(case: Case) -> Outcome:
    """KL alone, or beside a policy loss. Ours does not cut k3 at 10, as verl does: see ``k3_cut_at_ten``."""
    s = case.settings
    penalty = s["kl_penalty"]
    if penalty not in KL:
        raise LeftOut("the absolute log-ratio as a KL")
    algorithm = replace(CATALOG["rloo"], reduction=REDUCTION[s["loss_agg_mode"]], beta=1.0, kl_estimator=KL[penalty])
    if "loss_mode" in s:
        algorithm = replace(algorithm_of(case), beta=s["kl_loss_coef"], kl_estimator=KL[penalty])
        return outcome(case, algorithm)
    if KL[penalty].startswith("k3"):
        return k3_cut_at_ten(case, algorithm)
    zeros = torch.zeros(case.mask.shape[0], dtype=case.dtype)
    return outcome(case, algorithm, advantages=zeros)


def k3_cut_at_ten(case: Case, algorithm: Algorithm) -> Outcome:
    """verl's and ms-swift's reading: a token's k3 is at most 10, with no gradient beyond."""
    current, mask = leaf(case), case.mask
    d = (case.tensor("reference_logprobs") - current)[mask].clamp(-20, 20)
    values = (d.exp() - d - 1).clamp(-10, 10)
    if algorithm.kl_estimator == "k3_with_k2_gradient":
        k2 = d.square() / 2
        values = values.detach() + (k2 - k2.detach())
    inputs = flat_inputs(case, current, advantages=torch.ones(mask.shape[0], dtype=case.dtype))
    carrier = replace(inputs, current_logprobs=-values)
    return finish(policy_loss(carrier, replace(algorithm, rule="reinforce", beta=0.0)).loss, current)


def rollout(case: Case) -> Outcome:
    """Correction weights and rejection, then the loss. Rejected tokens leave |y| and all denominators.

    Ours calls that a filter: the caller takes them out of the mask. Weights come from before the rejection.
    """
    s = case.settings
    if s["loss_mode"] == "bypass_mode":
        return bypass(case)
    algorithm = algorithm_of(case)
    mask = torch.tensor(case.expected["modified_mask"]).bool()
    if s.get("rollout_is") and not s.get("rollout_rs") and s["loss_mode"] != "geo_mean":
        return outcome(case, replace(algorithm, **correction_of(s)), **totals_of(case, mask))
    weights = weights_of(case) if s.get("rollout_is") else torch.ones_like(case.tensor("current_logprobs"))
    advantages = torch.where(case.mask, case.tensor("advantages").reshape(len(mask), -1), 0.0)
    if s["loss_mode"] == "geo_mean":
        return row_mean_weight(case, algorithm, (mask, weights, advantages))
    return outcome(case, algorithm, mask=mask, advantages=advantages * weights, **totals_of(case, mask))


def correction_of(settings: dict) -> dict:
    """Our correction: a number truncates from above, "low_high" zeroes outside; its sequence is a product."""
    bounds = str(settings["rollout_is_threshold"]).split("_")
    unit = {"token": "token", "sequence": "sequence_product"}[settings["rollout_is"]]
    return {
        "correction": unit + ("_mask" if len(bounds) == 2 else "_truncate"),
        "correction_max": float(bounds[-1]),
        "correction_min": float(bounds[0]) if len(bounds) == 2 else None,
    }


def weights_of(case: Case) -> Tensor:
    """[B, T], from the mask before any rejection."""
    s, mask = case.settings, case.mask
    ours = correction_of(s)
    weights = correction_weights(
        case.tensor("proximal_logprobs")[mask],
        case.tensor("sampled_logprobs")[mask],
        Segments.from_mask(mask),
        kind=ours["correction"],
        maximum=ours["correction_max"],
        minimum=ours["correction_min"],
    )
    if s.get("rollout_is_batch_normalize"):
        firsts = Segments.from_mask(mask).mean(weights)[mask.any(1)]
        weights = weights / (weights.mean() if s["rollout_is"] == "token" else firsts.mean())
    return torch.zeros(mask.shape, dtype=case.dtype).masked_scatter(mask, weights)


def row_mean_weight(case: Case, algorithm: Algorithm, parts: tuple[Tensor, Tensor, Tensor]) -> Outcome:
    """verl's GMPO takes the geometric mean of a row's weights; ours weights each token's gradient."""
    mask, weights, advantages = parts
    logs = torch.where(mask, (weights + 1e-10).log(), 0.0)
    factor = (logs.sum(1) / (mask.sum(1) + 1e-8)).exp().unsqueeze(1)
    return outcome(case, algorithm, mask=mask, advantages=advantages * factor, total_sequences=float(len(mask)))


def bypass(case: Case) -> Outcome:
    """proximal = sampled; ppo_clip: the token clip after rejection; reinforce: a detached, truncated weight."""
    settings = case.settings["policy_loss"]["rollout_correction"]
    mask = case.mask
    if settings["loss_type"] == "ppo_clip":
        log_ratio = case.tensor("current_logprobs") - case.tensor("sampled_logprobs")
        low, high = (float(x) for x in settings["rollout_rs_threshold"].split("_"))
        k1 = -torch.where(mask, log_ratio, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        kept = (k1 >= torch.tensor(low).log()) & (k1 <= torch.tensor(high).log())
        mask = mask & kept.unsqueeze(1)
        return outcome(case, algorithm_of(case), mask=mask, **totals_of(case, mask))
    level = {"token": "token", "sequence": "sequence_product"}[settings["rollout_is"]]
    algorithm = Algorithm(
        name="bypass",
        rule="stop_gradient_clip",
        importance_sampling_level=level,
        reduction=REDUCTION[case.settings["loss_agg_mode"]],
        epsilon=None,
        epsilon_high=settings["rollout_is_threshold"] - 1.0,
    )
    return outcome(case, algorithm, proximal_logprobs=case.tensor("sampled_logprobs")[mask])
