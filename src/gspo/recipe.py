"""Loading a recipe: a TOML file, a packaged name or a mapping, plus dotted overrides, to ``config.Recipe``.

Every error is a ConfigError that says where (file and line, or command line), which option, what is wrong and
what to try. Left to others: combinations of algorithm options (``gspo.training.resolve``), the names of
options and what other libraries call them (``gspo.recipe_names``), words of errors (``gspo.recipe_words``).

A relative path in a recipe is looked for in the current directory; if it is not there and is beside the
recipe file, that one is taken.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo.config import Recipe
from gspo.errors import ConfigError
from gspo.recipe_names import annotation_of, explain_unknown, section_of, unknown_keys, unwrap
from gspo.recipe_toml import WRITTEN, dump_recipe, refuse_secrets
from gspo.recipe_words import Origin, in_words, where

__all__ = [
    "check_sizes",
    "dump_recipe",
    "load_recipe",
    "packaged_recipe_text",
    "packaged_recipes",
    "parse_overrides",
    "takes_value",
]

_PATHS = ("model.path", "model.chat_template", "coldstart.base")
_FILES = ("task.source", "eval.task.source", "coldstart.task.source")


def load_recipe(
    source: str | Path | Mapping[str, Any] | Recipe, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Recipe:
    """Read a recipe and apply overrides to it.

    ``source``: a TOML file, a run folder (its ``config.toml``), the name of a packaged recipe, a mapping
    shaped as the TOML, or a Recipe. ``overrides``: ``{"rollout.num_generations": 4}`` or command-line words
    (``["--rollout.num_generations", "4"]``, ``["rollout.num_generations=4"]``); they win over the source.
    Raises ConfigError.
    """
    data, origin = _read(source)
    _refuse_unknown(unknown_keys(data), origin)
    changes = dict(overrides if isinstance(overrides, Mapping) else parse_overrides(overrides))
    touched: set[str] = set()
    for dotted, value in changes.items():
        _apply(data, dotted, value, touched)
    _beside_the_file(data, origin, touched)
    refuse_secrets(data)
    recipe = _validate(data, origin, touched)
    check_sizes(recipe)
    return recipe


def packaged_recipes() -> dict[str, str]:
    """Name and first comment line of each recipe inside the package."""
    folder = importlib.resources.files("gspo") / "recipes"
    if not folder.is_dir():
        return {}
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            lines = entry.read_text(encoding="utf-8").splitlines()
            comment = next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
            found[entry.name.removesuffix(".toml")] = comment
    return found


def packaged_recipe_text(name: str) -> str:
    """The TOML text of a packaged recipe."""
    return (importlib.resources.files("gspo") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


# --- reading ---------------------------------------------------------------------------------------------


def _read(source: str | Path | Mapping[str, Any] | Recipe) -> tuple[dict[str, Any], Origin]:
    if isinstance(source, Recipe):
        return _copy(source.model_dump(exclude_unset=True)), Origin("recipe")
    if isinstance(source, Mapping):
        return _copy(source), Origin("recipe")
    if isinstance(source, str) and source in packaged_recipes():
        text = packaged_recipe_text(source)
        return _parse(text, source), Origin(source, text)
    path = Path(source)
    if path.is_dir():
        path = path / "config.toml"
    text = _read_text(path, str(source))
    # a run folder holds a model of its own, which must not be taken for the one that the run started from
    folder = None if text.startswith(WRITTEN) else path.parent
    return _parse(text, str(path)), Origin(str(path), text, folder)


def _read_text(path: Path, source: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such recipe; {_known_recipes(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _known_recipes(path: Path) -> str:
    names = list(packaged_recipes())
    near = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.6)
    if near:
        return f'did you mean the packaged recipe "{near[0]}"?'
    files = [item.name for item in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, files, n=1, cutoff=0.6)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    return f"give a TOML file or a packaged recipe ({', '.join(names) or 'none'})"


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = '; text needs quotes: name = "value"' if "Invalid value" in str(error) else ""
        raise ConfigError(f"{name}: not valid TOML: {error}{hint}") from None


def _copy(value: Any) -> Any:
    """A deep copy with plain dicts and lists; paths become text."""
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _beside_the_file(data: dict[str, Any], origin: Origin, touched: set[str]) -> None:
    """Point relative paths that exist only beside the recipe file there; overrides stay as they are."""
    if origin.folder is None:
        return
    for dotted in _PATHS + _FILES:
        *parents, leaf = dotted.split(".")
        table: Any = data
        for part in parents:
            table = table.get(part) if isinstance(table, dict) else None
        value = table.get(leaf) if isinstance(table, dict) else None
        if not isinstance(value, str) or not value or _overridden(dotted, touched) or os.path.exists(value):
            continue
        beside = origin.folder / value
        if beside.is_file() or (dotted in _PATHS and beside.is_dir()):
            table[leaf] = str(beside)


# --- overrides -------------------------------------------------------------------------------------------


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Command-line words to (dotted name, value text): ``--a.b 1``, ``--a.b=1``, ``a.b=1``.

    Hyphens may stand for underscores in names. A switch without a value is "true".
    """
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") and not equals:
            raise ConfigError(f'"{word}": expected --section.option value')
        if not equals:
            if takes_value(name, words[position : position + 1]):
                value = words[position]
                position += 1
            elif unwrap(annotation_of(name)) is bool:
                value = "true"
            elif annotation_of(name) is not None:
                raise ConfigError(f"--{name}: needs a value")
        yield name, value


