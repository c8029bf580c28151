"""The run folder: metrics, timings, rollouts, checkpoints, and what went wrong.

config.toml      the resolved recipe
metrics.jsonl    one line a step (and an evaluation); no wall-clock values
timings.jsonl    seconds by phase
rollouts/        step_000012.jsonl and eval_000012.jsonl: what the model wrote
checkpoints/     step_000050/ ...
dumps/           inputs of an update that was stopped for a non-finite value
model/           the final policy as a Hugging Face folder
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import ConfigError, RewardError
from gspo.evaluation import Evaluation
from gspo.observe.metrics import rollout_metrics, update_metrics
from gspo.observe.trackers import Trackers
from gspo.observe.update_table import update_table
from gspo.policy.learner import Learner
from gspo.training import checkpoint
from gspo.training.loop import StepResult
from gspo.types import Grading, Group, Rollout, StepReport

SAMPLES = 64  # held-out samples kept, a few of which are shown before and after


def create_run_folder(output_dir: str, name: str) -> Path:
    """A new folder ``output_dir/name``, with a number appended when it is taken.

    Raises ConfigError when it cannot be written.
    """
    root = Path(output_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            folder = root / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise ConfigError(f"run.output_dir = {output_dir!r} cannot be written: {error.strerror}") from error
    raise ConfigError(f"run.output_dir = {output_dir!r} holds too many runs named {name!r}")


def require_writable(folder: str, *, option: str = "run.output_dir") -> None:
    """Raises ConfigError, naming the option, where ``folder`` cannot be made or written; makes nothing."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} = {folder!r} cannot be written: look at {existing}")


@dataclass(slots=True)
class RunRecorder:
    """Writes what a run leaves behind."""

    folder: Path
    learner: Learner
    trackers: Trackers
    save_every: int
    keep: int
    max_failure_rate: float = 1.0
    correct_part: str | None = None  # the reward part that says "right"; the weighted sum by default
    on_report: Callable[[StepReport], None] = lambda report: None
    best: tuple[int, float] | None = None
    version: int = 0
    samples: tuple[list[Rollout], list[Rollout]] | None = None  # held-out: at the first evaluation, at the last
    facts: Mapping[str, Any] = field(default_factory=dict)  # kept with every checkpoint: what the run was made of
    _saved: set[int] = field(default_factory=set)

    def step(self, step: StepResult) -> StepReport:
        """Sum up a step, write its rollouts and log it."""
        rollouts = [rollout for group in step.groups for rollout in group.rollouts]
        advantages = sequence_means(step.batch.advantages, step.batch.sequence_ids, len(rollouts))
        self.version = step.version
        self._write_rollouts(f"step_{step.step:06d}", step.step, step.version - 1, step.groups, advantages)
        self._stop_on_failures(rollouts)
        metrics = {
            **rollout_metrics(step.groups, correct_part=self.correct_part),
            **update_metrics(update_table(step.updates)),
        }
        notes = tuple(note for update in step.updates for note in update.notes)
        report = StepReport(step.step, step.version, metrics, step.timings, notes)
        self.trackers.log(report)
        self.on_report(report)
        return report

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Log an evaluation; a new best is saved at once. The earliest wins a tie."""
        self._write_rollouts(f"eval_{step:06d}", step, step, result.groups, None)
        shown = [group.rollouts[0] for group in result.groups[:SAMPLES]]
        self.samples = (self.samples[0] if self.samples else shown, shown)
        report = StepReport(step, step, result.metrics)
        self.trackers.log(report)
        self.on_report(report)
        accuracy = result.metrics.get("eval/accuracy")
        if accuracy is not None and (self.best is None or accuracy > self.best[1]):
            self.best = (step, accuracy)
            if step > 0:
                self._saved.discard(step)  # a checkpoint of this step that is there already names the best before
                self._save(step, step)

    def save(self, step: int, version: int, *, last: bool) -> None:
        """Write a checkpoint where one is due."""
        if last or (self.save_every and step % self.save_every == 0):
            self._save(step, version)

    def _save(self, step: int, version: int) -> None:
        if step in self._saved:
            return
        state = {
            **self.facts,
            "policy_version": version,
            "updates_done": self.learner.updates_done,
            "max_tokens": self.learner.max_tokens,  # halved where memory ran out: sums keep their order on a resume
            "best": self.best,
        }
        root = self.folder / "checkpoints"
        checkpoint.save(root, step, self.learner.state(), state)
        self._saved.add(step)
        checkpoint.prune(root, self.keep, best=self.best[0] if self.best else None)

    def _stop_on_failures(self, rollouts: Sequence[Rollout]) -> None:
        bad = [r for r in rollouts if r.grading in (Grading.FAILED, Grading.TIMEOUT, Grading.CRASHED)]
        if rollouts and len(bad) > self.max_failure_rate * len(rollouts):
            raise RewardError(
                f"{len(bad)} of {len(rollouts)} rollouts could not be graded (grading.max_failure_rate = "
                f"{self.max_failure_rate}). The first: {bad[0].grading}: {bad[0].grading_error}"
            )

    def _write_rollouts(
        self, name: str, step: int, version: int, groups: Sequence[Group], advantages: np.ndarray | None
    ) -> None:
        folder = self.folder / "rollouts"
        folder.mkdir(exist_ok=True)
        partial = folder / f".{name}.partial"
        with partial.open("w", encoding="utf-8") as file:
            for i, rollout in enumerate(r for group in groups for r in group.rollouts):
                line = rollout_line(rollout, step, version)
                line["advantage"] = None if advantages is None else float(advantages[i])
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial.rename(folder / f"{name}.jsonl")

    def dump(self, arrays: dict[str, np.ndarray]) -> str:
        """Write the inputs of a stopped update; returns the path."""
        from safetensors.numpy import save_file

        folder = self.folder / "dumps"
        folder.mkdir(exist_ok=True)
        path = folder / f"version_{self.version:06d}_update_{self.learner.updates_done:06d}.safetensors"
        save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path)
        return str(path)


def rollout_line(rollout: Rollout, step: int, version: int) -> dict[str, Any]:
    """One line of a rollouts file."""
    prompt = rollout.prompt
    return {
        "step": step,
        "version": version,
        "group": prompt.id,
        "prompt_id": prompt.id,
        "index": rollout.index,
        "prompt": prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages],
        "answer": prompt.answer,
        "text": rollout.text,
        "reward": rollout.reward,
        "parts": dict(rollout.reward_parts),
        "grading": str(rollout.grading),
        "grading_error": rollout.grading_error,
        "finish_reason": str(rollout.finish_reason),
        "tokens": rollout.num_scored,
    }


def sequence_means(values: np.ndarray, sequence_ids: np.ndarray, size: int) -> np.ndarray:
    """Mean of each sequence's values [N] -> [size]; 0 for a sequence without tokens."""
    sums = np.bincount(sequence_ids, weights=values, minlength=size)
    return sums / np.maximum(np.bincount(sequence_ids, minlength=size), 1)
