"""``gspo train``: train a model from a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from gspo.recipe import load_recipe


@dataclass(frozen=True)
class Arguments:
    """Train a model from a recipe."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """A TOML file, or the name of a packaged recipe ("gspo recipes" lists them)."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Train; the console says where the run folder is."""
    recipe = load_recipe(arguments.recipe, overrides)
    from gspo.training.run import train

    train(recipe)
    return 0
