"""From a recipe to the components of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gspo.config import Recipe, TaskConfig
from gspo.engines.base import Engine
from gspo.engines.local import LocalEngine
from gspo.errors import ConfigError
from gspo.policy.learner import Learner, LearnerOptions
from gspo.policy.model import LoadOptions, Policy, load_policy, pick_device, uses_autocast
from gspo.rewards import Grader, RewardSpec, gold_problem
from gspo.rollouts import Collector, SamplingPlan
from gspo.seeding import seed
from gspo.tasks import Task, TaskOptions, load_task, shared_prompts
from gspo.tasks.encoding import encode_prompt, encode_task
from gspo.training.resolve import notes_on_learning, resolve_algorithm
from gspo.types import IntArray, Prompt, Sampling

NEEDS_ANSWER = ("math", "exact")  # built-in rewards that compare with the row's reference answer


@dataclass(slots=True)
class Components:
    """What a run is made of. ``close`` gives back workers and engine."""

    recipe: Recipe
    task: Task
    eval_task: Task | None
    policy: Policy
    engine: Engine
    grader: Grader
    collector: Collector
    eval_collector: Collector | None
    learner: Learner
    notes: tuple[str, ...] = ()

    def close(self) -> None:
        """Idempotent."""
        self.engine.close()
        self.grader.close()


def load_options(recipe: Recipe) -> LoadOptions:
    """The policy's options as plain arguments."""
    model, lora = recipe.model, recipe.lora
    return LoadOptions(
        path=model.path,
        gguf_file=model.gguf_file,
        revision=model.revision,
        dtype=model.dtype,
        autocast=model.autocast,
        attn_implementation=model.attn_implementation,
        gradient_checkpointing=model.gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.chat_template,
        device=recipe.run.device,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_target_modules=lora.target_modules,
        seed=seed(recipe.run.seed, "adapters"),
    )


def reward_specs(recipe: Recipe, functions: Sequence[Callable[..., Any]] = ()) -> list[RewardSpec]:
    """Reward functions of the recipe, or Python objects given instead."""
    if functions:
        return [RewardSpec(function=function) for function in functions]
    if not recipe.rewards:
        raise ConfigError(
            'no reward: add [[rewards]] with function = "math" (or "exact", "format", "module:function") to the recipe'
        )
    return [RewardSpec(r.function, r.weight, r.signature, r.options) for r in recipe.rewards]


def make_grader(recipe: Recipe, rewards: Sequence[RewardSpec]) -> Grader:
    """The reward workers. Made before the model is loaded, so that they can be forked from a small process."""
    grading = recipe.grading
    return Grader(
        rewards,
        workers=grading.workers,
        timeout_s=grading.timeout_s,
        in_process=grading.in_process,
    )


def inherit(config: TaskConfig | None, base: TaskConfig) -> TaskConfig:
    """A task section whose fields at their defaults are those of ``[task]``.

    Values decide, not what was written: a recipe read back from its resolved form inherits the same.
    """
    if config is None:
        return base
    defaults = dict(TaskConfig())
    changes = {name: value for name, value in config if value != defaults[name]}
    if "source" in changes and changes["source"] != base.source:
        return config  # another source: nothing of the first one's columns or options applies
    if "options" in changes:
        changes["options"] = {**base.options, **changes["options"]}
    return base.model_copy(update=changes)


def make_task(
    config: TaskConfig,
    default_seed: int,
    rows: Iterable[Any] | None = None,
    *,
    rewards: Sequence[RewardSpec] = (),
) -> Task:
    """Load a task section (or rows given as Python objects).

    Where a built-in reward compares with a reference answer, rows without one are refused; under ``math``, rows whose
    answer it cannot read are too, with their line numbers.
    """
    source = rows if rows is not None else config.source
    if not isinstance(source, str):
        source = list(source)
    if not source:
        raise ConfigError("task.source is empty: give a .jsonl or .parquet file, a data set or a generator")
    options = TaskOptions(
        source=source,
        name=config.name,
        split=config.split,
        subset=config.subset,
        size=config.size,
        seed=config.seed,
        options=config.options,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_prompt,
        prompt_template=config.prompt_template,
        answer_required=any(spec.function in NEEDS_ANSWER for spec in rewards),
        check_answer=gold_problem if any(spec.function == "math" for spec in rewards) else None,
    )
    return load_task(options, default_seed=default_seed)


