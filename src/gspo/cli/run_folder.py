"""Reading a run folder for the terminal: what is in it, and model text made harmless."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError

_KEPT = frozenset("\n\t\u200c\u200d")  # line breaks, tabs, and the joiners that scripts and emoji need


def require_run_folder(path: Path) -> Path:
    """The path, if it is a run folder. Raises ConfigError that names runs beside it."""
    if path.is_dir() and ((path / "config.toml").is_file() or (path / "rollouts").is_dir()):
        return path
    what = "is not a run folder (no config.toml in it)" if path.is_dir() else "does not exist"
    root = path if path.is_dir() else path.parent
    runs = sorted(item.parent.name for item in root.glob("*/config.toml")) if root.is_dir() else []
    hint = f"runs in {root}: {', '.join(runs[-8:])}" if runs else "give the folder that gspo train printed"
    raise ConfigError(f"{path} {what}; {hint}")


def safe_text(text: str) -> str:
    """Text that cannot steer a terminal: control, format and surrogate characters are shown as escapes."""
    return "".join(char if char in _KEPT or not _steers(char) else _escape(char) for char in text)


def _steers(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def rollout_files(run: Path, *, evaluation: bool = False) -> dict[int, Path]:
    """Step -> file of rollouts, ascending."""
    prefix = "eval_" if evaluation else "step_"
    found = {}
    for path in (run / "rollouts").glob(f"{prefix}*.jsonl"):
        number = path.stem.removeprefix(prefix)
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; a torn last line is left out.

    Raises ConfigError with the line of any other damage.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}:{number}: not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows
