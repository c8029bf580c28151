"""Clip fractions of a step's updates: by sequence and by token, side, advantage sign, update and length.

The paper's figure counts tokens, TRL counts sequences; both are logged, with skipped sequences in the denominator.
"""

from __future__ import annotations

import numpy as np

from gspo.observe.metric import Metric, finite
from gspo.observe.update_table import Mask, UpdateTable, by_sequence, by_token

_BY_DESIGN = "0.05 to 0.3 over all updates of a GSPO step (the paper's tokens: about 0.15)"

CLIP_METRICS = (
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
        "clip_ratio/delta_mean",
        "Share whose gradient delta zeroed besides the range (two-sided clip); not part of the clip fractions.",
        "mean over rows of tokens with ratio > delta that the range had not clipped / tokens",
        "near 0",
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
)


def clip_metrics(table: UpdateTable, scored: Mask) -> dict[str, float]:
    """Clip fractions over the rows [R] bool that have a scored token."""
    return {**_whole(table, scored), **_slices(table, scored)}


def length_bucket(length: int) -> str:
    """Name of the bucket of a length: 4^j .. 4^(j+1) - 1, as ``16_63``."""
    low = 4 ** ((int(length).bit_length() - 1) // 2)
    return f"{low}_{4 * low - 1}"


def _whole(table: UpdateTable, scored: Mask) -> dict[str, float]:
    sign = np.sign(table.advantage)
    both = table.clipped_low + table.clipped_high
    informative = scored & (sign != 0)
    region = by_sequence(table, both, scored)
    return finite(
        {
            "clip/sequence": region,
            "clip/token": by_token(table, both, scored),
            "clip/sequence_informative": by_sequence(table, both, informative),
            "clip/token_informative": by_token(table, both, informative),
            "clip_ratio/low_mean": by_sequence(table, table.clipped_low, scored),
            "clip_ratio/high_mean": by_sequence(table, table.clipped_high, scored),
            "clip_ratio/region_mean": region,
            "clip_ratio/delta_mean": by_sequence(table, table.clipped_delta, scored),
            "outside/low_positive": by_sequence(table, table.outside_low, scored & (sign > 0)),
            "outside/low_negative": by_sequence(table, table.outside_low, scored & (sign < 0)),
            "outside/high_positive": by_sequence(table, table.outside_high, scored & (sign > 0)),
            "outside/high_negative": by_sequence(table, table.outside_high, scored & (sign < 0)),
        }
    )


def _slices(table: UpdateTable, scored: Mask) -> dict[str, float]:
    clipped = table.clipped_low + table.clipped_high
    buckets = np.array([length_bucket(length) if length > 0 else "" for length in table.tokens], dtype=object)
    slices = {f"update_{k}": scored & (table.update_index == k) for k in np.unique(table.update_index)}
    slices |= {f"length_{name}": scored & (buckets == name) for name in sorted(set(buckets[scored]))}
    metrics: dict[str, float | None] = {}
    for name, rows in slices.items():
        metrics[f"clip/sequence/{name}"] = by_sequence(table, clipped, rows)
        metrics[f"clip/token/{name}"] = by_token(table, clipped, rows)
    return finite(metrics)
