"""Before step 0: what the settings mean, and one real group and one update to see that they work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.config import Recipe
from gspo.errors import ConfigError
from gspo.policy.learner import Learner
from gspo.recipe import check_sizes
from gspo.training.build import Components, build, engine_dtype, learner_options, sampling_plan
from gspo.training.loop import with_advantages
from gspo.training.resolve import load_estimator, refuse_unread
from gspo.types import Group, Rollout


def settings_table(parts: Components) -> list[tuple[str, str, str]]:
    """Rows (setting, value, what it means) for the table before step 0."""
    recipe, algorithm = parts.recipe, parts.learner.options.algorithm
    rollout, optim = recipe.rollout, recipe.optim
    total = rollout.prompts_per_step * rollout.num_generations
    steps, updates = recipe.run.steps, optim.updates_per_step
    unit = "groups kept whole" if optim.minibatches == "groups" else "single rollouts, shuffled"
    seen = steps * rollout.prompts_per_step / max(1, len(parts.task))
    if parts.eval_task is None:
        held_out = (
            "held-out task",
            "none",
            "give [eval.task] to see accuracy on items that are not trained on",
        )
    else:
        how = f"{recipe.eval.num_samples} samples each" if recipe.eval.temperature else "greedy"
        held_out = (
            "held-out task",
            f"{len(parts.eval_task):,}",
            f"items every {recipe.eval.every} steps, {how}",
        )
    return [
        ("algorithm", algorithm.name, clip_row(parts)),
        (
            "task",
            f"{len(parts.task):,}",
            f"prompts of {parts.task.name}; each is seen {seen:.2g} times in the run",
        ),
        held_out,
        (
            "rollouts a step",
            f"{total:,}",
            f"{rollout.prompts_per_step} prompts x {rollout.num_generations} completions",
        ),
        (
            "updates a step",
            f"{updates}",
            f"each of {total // updates} rollouts ({unit})",
        ),
        ("tokens a step", f"<= {total * rollout.max_completion_length:,}", "sampled and scored"),
        ("steps", f"{steps:,}", f"{steps * updates:,} updates, {steps * total:,} rollouts"),
        (
            "learning rate",
            f"{optim.learning_rate:g}",
            f"{optim.schedule}, warm-up over {optim.warmup_updates} updates",
        ),
        ("model", *model_row(parts)),
        ("memory", *memory_row(parts)),
    ]


def clip_row(parts: Components) -> str:
    """What the algorithm's axes are."""
    algorithm = parts.learner.options.algorithm
    level = {"sequence_token": "sequence (token gradients)"}.get(algorithm.importance_sampling_level)
    denominator = {"recompute": "the learner's", "engine": "the engine's", "detach": "its own"}
    level = level or algorithm.importance_sampling_level
    text = f"{level} ratio over {denominator[algorithm.proximal_logprobs]} log-probs"
    if algorithm.epsilon is not None and algorithm.epsilon_high is not None:
        text += f", range -{algorithm.epsilon:g} / +{algorithm.epsilon_high:g}"
    return text + (f", KL to the reference x {algorithm.beta:g}" if algorithm.beta else ", no KL term")


def model_row(parts: Components) -> tuple[str, str]:
    """Size and place of the policy."""
    everything = sum(p.numel() for p in parts.policy.model.parameters())
    trained = sum(p.numel() for _, p in parts.policy.trainable())
    share = "all trained" if trained == everything else f"{trained / 1e6:.3g}M trained (LoRA)"
    return (
        f"{everything / 1e6:.3g}M",
        f"parameters, {share}, {parts.recipe.model.dtype} on {parts.policy.device.type}",
    )


def memory_row(parts: Components) -> tuple[str, str]:
    """Estimate of weights, gradients, optimizer state, and activations of one micro-batch."""
    estimate = memory_estimate(parts)
    meaning = ", ".join(f"{name} {value:.2g}" for name, value in estimate.items())
    return f"~{sum(estimate.values()):.2g} GB", meaning


