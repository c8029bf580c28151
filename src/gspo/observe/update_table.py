"""The sums and counts that the updates of a step leave behind: what update metrics are computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gspo.observe.metric import mean, ratio

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

OPTIONAL = (
    "clipped_delta",
    "kl_proximal_sum",
    "kl_reference_sum",
    "mismatch_abs_sum",
    "mismatch_sum",
    "mismatch_max",
    "mismatch_missing",
    "entropy_sum",
    "correction_weight_sum",
    "correction_weight_sq_sum",
    "correction_dropped",
    "off_policy_dropped",
)
REQUIRED = (
    "advantage",
    "tokens",
    "log_ratio_sum",
    "log_ratio_sq_sum",
    "clipped_low",
    "clipped_high",
    "outside_low",
    "outside_high",
    "clamped",
)


class UpdateLike(Protocol):
    """One update as the learner returns it: named columns over its sequences, and scalars."""

    @property
    def sequences(self) -> Mapping[str, npt.NDArray[Any]]: ...  # [n] each; empty when skipped
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def skipped(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTable:
    """What the updates of a step have to say: R rows, one per (update, sequence), and U updates.

    Counts are in tokens. Rows without a scored token are ignored. Optional columns are None where the run has
    no such thing; NaN entries make the metrics built on them absent.
    """

    update_index: npt.NDArray[np.int64]  # [R] 0 .. U - 1
    advantage: Array  # [R] mean over the sequence's tokens
    tokens: Array  # [R] scored tokens, |y|
    log_ratio_sum: Array  # [R] sum of log current - log denominator
    log_ratio_sq_sum: Array  # [R] sum of its square
    clipped_low: Array  # [R] tokens whose gradient the lower bound zeroed
    clipped_high: Array  # [R] tokens whose gradient the upper bound zeroed
    outside_low: Array  # [R] tokens with a ratio below the range, whatever the advantage's sign
    outside_high: Array  # [R] tokens with a ratio above it
    clamped: Array  # [R] log ratios clamped before exp
    loss: Array  # [U]
    grad_norm: Array  # [U] before clipping
    learning_rate: Array  # [U]
    skipped: Mask  # [U] True where the update had no sequence
    clipped_delta: Array | None = None  # [R] tokens whose gradient delta zeroed, not the range
    kl_proximal_sum: Array | None = None  # [R] k3: sum of exp(d) - 1 - d, d = log current - log denominator
    kl_reference_sum: Array | None = None  # [R]
    mismatch_abs_sum: Array | None = None  # [R] sum of |log proximal - log sampled|
    mismatch_sum: Array | None = None  # [R] sum of log proximal - log sampled
    mismatch_max: Array | None = None  # [R] max of |log proximal - log sampled|
    mismatch_missing: Array | None = None  # [R] tokens without a sampled log-prob
    entropy_sum: Array | None = None  # [R]
    correction_weight_sum: Array | None = None  # [R]
    correction_weight_sq_sum: Array | None = None  # [R]
    correction_dropped: Array | None = None  # [R] tokens with weight 0
    off_policy_dropped: Array | None = None  # [R] tokens that the off-policy mask dropped


def update_table(updates: Sequence[UpdateLike]) -> UpdateTable:
    """Join the updates of one step. Raises KeyError where an update with rows lacks a required column.

    An optional column counts as absent unless every update with rows has it. So does a KL to the reference that is 0
    in every row: a learner without a reference fills zeros.
    """
    filled = [(k, update.sequences) for k, update in enumerate(updates) if not update.skipped]
    sizes = [len(columns["tokens"]) for _, columns in filled]
    present = [name for name in OPTIONAL if filled and all(name in columns for _, columns in filled)]
    if "kl_reference_sum" in present and not any(columns["kl_reference_sum"].any() for _, columns in filled):
        present.remove("kl_reference_sum")

    def join(name: str) -> Array:
        parts = [np.asarray(columns[name], dtype=np.float64) for _, columns in filled]
        return np.concatenate(parts) if parts else np.zeros(0)

    return UpdateTable(
        update_index=np.repeat(np.array([k for k, _ in filled], dtype=np.int64), np.array(sizes, dtype=np.int64)),
        loss=np.array([update.loss for update in updates]),
        grad_norm=np.array([update.grad_norm for update in updates]),
        learning_rate=np.array([update.learning_rate for update in updates]),
        skipped=np.array([update.skipped for update in updates], dtype=bool),
        **{name: join(name) for name in (*REQUIRED, *present)},
    )


def by_sequence(table: UpdateTable, counts: Array | None, rows: Mask) -> float | None:
    """Mean over the rows of counts / tokens: every sequence weighs the same."""
    return None if counts is None else mean(counts[rows] / table.tokens[rows])


def by_token(table: UpdateTable, sums: Array | None, rows: Mask) -> float | None:
    """Sums / tokens over the rows: every token weighs the same."""
    return None if sums is None else ratio(sums[rows].sum(), table.tokens[rows].sum())
