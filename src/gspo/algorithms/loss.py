"""The loss of one micro-batch: ratio, rule, correction, reduction and KL put together as an ``Algorithm`` says.

    L = -AGG[ w * g(r, A) ] + beta * AGG[ kl ]

Pure: takes tensors, returns a scalar and sums. Everything runs in float32 or better, under autocast too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithms import surrogates
from gspo.algorithms.catalog import Algorithm
from gspo.algorithms.corrections import (
    JOINT,
    correction_weights,
    is_token_level,
    mismatch_log_ratio,
    off_policy_keep,
)
from gspo.algorithms.inputs import LossInputs, LossOutput, at_least_float32
from gspo.algorithms.kl import kl_terms
from gspo.algorithms.ratios import (
    SEQUENCE_LOG_RATIO_MAX,
    attach_tokens,
    cut_above,
    importance_log_ratio,
    log_ratio,
    ratio_of,
)
from gspo.algorithms.reductions import reduce_tokens
from gspo.algorithms.segments import Segments
from gspo.algorithms.surrogates import Surrogate


@dataclass(frozen=True, slots=True)
class Tokens:
    """``LossInputs`` made ready: one float dtype of at least 32 bits, the proximal policy filled in."""

    current: Tensor
    proximal: Tensor
    sampled: Tensor | None
    reference: Tensor | None
    advantages: Tensor
    segments: Segments


def policy_loss(inputs: LossInputs, algorithm: Algorithm) -> LossOutput:
    """The loss of ``inputs`` under ``algorithm``; ``LossOutput`` says what the diagnostics mean.

    Finite for any log-probs but NaN ones, which pass through so that the learner's guard sees them. Without a scored
    token the loss is 0 and backward works. ValueError for unknown names, for beta > 0 without reference log-probs and
    for a correction without sampled ones.
    """
    with torch.autocast(device_type=inputs.current_logprobs.device.type, enabled=False):
        tokens = _ready(inputs)
        weights, keep = _weights(tokens, algorithm)
        surrogate, clamped = _surrogate(tokens, algorithm, weights)
        terms = surrogate.losses if algorithm.correction == JOINT else surrogate.losses * weights
        terms = torch.where(keep & (weights != 0), terms, torch.zeros_like(terms))
        loss = _reduce(terms, tokens, inputs, algorithm)
        if algorithm.beta > 0:
            kl, kl_clamped = _kl(tokens, algorithm)
            loss = loss + algorithm.beta * _reduce(kl, tokens, inputs, algorithm)
            clamped = clamped | kl_clamped
        with torch.no_grad():
            diagnostics = _diagnostics(tokens, surrogate) | _weight_diagnostics(tokens, weights, keep)
            diagnostics["clamped"] = clamped
            return LossOutput(loss, _sums(diagnostics, tokens))


def _ready(inputs: LossInputs) -> Tokens:
    current = at_least_float32(inputs.current_logprobs)

    def like_current(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().to(current.dtype)

    proximal = like_current(inputs.proximal_logprobs)
    return Tokens(
        current=current,
        proximal=current.detach() if proximal is None else proximal,
        sampled=like_current(inputs.sampled_logprobs),
        reference=like_current(inputs.reference_logprobs),
        advantages=inputs.advantages.detach().to(current.dtype),
        segments=Segments.from_ids(inputs.sequence_ids, inputs.num_sequences),
    )


def _weights(tokens: Tokens, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Correction weights [N] (1 where there is none) and which tokens the off-policy mask keeps [N] bool."""
    weights, keep = torch.ones_like(tokens.current), torch.ones_like(tokens.current, dtype=torch.bool)
    sampled = tokens.proximal if tokens.sampled is None else tokens.sampled
    if algorithm.correction != "none":
        joint = algorithm.correction == JOINT
        if tokens.sampled is None and not joint:
            raise ValueError(f"correction {algorithm.correction!r} needs sampled_logprobs")
        weights = correction_weights(
            tokens.current if joint else tokens.proximal,
            sampled,
            tokens.segments,
            kind=algorithm.correction,
            maximum=algorithm.correction_max,
            minimum=algorithm.correction_min,
        )
    if algorithm.off_policy_mask_delta is not None:
        delta = algorithm.off_policy_mask_delta
        keep = off_policy_keep(tokens.current, sampled, tokens.advantages, tokens.segments, delta=delta)
    return weights, keep


def _surrogate(tokens: Tokens, algorithm: Algorithm, weights: Tensor) -> tuple[Surrogate, Tensor]:
    """Token losses under the rule, and which tokens' log-ratio was cut at a bound [N] bool."""
    rule = algorithm.rule
    if rule == "clip_inside_mean":
        return _clip_inside_mean(tokens, algorithm)
    if rule == "reinforce":
        _refuse_joint(algorithm)
        never = torch.zeros_like(tokens.current, dtype=torch.bool)
        return surrogates.reinforce(tokens.advantages, tokens.current), never
    log_rho, clamped = importance_log_ratio(tokens.current, tokens.proximal, tokens.segments, _level(algorithm))
    ratio, advantages = ratio_of(log_rho), tokens.advantages
    if rule == "sign_mask":
        weight = weights if algorithm.correction == JOINT else ratio
        bounds = (1.0 - _epsilon(algorithm), 1.0 + algorithm.epsilon_high)
        return surrogates.sign_mask(ratio, weight, advantages, tokens.current, bounds=bounds), clamped
    _refuse_joint(algorithm)
    high = algorithm.epsilon_high
    if rule == "clip":
        epsilon, delta = _epsilon(algorithm), algorithm.delta
        return surrogates.hard_clip(ratio, advantages, epsilon=epsilon, epsilon_high=high, delta=delta), clamped
    if rule == "stop_gradient_clip":
        low, logprobs = algorithm.epsilon, tokens.current
        clip = surrogates.stop_gradient_clip(ratio, advantages, logprobs, epsilon=low, epsilon_high=high)
        return clip, clamped
    if rule == "soft_gate":
        plus, minus = algorithm.tau_positive, algorithm.tau_negative
        return surrogates.soft_gate(ratio, advantages, tau_positive=plus, tau_negative=minus), clamped
    raise ValueError(f"rule is {rule!r}; see gspo.algorithms.RULES")


