"""``load_task``: from a source to a Task, with every row that cannot be used said before step 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.errors import TaskError
from gspo.tasks import sources
from gspo.tasks.columns import SNIFFED_ROWS, Columns, recognise_columns
from gspo.tasks.generators import check_option_names, generators
from gspo.tasks.rows import (
    NumberedRow,
    ReadPrompts,
    cached_check,
    check_prompt,
    dressed,
    prompts_of_rows,
    with_unique_ids,
)
from gspo.tasks.task import LoadReport, RowProblem, Task, TaskOptions
from gspo.types import Prompt

ROW_OPTIONS = ("bad_rows", "answer_required", "id_column", "demonstration_column")
_REASONING_GYM = "reasoning_gym:"


def load_task(options: TaskOptions, *, default_seed: int = 0) -> Task:
    """Read the source, map its columns, check every row and build the Task.

    ``default_seed`` seeds a generator whose options name no seed. TaskError says which rows cannot be used,
    with their line numbers (``bad_rows = "drop"`` leaves them out and lists them in ``Task.report``);
    MissingExtra names the package that a source needs.
    """
    _check_options(options)
    seed = default_seed if options.seed is None else options.seed
    if isinstance(options.source, str) and options.source in generators():
        prompts = generators()[options.source](options.size, seed, split=options.split, options=options.options)
        return _task_of_prompts(prompts, options)
    if isinstance(options.source, str) and options.source.startswith(_REASONING_GYM):
        return _load_reasoning_gym(options, seed)
    items = options.source
    unit = "row"
    if isinstance(items, str):
        if items.endswith(sources.FILE_SUFFIXES):
            unit = "line" if not items.endswith(".parquet") else "row"
            return _task_of_rows(sources.read_file(Path(items), options.size), _row_options(options), unit)
        if not sources.is_dotted_path(items):
            return _task_of_rows(sources.read_hub(options), _row_options(options), unit)
        items = sources.call_dotted(items, options)
        options = replace(options, options={})  # they were the function's arguments
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise TaskError(f"source is {type(items).__name__}; a list of dicts or an iterable of Prompts is needed")
    prompts, rows = sources.split_prompts(items, options.size)
    if prompts:
        return _task_of_prompts(prompts, _row_options(options))
    return _task_of_rows(sources.read_rows(rows), _row_options(options), unit)


def _load_reasoning_gym(options: TaskOptions, seed: int) -> Task:
    rows = sources.read_reasoning_gym(options, seed)
    columns = Columns(prompt="question", answer="answer", found=("question", "answer", "entry"))
    # some of its data sets have no reference answer, only score_answer
    return _build(rows, columns, replace(options, options={}, answer_required=False), "row")


def _task_of_rows(rows: Iterator[NumberedRow], options: TaskOptions, unit: str) -> Task:
    head = list(itertools.islice(rows, SNIFFED_ROWS))
    usable = [numbered.row for numbered in head if numbered.row]
    if not usable:
        problems = tuple(RowProblem(numbered.line, numbered.reason or "empty") for numbered in head)
        raise TaskError(_refusal(LoadReport(_described(options), len(head), unit, {}, problems), 0))
    try:
        columns = recognise_columns(
            usable,
            prompt_column=options.prompt_column,
            answer_column=options.answer_column,
            demonstration_column=options.options.get("demonstration_column"),
            id_column=options.options.get("id_column"),
        )
    except TaskError as error:
        raise TaskError(f"{_described(options)}: {error}") from error
    if columns.answer is None and options.answer_required:
        raise TaskError(
            f"{_described(options)}: no answer column found. Columns: {', '.join(columns.found)}. Name it: "
            f'answer_column = "..."; where rewards need no answer: options.answer_required = false'
        )
    return _build(itertools.chain(head, rows), columns, options, unit)


def _build(rows: Iterable[NumberedRow], columns: Columns, options: TaskOptions, unit: str) -> Task:
    read = prompts_of_rows(rows, columns, options)
    return _finish(read, options, unit, columns.roles())


def _task_of_prompts(prompts: list[Prompt], options: TaskOptions) -> Task:
    read = ReadPrompts(prompts, list(range(1, len(prompts) + 1)), [])
    return _finish(read, options, "row", {})


def _finish(read: ReadPrompts, options: TaskOptions, unit: str, roles: Mapping[str, str]) -> Task:
    """Dress and check every prompt, refuse or drop bad rows, number repeated ids."""
    checked = replace(options, check_answer=cached_check(options.check_answer))
    kept: list[Prompt] = []
    problems = list(read.problems)
    for prompt, line in zip(read.prompts, read.lines, strict=True):
        reason = check_prompt(prompt, checked)
        if reason is None:
            kept.append(dressed(prompt, options))
        else:
            problems.append(RowProblem(line, reason))
    problems.sort(key=lambda problem: problem.line)
    total = len(read.prompts) + len(read.problems)
    report = LoadReport(_described(options), total, unit, roles, tuple(problems))
    if not kept or (problems and options.bad_rows == "error"):
        raise TaskError(_refusal(report, len(kept)))
    name = sources.task_name(options)
    named, renamed = with_unique_ids(kept, name)
    notes = []
    if renamed:
        notes.append(f"{renamed} rows had the id of an earlier row; they were numbered")
    if problems:
        notes.append(f"{len(problems)} of {total} rows were dropped")
    if options.size is not None and total < options.size:
        notes.append(f"the source has {total} rows, fewer than size = {options.size}")
    return Task(name, tuple(named), replace(report, notes=tuple(notes)))


def _refusal(report: LoadReport, kept: int) -> str:
    if not report.problems:
        return f"{report.source} holds no rows"
    lines = [f"{report.source}: {len(report.problems)} of {report.rows_read} rows cannot be used:"]
    lines += [f"  {line}" for line in report.problem_lines()]
    if kept:
        lines.append('Mend or remove them, or leave them out with bad_rows = "drop" (in a recipe: task.options)')
    return "\n".join(lines)


def _described(options: TaskOptions) -> str:
    return options.source if isinstance(options.source, str) else (options.name or "the rows given")


def _row_options(options: TaskOptions) -> TaskOptions:
    """``options`` of a source of rows, with the switches among ``options.options`` in place."""
    check_option_names(options.options, ROW_OPTIONS, _described(options))
    bad_rows: Any = options.options.get("bad_rows", options.bad_rows)
    if bad_rows not in ("error", "drop"):
        raise TaskError(f'{_described(options)}: bad_rows = {bad_rows!r}; valid: "error", "drop"')
    required: Any = options.options.get("answer_required", options.answer_required)
    if not isinstance(required, bool):
        raise TaskError(f"{_described(options)}: answer_required = {required!r}; valid: true, false")
    return replace(options, bad_rows=bad_rows, answer_required=required)


def _check_options(options: TaskOptions) -> None:
    if isinstance(options.source, str) and not options.source.strip():
        raise TaskError("the task has no source; name a file, a hub data set or a generator: task.source")
    if options.size is not None and options.size < 1:
        raise TaskError(f"size = {options.size}; at least 1 is needed")
    if options.prompt_template is not None and "{prompt}" not in options.prompt_template:
        raise TaskError(f"prompt_template {options.prompt_template[:60]!r} has no {{prompt}} in it")
