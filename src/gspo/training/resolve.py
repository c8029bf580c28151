"""From the recipe's words to an ``Algorithm``: the catalogue entry with its overrides, or an error that names the fix.

The pure functions compute any combination; here one that means nothing, or an option that the chosen algorithm does
not read, is refused. What is legal but surprising comes back as a note.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from gspo.algorithms import (
    ADVANTAGES,
    CATALOG,
    CORRECTIONS,
    KL_ESTIMATORS,
    REDUCTIONS,
    TOKEN_ESTIMATORS,
    AdvantageEstimator,
    Algorithm,
)
from gspo.config import AlgorithmConfig, CorrectionConfig, Recipe, Section
from gspo.errors import ConfigError

JOINT = "token_truncate_joint"
TOKEN_REDUCTIONS = ("token_mean", "sequence_mean_token_sum", "constant_length", "token_sum", "length_weighted")
GSPO_NEVER_CLIPS = 0.05
"""Sequence ratios stay within about 1 +- 0.01 in normal running; a range this wide never binds."""

_KNOBS_OF_RULE = {
    "clip": {"importance_sampling_level", "epsilon", "epsilon_high", "delta"},
    "stop_gradient_clip": {"importance_sampling_level", "epsilon", "epsilon_high"},
    "clip_inside_mean": {"epsilon", "epsilon_high"},
    "soft_gate": {"importance_sampling_level", "tau_positive", "tau_negative"},
    "sign_mask": {"importance_sampling_level", "epsilon", "epsilon_high"},
    "reinforce": set[str](),
}
_RULE_KNOBS = (
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "tau_positive",
    "tau_negative",
)
_OVERRIDES = (*_RULE_KNOBS, "advantage", "reduction", "loss_constant", "beta", "kl_estimator")
_DEFAULT_BOUNDS: dict[str, tuple[float, float | None]] = {  # kind: (max, min), with whose default it is
    "token_truncate": (2.0, None),  # verl, ms-swift
    "token_mask": (5.0, 0.5),  # IcePop
    "sequence_geometric_truncate": (2.0, None),  # ms-swift
    "sequence_geometric_mask": (1.01, 0.99),  # SkyRL
    "sequence_product_truncate": (2.0, None),  # verl
    "sequence_product_mask": (3.0, None),  # TRL
    JOINT: (5.0, None),  # MiniRL
}


def resolve_algorithm(
    algorithm: AlgorithmConfig,
    correction: CorrectionConfig,
    *,
    updates_per_step: int,
    max_completion_length: int,
) -> tuple[Algorithm, tuple[str, ...]]:
    """The ``Algorithm`` of a recipe, and notes for the user. ConfigError says what is wrong and what to write."""
    _require_known(algorithm.name, CATALOG, "algorithm.name")
    entry = CATALOG[algorithm.name]
    _refuse_unread(algorithm, entry)
    resolved = replace(entry, proximal_logprobs=algorithm.proximal_logprobs, **_given(algorithm))
    _check_names(resolved)
    _check_unit(resolved)
    _check_reduction(resolved, max_completion_length)
    _check_range(resolved, algorithm)
    _check_kl(resolved, algorithm)
    resolved = _with_correction(resolved, entry, correction)
    _check_proximal(resolved, correction, updates_per_step)
    return resolved, tuple(_notes(resolved, updates_per_step))


def refuse_unread(recipe: Recipe) -> None:
    """Raises ConfigError for an option outside the algorithm that another option keeps from being read.

    Values decide, not what was written: a recipe read back from its resolved form holds every option.
    """
    lora, evaluation, cold = recipe.lora, recipe.eval, recipe.coldstart
    if lora.rank == 0:
        _require_defaults(lora, ("alpha", "target_modules"), "lora", "lora.rank is 0; set lora.rank, 16 for example")
    if cold is not None and cold.base:
        built = ("architecture", "hidden_size", "num_layers", "num_heads", "num_experts", "num_experts_per_tok")
        _require_defaults(cold, built, "coldstart", "coldstart.base brings its own; remove one of the two")
    elif cold is not None and cold.architecture == "qwen3":
        experts = ("num_experts", "num_experts_per_tok")
        _require_defaults(cold, experts, "coldstart", 'coldstart.architecture is "qwen3"; "qwen3_moe" has experts')
    if recipe.grading.in_process:
        _require_defaults(recipe.grading, ("timeout_s",), "grading", "in_process = true keeps no deadline; remove one")
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        raise ConfigError(
            f"eval.num_samples = {evaluation.num_samples} with eval.temperature = 0: greedy completions of an item are "
            "all the same; set eval.temperature (0.6 for example), or num_samples = 1"
        )
    if evaluation.task is None:
        held_out = ("num_samples", "temperature", "max_completion_length", "reward")
        _require_defaults(evaluation, held_out, "eval", "there is no held-out task; add [eval.task]")


def notes_on_learning(recipe: Recipe) -> tuple[str, ...]:
    """What is legal and yet keeps the weights from moving as the recipe seems to ask."""
    optim, notes = recipe.optim, []
    updates = recipe.run.steps * optim.updates_per_step
    if optim.warmup_updates > updates:
        notes.append(
            f"optim.warmup_updates = {optim.warmup_updates} is longer than the run's {updates} updates: the learning "
            f"rate ends at {optim.learning_rate * updates / optim.warmup_updates:.2g}, below optim.learning_rate."
        )
    if recipe.model.dtype == "bfloat16" and recipe.lora.rank == 0:
        notes.append(
            f'model.dtype = "bfloat16" trains bfloat16 weights: a step of {optim.learning_rate:g} is lost in the '
            'rounding of most of them (8 bits); use "float32" with model.autocast = "bfloat16", or lora.rank.'
        )
    return tuple(notes)


def _require_defaults(section: Section, names: Sequence[str], where: str, why: str) -> None:
    default = type(section)()
    for name, value in section:
        if name in names and value != dict(default)[name]:
            raise ConfigError(f"{where}.{name} = {value!r} is not read: {why}")


def load_estimator(name: str) -> str | AdvantageEstimator:
    """The advantage estimator of a recipe: a built-in's name as it is, a dotted path ("module:function") imported.

    Raises ConfigError where the module or the function is not found.
    """
    if ":" not in name:
        return name
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f'algorithm.advantage = "{name}": {module_name} cannot be imported ({error})') from error
    if attribute not in vars(module):
        raise ConfigError(f'algorithm.advantage = "{name}": {module_name} has no "{attribute}"')
    estimator = vars(module)[attribute]
    if not callable(estimator):
        raise ConfigError(f'algorithm.advantage = "{name}" is not a function')
    if not _takes_rewards(estimator):
        raise ConfigError(
            f'algorithm.advantage = "{name}" takes other arguments: it is called as '
            "f(rewards, group_ids, valid, lengths, token_rewards)"
        )
    return cast(AdvantageEstimator, estimator)


def _takes_rewards(estimator: Callable[..., Any]) -> bool:
    """Whether a call with five positional arguments can be right; True where a function does not say."""
    try:
        signature = inspect.signature(estimator)
    except ValueError:
        return True
    try:
        signature.bind(*range(5))
    except TypeError:
        return False
    return True


def require_sequence_advantages(advantages: Tensor, sequence_ids: Tensor, algorithm: Algorithm) -> None:
    """Raises ConfigError where ``gspo`` meets advantages [N] that vary inside a sequence: ``gspo_token``'s case.

    ``sequence_ids`` [N] int64 in sequence order.
    """
    if algorithm.name != "gspo" or advantages.numel() == 0:
        return
    num_sequences = int(sequence_ids.max()) + 1
    first = torch.zeros(num_sequences, dtype=advantages.dtype, device=advantages.device)
    first[sequence_ids.flip(0)] = advantages.flip(0)
    if bool((advantages != first[sequence_ids]).any()):
        raise ConfigError(
            f'algorithm.name = "gspo" with advantage {algorithm.advantage!r}: the advantages vary inside a sequence, '
            'which GSPO\'s one ratio a sequence cannot carry; use name = "gspo_token"'
        )


def _given(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The overrides that the recipe sets."""
    values = algorithm.model_dump(include=set(_OVERRIDES))
    return {name: value for name, value in values.items() if value is not None}


