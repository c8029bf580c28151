"""Words of a command line to a command's ``Arguments`` (by tyro) and recipe overrides (left as words).

Overrides are not parsed by tyro: ``gspo.recipe`` reads them by the recipe's types, and its errors name the
option that was meant. tyro renders them in ``--help``, with the values of the recipe at hand as defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from gspo.config import ColdStartConfig, Recipe, TaskConfig
from gspo.errors import ConfigError
from gspo.recipe import load_recipe, takes_value

if TYPE_CHECKING:
    from gspo.cli.command import Command

T = TypeVar("T")


def parse(kind: type[T], words: Sequence[str], *, name: str, command: Command) -> tuple[T, tuple[str, ...]]:
    """The command's arguments and the words that are overrides; help and usage errors end the process."""
    prog, description = f"gspo {name}", f"{command.summary[:1].upper()}{command.summary[1:]}."
    own, overrides = list(words), list[str]()
    if command.overrides:
        own, overrides = split_overrides(words, flags_of(kind))
        if "-h" in words or "--help" in words:
            _help(kind, own, prog=prog, description=description)
    return tyro.cli(kind, args=own, prog=prog, description=description), tuple(overrides)


def flags_of(kind: type[Any]) -> frozenset[str]:
    """Names of a command's own flags, with underscores."""
    names = {item.name for item in dataclasses.fields(kind)}
    return frozenset(names | {f"no_{name}" for name in names} | {"help"})


def split_overrides(words: Sequence[str], own_flags: frozenset[str]) -> tuple[list[str], list[str]]:
    """(the command's own words, words of overrides): those are ``--name``s that the command does not know."""
    own: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if not word.startswith("--") or name in own_flags:
            own.append(word)
            continue
        overrides.append(word)
        if "=" not in word and takes_value(name, words[position : position + 1]):
            overrides.append(words[position])
            position += 1
    return own, overrides


def _help(kind: type[Any], own: Sequence[str], *, prog: str, description: str) -> None:
    """Print the command's help with every option of the recipe, and exit."""
    both = dataclasses.make_dataclass(
        "both",
        [
            ("arguments", Annotated[kind, tyro.conf.arg(name="")]),
            ("options", Annotated[Recipe, tyro.conf.arg(name="")], _with_sections(_recipe_at_hand(own))),
        ],
    )
    tyro.cli(
        both,
        args=["--help"],
        prog=prog,
        description=f"{description} Every option of the recipe can be given as --section.option value "
        "(lists by commas).",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def _recipe_at_hand(own: Sequence[str]) -> Recipe:
    """The recipe named among the words, so that help shows its values; else the defaults."""
    for word in own:
        if not word.startswith("-"):
            try:
                return load_recipe(word)
            except ConfigError:
                break
    return Recipe()


def _with_sections(recipe: Recipe) -> Recipe:
    """Optional sections filled in, so that their options are listed too."""
    evaluation = recipe.eval.model_copy(update={"task": recipe.eval.task or TaskConfig()})
    coldstart = recipe.coldstart or ColdStartConfig()
    coldstart = coldstart.model_copy(update={"task": coldstart.task or TaskConfig()})
    return recipe.model_copy(update={"eval": evaluation, "coldstart": coldstart})
