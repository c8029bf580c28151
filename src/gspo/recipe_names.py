"""Names of recipe options: what exists, what other libraries call it, and what was probably meant.

Reads the shape of ``gspo.config.Recipe`` and nothing else; loading and values are ``gspo.recipe``'s.
``ALIASES`` is also the table of ``docs/from-trl.md``; a test holds the two equal.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.config import Recipe, Section


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of another library: whose it is, our name for it ("" = there is none), and what changes."""

    library: str
    ours: str
    note: str


TRL, VERL, SWIFT, ORLHF = "TRL", "verl", "ms-swift", "OpenRLHF"
_FULL_DISTRIBUTION = "nothing truncates the distribution: log-probs are those of the whole softmax(logits / T)"
_TOKEN_BUDGET = "micro-batches are cut by a token budget, which changes memory and never the gradient"

ALIASES: Mapping[str, Alias] = {
    "model_name_or_path": Alias(TRL, "model.path", "a Hugging Face folder or hub name"),
    "dataset_name": Alias(TRL, "task.source", "a file, a hub data set or a generator"),
    "dataset_config": Alias(TRL, "task.subset", "the configuration of a hub data set"),
    "dataset_train_split": Alias(TRL, "task.split", "the split of a hub data set"),
    "dataset_test_split": Alias(TRL, "eval.task.split", "the split of the held-out task"),
    "reward_funcs": Alias(TRL, "rewards", 'one [[rewards]] table a function; signature = "trl" for TRL\'s'),
    "reward_weights": Alias(TRL, "rewards.weight", "the weight stands in its function's [[rewards]] table"),
    "per_device_train_batch_size": Alias(
        TRL,
        "rollout.prompts_per_step",
        f"a step is prompts_per_step * num_generations completions; {_TOKEN_BUDGET}",
    ),
    "gradient_accumulation_steps": Alias(TRL, "optim.max_tokens_per_microbatch", _TOKEN_BUDGET),
    "generation_batch_size": Alias(
        TRL, "rollout.prompts_per_step", "counts prompts: generation_batch_size / num_generations"
    ),
    "steps_per_generation": Alias(
        TRL,
        "optim.updates_per_step",
        "counts optimizer updates: steps_per_generation / gradient_accumulation_steps",
    ),
    "num_iterations": Alias(TRL, "", "each completion is trained once; updates_per_step splits the batch"),
    "loss_type": Alias(
        TRL,
        "algorithm.name",
        "gspo, grpo, dapo, dr_grpo ...; algorithm.reduction overrides the average alone",
    ),
    "scale_rewards": Alias(TRL, "algorithm.advantage", "the advantage estimator says whether it divides by the std"),
    "epsilon_low": Alias(TRL, "algorithm.epsilon", "the lower range has no suffix"),
    "off_policy_mask_threshold": Alias(TRL, "correction.off_policy_mask_delta", "the same bound"),
    "sapo_temperature_pos": Alias(TRL, "algorithm.tau_positive", "the same temperature"),
    "sapo_temperature_neg": Alias(TRL, "algorithm.tau_negative", "the same temperature"),
    "vllm_importance_sampling_correction": Alias(TRL, "correction.kind", '"none" switches it off'),
    "vllm_importance_sampling_mode": Alias(
        TRL, "correction.kind", "TRL's sequence modes multiply the ratios: sequence_product_truncate / _mask"
    ),
    "vllm_importance_sampling_cap": Alias(TRL, "correction.max", "the same bound"),
    "vllm_importance_sampling_clip_max": Alias(TRL, "correction.max", "the same bound"),
    "vllm_importance_sampling_clip_min": Alias(TRL, "correction.min", "the same bound"),
    "use_vllm": Alias(TRL, "rollout.engine", "names who samples"),
    "vllm_mode": Alias(TRL, "rollout.engine", "names who samples"),
    "num_generations_eval": Alias(TRL, "eval.num_samples", "completions of each held-out item"),
    "per_device_eval_batch_size": Alias(TRL, "rollout.max_batch_size", "sequences decoded at once"),
    "eval_steps": Alias(TRL, "eval.every", "counts steps (rollout batches), not optimizer updates"),
    "save_steps": Alias(TRL, "run.save_every", "counts steps (rollout batches), not optimizer updates"),
    "save_total_limit": Alias(TRL, "run.keep_checkpoints", "the best one is kept beside them"),
    "max_steps": Alias(TRL, "run.steps", "TRL counts optimizer updates: max_steps / updates_per_step"),
    "num_train_epochs": Alias(TRL, "run.steps", "epochs * prompts / prompts_per_step"),
    "report_to": Alias(TRL, "run.trackers", "JSONL files are always written"),
    "run_name": Alias(TRL, "run.name", "also the name of the run folder"),
    "bf16": Alias(TRL, "model.autocast", '"bfloat16"; the master weights stay float32'),
    "torch_dtype": Alias(TRL, "model.dtype", "the master weights"),
    "lr_scheduler_type": Alias(TRL, "optim.schedule", "constant, linear or cosine"),
    "warmup_steps": Alias(TRL, "optim.warmup_updates", "counts optimizer updates"),
    "warmup_ratio": Alias(TRL, "optim.warmup_updates", "a number of optimizer updates, not a share"),
    "adam_beta1": Alias(TRL, "optim.betas", "a list of both"),
    "adam_beta2": Alias(TRL, "optim.betas", "a list of both"),
    "use_peft": Alias(TRL, "lora.rank", "any rank above 0 switches LoRA on"),
    "lora_r": Alias(TRL, "lora.rank", "0 = off"),
    "lora_alpha": Alias(TRL, "lora.alpha", "the same scale"),
    "lora_target_modules": Alias(TRL, "lora.target_modules", "all-linear leaves head, routers and experts out"),
    "top_p": Alias(TRL, "", _FULL_DISTRIBUTION),
    "top_k": Alias(TRL, "", _FULL_DISTRIBUTION),
    "min_p": Alias(TRL, "", _FULL_DISTRIBUTION),
    "repetition_penalty": Alias(TRL, "", _FULL_DISTRIBUTION),
    "rollout.n": Alias(VERL, "rollout.num_generations", "completions of each prompt"),
    "val_kwargs.n": Alias(VERL, "eval.num_samples", "completions of each held-out item"),
    "train_batch_size": Alias(VERL, "rollout.prompts_per_step", "counts prompts, as verl does"),
    "ppo_mini_batch_size": Alias(
        VERL, "optim.updates_per_step", "counts updates: train_batch_size / ppo_mini_batch_size"
    ),
    "ppo_micro_batch_size_per_gpu": Alias(VERL, "optim.max_tokens_per_microbatch", _TOKEN_BUDGET),
    "ppo_max_token_len_per_gpu": Alias(VERL, "optim.max_tokens_per_microbatch", "the same budget"),
    "ppo_epochs": Alias(VERL, "", "each completion is trained once; updates_per_step splits the batch"),
    "clip_ratio": Alias(VERL, "algorithm.epsilon", "with algorithm.epsilon_high for the upper side"),
    "clip_ratio_low": Alias(VERL, "algorithm.epsilon", "the same range"),
    "clip_ratio_high": Alias(VERL, "algorithm.epsilon_high", "the same range"),
    "clip_ratio_c": Alias(VERL, "algorithm.delta", "the same bound"),
    "loss_mode": Alias(VERL, "algorithm.name", "verl's gspo averages over tokens by default; gspo here does not"),
    "loss_agg_mode": Alias(VERL, "algorithm.reduction", "each algorithm brings its own"),
    "adv_estimator": Alias(VERL, "algorithm.advantage", "each algorithm brings its own"),
    "norm_adv_by_std_in_grpo": Alias(
        VERL, "algorithm.advantage", "the advantage estimator says whether it divides by the std"
    ),
    "use_kl_loss": Alias(VERL, "algorithm.beta", "any value above 0 switches it on"),
    "kl_loss_coef": Alias(VERL, "algorithm.beta", "the same weight"),
    "kl_loss_type": Alias(VERL, "algorithm.kl_estimator", "k1, k2, k3"),
    "max_response_length": Alias(VERL, "rollout.max_completion_length", "the same limit"),
    "bypass_mode": Alias(VERL, "algorithm.proximal_logprobs", '"engine"'),
    "rollout_is": Alias(VERL, "correction.kind", "token_truncate, sequence_product_truncate ..."),
    "rollout_is_threshold": Alias(VERL, "correction.max", "the same bound"),
    "rollout_rs": Alias(VERL, "correction.kind", "the kinds that end in _mask"),
    "rollout_rs_threshold": Alias(VERL, "correction.max", "with correction.min for the lower bound"),
    "lr": Alias(VERL, "optim.learning_rate", "the same rate"),
    "lr_warmup_steps": Alias(VERL, "optim.warmup_updates", "counts optimizer updates"),
    "grad_clip": Alias(VERL, "optim.max_grad_norm", "the same norm"),
    "total_training_steps": Alias(VERL, "run.steps", "the same count"),
    "total_epochs": Alias(VERL, "run.steps", "epochs * prompts / prompts_per_step"),
    "test_freq": Alias(VERL, "eval.every", "the same count"),
    "save_freq": Alias(VERL, "run.save_every", "the same count"),
    "val_before_train": Alias(VERL, "eval.every", "an evaluation at step 0 is always made where every > 0"),
    "experiment_name": Alias(VERL, "run.name", "also the name of the run folder"),
    "train_files": Alias(VERL, "task.source", "one file"),
    "val_files": Alias(VERL, "eval.task.source", "one file"),
    "prompt_key": Alias(VERL, "task.prompt_column", "the same column"),
    "lora_rank": Alias(VERL, "lora.rank", "0 = off"),
    "enable_gradient_checkpointing": Alias(VERL, "model.gradient_checkpointing", "the same switch"),
    "filter_overlong_prompts": Alias(VERL, "task.overlong_prompts", '"drop" or "error"'),
    "rollout_importance_sampling_mode": Alias(
        SWIFT, "correction.kind", "ms-swift's sequence modes take the geometric mean: sequence_geometric_*"
    ),
    "rollout_importance_sampling_threshold": Alias(SWIFT, "correction.max", "the same bound"),
    "overlong_filter": Alias(SWIFT, "rollout.mask_truncated_completions", "the same switch"),
    "n_samples_per_prompt": Alias(ORLHF, "rollout.num_generations", "completions of each prompt"),
    "eps_clip": Alias(ORLHF, "algorithm.epsilon", "with algorithm.epsilon_high for the upper side"),
    "dual_clip": Alias(ORLHF, "algorithm.delta", "the same bound"),
}


