"""What the command line knows of a command before it is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives, what it says of itself, and whether it takes ``--section.option value``."""

    module: str
    summary: str
    overrides: bool = False