def _level(algorithm: Algorithm) -> str:
    """GSPO-token's form where weights vary inside a sequence: each token's gradient gets its own weight."""
    level = algorithm.importance_sampling_level
    return "sequence_token" if level == "sequence" and is_token_level(algorithm.correction) else level


def _clip_inside_mean(tokens: Tokens, algorithm: Algorithm) -> tuple[Surrogate, Tensor]:
    """GMPO: clip each token's log-ratio, then take the geometric mean of the sequence."""
    _refuse_joint(algorithm)
    clipped, below, above = surrogates.clip_log_ratio(
        log_ratio(tokens.current, tokens.proximal),
        tokens.advantages,
        epsilon=_epsilon(algorithm),
        epsilon_high=algorithm.epsilon_high,
    )
    means = tokens.segments.mean(clipped)
    if is_token_level(algorithm.correction):
        spread = attach_tokens(clipped, means, tokens.segments)
    else:
        spread = tokens.segments.spread(means)
    log_s, clamped = cut_above(spread, SEQUENCE_LOG_RATIO_MAX)
    return surrogates.unclipped(ratio_of(log_s), tokens.advantages, below, above), clamped


def _epsilon(algorithm: Algorithm) -> float:
    if algorithm.epsilon is None:
        raise ValueError(f"rule {algorithm.rule!r} needs a lower range: epsilon is None")
    return algorithm.epsilon


def _refuse_joint(algorithm: Algorithm) -> None:
    if algorithm.correction == JOINT:
        raise ValueError(f"correction {JOINT!r} replaces the ratio of rule 'sign_mask'; it has no other meaning")


def _kl(tokens: Tokens, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    if tokens.reference is None:
        raise ValueError(f"beta is {algorithm.beta}, but there are no reference_logprobs")
    return kl_terms(tokens.current, tokens.reference, estimator=algorithm.kl_estimator, proximal=tokens.proximal)


def _reduce(values: Tensor, tokens: Tokens, inputs: LossInputs, algorithm: Algorithm) -> Tensor:
    return reduce_tokens(
        values,
        tokens.segments,
        reduction=algorithm.reduction,
        total_sequences=inputs.total_sequences,
        total_tokens=inputs.total_tokens,
        loss_constant=algorithm.loss_constant,
    )


def _diagnostics(tokens: Tokens, surrogate: Surrogate) -> dict[str, Tensor]:
    current = tokens.current.detach()
    drift = log_ratio(current, tokens.proximal)
    terms = {
        "log_ratio_sum": drift,
        "log_ratio_sq_sum": drift.square(),
        "kl_proximal_sum": kl_terms(tokens.proximal, current, estimator="k3")[0],
        "clipped_low": surrogate.clipped_low,
        "clipped_high": surrogate.clipped_high,
        "clipped_delta": surrogate.clipped_delta,
        "outside_low": surrogate.outside_low,
        "outside_high": surrogate.outside_high,
    }
    if tokens.reference is not None:
        terms["kl_reference_sum"] = kl_terms(current, tokens.reference, estimator="k3")[0]
    return terms


def _weight_diagnostics(tokens: Tokens, weights: Tensor, keep: Tensor) -> dict[str, Tensor]:
    terms = {
        "correction_weight_sum": weights,
        "correction_weight_sq_sum": weights.square(),
        "correction_dropped": weights == 0,
        "off_policy_dropped": ~keep,
    }
    if tokens.sampled is not None:
        mismatch = mismatch_log_ratio(tokens.proximal, tokens.sampled)
        terms["mismatch_sum"] = mismatch
        terms["mismatch_abs_sum"] = mismatch.abs()
        terms["mismatch_sq_sum"] = mismatch.square()
        terms["mismatch_missing"] = tokens.sampled.isnan()
    return terms


_OPTIONAL = ("kl_reference_sum", "mismatch_sum", "mismatch_abs_sum", "mismatch_sq_sum", "mismatch_missing")


def _sums(terms: dict[str, Tensor], tokens: Tokens) -> dict[str, Tensor]:
    """Sum every term over its sequence in one pass; terms without their log-probs are 0."""
    dtype = tokens.current.dtype
    stacked = torch.stack([term.to(dtype) for term in terms.values()])  # [K, N]
    sums = dict(zip(terms, tokens.segments.sum(stacked), strict=True))
    sums["tokens"] = tokens.segments.counts.to(dtype)
    for name in _OPTIONAL:
        sums.setdefault(name, torch.zeros_like(sums["tokens"]))
    return sums