def unwrap(annotation: Any) -> Any:
    """The type inside ``X | None``; any other type unchanged."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return inner[0] if len(inner) == 1 else annotation
    return annotation


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone, optional or as a list; None for plain values."""
    inner = unwrap(annotation)
    if typing.get_origin(inner) is tuple:
        inner = typing.get_args(inner)[0]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def option_names(section: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted names of all options: ``rollout.num_generations``, ``eval.task.source``, ``rewards.weight``."""
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from option_names(inner, f"{prefix}{name}.")


def annotation_of(dotted: str) -> Any:
    """Type of the option; ``typing.Any`` inside free tables such as ``task.options``; None where none is."""
    current: Any = Recipe
    for part in dotted.split("."):
        section = section_of(current)
        if section is not None and part.isdigit() and typing.get_origin(unwrap(current)) is tuple:
            current = section
        elif section is not None:
            info = section.model_fields.get(part)
            if info is None:
                return None
            current = info.annotation
        elif current is Any or typing.get_origin(unwrap(current)) is dict:
            current = Any
        else:
            return None
    return current


def unknown_keys(data: Mapping[str, Any], section: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted names in ``data`` that no section has; below an unknown table, each of its leaves."""
    for key, value in data.items():
        info = section.model_fields.get(key)
        if info is None:
            yield from _leaves(value, f"{prefix}{key}")
            continue
        inner = section_of(info.annotation)
        if inner is None:
            continue
        if isinstance(value, Mapping):
            yield from unknown_keys(value, inner, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from unknown_keys(item, inner, f"{prefix}{key}.{index}.")


def _leaves(value: Any, dotted: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value and find_alias(dotted) is None:
        for key, inner in value.items():
            yield from _leaves(inner, f"{dotted}.{key}")
    else:
        yield dotted


def find_alias(dotted: str) -> tuple[str, Alias] | None:
    """The longest tail of the name that another library uses, with what we call it."""
    parts = dotted.replace("-", "_").split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in ALIASES:
            return name, ALIASES[name]
    return None


def explain_unknown(dotted: str) -> str:
    """What was probably meant by an option that does not exist: one sentence, never empty."""
    found = find_alias(dotted)
    if found is not None:
        name, alias = found
        if not alias.ours:
            return f"{name} is {alias.library}'s name and has no counterpart here: {alias.note}"
        return f"{name} is {alias.library}'s name; here it is {alias.ours} ({alias.note})"
    names = list(option_names())
    bare = _without_indices(dotted)
    leaf = bare.rsplit(".", 1)[-1]
    elsewhere = [name for name in names if name.rsplit(".", 1)[-1] == leaf and name != bare]
    if elsewhere:
        return f"did you mean {_any_of(_nearest_first(bare, elsewhere)[:3])}?"
    return _nearest(bare, leaf, names)


def _nearest(bare: str, leaf: str, names: list[str]) -> str:
    section = bare.rpartition(".")[0]
    siblings = {name.rsplit(".", 1)[-1]: name for name in names if name.rpartition(".")[0] == section}
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {siblings[close[0]]}?"
    matches = difflib.get_close_matches(bare, [*names, *Recipe.model_fields], n=1, cutoff=0.75)
    if not matches:
        leaves: dict[str, str] = {}
        for name in names:
            leaves.setdefault(name.rsplit(".", 1)[-1], name)
        matches = [leaves[m] for m in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    if matches:
        return f"did you mean {matches[0]}?"
    if siblings:
        return f"[{section}] has {', '.join(siblings)}"
    return f"the sections are {', '.join(Recipe.model_fields)}"


def _nearest_first(dotted: str, names: list[str]) -> list[str]:
    """The same name in other sections, most alike first; alone where one section is a slip of the other."""

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, dotted, name).ratio()

    ranked = sorted(names, key=lambda name: (-likeness(name), name))
    return ranked[:1] if likeness(ranked[0]) >= 0.9 else ranked


def _any_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _without_indices(dotted: str) -> str:
    return ".".join(part for part in dotted.split(".") if not part.isdigit())
