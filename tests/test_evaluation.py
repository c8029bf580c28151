"""Held-out evaluation by hand: avg@n, ungraded samples, parts, and seeds that do not depend on the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from gspo.engines.scripted import Reply, ScriptedEngine
from gspo.errors import ConfigError
from gspo.evaluation import evaluate
from gspo.rewards.contract import Verdict
from gspo.rollouts import Collector, SamplingPlan
from gspo.types import Grading, Prompt, Rollout, Sampling

PROMPTS = [Prompt(name, text=name) for name in "ab"]


@dataclass
class Given:
    """A grader that hands out values in turn; None is ungraded."""

    values: Sequence[float | None]
    seen: list[Rollout] = field(default_factory=list)

    def grade(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        self.seen += rollouts
        return [
            Verdict(None, {}, Grading.TIMEOUT, "slow") if v is None else Verdict(v, {"half": v / 2}, Grading.GRADED)
            for v in self.values
        ]


def collector(values: Sequence[float | None]) -> tuple[Collector, Given, ScriptedEngine]:
    engine = ScriptedEngine(lambda request, version: Reply([3, 4]))
    grader = Given(values)
    made = Collector(engine, grader, encode=lambda prompt: np.array([1, 2]), decode=lambda ids: "x")
    return made, grader, engine


def plan(samples: int) -> SamplingPlan:
    return SamplingPlan(samples, Sampling(max_new_tokens=2), run_seed=0, stream="eval", purpose="eval")


def test_avg_at_n_is_the_mean_over_items_of_the_mean_over_samples() -> None:
    made, grader, engine = collector([1.0, 0.0, 1.0, 1.0])
    metrics = evaluate(made, PROMPTS, plan(2)).metrics
    assert metrics["eval/accuracy"] == 0.75 and metrics["eval/items"] == 2 and metrics["eval/samples"] == 2
    assert metrics["eval/accuracy_se"] == pytest.approx(np.std([0.5, 1.0], ddof=1) / 2**0.5)
    assert metrics["eval/truncated"] == 1.0 and metrics["eval/mean_length"] == 2.0
    assert {request.purpose for request in engine.requests} == {"eval"} and len(grader.seen) == 4


def test_an_ungraded_sample_is_left_out_and_counted() -> None:
    made, _, _ = collector([1.0, None, 0.0, 0.0])
    metrics = evaluate(made, PROMPTS, plan(2)).metrics
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/ungraded"] == 0.25
    made, _, _ = collector([None, None, 1.0, 0.0])
    assert evaluate(made, PROMPTS, plan(2)).metrics["eval/accuracy"] == 0.5


def test_without_a_graded_sample_there_is_no_accuracy() -> None:
    made, _, _ = collector([None, None])
    metrics = evaluate(made, PROMPTS, plan(1), part="half").metrics
    assert "eval/accuracy" not in metrics and metrics["eval/ungraded"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


def test_the_part_that_counts() -> None:
    made, _, _ = collector([1.0, 0.0])
    assert evaluate(made, PROMPTS, plan(1), part="half").metrics["eval/accuracy"] == 0.25
    with pytest.raises(ConfigError, match=r'eval.reward = "whole".*there are: half'):
        evaluate(made, PROMPTS, plan(1), part="whole")


def test_two_evaluations_ask_the_same() -> None:
    made, _, engine = collector([1.0, 0.0])
    evaluate(made, PROMPTS, plan(1))
    first = [request.seed for request in engine.requests]
    evaluate(made, PROMPTS, plan(1))
    assert [request.seed for request in engine.requests][2:] == first and len(set(first)) == 2


def test_no_items() -> None:
    made, _, _ = collector([])
    with pytest.raises(ConfigError, match="no prompts"):
        evaluate(made, [], plan(1))