def _require_known(value: str, known: Collection[str], where: str) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f'did you mean "{near[0]}"? ' if near else ""
        raise ConfigError(f'{where} = "{value}" is unknown; {hint}known are: {", ".join(known)}')


def _check_names(algorithm: Algorithm) -> None:
    _require_known(algorithm.reduction, REDUCTIONS, "algorithm.reduction")
    _require_known(algorithm.kl_estimator, KL_ESTIMATORS, "algorithm.kl_estimator")
    if ":" not in algorithm.advantage:  # else a dotted path, loaded by the loop
        _require_known(algorithm.advantage, ADVANTAGES, "algorithm.advantage")


def _refuse_unread(algorithm: AlgorithmConfig, entry: Algorithm) -> None:
    """Refuse the ratio's and the rule's options where the entry's rule does not read them."""
    read = _KNOBS_OF_RULE[entry.rule]
    for knob in _RULE_KNOBS:
        if knob in _given(algorithm) and knob not in read:
            readers = [name for name, other in CATALOG.items() if knob in _KNOBS_OF_RULE[other.rule]]
            raise ConfigError(
                f'algorithm.{knob} is not read by "{entry.name}"; remove it, or use one of: {", ".join(readers)}'
            )


def _check_unit(algorithm: Algorithm) -> None:
    """The names gspo, gspo_token and luspo are their unit of the ratio."""
    name, level = algorithm.name, algorithm.importance_sampling_level
    if name in ("gspo", "gspo_token", "luspo") and level != CATALOG[name].importance_sampling_level:
        right = {"token": "grpo", "sequence": "gspo", "sequence_token": "gspo_token"}[level]
        raise ConfigError(
            f'algorithm.importance_sampling_level = "{level}" contradicts name = "{name}"; '
            f'use name = "{right}" (its clip range is its own), or remove the level'
        )
    if name == "gspo" and algorithm.advantage in TOKEN_ESTIMATORS:
        raise ConfigError(
            f'algorithm.advantage = "{algorithm.advantage}" can vary inside a sequence; '
            'use name = "gspo_token", or advantage = "reinforce_pp_sequence"'
        )