def takes_value(name: str, following: Sequence[str]) -> bool:
    """Whether the next word (0 or 1 of them) is the value of ``--name``: switches take only true or false."""
    if not following or following[0].startswith("--"):
        return False
    return unwrap(annotation_of(name)) is not bool or following[0].lower() in ("true", "false")


def _apply(data: dict[str, Any], dotted: str, value: Any, touched: set[str]) -> None:
    """Set one option in the nested data, reading text by the option's type."""
    annotation = annotation_of(dotted)
    if annotation is None:
        raise ConfigError(f"--{dotted}: unknown option; {explain_unknown(dotted)}")
    section = section_of(annotation)
    value = _from_text(value, annotation, dotted) if isinstance(value, str) else _copy(value)
    if isinstance(value, dict) and section is not None:
        for key in unknown_keys(value, section, f"{dotted}."):
            raise ConfigError(f"--{key}: unknown option; {explain_unknown(key)}")
    touched.add(dotted)
    *parents, leaf = dotted.split(".")
    table: Any = data
    for depth, part in enumerate(parents):
        table = _descend(table, part, ".".join(parents[: depth + 1]))
    if isinstance(table, list):
        table[_index(table, leaf, dotted)] = value
    elif value is None:
        table.pop(leaf, None)
    elif isinstance(value, dict) and section is not None and isinstance(table.get(leaf), dict):
        table[leaf] |= value
    else:
        table[leaf] = value


def _descend(table: Any, part: str, dotted: str) -> Any:
    if isinstance(table, list):
        return table[_index(table, part, dotted)]
    inner = table.setdefault(part, [] if typing.get_origin(annotation_of(dotted)) is tuple else {})
    if not isinstance(inner, (dict, list)):
        raise ConfigError(f"{dotted}: must be a table, not {inner!r}")
    return inner


