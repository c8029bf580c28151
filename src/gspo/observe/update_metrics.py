"""Metrics of a step's updates, computed from one table of sums and counts that the learner fills.

Every number here is a sum over rows divided once, so it does not depend on how an update was split into
micro-batches. A row is one sequence in one update. Each metric is defined beside the code that computes it.
"""

from __future__ import annotations

import numpy as np

from gspo.observe.clip_metrics import CLIP_METRICS, clip_metrics
from gspo.observe.metric import Metric, finite, mean, ratio, std
from gspo.observe.update_table import Array, Mask, UpdateTable, by_token

_METRICS = (
    Metric(
        "loss",
        "Mean loss of the step's updates.",
        "mean over updates of the loss",
        "no trend to expect",
        "loss",
    ),
    Metric("loss/update_{k}", "Loss of update k (from 0).", "loss of update k", "no trend to expect", "loss"),
    Metric(
        "grad_norm",
        "Mean gradient norm before it is clipped.",
        "mean over updates not skipped of the 2-norm of the gradient",
        "steady; above max_grad_norm it is scaled down; 0 means nothing is learnt",
        "gradient",
    ),
    Metric(
        "grad_norm_max",
        "Largest gradient norm of the step.",
        "max over updates not skipped",
        "within ten times grad_norm",
        "gradient",
    ),
    Metric(
        "learning_rate",
        "Learning rate of the last update.",
        "schedule at that update",
        "the schedule",
        "1/update",
    ),
    Metric("updates/count", "Updates of the step.", "number of updates", "updates_per_step", "count"),
    Metric(
        "updates/skipped",
        "Updates skipped because no sequence was left in them.",
        "number of updates with B = 0",
        "0",
        "count",
    ),
    Metric(
        "updates/sequences",
        "Sequences in the step's updates.",
        "number of rows",
        "completions/count",
        "count",
    ),
    Metric(
        "advantages/zero_ratio",
        "Share of sequences whose advantage is 0.",
        "rows with mean advantage 0 / rows",
        "below 0.7; at 1 nothing is learnt",
        "share",
    ),
    Metric(
        "ratio/log_s_mean",
        "Mean log sequence ratio: drift of the policy in this step, with its sign.",
        "mean over rows of log s = (1/|y|) sum_t (log current - log denominator)",
        "slightly below 0 (its expectation is minus a KL)",
        "nats/token",
    ),
    Metric(
        "ratio/log_s_std",
        "Spread of the log sequence ratio; the clip range is sized against it.",
        "standard deviation over rows of log s",
        "about epsilon; far above it the clip is a coin flip, far below it nothing is clipped",
        "nats/token",
    ),
    Metric(
        "ratio/log_s_mean/update_{k}",
        "Mean log sequence ratio in update k (from 0).",
        "ratio/log_s_mean over the rows of update k",
        "0 in update 0 of a synchronous run",
        "nats/token",
    ),
    Metric(
        "ratio/log_s_std/update_{k}",
        "Spread of the log sequence ratio in update k (from 0).",
        "ratio/log_s_std over the rows of update k",
        "0 in update 0, then growing with k",
        "nats/token",
    ),
    Metric(
        "ratio/noise_floor",
        "Size of log s before any weight has moved: rounding, routing, engine mismatch.",
        'root mean square of log s over the rows of update 0; 0 by construction under proximal_logprobs = "recompute", '
        "whose first update takes its own forward pass as the denominator (`gspo calibrate` measures it there)",
        "below epsilon / 3",
        "nats/token",
    ),
    Metric(
        "ratio/token_log_ratio_rms",
        "Size of a token's log ratio.",
        "root of sum over tokens of (log current - log denominator)^2 / tokens",
        "0.001 to 0.1",
        "nats",
    ),
    Metric(
        "ratio/clamped",
        "Tokens or sequences whose log ratio was clamped before exp.",
        "sum over rows of clamped",
        "0",
        "count",
    ),
    Metric(
        "kl_proximal/k1",
        "KL from the policy before this step's updates to the current one, unbiased but noisy.",
        "k1: mean over tokens of log denominator - log current",
        "0 to 0.01",
        "nats/token",
    ),
    Metric(
        "kl_proximal/k3",
        "The same KL, unbiased and always positive.",
        "k3: mean over tokens of exp(d) - 1 - d, d = log current - log denominator",
        "0 to 0.01",
        "nats/token",
    ),
    Metric(
        "kl",
        "KL from the current policy to the reference model; only with beta > 0.",
        "k3: sum over tokens of exp(d) - 1 - d, d = log reference - log current / tokens",
        "grows slowly; a jump means the policy has left the reference",
        "nats/token",
    ),
    Metric(
        "entropy",
        "Entropy of the policy's next-token distribution at the sampling temperature.",
        "sum over scored tokens of -sum_v p log p / tokens",
        "falls slowly; near 0 the policy has stopped exploring",
        "nats/token",
    ),
    Metric(
        "sampling/sampling_logp_difference/mean",
        "How far the engine's log-probs are from the learner's for the same tokens.",
        "mean over tokens of |log proximal - log sampled|",
        "below 1e-4 in float32, below 0.02 in bfloat16",
        "nats",
    ),
    Metric(
        "sampling/sampling_logp_difference/max",
        "The largest such difference.",
        "max over tokens of |log proximal - log sampled|",
        "below 1e-3 in float32, below 1 in bfloat16",
        "nats",
    ),
    Metric(
        "sampling/offset",
        "The same difference with its sign: minus the KL from engine to learner; it shifts ratios below 1.",
        "mean over tokens of log proximal - log sampled",
        "smaller in size than epsilon / 3",
        "nats/token",
    ),
    Metric(
        "sampling/importance_sampling_ratio/mean",
        "Mean weight of the correction between engine and learner.",
        "sum over tokens of the weight / tokens",
        "0.9 to 1.1",
        "weight",
    ),
    Metric(
        "sampling/correction_dropped",
        "Share of tokens whose weight the correction set to 0.",
        "dropped tokens / tokens",
        "below 0.05",
        "share",
    ),
    Metric(
        "sampling/effective_sample_size",
        "Share of tokens that would do as much, weighted alike.",
        "(sum w)^2 / (tokens * sum w^2) over all tokens",
        "above 0.9",
        "share",
    ),
    Metric(
        "sampling/off_policy_dropped",
        "Share of tokens in sequences that the off-policy mask dropped.",
        "dropped tokens / tokens",
        "below 0.05",
        "share",
    ),
    Metric(
        "sampling/missing_ratio",
        "Share of tokens for which the engine gave no log-prob.",
        "tokens without a sampled log-prob / tokens",
        "0",
        "share",
    ),
)


