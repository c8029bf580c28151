"""``gspo eval``: a model's score on its held-out task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gspo.cli.run_folder import require_run_folder
from gspo.recipe import load_recipe, packaged_recipes


@dataclass(frozen=True)
class Arguments:
    """Evaluate on the held-out task."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE_OR_RUN")]
    """A recipe (its model as it is), or a run folder (its best checkpoint, else the newest)."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Evaluate; prints one line a metric."""
    folder = Path(arguments.source)
    is_run = arguments.source not in packaged_recipes() and folder.is_dir()
    recipe = load_recipe(require_run_folder(folder) if is_run else arguments.source, overrides)
    from gspo.training.run import evaluate_recipe

    result = evaluate_recipe(recipe, checkpoint_of=folder if is_run else None)
    for name, value in result.metrics.items():
        print(f"{name:<20} {value:.6g}")
    return 0
