"""Metrics of a step's updates, computed from one table of sums and counts that the learner fills.

Every number here is a sum over rows divided once, so it does not depend on how an update was split into
micro-batches. A row is one sequence in one update. Each metric is defined beside the code that computes it.
"""

from __future__ import annotations

import numpy as np

from gspo.observe.metric import Metric, finite, ratio
from gspo.observe.update_table import Array, Mask, UpdateTable

_BY_DESIGN = "0.05 to 0.3 over all updates of a GSPO step (the paper's tokens: about 0.15)"

UPDATE_METRICS = (
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
        "clip/sequence",
        "Clip fraction by sequence: share of a sequence whose gradient the clip zeroed, all sequences alike.",
        "mean over rows of clipped tokens / tokens; aware of the advantage's sign, all updates, all rows",
        _BY_DESIGN,
        "share",
    ),
    Metric(
        "clip/token",
        "Clip fraction by token: what the paper's figure of clip fractions shows.",
        "clipped tokens / tokens over all rows of all updates",
        _BY_DESIGN + "; below 0.01 under token ratios",
        "share",
    ),
    Metric(
        "clip/sequence_informative",
        "Clip fraction by sequence among sequences that carry a signal.",
        "clip/sequence over rows with an advantage other than 0",
        "0.05 to 0.4",
        "share",
    ),
    Metric(
        "clip/token_informative",
        "Clip fraction by token among sequences that carry a signal.",
        "clip/token over rows with an advantage other than 0",
        "0.05 to 0.4",
        "share",
    ),
    Metric(
        "clip/sequence/update_{k}",
        "Clip fraction by sequence in update k (from 0).",
        "clip/sequence over the rows of update k",
        "0 in update 0, then rising; above 0.4 the clip is a coin flip",
        "share",
    ),
    Metric(
        "clip/token/update_{k}",
        "Clip fraction by token in update k (from 0).",
        "clip/token over the rows of update k",
        "0 in update 0, then rising",
        "share",
    ),
    Metric(
        "clip/sequence/length_{bucket}",
        "Clip fraction by sequence among completions whose length falls into the bucket.",
        "clip/sequence over rows with 4^j <= |y| < 4^(j+1); the bucket is named by its first and last length",
        "alike over buckets; under sequence ratios short completions clip more",
        "share",
    ),
    Metric(
        "clip/token/length_{bucket}",
        "Clip fraction by token among completions whose length falls into the bucket.",
        "clip/token over rows with 4^j <= |y| < 4^(j+1)",
        "alike over buckets",
        "share",
    ),
    Metric(
        "clip_ratio/low_mean",
        "Share clipped on the low side (ratio below 1 - epsilon, advantage negative).",
        "mean over rows of tokens clipped low / tokens; TRL's name",
        "of the size of clip_ratio/high_mean",
        "share",
    ),
    Metric(
        "clip_ratio/high_mean",
        "Share clipped on the high side (ratio above 1 + epsilon_high, advantage positive).",
        "mean over rows of tokens clipped high / tokens; TRL's name",
        "of the size of clip_ratio/low_mean",
        "share",
    ),
    Metric(
        "clip_ratio/region_mean",
        "Share clipped on either side: clip/sequence under TRL's name.",
        "clip/sequence",
        _BY_DESIGN,
        "share",
    ),
    Metric(
        "outside/low_positive",
        "Among positive advantages, share of sequences below the clip range (not clipped there).",
        "mean over rows with advantage > 0 of tokens with ratio < 1 - epsilon / tokens",
        "of the size of outside/high_negative",
        "share",
    ),
    Metric(
        "outside/low_negative",
        "Among negative advantages, share of sequences below the clip range (these are clipped).",
        "mean over rows with advantage < 0 of tokens with ratio < 1 - epsilon / tokens",
        "of the size of outside/high_positive; far above it, look for an offset between engine and learner",
        "share",
    ),
    Metric(
        "outside/high_positive",
        "Among positive advantages, share of sequences above the clip range (these are clipped).",
        "mean over rows with advantage > 0 of tokens with ratio > 1 + epsilon_high / tokens",
        "of the size of outside/low_negative",
        "share",
    ),
    Metric(
        "outside/high_negative",
        "Among negative advantages, share of sequences above the clip range (not clipped there).",
        "mean over rows with advantage < 0 of tokens with ratio > 1 + epsilon_high / tokens",
        "of the size of outside/low_positive",
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
        "root mean square of log s over the rows of update 0",
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
        "k1: mean over tokens of log proximal - log current",
        "0 to 0.01",
        "nats/token",
    ),
    Metric(
        "kl_proximal/k2",
        "The same KL, always positive and of low variance; biased for large steps.",
        "k2: mean over tokens of (log proximal - log current)^2 / 2",
        "0 to 0.01",
        "nats/token",
    ),
    Metric(
        "kl_proximal/k3",
        "The same KL, unbiased and always positive.",
        "k3: mean over tokens of exp(d) - 1 - d, d = log current - log proximal",
        "0 to 0.01",
        "nats/token",
    ),
    Metric(
        "kl",
        "KL from the current policy to the reference model; only with beta > 0.",
        "sum over tokens of the recipe's kl_estimator / tokens",
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
)


def update_metrics(table: UpdateTable) -> dict[str, float]:
    """Describe a step's updates. Metrics over nothing (no row, no reference) are absent, never NaN."""
    scored = np.asarray(table.tokens) > 0
    return {
        **_update_scalars(table),
        **_clip_metrics(table, scored),
        **_clip_slices(table, scored),
        **_ratio_metrics(table, scored),
        **_token_means(table, scored),
    }


