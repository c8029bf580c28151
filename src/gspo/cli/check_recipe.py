"""``gspo check recipe``: one real group and one update, before hours are spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from gspo.cli.run_folder import safe_text
from gspo.recipe import load_recipe


@dataclass(frozen=True)
class Arguments:
    """Try a recipe."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """A TOML file, or the name of a packaged recipe."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Sample and grade a group, take an update; prints what came out."""
    recipe = load_recipe(arguments.recipe, overrides)
    from gspo.training.preflight import check_recipe

    result = check_recipe(recipe)
    for row in result.settings:
        print(f"{row[0]:<16} {'  '.join(row[1:])}")
    print(f"\nprompt {safe_text(result.group.rollouts[0].prompt.id)}")
    for rollout in result.group.rollouts:
        reward = "none" if rollout.reward is None else f"{rollout.reward:.4g}"
        text = safe_text(rollout.text).replace("\n", "\\n")[:160]
        print(f"  reward {reward:<6} {rollout.num_scored:>5} tokens  {rollout.finish_reason:<8} {text}")
    print(f"\nloss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}")
    print(f"largest |log-prob of the learner - of the engine| {result.mismatch_max:.2g}")
    for note in result.notes:
        print(f"note: {note}")
    print("ok")
    return 0
