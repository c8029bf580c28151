"""What a second look at whole runs found: seeds, resuming, full disks, options that nobody reads."""

from __future__ import annotations

import pytest
import torch

import gspo
from gspo.config import Recipe
from gspo.policy.model import load_policy
from gspo.training.build import load_options
from gspo.training.coldstart import coldstart
from gspo.types import Rollout


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose cold start is done: 2 batches."""
    root = tmp_path_factory.mktemp("review")
    text = {
        "run": {"name": "tiny", "output_dir": str(root / "runs"), "steps": 2, "save_every": 1, "threads": 1},
        "model": {"path": str(root / "model")},
        "coldstart": {
            "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_length": 48, "steps": 2, "batch_size": 8,
            "task": {"size": 50},
        },
        "task": {"source": "addition", "split": "train", "size": 32},
        "rewards": [{"function": "exact", "options": {"marker": "#"}}],
        "grading": {"in_process": True},
        "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8},
        "optim": {"learning_rate": 1e-3, "updates_per_step": 2},
    }  # fmt: skip
    loaded = gspo.load_recipe(text)
    coldstart(loaded)
    return loaded


def changed(recipe: Recipe, **overrides: object) -> Recipe:
    return gspo.load_recipe(recipe, {name.replace("__", "."): value for name, value in overrides.items()})


def digits(rollout: Rollout) -> float:
    """A reward that untrained models earn now and then."""
    return float(sum(c.isdigit() for c in rollout.text) % 3)


def adapter(recipe: Recipe) -> torch.Tensor:
    policy = load_policy(load_options(recipe))
    return torch.cat([p.detach().flatten() for _, p in policy.trainable()])


def test_adapters_start_from_the_seed(recipe: Recipe) -> None:
    wanted = changed(recipe, lora__rank=2)
    torch.manual_seed(1)
    first, after = adapter(wanted), torch.rand(1)
    torch.manual_seed(2)
    assert torch.equal(first, adapter(wanted)) and first.any()
    torch.manual_seed(1)
    assert after == torch.rand(1), "the global generator moved"
    assert not torch.equal(first, adapter(changed(wanted, run__seed=1)))
