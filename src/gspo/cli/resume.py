"""``gspo resume``: continue a run from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gspo.cli.run_folder import require_run_folder


@dataclass(frozen=True)
class Arguments:
    """Continue a run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Resume; the console says where the run folder is."""
    folder = require_run_folder(arguments.run)
    from gspo.training.run import resume

    resume(folder)
    return 0
