"""``gspo plot``: a run's curves as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gspo.cli.run_folder import require_run_folder


@dataclass(frozen=True)
class Arguments:
    """Draw a run's curves."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Draw; prints where the picture is."""
    folder = require_run_folder(arguments.run)
    from gspo.observe.plot import plot_run

    print(f"plot: {plot_run(folder)}")
    return 0
