"""GSPO learns what the quickstart promises, and nothing where rewards say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gspo

pytestmark = pytest.mark.slow
STEPS = 30  # the quickstart takes 100


def accuracies(folder: Path) -> list[float]:
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [metrics["eval/accuracy"] for metrics in lines if "eval/accuracy" in metrics]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The quickstart, cut to the steps that show whether it learns; the cold start is shared."""
    root = tmp_path_factory.mktemp("learning")
    return {
        "run.steps": STEPS,
        "run.output_dir": str(root / "runs"),
        "run.threads": 1,
        "model.path": str(root / "model"),
        "eval.every": STEPS,
        "eval.task.size": 400,
        "grading.in_process": True,
    }


def test_the_quickstart_learns_to_carry(overrides: dict[str, object]) -> None:
    before, after = accuracies(gspo.train("quickstart", overrides=overrides, quiet=True))
    assert 0.4 < before < 0.65
    assert after - before > 0.2


def test_shuffled_rewards_teach_nothing(overrides: dict[str, object]) -> None:
    control = {**overrides, "algorithm.advantage": "shuffled:shuffled"}
    before, after = accuracies(gspo.train("quickstart", overrides=control, quiet=True))
    assert after - before <= 0.05