def _check_reduction(algorithm: Algorithm, max_completion_length: int) -> None:
    reduction, constant = algorithm.reduction, algorithm.loss_constant
    if reduction == "constant_length" and constant is None:
        raise ConfigError(
            f'"{algorithm.name}" divides by a constant length: set algorithm.loss_constant, for example '
            f"{max_completion_length} (rollout.max_completion_length now); it stays the same when that changes"
        )
    if reduction != "constant_length" and constant is not None:
        raise ConfigError(
            f'algorithm.loss_constant is not read by reduction "{reduction}"; '
            'remove it, or set reduction = "constant_length" (name = "dr_grpo")'
        )
    sequence_ratio = algorithm.importance_sampling_level != "token" and algorithm.rule in ("clip", "soft_gate")
    by_tokens = reduction in TOKEN_REDUCTIONS or algorithm.rule == "clip_inside_mean"
    if algorithm.rule == "clip_inside_mean" and reduction != "sequence_mean_token_mean":
        raise ConfigError(
            f'reduction "{reduction}" weights GMPO\'s sequences by length; use "sequence_mean_token_mean"'
        )
    if sequence_ratio and by_tokens and algorithm.name != "luspo":
        raise ConfigError(
            f'reduction "{reduction}" with one ratio a sequence weights each sequence by its length; '
            'use name = "luspo" if that is meant, name = "dapo" for a token ratio with the token mean, '
            'or reduction = "sequence_mean_token_mean"'
        )
    if reduction == "length_weighted" and algorithm.name != "luspo":
        raise ConfigError('reduction "length_weighted" is LUSPO\'s; use name = "luspo", or "sequence_mean_token_sum"')
    if algorithm.name == "luspo" and reduction != "length_weighted":
        raise ConfigError(f'name = "luspo" is its length weighting; with reduction "{reduction}" use name = "gspo"')


def _check_range(algorithm: Algorithm, given: AlgorithmConfig) -> None:
    high, delta = algorithm.epsilon_high, algorithm.delta
    if delta is not None and delta <= 1.0 + high:
        raise ConfigError(
            f"algorithm.delta = {delta:g} lies inside the clip range (up to 1 + epsilon_high = {1 + high:g}) and would "
            f"cut positive advantages too; set delta above {1 + high:g}, 4 for example, or remove it"
        )
    if algorithm.rule == "stop_gradient_clip" and given.epsilon_high is not None and high < 0.5:
        raise ConfigError(
            f'algorithm.epsilon_high = {high:g} with "{algorithm.name}" bounds every weight at {1 + high:g}: it is '
            "added to 1 here, while TRL and ms-swift take the bound itself; write 4 for a weight of at most 5"
        )
    if algorithm.rule in ("clip", "sign_mask") and algorithm.epsilon is not None and algorithm.epsilon > 1.0:
        raise ConfigError(f"algorithm.epsilon = {algorithm.epsilon:g} puts the lower bound below 0; at most 1")


def _check_kl(algorithm: Algorithm, given: AlgorithmConfig) -> None:
    if given.kl_estimator is not None and algorithm.beta == 0:
        raise ConfigError("algorithm.kl_estimator is not read while beta = 0; set algorithm.beta, or remove it")
    if algorithm.beta > 0 and algorithm.kl_estimator == "k1":
        raise ConfigError(
            'kl_estimator "k1" as a loss has no gradient in expectation; use "k1_unbiased", "k3_unbiased" or "k2"'
        )


