"""``gspo init``: a commented recipe for the user's own data, its columns recognised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gspo.errors import ConfigError, TaskError
from gspo.recipe import load_recipe
from gspo.recipe_toml import toml_text

if TYPE_CHECKING:
    from gspo.tasks import Task

_MATHEMATICAL = re.compile(r"[-+]?[\d.,/ ]*\d[\d.,/ %°]*|.*[\\^=].*")


@dataclass(frozen=True)
class Arguments:
    """Write a recipe for your own data."""

    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """A .jsonl, .json or .parquet file with a column of prompts and, usually, one of answers."""
    output: Path | None = None
    """The recipe to write; DATA with the ending .toml by default."""
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Hugging Face folder or hub name."""
    eval: Path | None = None
    """A file of held-out rows, for the evaluation inside the run."""
    prompt_column: str | None = None
    """Column with the prompt, where its name is not a usual one."""
    answer_column: str | None = None
    """Column with the reference answer, likewise."""
    force: bool = False
    """Write over a recipe that is there."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Read the data, write the recipe; prints what was recognised."""
    output = arguments.output or arguments.data.with_suffix(".toml")
    if output.exists() and not arguments.force:
        raise ConfigError(f"{output} is there already; choose another with --output, or write over it with --force")
    task = read_task(arguments.data, arguments)
    if len(task) < 4:
        raise TaskError(f"{arguments.data} holds {len(task)} usable rows; a step needs at least 4 prompts")
    from gspo.tasks import shared_prompts

    held_out = read_task(arguments.eval, arguments) if arguments.eval else None
    output.write_text(recipe_text(task, held_out, arguments, output), encoding="utf-8")
    load_recipe(output)  # what is written is a valid recipe
    roles = ", ".join(f"{role} = {column}" for role, column in task.report.columns.items())
    print(f"{arguments.data}: {len(task)} prompts; {roles}")
    for line in (*task.report.notes, *task.report.problem_lines(limit=5)):
        print(f"note: {line}")
    if held_out is not None:
        shared = shared_prompts(task, held_out)
        if shared:
            print(f"warning: {len(shared)} held-out prompts are training prompts too")
    else:
        print("note: no held-out rows, so no evaluation; give them with --eval FILE")
    print(f"recipe: {output}\nnext: gspo check recipe {output}")
    return 0


def read_task(path: Path, arguments: Arguments) -> Task:
    """The file as a task; rows that cannot be used are listed, rows without an answer are kept."""
    from gspo.tasks import TaskOptions, load_task

    return load_task(
        TaskOptions(
            source=str(path),
            prompt_column=arguments.prompt_column,
            answer_column=arguments.answer_column,
            answer_required=False,
            bad_rows="drop",
        )
    )


def recipe_text(task: Task, held_out: Task | None, arguments: Arguments, output: Path) -> str:
    """The recipe, section by section, each choice with its reason."""
    prompts_per_step = min(16, len(task) // 4 * 4)
    steps = max(20, min(200, round(3 * len(task) / prompts_per_step)))
    sections = [
        f"# {arguments.data.stem}: {len(task)} prompts of our own.\n# Try it first: gspo check recipe {output}",
        f"[run]\nname = {toml_text(_run_name(arguments.data.stem))}\n"
        f"steps = {steps}  # {steps * prompts_per_step / len(task):.2g} passes over the data",
        f"[model]\npath = {toml_text(arguments.model)}  # a Hugging Face folder or hub name",
        "# Adapters instead of all weights, for models that do not fit otherwise:\n"
        "# [lora]\n# rank = 32\n# and optim.learning_rate about ten times higher",
        "\n".join(["[task]", *_task_lines(task, path_for(arguments.data, output), _instruction(task))]),
        _reward_section(task),
        f"[rollout]\nprompts_per_step = {prompts_per_step}\nnum_generations = 8\n"
        "max_completion_length = 512  # tokens; watch the truncated share",
        '[algorithm]\nname = "gspo"\n'
        "# The paper's clip range, 3e-4 and 4e-4, is meant for completions of thousands of tokens. For shorter ones\n"
        f"# measure it: gspo calibrate {output}\n# epsilon = 3e-4\n# epsilon_high = 4e-4",
        "[optim]\nlearning_rate = 1e-6\nupdates_per_step = 4  # divides prompts_per_step",
        _eval_section(held_out, arguments, output, _instruction(task)),
    ]
    return "\n\n".join(sections) + "\n"


def _task_lines(task: Task, path: str, instruction: str) -> list[str]:
    """What [task] says of a file of rows: its columns, what the model is told, what becomes of bad rows."""
    lines = [f"source = {toml_text(path)}"]
    columns = task.report.columns
    lines.append(f"prompt_column = {toml_text(columns['prompt'])}")
    answer = re.sub(r" \((hashes|boxed)\)$", "", columns.get("answer", ""))
    if answer and not answer.startswith("<"):
        lines.append(f"answer_column = {toml_text(answer)}")
    if instruction:
        lines.append(f"system_prompt = {toml_text(instruction)}")
    unusable = bool(task.report.problems) or (bool(answer) and any(p.answer is None for p in task.prompts))
    options = ['bad_rows = "drop"'] if unusable else []
    options += [] if answer else ["answer_required = false"]
    if options:
        why = "rows that cannot be used are left out and listed" if unusable else "the reward needs no answer"
        lines.append(f"options = {{ {', '.join(options)} }}  # {why}")
    return lines


def is_mathematical(task: Task) -> bool:
    """Whether most answers are numbers or formulas, so that equal values should count as equal."""
    answers = [prompt.answer for prompt in task.prompts if prompt.answer]
    return sum(_MATHEMATICAL.fullmatch(answer) is not None for answer in answers) > 0.8 * len(answers)


def _instruction(task: Task) -> str:
    if not task.report.columns.get("answer"):
        return ""
    if is_mathematical(task):
        return "Reason step by step, and put your final answer within \\boxed{}."
    return "Reason step by step. Then write your final answer alone on the last line, after ####."


def _reward_section(task: Task) -> str:
    if not task.report.columns.get("answer"):
        return (
            "# No answer column was found, so the reward is a function of yours: f(rollout) -> float, dict or None,\n"
            "# in my_rewards.py beside this file. rollout.text is the completion, rollout.prompt.metadata the row.\n"
            '[[rewards]]\nfunction = "my_rewards:score"'
        )
    if is_mathematical(task):
        return '[[rewards]]\nfunction = "math"  # the last \\boxed{} against the answer, equal values are equal'
    return '[[rewards]]\nfunction = "exact"  # the text after #### is the answer\noptions = { marker = "####" }'


def _eval_section(held_out: Task | None, arguments: Arguments, output: Path, instruction: str) -> str:
    if held_out is None or arguments.eval is None:
        return (
            "# Held-out rows show whether the model learns more than its training data:\n"
            '[eval]\nevery = 0  # 10, with:\n# [eval.task]\n# source = "held_out.jsonl"'
        )
    return "\n".join(
        ["[eval]\nevery = 10\n\n[eval.task]", *_task_lines(held_out, path_for(arguments.eval, output), instruction)]
    )


def path_for(data: Path, recipe: Path) -> str:
    """The data as the recipe names it: by its name beside the recipe, else as it was given, else its whole path."""
    if data.parent.resolve() == recipe.parent.resolve():
        return data.name
    if recipe.parent.resolve() == Path.cwd().resolve():
        return data.as_posix()
    return data.resolve().as_posix()


def _run_name(stem: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")
    return name or "run"
