"""The river: prompts -> rollouts -> rewards -> advantages -> loss -> update -> weight sync -> report.

Each arrow is one call. A reader who opens this file first has understood the library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from gspo.algorithms import AdvantageEstimator, Algorithm, estimate_advantages
from gspo.engines.base import Engine
from gspo.evaluation import Evaluation, evaluate
from gspo.policy.learner import UpdateResult
from gspo.policy.packing import plan_updates
from gspo.rollouts import Collector, SamplingPlan
from gspo.seeding import seed
from gspo.tasks import Task
from gspo.training.resolve import require_sequence_advantages
from gspo.training.timing import Stopwatch
from gspo.types import Grading, Group, Prompt, Rollout, StepReport, TrainBatch


class Learner(Protocol):
    """What the loop asks of whoever trains: one process, or a group behind the same calls.

    Calls come in one order, each with the whole batch; after an exception a learner is unusable.
    """

    def score(self, rollouts: Sequence[Rollout], *, first_update: np.ndarray | None = None) -> TrainBatch:
        """Arrays of S rollouts, N scored tokens; ``first_update`` [n] int64 indices of sequences left to update 1."""
        ...

    def update(self, batch: TrainBatch, sequence_indices: np.ndarray) -> UpdateResult:
        """One optimizer step over these sequences [n] int64. NumericsError before a non-finite one changes weights."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> Any:
        """The complete weights, a re-iterable stream of (checkpoint name, tensor), cast where a dtype is given."""
        ...

    def close(self) -> None:
        """Give back memory. Idempotent."""
        ...


class Recorder(Protocol):
    """Where a run leaves its traces: reports, rollouts, checkpoints."""

    def step(self, step: StepResult) -> StepReport:
        """Sum up and log a finished step."""
        ...

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Log an evaluation made before sampling ``step``."""
        ...

    def save(self, step: int, version: int, *, last: bool) -> None:
        """After ``step`` finished steps: write a checkpoint where one is due."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything the loop needs; made by ``training.build`` or by hand from components."""

    task: Task
    collector: Collector
    engine: Engine
    learner: Learner
    recorder: Recorder
    plan: SamplingPlan
    steps: int
    prompts_per_step: int
    algorithm: Algorithm
    advantage: str | AdvantageEstimator = "group"
    updates_per_step: int = 4
    minibatches: str = "groups"
    first_step: int = 0
    engine_dtype: torch.dtype | None = None
    eval_every: int = 0
    eval_collector: Collector | None = None
    eval_prompts: Sequence[Prompt] = ()
    eval_plan: SamplingPlan | None = None
    eval_part: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced, before it is summed up."""

    step: int
    version: int  # of the weights after the step
    groups: list[Group]
    batch: TrainBatch
    updates: list[UpdateResult]
    timings: dict[str, float] = field(default_factory=dict)


def loop(run: Run) -> Iterator[StepReport]:
    """Train; yields one report a step. Version k samples step k; evaluation runs before sampling, at one version.

    Raises what its parts raise: EngineError, RewardError (a return of a wrong shape, too many failed gradings),
    NumericsError (before weights change), CheckpointError, TaskError (a step larger than the task).
    """
    for step in range(run.first_step, run.steps):
        if evaluation_due(run, step):
            run.recorder.evaluation(step, run_evaluation(run))
        report = run.recorder.step(train_step(run, step))
        run.recorder.save(step + 1, step + 1, last=step + 1 == run.steps)
        yield report
    if run.eval_every and run.eval_prompts:
        run.recorder.evaluation(run.steps, run_evaluation(run))


def train_step(run: Run, step: int) -> StepResult:
    """One turn of the river: sample, grade, score, update, give the weights to the engine. Nothing is written."""
    watch = Stopwatch()
    prompts = run.task.batch(step, run.prompts_per_step, run.plan.run_seed)
    groups = run.collector.collect(prompts, run.plan, step=step)
    watch.lap("rollout")

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    updates = split_updates(run, groups, step)
    batch = run.learner.score(rollouts, first_update=updates[0])
    batch = with_advantages(batch, rollouts, run.advantage)
    require_sequence_advantages(torch.from_numpy(batch.advantages), torch.from_numpy(batch.sequence_ids), run.algorithm)
    watch.lap("score")

    results = [run.learner.update(batch, indices) for indices in updates]
    watch.lap("update")

    run.engine.load_weights(run.learner.weights(run.engine_dtype), version=step + 1)
    watch.lap("sync")
    return StepResult(step, step + 1, groups, batch, results, watch.laps)


def split_updates(run: Run, groups: Sequence[Group], step: int) -> list[np.ndarray]:
    """Which rollouts each update takes, in an order seeded by the step: ``updates_per_step`` int64 arrays of indices.

    Raises ValueError where the updates do not divide the groups (or rollouts).
    """
    group_ids = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    order = seed(run.plan.run_seed, "minibatches", step)
    return plan_updates(group_ids, run.updates_per_step, minibatches=run.minibatches, seed=order)


def with_advantages(batch: TrainBatch, rollouts: Sequence[Rollout], estimator: str | AdvantageEstimator) -> TrainBatch:
    """Fill in the advantages, [N] float32: computed once over whole groups, before any shuffling, in float64.

    Only graded members with a token enter; a masked truncation does. Raises ValueError for an estimator that returns
    neither [S] nor [N].
    """
    graded = np.array([r.grading is Grading.GRADED and r.num_scored > 0 for r in rollouts])
    rewards = np.array([r.reward if ok else 0.0 for r, ok in zip(rollouts, graded, strict=True)], dtype=np.float64)
    lengths = np.bincount(batch.sequence_ids, minlength=len(rollouts))
    estimates = estimate_advantages(
        estimator,
        torch.from_numpy(rewards),
        torch.from_numpy(batch.group_ids),
        torch.from_numpy(graded),
        lengths=torch.from_numpy(lengths),
    ).numpy()
    per_token = estimates[batch.sequence_ids] if len(estimates) == len(rollouts) else estimates
    return replace(batch, advantages=per_token.astype(np.float32))


def evaluation_due(run: Run, step: int) -> bool:
    """At step 0 and every ``eval_every`` steps. A resume at such a step evaluates again, to the same numbers."""
    return bool(run.eval_every and run.eval_prompts) and step % run.eval_every == 0


def run_evaluation(run: Run) -> Evaluation:
    """Held-out evaluation of the engine's present weights."""
    assert run.eval_plan is not None and run.eval_collector is not None
    return evaluate(run.eval_collector, run.eval_prompts, run.eval_plan, part=run.eval_part)
