"""``gspo.train`` and ``gspo.resume``: the command line's runs from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import Recipe
from gspo.errors import ConfigError
from gspo.policy.model import Policy
from gspo.recipe import load_recipe
from gspo.training import run
from gspo.training.console import RunConsole


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    model: str | Policy | None = None,
    task: str | Iterable[Any] | None = None,
    rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    quiet: bool = False,
) -> Path:
    """Train and return the run folder.

    Args:
        recipe: a TOML file, the name of a packaged recipe, a mapping shaped as the TOML, or a Recipe; without one the
            defaults are the paper's.
        model: a Hugging Face folder, a hub name, or a ``Policy``; takes the place of ``model.path``.
        task: rows (dicts or ``Prompt`` objects) or what ``task.source`` takes.
        rewards: functions ``f(rollout) -> float, dict or None``, or names of built-in ones, one or several;
            each weighs 1.
        overrides: dotted options, ``{"run.steps": 50}``; they win over everything else.
        quiet: print nothing.

    Raises:
        GspoError: what is wrong, where, and what to try.
    """
    changes: dict[str, Any] = {}
    if isinstance(model, str):
        changes["model.path"] = model
    if isinstance(task, str):
        changes["task.source"] = task
    if callable(rewards) or isinstance(rewards, str):
        rewards = [rewards]
    functions, named = _split(rewards or ())
    if named:
        changes["rewards"] = [{"function": name} for name in named]
    loaded = load_recipe(load_recipe(recipe if recipe is not None else {}, changes), overrides)
    return run.train(
        loaded,
        rows=None if task is None or isinstance(task, str) else task,
        functions=functions,
        policy=model if isinstance(model, Policy) else None,
        console=RunConsole(quiet=quiet),
    )


def resume(run_folder: str | Path, *, quiet: bool = False) -> Path:
    """Go on from the newest valid checkpoint of a run folder that a recipe made; returns the folder.

    A run that was given Python objects (rows, functions, a policy) cannot be resumed from its folder alone.
    """
    return run.resume(Path(run_folder), console=RunConsole(quiet=quiet))


def _split(rewards: Sequence[str | Callable[..., Any]]) -> tuple[list[Callable[..., Any]], list[str]]:
    functions = [reward for reward in rewards if not isinstance(reward, str)]
    named = [reward for reward in rewards if isinstance(reward, str)]
    if functions and named:
        raise ConfigError(
            "rewards: give functions or names, not both (a built-in is importable: gspo.rewards.load_reward)"
        )
    return functions, named
