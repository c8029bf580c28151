"""Calibration: shares counted by hand, and a real one on a model of random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gspo
from case_helpers import tiny_recipe
from docs_helpers import make_model
from gspo.errors import ConfigError
from gspo.studies.calibrate import Spread, calibrate, fraction_clipped, propose


def spread(log_s: list[float], advantage: list[float], tokens: list[int], update: list[int] | None = None) -> Spread:
    return Spread(
        np.array(update or [1] * len(log_s)), np.array(log_s), np.array(advantage, dtype=float), np.array(tokens)
    )


def test_tokens_of_clipped_sequences_by_hand() -> None:
    """Above the range with a positive advantage, or below it with a negative one; the other sides are not clipped."""
    table = spread([0.02, 0.02, -0.02, -0.02, 0.02], [1, -1, 1, -1, 0], [1, 2, 4, 8, 16])
    assert fraction_clipped([table], 0.01, 0.01) == (1 + 8) / 31
    assert fraction_clipped([table], 0.03, 0.01) == 1 / 31
    assert fraction_clipped([table], 0.01, 0.03) == 8 / 31
    assert fraction_clipped([table, table], 0.03, 0.03) == 0.0


def test_the_proposal_is_the_paper_s_proportion_at_the_wanted_share() -> None:
    rng = np.random.default_rng(0)
    log_s = rng.normal(0, 1e-2, 4000)
    table = spread(log_s.tolist(), rng.choice([-1.0, 1.0], 4000).tolist(), [10] * 4000)
    found = propose([table], 0.15, updates=2, discarded=(0.02, 0.01))
    assert found.epsilon_high / found.epsilon == pytest.approx(4 / 3, rel=0.05)  # two digits each
    assert found.clip_fraction == pytest.approx(0.15, abs=0.01)
    # half of P(z > 3x) + P(z > 4x) is 0.15 at x = 0.30 standard deviations
    assert found.epsilon == pytest.approx(0.9e-2, rel=0.1)
    assert found.mean_length == 10 and found.noise_floor == 0.0


def test_a_noise_floor_beside_the_range_is_said() -> None:
    noise = spread([0.01, -0.01] * 50, [1.0, -1.0] * 50, [1] * 100, [0, 1] * 50)
    loud = spread([0.02, -0.02, 0.02, -0.02] * 25, [1.0, -1.0] * 50, [1] * 100, [0, 0, 1, 1] * 25)
    assert propose([noise], 0.2, updates=2, discarded=()).notes == ()
    assert "noise floor" in propose([loud], 0.2, updates=2, discarded=()).notes[0]


def test_a_share_that_cannot_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"only 0\.250"):
        propose([spread([0.01, 0.0], [1.0, 0.0], [1, 3])], 0.3, updates=2, discarded=())


def test_a_real_calibration(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    recipe = tiny_recipe(
        tmp_path, rewards=[{"function": "case_helpers:count_digits"}], optim__updates_per_step=4,
        rollout__prompts_per_step=8, rollout__num_generations=4, optim__warmup_updates=50,
    )  # fmt: skip
    lines: list[str] = []
    found = calibrate(recipe, clip_fraction=0.1, max_discarded=3, measured=2, progress=lines.append)
    assert len(found.discarded) == 3 and len(lines) == 3
    assert 1e-5 < found.epsilon < found.epsilon_high < 0.5
    assert found.clip_fraction == pytest.approx(0.1, abs=0.03)
    assert len(found.sd_by_update) == 4 and found.sd_by_update[0] < 1e-6 < found.sd_by_update[3]
    assert found.noise_floor < found.epsilon
    assert not (tmp_path / "runs").exists()  # nothing is written


@pytest.mark.parametrize(
    ("overrides", "share", "says"),
    [
        ({"algorithm.name": "grpo", "optim.updates_per_step": 2}, 0.15, "sequence-level"),
        ({"optim.updates_per_step": 1}, 0.15, "nothing to calibrate"),
        ({"optim.updates_per_step": 2}, 0.7, "between 0 and 0.5"),
        ({"optim.updates_per_step": 2, "lora.alpha": 8.0}, 0.15, "lora.rank"),
    ],
)
def test_what_cannot_be_calibrated(tmp_path: Path, overrides: dict[str, object], share: float, says: str) -> None:
    make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=says):
        calibrate(gspo.load_recipe(tiny_recipe(tmp_path), overrides), clip_fraction=share)
