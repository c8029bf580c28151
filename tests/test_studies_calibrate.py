"""The clip range that a wanted clip fraction asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gspo
from gspo.errors import ConfigError
from gspo.studies.calibrate import Spread, calibrate, fraction_clipped, propose


def spread(sd: float, *, updates: int = 4, size: int = 4000, seed: int = 0) -> Spread:
    """Gaussian log s after update 1, advantages of both signs, ten tokens each."""
    generator = np.random.default_rng(seed)
    update = np.repeat(np.arange(updates), size)
    log_s = np.where(update == 0, 0.0, generator.normal(0.0, sd, updates * size))
    advantage = np.where(generator.random(updates * size) < 0.5, 1.0, -1.0)
    return Spread(update, log_s, advantage, np.full(updates * size, 10.0))


def test_the_fraction_by_hand() -> None:
    s = Spread(
        update=np.array([0, 1, 1, 1]),
        log_s=np.array([0.0, 0.01, -0.01, 0.01]),
        advantage=np.array([1.0, 1.0, -1.0, -1.0]),
        tokens=np.array([5.0, 3.0, 2.0, 10.0]),
    )
    # Of 20 tokens: 3 clipped above (A > 0), 2 below (A < 0); the last one is above with A < 0, which is not clipped.
    assert fraction_clipped([s], 0.005, 0.005) == pytest.approx(5 / 20)
    assert fraction_clipped([s], 0.02, 0.005) == pytest.approx(3 / 20)
    assert fraction_clipped([s], 0.02, 0.02) == 0.0


@pytest.mark.parametrize("sd", [1e-3, 1e-2])
def test_the_proposal_keeps_the_papers_proportion_and_hits_the_fraction(sd: float) -> None:
    found = propose([spread(sd), spread(sd, seed=1)], 0.15, updates=4, discarded=())
    assert found.epsilon_high / found.epsilon == pytest.approx(4 / 3, rel=0.05)
    assert found.clip_fraction == pytest.approx(0.15, abs=0.01)
    # 0.15 over four updates, none on the first, is 0.2 on each other one: the mean of P(z > 0.72) = 0.236 for the
    # lower side and P(z > 0.96) = 0.169 for the upper side of a normal distribution.
    assert found.epsilon == pytest.approx(0.72 * sd, rel=0.06)
    assert found.sd_by_update[0] == 0.0 and found.sd_by_update[1] == pytest.approx(sd, rel=0.05)


def test_an_unreachable_fraction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached.*0\.3"):
        propose([spread(1e-3)], 0.45, updates=4, discarded=())


def test_a_noise_floor_is_said() -> None:
    noisy = spread(1e-3)
    noisy.log_s[noisy.update == 0] = np.random.default_rng(2).normal(0.0, 1e-3, 4000)
    assert "noise floor" in propose([noisy], 0.15, updates=4, discarded=()).notes[0]


def test_a_recipe_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    recipe = gspo.load_recipe(
        "quickstart",
        {
            "model.path": str(tmp_path / "model"), "run.threads": 1, "coldstart.steps": 20, "coldstart.hidden_size": 32,
            "coldstart.num_layers": 2, "rollout.prompts_per_step": 8, "rollout.num_generations": 4,
            "rollout.max_completion_length": 16, "optim.learning_rate": 1e-3, "grading.in_process": True,
            "rewards.0.function": f"{__name__}:digits", "rewards.0.options": {}, "eval.every": 0,
        },
    )  # fmt: skip
    weights = tmp_path / "model" / "model.safetensors"
    first = calibrate(recipe, clip_fraction=0.1, max_discarded=2, measured=1)
    before = weights.read_bytes()
    again = calibrate(recipe, clip_fraction=0.1, max_discarded=2, measured=1)
    assert first == again and weights.read_bytes() == before
    assert len(first.discarded) == 2 and all(sd > 0 for sd in first.sd_by_update[1:])
    assert first.noise_floor < 1e-5 < first.epsilon


def digits(rollout) -> float:
    """A reward that an untrained model earns in part."""
    return float(sum(c.isdigit() for c in rollout.text) % 3)


@pytest.mark.parametrize(
    ("overrides", "fraction", "says"),
    [
        ({"algorithm.name": "grpo", "algorithm.epsilon": 0.2, "algorithm.epsilon_high": 0.27}, 0.15, "sequence-level"),
        ({"optim.updates_per_step": 1}, 0.15, "updates_per_step"),
        ({}, 0.7, "between 0 and 0.5"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    tmp_path: Path, overrides: dict[str, object], fraction: float, says: str
) -> None:
    quick = {"model.path": str(tmp_path / "model"), "coldstart.steps": 2, "run.threads": 1, "grading.in_process": True}
    with pytest.raises(ConfigError, match=says):
        calibrate(gspo.load_recipe("quickstart", {**quick, **overrides}), clip_fraction=fraction)
