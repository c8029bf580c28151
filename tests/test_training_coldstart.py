"""The cold start: a mixture of experts built from nothing, what is imitated, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gspo
from case_helpers import Recorded, components, tiny_recipe
from gspo.config import Recipe
from gspo.errors import GspoError
from gspo.policy.model import LoadOptions, load_policy
from gspo.training.coldstart import coldstart
from gspo.training.loop import train_step
from gspo.training.run import make_run

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_length": 48, "steps": 2, "batch_size": 4}


def cold_recipe(root: Path, section: dict[str, Any], **overrides: Any) -> Recipe:
    return gspo.load_recipe(tiny_recipe(root, coldstart={**SMALL, **section}), overrides)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A mixture of 4 experts, 2 a token."""
    experts = {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    recipe = cold_recipe(tmp_path_factory.mktemp("mixture"), experts)
    coldstart(recipe)
    return recipe


def routers(policy: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if n.endswith("mlp.gate.weight")}


def test_a_mixture_of_experts_is_sampled_scored_and_trained(mixture: Recipe) -> None:
    made = components(mixture)
    try:
        assert made.policy.hf.config.num_experts == 4 and made.policy.hf.config.num_experts_per_tok == 2
        before = routers(made.policy)
        assert len(before) == 2
        batch = made.learner.score([r for g in make_run(made, recorder=None).collector.collect(
            made.task.prompts[:4], make_run(made, recorder=None).plan, step=0) for r in g.rollouts])  # fmt: skip
        assert batch.proximal_logprobs is not None
        assert np.abs(batch.proximal_logprobs - batch.sampled_logprobs).max() < 1e-5
        result = train_step(make_run(made, recorder=Recorded()), 0)
        assert all(np.isfinite(u.loss) and u.grad_norm > 0 for u in result.updates)
        assert all(not torch.equal(p, before[n]) for n, p in routers(made.policy).items())
    finally:
        made.close()


def test_adapters_leave_routers_and_experts_alone(mixture: Recipe) -> None:
    policy = load_policy(LoadOptions(path=mixture.model.path, device="cpu", lora_rank=2))
    names = [name for name, _ in policy.trainable()]
    assert names and all("self_attn" in name and "lora_" in name for name in names)


def test_the_same_settings_make_the_same_weights(tmp_path: Path) -> None:
    states = []
    for name in ("a", "b"):
        torch.manual_seed(len(name) + ord(name))  # what went on before must not matter
        folder = coldstart(cold_recipe(tmp_path / name, {}))
        states.append((folder / "model.safetensors").read_bytes())
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"completion_column": "worked"}, "worked"),
        ({"max_length": 4}, "max_length"),
        ({"hidden_size": 15}, "hidden_size"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, section: dict[str, Any], says: str) -> None:
    with pytest.raises(GspoError, match=says):
        coldstart(cold_recipe(tmp_path, section))
    assert not (tmp_path / "model").exists()


def test_examples_that_are_too_long_are_counted(tmp_path: Path) -> None:
    from gspo.training.coldstart import left_out

    recipe = cold_recipe(tmp_path, {"max_length": 26, "task": {"options": {"min_digits": 1}, "size": 60}})
    folder = coldstart(recipe)
    lengths = [
        len(prompt.text or "") + len(str(prompt.metadata["demonstration"])) + 1 for prompt in gspo_prompts(recipe)
    ]
    cut = sum(length > 26 for length in lengths)
    assert 0 < cut < 60
    assert f"{cut} of 60 examples" in str(left_out(folder)) and left_out(tmp_path) is None


def gspo_prompts(recipe: Recipe) -> Any:
    from gspo.seeding import seed
    from gspo.training.build import inherit, make_task

    assert recipe.coldstart is not None
    config = inherit(recipe.coldstart.task, recipe.task)
    return make_task(config, seed(recipe.run.seed, "coldstart-task") % 2**31).prompts


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"hidden_size": 18, "num_heads": 4}, "not divisible"),
        ({"architecture": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3}, "more experts than there are"),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_training(
    tmp_path: Path, section: dict[str, Any], says: str
) -> None:
    with pytest.raises(GspoError, match=says):
        coldstart(cold_recipe(tmp_path, section))


def test_an_unwritable_folder_is_noticed_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    recipe = cold_recipe(tmp_path, {}, **{"model.path": str(tmp_path / "file" / "model")})
    with pytest.raises(GspoError, match=r"model\.path.*cannot be written"):
        coldstart(recipe, progress=lambda done, total, loss: pytest.fail("it trained first"))
