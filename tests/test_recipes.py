"""Every recipe inside the package loads, resolves, and says the same after a trip through a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.recipe import dump_recipe, load_recipe, packaged_recipe_text, packaged_recipes
from gspo.rewards.contract import BUILTINS
from gspo.training.build import inherit
from gspo.training.resolve import resolve_algorithm

NAMES = sorted(packaged_recipes())
NOT_RUN = ("gsm8k", "qwen3-8b-math-lora")


def test_the_packaged_recipes_are_these() -> None:
    assert NAMES == ["gsm8k", "quickstart", "qwen3-8b-math-lora", "smollm2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_loads_resolves_and_survives_its_run_folder(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    algorithm, notes = resolve_algorithm(
        recipe.algorithm,
        recipe.correction,
        updates_per_step=recipe.optim.updates_per_step,
        max_completion_length=recipe.rollout.max_completion_length,
    )
    assert algorithm.name == "gspo" and algorithm.epsilon_high > (algorithm.epsilon or 1.0) > 0
    assert not notes  # nothing about it is surprising
    (tmp_path / "config.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_recipe_has_a_reward_and_a_held_out_task_of_its_own(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.rewards and all(reward.function in BUILTINS for reward in recipe.rewards)
    held_out = inherit(recipe.eval.task, recipe.task)
    assert recipe.eval.every > 0
    assert (held_out.source, held_out.split, held_out.options) != (
        recipe.task.source,
        recipe.task.split,
        recipe.task.options,
    )


@pytest.mark.parametrize("name", NAMES)
def test_only_recipes_that_were_never_run_say_so_first(name: str) -> None:
    first = packaged_recipe_text(name).splitlines()[0]
    assert ("Not run here" in first) == (name in NOT_RUN)