def _with_correction(algorithm: Algorithm, entry: Algorithm, correction: CorrectionConfig) -> Algorithm:
    """Put the recipe's ``[correction]`` in, with the default bounds of its kind."""
    kind = entry.correction if correction.kind is None else correction.kind
    _require_known(kind, CORRECTIONS, "correction.kind")
    if kind == JOINT and algorithm.rule != "sign_mask":
        raise ConfigError(f'correction.kind = "{JOINT}" is MiniRL\'s; use "token_truncate", or name = "minirl"')
    if kind == "none":
        for option, value in {"max": correction.max, "min": correction.min}.items():
            if value is not None:
                raise ConfigError(f'correction.{option} is not read without correction.kind; set it, e.g. "token_mask"')
        return replace(algorithm, correction="none", off_policy_mask_delta=correction.off_policy_mask_delta)
    if correction.min is not None and not kind.endswith("_mask"):
        other = kind.replace("_truncate", "_mask") if kind != JOINT else "token_mask"
        raise ConfigError(f'correction.min is not read by "{kind}"; remove it, or use kind = "{other}"')
    top, bottom = _DEFAULT_BOUNDS[kind]
    top = top if correction.max is None else correction.max
    bottom = bottom if correction.min is None else correction.min
    if bottom is not None and bottom >= top:
        raise ConfigError(f"correction.min = {bottom:g} is not below correction.max = {top:g}; swap or widen them")
    return replace(
        algorithm,
        correction=kind,
        correction_max=top,
        correction_min=bottom,
        off_policy_mask_delta=correction.off_policy_mask_delta,
    )


def _check_proximal(algorithm: Algorithm, correction: CorrectionConfig, updates_per_step: int) -> None:
    name, proximal = algorithm.name, algorithm.proximal_logprobs
    if algorithm.rule == "reinforce" and updates_per_step > 1:
        raise ConfigError(
            f'"{name}" has no importance ratio, so only one update per step is on-policy: set '
            f'optim.updates_per_step = 1 (it is {updates_per_step}), or name = "grpo" with advantage = "rloo"'
        )
    if proximal == "engine" and algorithm.rule == "reinforce":
        raise ConfigError(
            f'algorithm.proximal_logprobs = "engine" is not read by "{name}", which has no ratio; remove it'
        )
    if proximal == "engine" and algorithm.correction not in ("none", JOINT):
        raise ConfigError(
            f'correction.kind = "{algorithm.correction}" with proximal_logprobs = "engine" corrects nothing: the ratio '
            'starts from the engine already; remove the correction, or use proximal_logprobs = "recompute"'
        )
    if proximal == "detach" and updates_per_step > 1:
        raise ConfigError(
            f'algorithm.proximal_logprobs = "detach" makes every ratio 1, so {updates_per_step} updates per step would '
            'never clip; use "recompute", or optim.updates_per_step = 1'
        )


def _notes(algorithm: Algorithm, updates_per_step: int) -> list[str]:
    notes = []
    sequence_ratio = algorithm.rule == "clip" and algorithm.importance_sampling_level != "token"
    widest = max(algorithm.epsilon or 0.0, algorithm.epsilon_high)
    if sequence_ratio and widest >= GSPO_NEVER_CLIPS:
        notes.append(
            f"epsilon {algorithm.epsilon:g} / {algorithm.epsilon_high:g} with a sequence ratio clips nothing: it is a "
            "token-ratio setting. The paper has 3e-4 / 4e-4 for long completions; `gspo calibrate` finds yours."
        )
    if algorithm.rule == "clip" and not sequence_ratio and widest < 0.01:
        notes.append(
            f"epsilon {algorithm.epsilon:g} / {algorithm.epsilon_high:g} with a token ratio clips nearly every token "
            "that moved: it is a sequence-ratio setting; GRPO's usual range is 0.2."
        )
    on_policy = updates_per_step == 1 and algorithm.proximal_logprobs != "engine"
    if on_policy and algorithm.rule in ("clip", "clip_inside_mean", "sign_mask", "stop_gradient_clip"):
        notes.append(
            "one update per step: every ratio is 1 when its gradient is taken, so the clip is inactive and "
            f'"{algorithm.name}" equals REINFORCE with its advantage; the paper takes 4 updates per step.'
        )
    if algorithm.importance_sampling_level == "sequence" and algorithm.correction in ("token_truncate", "token_mask"):
        notes.append(
            "a token-level correction under a sequence ratio weights each token's gradient: GSPO-token's form."
        )
    if algorithm.proximal_logprobs == "engine" and sequence_ratio:
        notes.append(
            "the ratio is taken against the engine's log-probs: the clip sees the mismatch of engine and learner as "
            "well, and a mean of 5e-4 nats per token is beyond the paper's range; watch ratio/noise_floor (the "
            "mismatch, in update 0) and clip_ratio/low_mean."
        )
    return notes
