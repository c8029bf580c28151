"""``gspo calibrate``: a clip range measured on a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from gspo.recipe import load_recipe


@dataclass(frozen=True)
class Arguments:
    """Propose a clip range."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """A TOML file, or the name of a packaged recipe."""
    clip_fraction: float = 0.15
    """Wanted share of clipped tokens over all updates of a step; 0.15 is the paper's."""
    measured: int = 2
    """Rollout batches to measure, after those thrown away."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Measure; prints the spread and the lines to put into the recipe."""
    recipe = load_recipe(arguments.recipe, overrides)
    from gspo.studies.calibrate import calibrate

    result = calibrate(recipe, clip_fraction=arguments.clip_fraction, measured=arguments.measured, progress=print)
    spreads = ", ".join(f"{sd:.2e}" for sd in result.sd_by_update)
    print(f"sd of log s by update: {spreads} (the first is the noise floor)")
    print(f"mean length {result.mean_length:.1f} tokens; clip fraction {result.clip_fraction:.3f} with this range:")
    print(f"\n[algorithm]\nepsilon = {result.epsilon:g}\nepsilon_high = {result.epsilon_high:g}")
    for note in result.notes:
        print(f"note: {note}")
    return 0
