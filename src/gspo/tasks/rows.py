"""From numbered rows to prompts: the column mapping applied, and what cannot be used listed with its line.

Where rows come from is the business of ``sources``; what a column is called, of ``columns``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo.errors import TaskError
from gspo.tasks.answers import extract_answer, plain_text
from gspo.tasks.columns import LAST_TURN, Columns, column_value
from gspo.tasks.messages import Turn, is_conversation, split_conversation
from gspo.tasks.task import AnswerCheck, RowProblem, TaskOptions, content_id
from gspo.types import Prompt

_FORM_MARKS = {"hashes": '"####"', "boxed": '"\\boxed{}"'}


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """One row and its line, from 1. ``row`` is None where it could not be read, for ``reason``."""

    line: int
    row: Mapping[str, Any] | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReadPrompts:
    """Prompts with the line of each, and the rows that gave none."""

    prompts: list[Prompt]
    lines: list[int]
    problems: list[RowProblem]


def prompts_of_rows(rows: Iterable[NumberedRow], columns: Columns, options: TaskOptions) -> ReadPrompts:
    """Every row as a Prompt, its problems collected and none raised."""
    result = ReadPrompts([], [], [])
    for numbered in rows:
        if numbered.row is None:
            result.problems.append(RowProblem(numbered.line, numbered.reason))
            continue
        try:
            result.prompts.append(prompt_of_row(numbered.row, columns, options))
            result.lines.append(numbered.line)
        except TaskError as error:
            result.problems.append(RowProblem(numbered.line, str(error)))
    return result


def prompt_of_row(row: Mapping[str, Any], columns: Columns, options: TaskOptions) -> Prompt:
    """One row as a Prompt without a task name; TaskError with the reason where it cannot be one.

    ``metadata`` holds every column but the prompt's, as it stood; and ``demonstration`` where there is one.
    """
    turns, last_turn = _turns(row, columns)
    answer = None
    if columns.answer is not None:
        raw = last_turn if columns.answer == LAST_TURN else column_value(row, columns.answer)
        answer = _answer(raw, columns, required=options.answer_required)
    metadata = {name: value for name, value in row.items() if name not in (columns.prompt, columns.context)}
    demonstration = last_turn if columns.demonstration == LAST_TURN else column_value(row, columns.demonstration or "")
    if isinstance(demonstration, str) and demonstration.strip():
        metadata["demonstration"] = demonstration
    own_id = row.get(columns.id) if columns.id else None
    prompt = Prompt(id="" if own_id is None else str(own_id), answer=answer, metadata=metadata, **_spoken(turns))
    return prompt if prompt.id else replace(prompt, id=content_id(prompt.text, prompt.messages, prompt.answer))


def dressed(prompt: Prompt, options: TaskOptions) -> Prompt:
    """The prompt with the task's template around its last user turn and its system prompt before it.

    A system prompt replaces a system turn that the data brought.
    """
    if options.prompt_template is None and options.system_prompt is None:
        return prompt
    turns: list[Turn] = list(prompt.messages or ({"role": "user", "content": prompt.text or ""},))
    if options.prompt_template is not None:
        last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=None)
        if last is None:
            raise TaskError("no user turn to put prompt_template around")
        content = options.prompt_template.replace("{prompt}", turns[last]["content"])
        turns[last] = {"role": "user", "content": content}
    if options.system_prompt is not None:
        turns = [turn for turn in turns if turn["role"] != "system"]
        turns.insert(0, {"role": "system", "content": options.system_prompt})
    return replace(prompt, **{"text": None, "messages": None, **_spoken(tuple(turns))})


def check_prompt(prompt: Prompt, options: TaskOptions) -> str | None:
    """Why a prompt cannot be used, or None: empty, both or neither of text and messages, bad answer."""
    if (prompt.text is None) == (prompt.messages is None):
        return "exactly one of text and messages must be set"
    if prompt.text is not None and not prompt.text.strip():
        return "the prompt is empty"
    if prompt.messages is not None and not any(turn["content"].strip() for turn in prompt.messages):
        return "the prompt is empty"
    if prompt.answer is None or not prompt.answer.strip():
        return "no answer" if options.answer_required else None
    reason = options.check_answer(prompt.answer) if options.check_answer else None
    return f"answer {prompt.answer[:60]!r} cannot be graded: {reason}" if reason else None


def cached_check(check: AnswerCheck | None) -> AnswerCheck | None:
    """``check`` asked once for each distinct answer: a symbolic parser takes milliseconds."""
    if check is None:
        return None
    verdicts: dict[str, str | None] = {}

    def cached(answer: str) -> str | None:
        if answer not in verdicts:
            verdicts[answer] = check(answer)
        return verdicts[answer]

    return cached


def with_unique_ids(prompts: Sequence[Prompt], task: str) -> tuple[list[Prompt], int]:
    """(prompts with the task's name and unique ids, how many ids had to be numbered).

    The second prompt of an id becomes "id#2" and so on, in the source's order: two rows are never one group.
    """
    seen: Counter[str] = Counter()
    taken = {prompt.id for prompt in prompts}
    result, renamed = [], 0
    for prompt in prompts:
        name = prompt.id or content_id(prompt.text, prompt.messages, prompt.answer)
        seen[name] += 1
        if seen[name] > 1:
            renamed += 1
            base = name
            while name in taken:
                name = f"{base}#{seen[base]}"
                seen[base] += name in taken
            taken.add(name)
        result.append(replace(prompt, id=name, task=prompt.task or task))
    return result, renamed


def _turns(row: Mapping[str, Any], columns: Columns) -> tuple[tuple[Turn, ...], str | None]:
    """(the prompt as turns, the text of a last assistant turn)."""
    value = column_value(row, columns.prompt)
    if is_conversation(value):
        return split_conversation(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise TaskError(f"no prompt in column {columns.prompt!r}")
    if not isinstance(value, str | int | float):
        raise TaskError(f"the prompt in column {columns.prompt!r} is {type(value).__name__}, neither text nor turns")
    context = column_value(row, columns.context) if columns.context else None
    text = f"{value}\n\n{context}" if isinstance(context, str) and context.strip() else str(value)
    return ({"role": "user", "content": text},), None


def _spoken(turns: tuple[Turn, ...]) -> dict[str, Any]:
    """Prompt fields: a lone user turn is text, since a chat template puts text into one again."""
    if len(turns) == 1 and turns[0]["role"] == "user":
        return {"text": turns[0]["content"]}
    return {"messages": turns}


def _answer(value: Any, columns: Columns, *, required: bool) -> str | None:
    text = plain_text(value)
    if text is None:
        return None
    answer = extract_answer(text, columns.answer_form)
    if answer is None and required:
        raise TaskError(f"no {_FORM_MARKS[columns.answer_form]} with an answer in column {columns.answer!r}")
    return answer
