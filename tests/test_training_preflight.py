"""Before step 0: the table of what the settings mean, and one real group and update."""

from __future__ import annotations

from pathlib import Path

import pytest

import gspo
from case_helpers import components, tiny_recipe
from docs_helpers import make_model
from gspo.errors import ConfigError
from gspo.training.preflight import check_recipe, memory_estimate, settings_table


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    make_model(folder / "model")
    return folder


def test_the_table_says_what_a_step_is(root: Path) -> None:
    made = components(tiny_recipe(root, run__steps=6, optim__updates_per_step=2))
    try:
        rows = {name: (value, meaning) for name, value, meaning in settings_table(made)}
    finally:
        made.close()
    assert rows["task"] == ("8", f"prompts of {made.task.name}; each is seen 3 times in the run")
    assert rows["rollouts a step"] == ("8", "4 prompts x 2 completions")
    assert rows["updates a step"][0] == "2" and "each of 4 rollouts" in rows["updates a step"][1]
    assert rows["tokens a step"][0] == "<= 48"
    assert rows["steps"] == ("6", "12 updates, 48 rollouts")
    assert "sequence ratio" in rows["algorithm"][1] and "-0.0003 / +0.0004" in rows["algorithm"][1]


def test_the_memory_estimate_counts_what_is_trained_and_kept(root: Path) -> None:
    """Float32 weights and gradients of 4 bytes, two moments; a reference model is a second copy of the weights."""
    estimates = []
    for beta in (0.0, 0.1):
        made = components(tiny_recipe(root, algorithm__beta=beta))
        size = sum(p.numel() for p in made.policy.model.parameters())
        estimates.append(memory_estimate(made))
        made.close()
    assert estimates[0]["weights"] == pytest.approx(4e-9 * size)
    assert estimates[0]["gradients"] == pytest.approx(4e-9 * size)
    assert estimates[0]["optimizer"] == pytest.approx(8e-9 * size)
    assert estimates[1]["weights"] == pytest.approx(8e-9 * size)


def test_check_recipe_samples_a_group_and_takes_an_update(root: Path, tmp_path: Path) -> None:
    found = check_recipe(tiny_recipe(root, rollout__num_generations=3))
    assert len(found.group.rollouts) == 3 and all(r.reward == 0.0 for r in found.group.rollouts)
    assert found.grad_norm > 0  # the group is degenerate: the backward pass is tried all the same, and that is said
    assert any("rewards of the group are equal" in note for note in found.notes)
    assert found.mismatch_max < 1e-4
    assert not (root / "runs").exists()


def broken(rollout: object) -> float:
    raise KeyError("gold")


def test_check_recipe_says_why_nothing_could_be_learned_from(root: Path) -> None:
    recipe = gspo.load_recipe(tiny_recipe(root), {"rewards": [{"function": f"{__name__}:broken"}]})
    with pytest.raises(ConfigError, match="KeyError"):
        check_recipe(recipe)
