"""A recipe as TOML text: the resolved ``config.toml`` of a run folder.

Writes what ``tomllib`` reads back to the same recipe, and refuses credentials. Reading is ``gspo.recipe``'s.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from gspo.config import Recipe, Section
from gspo.errors import ConfigError

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|(access|auth|hf|wandb|bearer)_token)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
    r"|://[^/\s:@]+:[^/\s@]+@"
)
WRITTEN = "# The recipe of this run with every default written out."
"""First line of what ``dump_recipe`` writes."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as TOML, defaults included; options that are None are left out.

    ``[eval.task]`` and ``[coldstart.task]`` take what they leave out from ``[task]``, so only what they set is
    written. ``load_recipe`` of the text gives an equal recipe. Raises ConfigError for values that TOML cannot
    hold: objects that are no text, number, list or table, and None where it would hide a value of ``[task]``;
    and for credentials.
    """
    refuse_secrets(recipe.model_dump())
    parts = [WRITTEN + "\n"]
    for name, value in recipe:
        if name == "rewards":
            parts += [_table("[[rewards]]", name, dict(item)) for item in value]
        elif value is not None:
            plain = {key: item for key, item in value if not isinstance(item, Section)}
            parts.append(_table(f"[{name}]", name, plain))
            parts += [_task_table(f"{name}.{key}", item) for key, item in value if isinstance(item, Section)]
    return "\n".join(parts)


def _task_table(path: str, task: Section) -> str:
    chosen = task.model_dump(exclude_unset=True)
    for key, value in chosen.items():
        if value is None:
            raise ConfigError(f"{path}.{key} = None cannot be written to TOML; leave it out")
    return _table(f"[{path}]", path, chosen)


def _table(header: str, path: str, values: Mapping[str, Any]) -> str:
    lines = [
        f"{toml_key(key)} = {toml_value(value, f'{path}.{key}')}" for key, value in values.items() if value is not None
    ]
    return "\n".join([header, *lines]) + "\n"


def refuse_secrets(value: Any, dotted: str = "") -> None:
    """Raise ConfigError for what looks like a credential: recipes are copied into run folders and trackers."""
    if isinstance(value, dict):
        for key, item in value.items():
            name = f"{dotted}.{key}" if dotted else key
            if _SECRET_KEY.search(key) and isinstance(item, str) and item:
                raise ConfigError(f"{name}: looks like a credential; set it in the environment, not in a recipe")
            refuse_secrets(item, name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            refuse_secrets(item, f"{dotted}.{index}")
    elif isinstance(value, str) and _SECRET_VALUE.search(value):
        raise ConfigError(f"{dotted}: looks like a credential; set it in the environment, not in a recipe")


def toml_key(key: str) -> str:
    """A key, quoted where TOML asks for it."""
    return key if _BARE_KEY.fullmatch(key) else toml_text(key)


def toml_text(text: str) -> str:
    """A basic string on one line; control characters are escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: Any, where: str) -> str:
    """One value; ``where`` names it in errors."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item, f"{where}.{i}") for i, item in enumerate(value)) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(str(key))} = {toml_value(item, f'{where}.{key}')}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(
        f"{where}: a {type(value).__name__} cannot be written to TOML; use text, numbers, true/false, lists or tables"
    )


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