def length_bucket(length: int) -> str:
    """Name of the bucket of a length: 4^j .. 4^(j+1) - 1, as ``16_63``."""
    low = 4 ** ((int(length).bit_length() - 1) // 2)
    return f"{low}_{4 * low - 1}"


def _update_scalars(table: UpdateTable) -> dict[str, float]:
    done = ~np.asarray(table.skipped, dtype=bool)
    norms, losses = np.asarray(table.grad_norm)[done], np.asarray(table.loss)
    rows = int((np.asarray(table.tokens) > 0).sum())
    metrics: dict[str, float | None] = {
        "loss": _mean(losses[done]),
        "grad_norm": _mean(norms),
        "grad_norm_max": float(norms.max()) if norms.size else None,
        "learning_rate": float(table.learning_rate[-1]) if len(table.learning_rate) else None,
        "updates/count": len(done),
        "updates/skipped": int((~done).sum()),
        "updates/sequences": rows,
    }
    metrics.update({f"loss/update_{k}": float(losses[k]) for k in np.flatnonzero(done)})
    return finite(metrics)


def _clip_metrics(table: UpdateTable, scored: Mask) -> dict[str, float]:
    sign = np.sign(table.advantage)
    both = table.clipped_low + table.clipped_high
    informative = scored & (sign != 0)
    region = _by_sequence(table, both, scored)
    return finite(
        {
            "advantages/zero_ratio": ratio((scored & (sign == 0)).sum(), scored.sum()),
            "clip/sequence": region,
            "clip/token": _by_token(table, both, scored),
            "clip/sequence_informative": _by_sequence(table, both, informative),
            "clip/token_informative": _by_token(table, both, informative),
            "clip_ratio/low_mean": _by_sequence(table, table.clipped_low, scored),
            "clip_ratio/high_mean": _by_sequence(table, table.clipped_high, scored),
            "clip_ratio/region_mean": region,
            "outside/low_positive": _by_sequence(table, table.outside_low, scored & (sign > 0)),
            "outside/low_negative": _by_sequence(table, table.outside_low, scored & (sign < 0)),
            "outside/high_positive": _by_sequence(table, table.outside_high, scored & (sign > 0)),
            "outside/high_negative": _by_sequence(table, table.outside_high, scored & (sign < 0)),
        }
    )


def _clip_slices(table: UpdateTable, scored: Mask) -> dict[str, float]:
    clipped = table.clipped_low + table.clipped_high
    buckets = np.array([length_bucket(length) if length > 0 else "" for length in table.tokens], dtype=object)
    slices = {f"update_{k}": scored & (table.update_index == k) for k in np.unique(table.update_index)}
    slices |= {f"length_{name}": scored & (buckets == name) for name in sorted(set(buckets[scored]))}
    metrics: dict[str, float | None] = {}
    for name, rows in slices.items():
        metrics[f"clip/sequence/{name}"] = _by_sequence(table, clipped, rows)
        metrics[f"clip/token/{name}"] = _by_token(table, clipped, rows)
    return finite(metrics)


def _ratio_metrics(table: UpdateTable, scored: Mask) -> dict[str, float]:
    log_s = np.divide(table.log_ratio_sum, table.tokens, where=scored, out=np.zeros(len(scored)))
    first = log_s[scored & (table.update_index == 0)]
    mean_square = ratio(table.log_ratio_sq_sum[scored].sum(), table.tokens[scored].sum())
    metrics: dict[str, float | None] = {
        "ratio/log_s_mean": _mean(log_s[scored]),
        "ratio/log_s_std": _std(log_s[scored]),
        "ratio/noise_floor": float(np.sqrt(np.mean(first**2))) if first.size else None,
        "ratio/token_log_ratio_rms": None if mean_square is None else mean_square**0.5,
        "ratio/clamped": float(table.clamped[scored].sum()),
    }
    for k in np.unique(table.update_index):
        rows = log_s[scored & (table.update_index == k)]
        metrics[f"ratio/log_s_mean/update_{k}"] = _mean(rows)
        metrics[f"ratio/log_s_std/update_{k}"] = _std(rows)
    return finite(metrics)


def _token_means(table: UpdateTable, scored: Mask) -> dict[str, float]:
    largest = None if table.mismatch_max is None else table.mismatch_max[scored]
    return finite(
        {
            "kl_proximal/k1": _by_token(table, -table.log_ratio_sum, scored),
            "kl_proximal/k2": _by_token(table, table.log_ratio_sq_sum / 2, scored),
            "kl_proximal/k3": _by_token(table, table.kl_proximal_k3_sum, scored),
            "kl": _by_token(table, table.kl_reference_sum, scored),
            "entropy": _by_token(table, table.entropy_sum, scored),
            "sampling/sampling_logp_difference/mean": _by_token(table, table.mismatch_abs_sum, scored),
            "sampling/sampling_logp_difference/max": float(largest.max())
            if largest is not None and largest.size
            else None,
            "sampling/offset": _by_token(table, table.mismatch_sum, scored),
            "sampling/importance_sampling_ratio/mean": _by_token(table, table.correction_weight_sum, scored),
            "sampling/correction_dropped": _by_token(table, table.correction_dropped, scored),
        }
    )


def _by_sequence(table: UpdateTable, counts: Array, rows: Mask) -> float | None:
    return _mean(counts[rows] / table.tokens[rows])


def _by_token(table: UpdateTable, sums: Array | None, rows: Mask) -> float | None:
    return None if sums is None else ratio(sums[rows].sum(), table.tokens[rows].sum())


def _mean(values: Array) -> float | None:
    return float(np.mean(values, dtype=np.float64)) if values.size else None


def _std(values: Array) -> float | None:
    return float(np.std(values, dtype=np.float64)) if values.size else None
