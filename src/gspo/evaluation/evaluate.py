"""Evaluate a policy on a held-out task, through the same collector as training.

avg@n is the mean over items of the mean over n samples: the unbiased estimate of pass@1. Suites (AIME'24 and others)
and pass@k stand on this function later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo.errors import ConfigError
from gspo.rollouts import Collector, SamplingPlan
from gspo.types import Grading, Group, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics (named eval/...) and the groups they were computed from."""

    metrics: dict[str, float]
    groups: list[Group]


def evaluate(
    collector: Collector, prompts: Sequence[Prompt], plan: SamplingPlan, *, part: str | None = None
) -> Evaluation:
    """Sample every item ``num_generations`` times and average.

    ``part`` names the reward part that counts; None takes the weighted sum. Seeds do not depend on the step, so that
    two evaluations differ by the weights alone. Ungraded samples are left out and counted in ``eval/ungraded``; an
    item without a graded sample leaves the mean. Lengths are in tokens, the others are shares or values of the
    part; ``eval/accuracy`` is absent where nothing was graded.

    Raises ConfigError for no prompts, or a part that no graded rollout has; EngineError as ``Collector.collect``.
    """
    if not prompts:
        raise ConfigError("nothing to evaluate: the held-out task has no prompts")
    groups = collector.collect(prompts, plan, step=0)
    if part is not None:
        _require_part(groups, part)
    items = [_item_values(group, part) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {
        "eval/items": float(len(groups)),
        "eval/samples": float(plan.num_generations),
        "eval/ungraded": float(np.mean([r.grading is not Grading.GRADED for r in rollouts])),
        "eval/mean_length": float(np.mean([r.num_scored for r in rollouts])),
        "eval/truncated": float(np.mean([r.truncated for r in rollouts])),
    }
    means = np.array([np.mean(values) for values in items if values])
    if len(means):
        metrics["eval/accuracy"] = float(means.mean())
        metrics["eval/accuracy_se"] = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0
    return Evaluation(metrics, groups)


def _require_part(groups: Sequence[Group], part: str) -> None:
    """Raises ConfigError where rollouts were graded and none has such a part."""
    graded = [r for group in groups for r in group.rollouts if r.grading is Grading.GRADED]
    names = dict.fromkeys(name for rollout in graded for name in rollout.reward_parts)
    if graded and part not in names:
        raise ConfigError(f'eval.reward = "{part}": no reward part has that name; there are: {", ".join(names)}')


def _item_values(group: Group, part: str | None) -> list[float]:
    """Values of the graded samples of one item."""
    values = [_value(r, part) for r in group.rollouts if r.grading is Grading.GRADED]
    return [value for value in values if value is not None]


def _value(rollout: Rollout, part: str | None) -> float | None:
    return rollout.reward if part is None else rollout.reward_parts.get(part)
