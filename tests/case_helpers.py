"""What the tests of the numbered cases share: a recipe over a tiny model, and runs whose engine follows a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import gspo
from gspo.config import Recipe
from gspo.engines.scripted import Reply, ScriptedEngine
from gspo.training.build import Components, build
from gspo.training.loop import Run
from gspo.training.run import make_run
from gspo.types import FinishReason, Grading, Group, Prompt, Request, Rollout, TokenRow


def tiny_recipe(root: Path, **overrides: Any) -> Recipe:
    """Four prompts of two digits, groups of two, one update a step, over a model of random weights in ``root``."""
    text = {
        "run": {"name": "tiny", "output_dir": str(root / "runs"), "steps": 2, "save_every": 1, "threads": 1},
        "model": {"path": str(root / "model")},
        "task": {"source": "addition", "split": "train", "size": 8},
        "rewards": [{"function": "exact"}],
        "grading": {"in_process": True},
        "rollout": {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 6},
        "optim": {"learning_rate": 1e-3, "updates_per_step": 1},
        "eval": {"every": 0},
    }
    return gspo.load_recipe(text, {name.replace("__", "."): value for name, value in overrides.items()})


def count_digits(rollout: Rollout) -> float:
    """A reward that random text earns in different amounts."""
    return float(sum(c.isdigit() for c in rollout.text))


def rollout(
    reward: float | None, *, tokens: int = 2, prompt: str = "p", index: int = 0, grading: Grading | None = None
) -> Rollout:
    """A rollout of one prompt token and ``tokens`` sampled ones; graded where it has a reward."""
    mask = np.array([False] + [True] * tokens)
    row = TokenRow(np.arange(1, tokens + 2), mask, np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, -1))
    made = Rollout(Prompt(prompt, text=prompt), index, (row,), finish_reason=FinishReason.STOP, text="t" * tokens)
    graded = Grading.GRADED if reward is not None else Grading.FAILED
    return replace(made, reward=reward, grading=grading or graded)


class Recorded:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.evaluations: list[tuple[int, Any]] = []

    def step(self, step: Any) -> Any:
        self.steps.append(step)
        return step

    def evaluation(self, step: int, result: Any) -> None:
        self.evaluations.append((step, result))

    def save(self, step: int, version: int, *, last: bool) -> None: ...


def scripted(parts: Components, script: Callable[[Request, int], Reply | Sequence[int]], **options: Any) -> Run:
    """The run of these components with an engine that follows a script instead of the model."""
    engine = ScriptedEngine(script, **options)
    parts.collector.engine = engine
    return replace(make_run(parts, recorder=Recorded()), engine=engine)


def groups_of(run: Run, step: int = 0) -> list[Group]:
    """The groups of one step."""
    return run.collector.collect(run.task.batch(step, run.prompts_per_step, 0), run.plan, step=step)


def components(recipe: Recipe, **objects: Any) -> Components:
    """Everything a run needs, with a reward that random text earns unless another is given."""
    objects.setdefault("functions", [count_digits])
    return build(recipe, **objects)
