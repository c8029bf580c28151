"""Calibrate the clip range: measure how far log s spreads, propose epsilon and epsilon_high.

The paper's 3e-4 / 4e-4 fits completions of thousands of tokens; log s is a mean over tokens, so its spread falls with
length and the right range grows as completions get shorter. Rollout batches are trained unclipped, without warm-up,
by a throw-away optimizer. A fresh AdamW moves two to three times too far in its first batch, so batches are thrown
away until the spread settles; the following ones are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gspo.algorithms import Algorithm
from gspo.config import Recipe
from gspo.errors import ConfigError
from gspo.recipe import check_sizes
from gspo.training.build import build, learner_options
from gspo.training.coldstart import coldstart
from gspo.training.loop import Run, split_updates, with_advantages
from gspo.training.resolve import refuse_unread
from gspo.training.run import make_run

UNCLIPPED = 1e6
PROPORTION = (3.0, 4.0)  # epsilon : epsilon_high of the paper
SETTLED = 0.2  # relative change of the spread between two batches


@dataclass(frozen=True, slots=True)
class Spread:
    """log s of every (update, sequence) of one rollout batch."""

    update: np.ndarray  # [R]
    log_s: np.ndarray  # [R]
    advantage: np.ndarray  # [R]
    tokens: np.ndarray  # [R]

    def sd(self, update: int | None = None) -> float:
        """Standard deviation of log s; over the updates after the first where none is named."""
        chosen = self.update > 0 if update is None else self.update == update
        return float(self.log_s[chosen].std()) if chosen.any() else 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured and what is proposed."""

    epsilon: float
    epsilon_high: float
    clip_fraction: float  # of tokens over all updates, at the proposed range, on the measured batches
    noise_floor: float  # sd of log s on update 1, where the policies are the same
    sd_by_update: tuple[float, ...]
    discarded: tuple[float, ...]  # sd of the batches thrown away
    mean_length: float
    notes: tuple[str, ...]


