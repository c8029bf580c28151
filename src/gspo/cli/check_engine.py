"""``gspo check engine``: the recipe's engine, with the recipe's model, against the protocol and the learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from gspo.cli.run_folder import safe_text
from gspo.config import Recipe
from gspo.errors import TaskError
from gspo.recipe import load_recipe

if TYPE_CHECKING:
    from gspo.engines.check import Check, Score
    from gspo.policy.model import Policy

PROMPTS = 8
BFLOAT16_TOLERANCE = 0.25  # nats; its 8 bits of mantissa leave about 0.03 on a logit of 8


@dataclass(frozen=True)
class Arguments:
    """Try the engine of a recipe."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """A TOML file, or the name of a packaged recipe."""
    tolerance: float | None = None
    """Largest difference of a log-prob between engine and learner; 1e-4, in bfloat16 0.25."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Print one line a check; 1 where one fails."""
    checks = check_recipe_engine(load_recipe(arguments.recipe, overrides), arguments.tolerance)
    for check in checks:
        word = "failed" if not check.passed else "skipped" if check.skipped else "ok"
        print(safe_text(f"{word:<8} {check.name}" + (f": {check.detail}" if check.detail else "")))
    return 0 if all(check.passed for check in checks) else 1


def check_recipe_engine(recipe: Recipe, tolerance: float | None = None) -> tuple[Check, ...]:
    """Build the recipe's model and engines on it, and hold them to the contract on the task's first prompts."""
    from gspo.engines.check import check_engine
    from gspo.policy.learner import WeightView
    from gspo.policy.model import load_policy
    from gspo.training.build import engine_dtype, load_options, make_engine
    from gspo.training.coldstart import coldstart

    if recipe.coldstart:
        model = recipe.model.model_copy(update={"path": str(coldstart(recipe))})
        recipe = recipe.model_copy(update={"model": model})
    policy = load_policy(load_options(recipe))
    dtype = engine_dtype(recipe)
    exact = dtype is None and not policy.autocast and recipe.model.dtype == "float32"
    return check_engine(
        lambda: make_engine(recipe, policy),
        prompt_ids(recipe, policy),
        score=score_by(policy),
        weights=None if dtype is None else WeightView(policy.model, dtype),
        tolerance=tolerance or (1e-4 if exact else BFLOAT16_TOLERANCE),
    )


def prompt_ids(recipe: Recipe, policy: Policy) -> list[list[int]]:
    """Token ids of the task's first prompts, and of one of them cut, so that lengths differ."""
    from gspo.training.build import encoder, make_task

    task = make_task(recipe.task, recipe.run.seed)
    encode = encoder(policy, recipe.task)
    found = [encode(prompt).tolist() for prompt in task.prompts[:PROMPTS]]
    if not found or len(found[0]) < 2:
        raise TaskError(f"task {task.name!r} has no prompt of two tokens or more to try the engine on")
    return [*found, found[0][:-1]]


def score_by(policy: Policy) -> Score:
    """The learner's log-probs of a completion: (prompt ids, completion ids, temperature) -> one a token."""
    import numpy as np
    import torch

    from gspo.policy.packing import collate
    from gspo.types import TokenRow

    def score(prompt: Sequence[int], completion: Sequence[int], temperature: float) -> list[float]:
        ids = np.array([*prompt, *completion], dtype=np.int64)
        zeros = np.zeros(len(ids), dtype=np.float32)
        row = TokenRow(ids, np.arange(len(ids)) >= len(prompt), zeros, zeros.astype(np.int64))
        with torch.no_grad():
            logprobs, _ = policy(collate([row], policy.device), temperature=temperature)
        return [float(value) for value in logprobs.float().cpu()]

    return score
