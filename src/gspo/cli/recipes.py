"""``gspo recipes``: the recipes that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from gspo.errors import ConfigError
from gspo.recipe import packaged_recipe_text, packaged_recipes


@dataclass(frozen=True)
class Arguments:
    """List packaged recipes, or print one."""

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="NAME")] = None
    """Print this one: gspo recipes quickstart > my.toml"""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Print the list, or one recipe's text."""
    recipes = packaged_recipes()
    if arguments.name is not None:
        if arguments.name not in recipes:
            raise ConfigError(f'no packaged recipe "{arguments.name}"; there are {", ".join(recipes)}')
        print(packaged_recipe_text(arguments.name), end="")
        return 0
    width = max((len(name) for name in recipes), default=0)
    for name, comment in recipes.items():
        print(f"{name:<{width}}  {comment}")
    return 0
