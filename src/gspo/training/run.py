"""Whole runs: train, resume, evaluate. What the command line and ``gspo.train`` call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo.config import Recipe
from gspo.errors import CheckpointError, ConfigError
from gspo.evaluation import Evaluation
from gspo.observe.trackers import build_trackers
from gspo.policy.model import Policy
from gspo.recipe import check_sizes, dump_recipe, load_recipe
from gspo.tasks import Task
from gspo.training import checkpoint
from gspo.training.build import (
    Components,
    build,
    engine_dtype,
    eval_plan,
    inherit,
    learner_options,
    make_grader,
    make_task,
    reward_specs,
    sampling_plan,
)
from gspo.training.coldstart import coldstart, left_out
from gspo.training.console import RunConsole
from gspo.training.loop import Run, loop, run_evaluation
from gspo.training.preflight import settings_table
from gspo.training.record import RunRecorder, create_run_folder, require_writable
from gspo.training.resolve import load_estimator, refuse_unread


def train(
    recipe: Recipe,
    *,
    rows: Iterable[Any] | None = None,
    functions: Sequence[Callable[..., Any]] = (),
    policy: Policy | None = None,
    console: RunConsole | None = None,
) -> Path:
    """Train from step 0 in a new run folder; returns the folder.

    A recipe with ``[coldstart]`` builds its model first, unless its folder is there. ``rows``, ``functions`` and
    ``policy`` take the place of what the recipe names. Raises GspoError before step 0 for what is wrong with the
    recipe, the task, the model or the folder, and as ``loop`` afterwards.
    """
    if policy is not None and recipe.lora.rank and not policy.has_adapter:
        raise ConfigError(
            f"lora.rank = {recipe.lora.rank} is not read where the policy is an object, and this one has no adapter: "
            "all its weights would be trained; wrap its model with peft, or give a path for the model"
        )
    check_early(recipe, rows=rows, functions=functions)
    console = console or RunConsole()
    if recipe.coldstart and rows is not None and policy is None:
        source = inherit(recipe.coldstart.task, recipe.task).source
        console.note(f"note: the cold start takes its examples from {source!r}, not from the rows given")
    # Made before a cold start touches the device: workers are forked from a process that has not used it yet.
    grader = make_grader(recipe, reward_specs(recipe, functions))
    if recipe.coldstart and policy is None:
        try:
            with console.phase("cold start") as progress:
                folder = coldstart(recipe, progress=progress)
        except BaseException:
            grader.close()
            raise
        if note := left_out(folder):
            console.note(f"note: {note}")
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
    with assembled(recipe, rows=rows, functions=functions, policy=policy, grader=grader) as parts:
        require_prompts(parts.task, recipe)  # again: prompts that are too long are gone now
        folder = create_run_folder(recipe.run.output_dir, recipe.run.name)
        (folder / "config.toml").write_text(dump_recipe(recipe), encoding="utf-8")
        console.settings(settings_table(parts), notes=parts.notes)
        given = {"rows": rows is not None, "functions": bool(functions), "policy": policy is not None}
        objects = [name for name, there in given.items() if there]
        _follow(parts, folder, console, start=None, objects=objects)
    return folder


def check_early(
    recipe: Recipe, *, rows: Iterable[Any] | None = None, functions: Sequence[Callable[..., Any]] = ()
) -> None:
    """What can be wrong without a model, before a cold start spends minutes: sizes, algorithm, rewards, task, disk."""
    check_sizes(recipe)
    refuse_unread(recipe)
    load_estimator(learner_options(recipe)[0].algorithm.advantage)
    rewards = reward_specs(recipe, functions)
    if rows is None:
        require_prompts(make_task(recipe.task, recipe.run.seed, rewards=rewards), recipe)
    require_writable(recipe.run.output_dir)
    if recipe.coldstart and recipe.model.path:
        require_writable(recipe.model.path, option="model.path")


def require_prompts(task: Task, recipe: Recipe) -> None:
    """Raises TaskError where the task has fewer prompts than a step takes."""
    task.batch(0, recipe.rollout.prompts_per_step, recipe.run.seed)


def resume(folder: Path, *, console: RunConsole | None = None) -> Path:
    """Go on from the newest checkpoint that verifies, with the run folder's own recipe; returns the folder.

    Raises ConfigError for a folder that is no run's, CheckpointError where no checkpoint verifies.
    """
    recipe = read_run_recipe(folder)
    console = console or RunConsole()
    start, problems = checkpoint.newest(folder / "checkpoints")
    for problem in problems:
        console.note(f"skipped a damaged checkpoint: {problem}")
    if start is None:
        raise CheckpointError(f"{folder}: no valid checkpoint to resume from; start again with `gspo train`")
    if start.step >= recipe.run.steps and (folder / "model").is_dir():
        console.note(f"{folder} has finished its {recipe.run.steps} steps; nothing to resume")
        return folder
    if objects := start.state.get("objects"):
        raise CheckpointError(
            f"{folder} was given Python objects ({', '.join(objects)}), which its recipe does not hold: it cannot be "
            "resumed from its folder; name them in a recipe (task.source, [[rewards]], model.path) to have that"
        )
    with assembled(recipe) as parts:
        if start.state.get("task", parts.task.fingerprint) != parts.task.fingerprint:
            raise CheckpointError(
                f"{folder}: the prompts of task {parts.task.name!r} are no longer those that the run started with, so "
                "its steps would take others; restore the data, or start a new run"
            )
        restore(parts, start)
        console.note(f"resuming {folder} at step {start.step} of {recipe.run.steps}")
        _follow(parts, folder, console, start=start)
    return folder


def restore(parts: Components, start: checkpoint.Checkpoint) -> None:
    """Put a checkpoint's weights and optimizer in. Raises CheckpointError where the recipe builds another model."""
    learner = parts.learner
    try:
        learner.load_state(start.tensors(), updates_done=start.state["updates_done"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{start.folder} does not fit the policy that the recipe builds ({error.args[0]}); "
            "undo what was changed in [model], [lora] or at model.path"
        ) from error
    learner.max_tokens = min(learner.max_tokens, start.state.get("max_tokens", learner.max_tokens))
    weights = learner.weights(engine_dtype(parts.recipe))
    parts.engine.load_weights(weights, version=start.state["policy_version"])


def read_run_recipe(folder: Path) -> Recipe:
    """The resolved recipe of a run folder. Raises ConfigError for a folder without one."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it holds no config.toml")
    return load_recipe(folder / "config.toml")


def evaluate_recipe(recipe: Recipe, *, checkpoint_of: Path | None = None) -> Evaluation:
    """Held-out evaluation of the recipe's model, or of a run's best (else newest) checkpoint.

    Where no evaluation of the run was better than step 0's, the best are the weights it started from. Raises
    ConfigError without a held-out task, CheckpointError where no checkpoint verifies.
    """
    path = recipe.model.path
    if checkpoint_of is None and recipe.coldstart and not Path(path).exists():
        raise ConfigError(f"the recipe's cold start has not been made yet ({path!r}): `gspo coldstart RECIPE` makes it")
    with assembled(recipe) as parts:
        if checkpoint_of is not None:
            start = _best_or_newest(checkpoint_of)
            if start is not None:
                restore(parts, start)
        if parts.eval_task is None:
            raise ConfigError("nothing to evaluate: the recipe has no [eval.task], or eval.every is 0")
        return run_evaluation(make_run(parts, recorder=None))


@contextmanager
def assembled(recipe: Recipe, **objects: Any) -> Iterator[Components]:
    """Components that are closed at the end."""
    parts = build(recipe, **objects)
    try:
        yield parts
    finally:
        parts.close()


def make_run(parts: Components, *, recorder: Any, first_step: int = 0) -> Run:
    """The loop's input from components."""
    recipe = parts.recipe
    return Run(
        task=parts.task,
        collector=parts.collector,
        engine=parts.engine,
        learner=parts.learner,
        recorder=recorder,
        plan=sampling_plan(recipe, parts.policy),
        steps=recipe.run.steps,
        prompts_per_step=recipe.rollout.prompts_per_step,
        algorithm=parts.learner.options.algorithm,
        advantage=load_estimator(parts.learner.options.algorithm.advantage),
        updates_per_step=recipe.optim.updates_per_step,
        minibatches=recipe.optim.minibatches,
        first_step=first_step,
        engine_dtype=engine_dtype(recipe),
        eval_every=recipe.eval.every,
        eval_collector=parts.eval_collector,
        eval_prompts=parts.eval_task.prompts if parts.eval_task else (),
        eval_plan=eval_plan(recipe, parts.policy),
        eval_part=recipe.eval.reward,
    )


def _follow(
    parts: Components,
    folder: Path,
    console: RunConsole,
    *,
    start: checkpoint.Checkpoint | None,
    objects: Sequence[str] = (),
) -> None:
    """Run the loop to its end in ``folder``; write the model and the curves."""
    recipe = parts.recipe
    first_step = start.step if start else 0
    trackers = build_trackers(recipe.run.trackers, folder, recipe.model_dump(mode="json"))
    best = start.state["best"] if start else None
    recorder = RunRecorder(
        folder=folder,
        learner=parts.learner,
        trackers=trackers,
        save_every=recipe.run.save_every,
        keep=recipe.run.keep_checkpoints,
        max_failure_rate=recipe.grading.max_failure_rate,
        correct_part=recipe.eval.reward,
        on_report=console.report,
        best=tuple(best) if best else None,
        version=first_step,
        facts={"task": parts.task.fingerprint, "objects": list(objects)},
    )
    parts.learner.dump_with(recorder.dump)
    algorithm = parts.learner.options.algorithm
    if algorithm.rule == "clip" and algorithm.epsilon is not None and algorithm.epsilon_high is not None:
        level = algorithm.importance_sampling_level
        console.watch_clip(algorithm.epsilon, algorithm.epsilon_high, sequence_level=level != "token")
    try:
        with console.training(recipe.run.steps, first_step):
            for _ in loop(make_run(parts, recorder=recorder, first_step=first_step)):
                pass
    finally:
        trackers.close()
    parts.policy.save(folder / "model")
    console.finished(folder, recorder.samples)


def _best_or_newest(folder: Path) -> checkpoint.Checkpoint | None:
    """None where no evaluation was better than step 0's: the best weights are those that the run started from."""
    newest, _ = checkpoint.newest(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{folder}: no valid checkpoint")
    best = newest.state["best"]
    if best and best[0] == 0:
        return None
    if best and (folder / "checkpoints" / f"step_{best[0]:06d}").is_dir():
        return checkpoint.load(folder / "checkpoints" / f"step_{best[0]:06d}")
    return newest