def calibrate(
    recipe: Recipe,
    *,
    clip_fraction: float = 0.15,
    max_discarded: int = 6,
    measured: int = 2,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Propose a clip range for the recipe. Nothing is written but a missing cold start's folder.

    Raises ConfigError for an algorithm that does not clip a sequence ratio, one update per step, or an impossible
    fraction.
    """
    updates = recipe.optim.updates_per_step
    _refuse(recipe, clip_fraction)
    check_sizes(recipe)
    refuse_unread(recipe)
    _require_sequence_clip(learner_options(recipe)[0].algorithm)
    if recipe.coldstart:
        folder = coldstart(recipe)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
    optim = recipe.optim.model_copy(update={"warmup_updates": 0, "schedule": "constant"})
    recipe = recipe.model_copy(update={"optim": optim})
    parts = build(recipe)
    try:
        options = parts.learner.options
        parts.learner.options = replace(options, algorithm=unclipped(options.algorithm))
        run = make_run(parts, recorder=None)
        discarded: list[float] = []
        for step in range(max_discarded):
            discarded.append(unclipped_step(run, step).sd())
            progress(f"batch {step + 1}: sd of log s {discarded[-1]:.2e} (thrown away)")
            if step >= 2 and abs(discarded[-1] - discarded[-2]) < SETTLED * discarded[-2]:
                break
        first = len(discarded)
        spreads = [unclipped_step(run, first + k) for k in range(measured)]
    finally:
        parts.close()
    return propose(spreads, clip_fraction, updates=updates, discarded=tuple(discarded))


def unclipped(algorithm: Algorithm) -> Algorithm:
    """The algorithm with a range that nothing leaves."""
    return replace(algorithm, epsilon=UNCLIPPED, epsilon_high=UNCLIPPED)


def unclipped_step(run: Run, step: int) -> Spread:
    """One rollout batch and its updates. Every proximal log-prob is recomputed, so that update 1 shows the noise."""
    prompts = run.task.batch(step, run.prompts_per_step, run.plan.run_seed)
    groups = run.collector.collect(prompts, run.plan, step=step)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    batch = with_advantages(run.learner.score(rollouts), rollouts, run.advantage)
    results = [run.learner.update(batch, indices) for indices in split_updates(run, groups, step)]
    run.engine.load_weights(run.learner.weights(run.engine_dtype), version=step + 1)
    tables = [(k, result.sequences) for k, result in enumerate(results) if not result.skipped]
    if not tables:
        first = rollouts[0]
        raise ConfigError(
            f"no rollout of batch {step + 1} can be learned from, so there is no spread to measure; the first: "
            f"{first.grading}{f': {first.grading_error}' if first.grading_error else ''}, {first.finish_reason}"
        )
    return Spread(
        update=np.concatenate([np.full(len(t["tokens"]), k) for k, t in tables]),
        log_s=np.concatenate([t["log_ratio_sum"] / np.maximum(t["tokens"], 1) for _, t in tables]),
        advantage=np.concatenate([t["advantage"] for _, t in tables]),
        tokens=np.concatenate([t["tokens"] for _, t in tables]),
    )


def fraction_clipped(spreads: list[Spread], epsilon: float, epsilon_high: float) -> float:
    """Share of tokens in clipped sequences over all updates, sign-aware, zero advantages counted below."""
    clipped = total = 0.0
    for s in spreads:
        high = (s.advantage > 0) & (s.log_s > np.log1p(epsilon_high))
        low = (s.advantage < 0) & (s.log_s < np.log1p(-min(epsilon, 1 - 1e-12)))
        clipped += float(s.tokens[high | low].sum())
        total += float(s.tokens.sum())
    return clipped / max(total, 1.0)


def propose(spreads: list[Spread], wanted: float, *, updates: int, discarded: tuple[float, ...]) -> Calibration:
    """The range in the paper's proportion 3 : 4 at which the wanted share of tokens is clipped, by bisection.

    Raises ConfigError where even a range of 0 clips no more than the wanted share.
    """
    reachable = fraction_clipped(spreads, 0.0, 0.0)
    if reachable <= wanted:
        raise ConfigError(
            f"a clip fraction of {wanted} cannot be reached: even with epsilon 0 only {reachable:.3f} of the tokens "
            f"are clipped (zero-advantage groups and update 1 count as unclipped); ask for less"
        )
    low, high = 1e-9, 0.25
    for _ in range(60):
        middle = (low * high) ** 0.5
        if fraction_clipped(spreads, PROPORTION[0] * middle, PROPORTION[1] * middle) > wanted:
            low = middle
        else:
            high = middle
    epsilon, epsilon_high = (float(f"{side * high:.2g}") for side in PROPORTION)
    noise = float(np.mean([s.sd(0) for s in spreads]))
    notes = []
    if noise > epsilon / 3:
        notes.append(
            f"the noise floor {noise:.1e} exceeds a third of epsilon {epsilon:.1e}: the clip sees rounding; "
            f'use float32 (model.autocast = "none") or a larger range'
        )
    return Calibration(
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        clip_fraction=fraction_clipped(spreads, epsilon, epsilon_high),
        noise_floor=noise,
        sd_by_update=tuple(float(np.mean([s.sd(k) for s in spreads])) for k in range(updates)),
        discarded=discarded,
        mean_length=float(np.concatenate([s.tokens for s in spreads]).mean()),
        notes=tuple(notes),
    )


def _refuse(recipe: Recipe, clip_fraction: float) -> None:
    if not 0 < clip_fraction < 0.5:
        raise ConfigError(f"clip fraction {clip_fraction}: give a number between 0 and 0.5 (the paper saw 0.15)")
    if recipe.optim.updates_per_step < 2:
        raise ConfigError(
            "optim.updates_per_step = 1: every ratio is 1 and nothing is ever clipped; nothing to calibrate"
        )


def _require_sequence_clip(algorithm: Algorithm) -> None:
    """Only a hard clip of a sequence ratio has its range in log s; GMPO's is in a token's log-ratio."""
    if algorithm.importance_sampling_level == "token":
        raise ConfigError(f'{algorithm.name} clips single tokens; calibrate a sequence-level algorithm such as "gspo"')
    if algorithm.rule != "clip":
        raise ConfigError(
            f"{algorithm.name} does not clip the sequence ratio, so log s says nothing about its range; "
            'calibrate "gspo", "gspo_token" or "luspo"'
        )