def fit_task(task: Task, config: TaskConfig, policy: Policy, max_completion_length: int) -> Task:
    """The prompts that fit: within ``max_prompt_length``, and with room for a completion in the context."""
    limit = config.max_prompt_length
    window = policy.max_length()
    if window:
        room = window - max_completion_length
        if room < 1:
            raise ConfigError(
                f"rollout.max_completion_length = {max_completion_length} leaves no room for a prompt in the model's "
                f"context of {window} tokens; at most {window - 1} is possible"
            )
        limit = min(limit, room) if limit else room
    return encode_task(
        task,
        policy.tokenizer,
        max_prompt_length=limit,
        overlong=config.overlong_prompts,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
    )


def make_collector(engine: Engine, grader: Grader, policy: Policy, task: Task) -> Collector:
    """A collector of one task's prompts, whose ids were computed when the task was fitted."""
    return Collector(
        engine,
        grader,
        encode=lambda prompt: task.ids[prompt.id],
        decode=lambda ids: policy.tokenizer.decode(ids, skip_special_tokens=True),
    )


def encoder(policy: Policy, config: TaskConfig) -> Callable[[Prompt], IntArray]:
    """Prompt -> token ids."""

    def encode(prompt: Prompt) -> IntArray:
        return encode_prompt(
            prompt,
            policy.tokenizer,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
        )

    return encode


def make_engine(recipe: Recipe, policy: Policy) -> Engine:
    """The engine that samples: it shares the learner's parameters, or holds a copy in another dtype."""
    rollout = recipe.rollout
    if rollout.engine != "local":
        raise ConfigError(f'rollout.engine = {rollout.engine!r} is not there yet; this version has "local"')
    model: Any = policy.model
    dtype = engine_dtype(recipe)
    if dtype is not None:
        model = policy.frozen_copy().model.to(dtype)
    return LocalEngine(
        model,
        tokenizer=policy.tokenizer,
        max_batch_size=rollout.max_batch_size,
        shared=dtype is None,
    )


def engine_dtype(recipe: Recipe) -> torch.dtype | None:
    """None where the engine shares the learner's parameters.

    ``auto``: a bfloat16 copy where the learner's forward pass is bfloat16 by autocast, else shared.
    """
    wanted = recipe.rollout.engine_dtype
    if wanted == "auto":
        wanted = "bfloat16" if uses_autocast(recipe.model.autocast, pick_device(recipe.run.device)) else "float32"
        wanted = wanted if recipe.model.dtype == "float32" else recipe.model.dtype
    return None if wanted == recipe.model.dtype else torch.float32 if wanted == "float32" else torch.bfloat16


def learner_options(recipe: Recipe) -> tuple[LearnerOptions, tuple[str, ...]]:
    """The learner's options and the notes on the chosen algorithm."""
    optim = recipe.optim
    algorithm, notes = resolve_algorithm(
        recipe.algorithm,
        recipe.correction,
        updates_per_step=optim.updates_per_step,
        max_completion_length=recipe.rollout.max_completion_length,
    )
    options = LearnerOptions(
        algorithm=algorithm,
        total_updates=recipe.run.steps * optim.updates_per_step,
        temperature=recipe.rollout.temperature,
        learning_rate=optim.learning_rate,
        schedule=optim.schedule,
        warmup_updates=optim.warmup_updates,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        adam_epsilon=optim.adam_epsilon,
        max_grad_norm=optim.max_grad_norm,
        max_tokens_per_microbatch=optim.max_tokens_per_microbatch,
        mask_truncated_completions=recipe.rollout.mask_truncated_completions,
    )
    return options, notes


