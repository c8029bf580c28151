"""The words of recipe errors: where an option stands, and what is wrong with its value, without jargon."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a recipe came from: its name in errors, its text (for line numbers) and its folder."""

    name: str
    text: str = ""
    folder: Path | None = None


_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}


def in_words(item: Mapping[str, Any], data: Any) -> tuple[str, str]:
    """A pydantic error as (dotted option, what is wrong) without jargon. ``data``: what was validated."""
    *parents, leaf = item["loc"]
    holder = data
    for part in parents:
        holder = holder[part]
    if item["type"] in ("missing", "too_long") and isinstance(holder, list):  # a pair such as betas
        return ".".join(map(str, parents)), f"must be a list of 2 numbers, not {holder}"
    if item["type"] == "too_long":
        return ".".join(map(str, item["loc"])), f"must be a list of 2 numbers, not {holder[leaf]}"
    return ".".join(map(str, item["loc"])), _sentence(item["type"], item.get("ctx", {}), item)


def _sentence(kind: str, context: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    value = item.get("input")
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"must be {word} {context[key]:g}, not {value}"
    if kind == "literal_error":
        near = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", context["expected"]), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        return f"must be {context['expected']}, not {value!r}{hint}".replace("'", '"')
    if kind == "missing":
        return "is missing; it has no default"
    if kind == "string_pattern_mismatch":
        return f'"{value}" may hold letters, digits, ".", "_" and "-", and starts with a letter or digit'
    stem = kind.split("_")[0]
    return f"must be {_EXPECTED[stem]}, not {_shown(value)}" if stem in _EXPECTED else str(item["msg"])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'the text "{value}"' if isinstance(value, str) else str(value)


def where(origin: Origin, dotted: str) -> str:
    """``file.toml:12: rollout.num_generation``, with the line where the text shows it."""
    line = _line_of(origin.text, dotted) or _line_of(origin.text, dotted.rpartition(".")[0])
    return f"{origin.name}:{line}: {dotted}" if line else f"{origin.name}: {dotted}"


def _line_of(text: str, dotted: str) -> int | None:
    """Line of ``key = value`` or ``[key]`` in TOML text, 1-based; None where no plain line shows it."""
    wanted = dotted.split(".")
    table: list[str] = []
    entries: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([\w.\- ]+?)\s*\]", line)
        key = re.match(r"\s*([\w.\-]+)\s*=", line)
        if header:
            table = [part.strip() for part in header[2].split(".")]
            if header[1] == "[[":
                entries[header[2]] = entries.get(header[2], -1) + 1
                table.append(str(entries[header[2]]))
        if (header and table == wanted) or (key and table + key[1].split(".") == wanted):
            return number
    return None