def _index(items: list[Any], part: str, dotted: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        name = dotted.rpartition(".")[0] or dotted
        raise ConfigError(f"--{dotted}: {name} has {len(items)} entries, numbered from 0; add others in the file")
    return int(part)


def _from_text(text: str, annotation: Any, dotted: str) -> Any:
    """Read a command-line value: text options as they are, lists by commas or as TOML, the rest as TOML."""
    kind = unwrap(annotation)
    if kind is str or (typing.get_origin(kind) is typing.Literal):
        return text
    if kind is not annotation and text.lower() == "none":
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if typing.get_origin(kind) is tuple and section_of(kind) is None and not text.startswith("["):
        if typing.get_args(kind)[0] is str:
            return [item.strip() for item in text.split(",") if item.strip()]
        text = f"[{text}]"
    try:
        return tomllib.loads(f"value = {text}\n")["value"]
    except tomllib.TOMLDecodeError:
        if section_of(kind) is not None or typing.get_origin(kind) is dict:
            raise ConfigError(f"--{dotted}: expected a TOML table such as '{{ key = 1 }}', not {text!r}") from None
        return text


# --- checking --------------------------------------------------------------------------------------------


def _refuse_unknown(names: Iterator[str], origin: Origin) -> None:
    found = [f"{where(origin, name)}: unknown option; {explain_unknown(name)}" for name in names]
    if found:
        raise ConfigError("\n".join(found))


def _validate(data: dict[str, Any], origin: Origin, touched: set[str]) -> Recipe:
    # JSON mode is strict about "8" for 8 and lets lists be tuples, which is what TOML means by both.
    try:
        return Recipe.model_validate_json(json.dumps(data, default=_no_json), strict=True)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            dotted, words = in_words(dict(item), data)
            place = f"--{dotted}" if _overridden(dotted, touched) else where(origin, dotted)
            lines.append(f"{place}: {words}")
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _overridden(dotted: str, touched: set[str]) -> bool:
    return any(f"{dotted}.".startswith(f"{name}.") for name in touched)


def _no_json(value: Any) -> Any:
    raise ConfigError(
        f"{value!r} is a {type(value).__name__}, which a recipe cannot hold; "
        "use text, numbers, true/false, lists or tables"
    )


def check_sizes(recipe: Recipe) -> None:
    """Refuse a group of one, updates that do not divide the step, and numbers that no type rules out.

    Raises ConfigError, with the nearest valid values.
    """
    rollout, optim = recipe.rollout, recipe.optim
    if not all(0.0 <= beta < 1.0 for beta in optim.betas):
        raise ConfigError(f"optim.betas = {list(optim.betas)}: each is at least 0 and below 1; [0.9, 0.99] is usual")
    if "" in rollout.stop:
        raise ConfigError("rollout.stop holds an empty string, which would end every completion at once; remove it")
    generations, prompts, updates = rollout.num_generations, rollout.prompts_per_step, optim.updates_per_step
    if generations < 2:
        raise ConfigError(
            "rollout.num_generations = 1: advantages compare the completions of one prompt with each other, "
            "so a group needs at least 2; 8 and 16 are usual"
        )
    if optim.minibatches == "groups":
        if prompts % updates:
            raise ConfigError(
                f"optim.updates_per_step = {updates} does not divide rollout.prompts_per_step = {prompts}, "
                f'and an update takes whole groups (optim.minibatches = "groups"). Valid: updates_per_step '
                f"{_divisors_near(prompts, updates)}, or prompts_per_step {_multiples_near(prompts, updates)}"
            )
    elif (prompts * generations) % updates:
        total = prompts * generations
        raise ConfigError(
            f"optim.updates_per_step = {updates} does not divide the {total} rollouts of a step "
            f"(prompts_per_step {prompts} * num_generations {generations}). Valid: updates_per_step "
            f"{_divisors_near(total, updates)}, or a multiple of {updates} rollouts"
        )


def _divisors_near(number: int, wanted: int) -> str:
    """The nearest divisor on each side of ``wanted``; the two nearest below where none is above."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    above = [d for d in divisors if d > wanted][:1]
    below = [d for d in divisors if d < wanted][-1 if above else -2 :]
    return " or ".join(str(d) for d in below + above)


def _multiples_near(number: int, factor: int) -> str:
    below = number // factor * factor
    return " or ".join(str(m) for m in (below, below + factor) if m > 0)