def memory_estimate(parts: Components) -> dict[str, float]:
    """GB by part. Activations: about 34 bytes a token, layer and unit of width plus attention scores, as in
    Korthikanti et al. (2205.05198, table 2) for 2-byte values, doubled in float32; checkpointing keeps the inputs."""
    config = parts.policy.hf.config.get_text_config()
    width = 2 if parts.policy.autocast else 4
    trained = sum(p.numel() for _, p in parts.policy.trainable())
    weights = sum(p.numel() * p.element_size() for p in parts.policy.model.parameters())
    tokens = parts.recipe.optim.max_tokens_per_microbatch
    per_layer = tokens * config.hidden_size * (width if parts.recipe.model.gradient_checkpointing else 17 * width)
    copies = (1 if parts.learner.reference is not None else 0) * weights
    sampling = engine_dtype(parts.recipe)
    everything = sum(p.numel() for p in parts.policy.model.parameters())
    return {
        "weights": (weights + copies) / 1e9,
        **({} if sampling is None else {"engine's copy": everything * sampling.itemsize / 1e9}),
        "gradients": trained * 4 / 1e9,
        "optimizer": trained * 8 / 1e9,
        "activations": per_layer * config.num_hidden_layers / 1e9,
    }


@dataclass(frozen=True, slots=True)
class RecipeCheck:
    """What one real group and one update showed."""

    settings: list[tuple[str, str, str]]
    group: Group
    loss: float
    grad_norm: float
    mismatch_max: float  # largest |log-prob of the learner - of the engine|
    notes: tuple[str, ...]


def check_recipe(recipe: Recipe) -> RecipeCheck:
    """Sample one group, grade it, take one update; nothing is written but a missing cold start's folder.

    Advantages of a degenerate group are replaced by +1 and -1 so that the backward pass is tried for certain.
    Raises ConfigError where no rollout of the group could be graded, and whatever a run would raise before step 0.
    """
    from gspo.training.coldstart import coldstart

    check_sizes(recipe)
    refuse_unread(recipe)
    learner_options(recipe)
    if recipe.coldstart:
        folder = coldstart(recipe)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
    parts = build(recipe)
    try:
        group = parts.collector.collect(
            parts.task.batch(0, 1, recipe.run.seed), sampling_plan(recipe, parts.policy), step=0
        )[0]
        rollouts = list(group.rollouts)
        batch = parts.learner.score(rollouts)
        if not batch.valid.any():
            first = rollouts[0]
            raise ConfigError(f"no rollout of the group can be learned from: {first.grading}: {first.grading_error}")
        mismatch_max = _mismatch_max(parts.learner, rollouts)
        batch = with_advantages(batch, rollouts, load_estimator(parts.learner.options.algorithm.advantage))
        notes = parts.notes
        if not batch.advantages.any():
            notes = (
                *notes,
                "all rewards of the group are equal: the update was tried with advantages +1 and -1",
            )
            batch.advantages[:] = np.where(batch.sequence_ids % 2 == 0, 1.0, -1.0)
        result = parts.learner.update(batch, np.arange(len(rollouts)))
        return RecipeCheck(settings_table(parts), group, result.loss, result.grad_norm, mismatch_max, notes)
    finally:
        parts.close()


def _mismatch_max(learner: Learner, rollouts: Sequence[Rollout]) -> float:
    """Largest |log-prob of the learner - of the engine|, whichever of the two the recipe's ratio starts from."""
    options = learner.options
    recompute = replace(options.algorithm, proximal_logprobs="recompute", beta=0.0)
    learner.options = replace(options, algorithm=recompute)
    batch = learner.score(rollouts)
    learner.options = options
    assert batch.proximal_logprobs is not None
    return float(np.nanmax(np.abs(batch.proximal_logprobs - batch.sampled_logprobs)))
