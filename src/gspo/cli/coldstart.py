"""``gspo coldstart``: make the model that a recipe's training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from gspo.recipe import load_recipe


@dataclass(frozen=True)
class Arguments:
    """Make the starting model of a recipe."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """A TOML file, or the name of a packaged recipe."""
    force: bool = False
    """Make it again where it exists."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Fine-tune or build; prints where the model is."""
    recipe = load_recipe(arguments.recipe, overrides)
    from gspo.training.coldstart import coldstart, left_out

    folder = coldstart(recipe, force=arguments.force)
    if note := left_out(folder):
        print(f"note: {note}")
    print(f"model: {folder}")
    return 0