UPDATE_METRICS = (*_METRICS, *CLIP_METRICS)


def update_metrics(table: UpdateTable) -> dict[str, float]:
    """Describe a step's updates. Metrics over nothing (no row, no reference) are absent, never NaN."""
    scored = np.asarray(table.tokens) > 0
    return {
        **_update_scalars(table, scored),
        **clip_metrics(table, scored),
        **_ratio_metrics(table, scored),
        **_token_means(table, scored),
    }


def _update_scalars(table: UpdateTable, scored: Mask) -> dict[str, float]:
    done = ~np.asarray(table.skipped, dtype=bool)
    norms, losses = np.asarray(table.grad_norm)[done], np.asarray(table.loss)
    metrics: dict[str, float | None] = {
        "loss": mean(losses[done]),
        "grad_norm": mean(norms),
        "grad_norm_max": float(norms.max()) if norms.size else None,
        "learning_rate": float(table.learning_rate[-1]) if len(table.learning_rate) else None,
        "updates/count": len(done),
        "updates/skipped": int((~done).sum()),
        "updates/sequences": int(scored.sum()),
        "advantages/zero_ratio": ratio((table.advantage[scored] == 0).sum(), scored.sum()),
    }
    metrics.update({f"loss/update_{k}": float(losses[k]) for k in np.flatnonzero(done)})
    return finite(metrics)


def _ratio_metrics(table: UpdateTable, scored: Mask) -> dict[str, float]:
    log_s = np.divide(table.log_ratio_sum, table.tokens, where=scored, out=np.zeros(len(scored)))
    first = log_s[scored & (table.update_index == 0)]
    mean_square = ratio(table.log_ratio_sq_sum[scored].sum(), table.tokens[scored].sum())
    metrics: dict[str, float | None] = {
        "ratio/log_s_mean": mean(log_s[scored]),
        "ratio/log_s_std": std(log_s[scored]),
        "ratio/noise_floor": float(np.sqrt(np.mean(first**2))) if first.size else None,
        "ratio/token_log_ratio_rms": None if mean_square is None else mean_square**0.5,
        "ratio/clamped": float(table.clamped[scored].sum()),
    }
    for k in np.unique(table.update_index):
        rows = log_s[scored & (table.update_index == k)]
        metrics[f"ratio/log_s_mean/update_{k}"] = mean(rows)
        metrics[f"ratio/log_s_std/update_{k}"] = std(rows)
    return finite(metrics)


def _token_means(table: UpdateTable, scored: Mask) -> dict[str, float]:
    columns = {
        "kl_proximal/k1": -table.log_ratio_sum,
        "kl_proximal/k3": table.kl_proximal_sum,
        "kl": table.kl_reference_sum,
        "entropy": table.entropy_sum,
        "sampling/sampling_logp_difference/mean": table.mismatch_abs_sum,
        "sampling/offset": table.mismatch_sum,
        "sampling/missing_ratio": table.mismatch_missing,
        "sampling/importance_sampling_ratio/mean": table.correction_weight_sum,
        "sampling/correction_dropped": table.correction_dropped,
        "sampling/off_policy_dropped": table.off_policy_dropped,
    }
    means = {name: by_token(table, column, scored) for name, column in columns.items()}
    means["sampling/sampling_logp_difference/max"] = _largest(table.mismatch_max, scored)
    means["sampling/effective_sample_size"] = _effective_sample_size(table, scored)
    return finite(means)


def _largest(values: Array | None, rows: Mask) -> float | None:
    return None if values is None or not rows.any() else float(values[rows].max())


def _effective_sample_size(table: UpdateTable, rows: Mask) -> float | None:
    if table.correction_weight_sum is None or table.correction_weight_sq_sum is None:
        return None
    squares = table.correction_weight_sq_sum[rows].sum() * table.tokens[rows].sum()
    return ratio(table.correction_weight_sum[rows].sum() ** 2, squares)
