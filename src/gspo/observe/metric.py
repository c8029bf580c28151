"""What a metric is: its name, its meaning, its estimator, what is healthy. Numbers are computed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the fixed list. ``name`` may hold fields in braces: ``rewards/{name}/mean``."""

    name: str
    meaning: str  # one sentence
    estimator: str  # the formula
    healthy: str  # a range, or words
    unit: str


def finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Keep what is a finite number: a metric over an empty set is absent, never NaN."""
    kept = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in kept.items() if math.isfinite(value)}


def ratio(numerator: float, denominator: float) -> float | None:
    """Divide, or None where there is nothing to divide by."""
    return float(numerator) / float(denominator) if denominator else None


def mean(values: npt.ArrayLike) -> float | None:
    """Mean of a flat array in float64; None of nothing."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else None


def std(values: npt.ArrayLike, *, ddof: int = 0) -> float | None:
    """Standard deviation of a flat array in float64; None with no more than ``ddof`` values."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=ddof)) if array.size > ddof else None
