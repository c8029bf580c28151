"""``gspo check task``: what a task's rows become, and which cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from gspo.cli.run_folder import safe_text
from gspo.config import Recipe
from gspo.recipe import load_recipe, packaged_recipes


@dataclass(frozen=True)
class Arguments:
    """Try a task."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE_OR_SOURCE")]
    """A recipe, or what task.source may be: a data file, a data set, a generator, module:function."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Load the task and print the report; 1 where rows cannot be used or something is suspicious."""
    recipe = recipe_of(arguments.source, overrides)
    from gspo.tasks import TaskOptions, check_task

    names = {item.name for item in fields(TaskOptions)}
    options = TaskOptions(**{name: value for name, value in recipe.task if name in names})
    report = check_task(options, default_seed=recipe.run.seed)
    print(safe_text(str(report)))
    return 0 if report.ok else 1


def recipe_of(source: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, or one around a task source."""
    path = Path(source)
    if source in packaged_recipes() or path.suffix == ".toml" or (path / "config.toml").is_file():
        return load_recipe(source, overrides)
    return load_recipe({"task": {"source": source}}, overrides)