def sampling_plan(recipe: Recipe, policy: Policy) -> SamplingPlan:
    """How training rollouts are sampled."""
    rollout = recipe.rollout
    sampling = Sampling(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_completion_length,
        eos_token_ids=policy.eos_token_ids(),
        stop=rollout.stop,
    )
    return SamplingPlan(rollout.num_generations, sampling, recipe.run.seed)


def eval_plan(recipe: Recipe, policy: Policy) -> SamplingPlan:
    """How held-out items are sampled."""
    evaluation = recipe.eval
    sampling = Sampling(
        temperature=evaluation.temperature,
        max_new_tokens=evaluation.max_completion_length or recipe.rollout.max_completion_length,
        eos_token_ids=policy.eos_token_ids(),
        stop=recipe.rollout.stop,
    )
    return SamplingPlan(evaluation.num_samples, sampling, recipe.run.seed, stream="eval", purpose="eval")


def build(
    recipe: Recipe,
    *,
    rows: Iterable[Any] | None = None,
    functions: Sequence[Callable[..., Any]] = (),
    policy: Policy | None = None,
    grader: Grader | None = None,
) -> Components:
    """Make everything a run needs, cheapest checks first. ``rows``, ``functions``, ``policy``: Python objects that
    take the place of what the recipe names. ``grader``: one made earlier, which is closed with the rest."""
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    options, notes = learner_options(recipe)
    rewards = reward_specs(recipe, functions)
    grader = grader or make_grader(recipe, rewards)
    try:
        task = make_task(recipe.task, recipe.run.seed, rows, rewards=rewards)
        held_out = _eval_task(recipe, rewards)
        leaks = leak_notes(task, held_out)
        policy = policy or load_policy(load_options(recipe))
        length = recipe.rollout.max_completion_length
        task = fit_task(task, recipe.task, policy, length)
        if held_out is not None:
            eval_config = inherit(recipe.eval.task, recipe.task)
            held_out = fit_task(held_out, eval_config, policy, recipe.eval.max_completion_length or length)
        notes = (*notes, *notes_on_learning(recipe), *task_notes(task, held_out), *leaks, *end_notes(policy, recipe))
        learner = Learner(policy, options)
        engine = make_engine(recipe, policy)
        grader.wait_ready()  # a reward that cannot be imported is an error before step 0
    except BaseException:
        grader.close()
        raise
    collector = make_collector(engine, grader, policy, task)
    eval_collector = make_collector(engine, grader, policy, held_out) if held_out else None
    return Components(recipe, task, held_out, policy, engine, grader, collector, eval_collector, learner, notes)


def task_notes(*tasks: Task | None) -> tuple[str, ...]:
    """What loading and encoding left out or changed: rows and prompts dropped, with their counts."""
    there = [task for task in tasks if task is not None]
    notes = [f"task {task.name}: {note}" for task in there for note in task.report.notes]
    for task in there:
        if missing := sum(prompt.answer is None for prompt in task.prompts):
            notes.append(f"task {task.name}: {missing} of {len(task)} prompts have no reference answer")
    return tuple(notes)


def end_notes(policy: Policy, recipe: Recipe) -> tuple[str, ...]:
    """A note where nothing but the length limit can end a completion."""
    if policy.eos_token_ids() or recipe.rollout.stop:
        return ()
    return (
        "neither the model nor its tokenizer names an end-of-sequence id: every completion runs to "
        f"rollout.max_completion_length = {recipe.rollout.max_completion_length}; set rollout.stop",
    )


def leak_notes(task: Task, held_out: Task | None) -> tuple[str, ...]:
    """A note where held-out items are trained on."""
    shared = shared_prompts(task, held_out) if held_out is not None else []
    if not shared:
        return ()
    return (f"{len(shared)} of {len(held_out or ())} held-out items are among the training prompts",)


def _eval_task(recipe: Recipe, rewards: Sequence[RewardSpec]) -> Task | None:
    """The held-out task; rows given in Python have none unless the recipe names one."""
    if not recipe.eval.every or recipe.eval.task is None:
        return None
    return make_task(inherit(recipe.eval.task, recipe.task), recipe.run.seed, rewards=rewards)
