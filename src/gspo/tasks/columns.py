"""Which column of a row holds what: the common shapes by name, and nothing by guessing.

Two candidates that disagree are an error that lists the columns; two that say the same are one. Reading a row
by the mapping found here is the business of ``rows``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.errors import TaskError
from gspo.tasks.answers import AnswerForm, answer_form, extract_answer, plain_text
from gspo.tasks.messages import Turn, is_conversation, split_conversation

PROMPT_COLUMNS = (
    "prompt", "question", "problem", "query", "instruction", "input", "messages", "conversations"
)  # fmt: skip
ANSWER_COLUMNS = (
    "answer", "final_answer", "ground_truth", "target", "label", "gold", "expected_answer",
    "reward_model.ground_truth",
)  # fmt: skip
WORKED_COLUMNS = (
    "demonstration", "solution", "rationale", "completion", "response", "output", "extra_info.answer"
)  # fmt: skip
ID_COLUMNS = ("id", "uid", "uuid", "unique_id", "question_id", "problem_id")
LAST_TURN = "<last assistant turn>"
SNIFFED_ROWS = 100


@dataclass(frozen=True, slots=True)
class Columns:
    """What each column is. A name with a dot is nested; None = there is none."""

    prompt: str
    answer: str | None = None
    answer_form: AnswerForm = "plain"
    demonstration: str | None = None
    context: str | None = None  # put behind the prompt with a blank line between ("input" beside "instruction")
    id: str | None = None
    found: tuple[str, ...] = ()

    def roles(self) -> dict[str, str]:
        """Role -> column, for reports and recipes; the answer's form in brackets where it is not plain."""
        roles = {
            "prompt": self.prompt,
            "context": self.context,
            "demonstration": self.demonstration,
            "id": self.id,
        }
        form = "" if self.answer_form == "plain" else f" ({self.answer_form})"
        roles["answer"] = f"{self.answer}{form}" if self.answer else None
        return {role: column for role, column in roles.items() if column}


def recognise_columns(
    rows: Sequence[Mapping[str, Any]],
    *,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    demonstration_column: str | None = None,
    id_column: str | None = None,
) -> Columns:
    """Find the columns of ``rows`` (the first 100 are looked at) by their usual names; a name given is taken.

    Without an answer column, ``answer`` is None. TaskError, listing the columns found and how to name one,
    where no prompt column is found, where a name given does not exist, or where two candidates disagree.
    """
    sample = [row for row in rows[:SNIFFED_ROWS] if row]
    found = tuple(dict.fromkeys(name for row in sample for name in row))
    if not found:
        raise TaskError("no column found: the rows are empty")
    named = {
        "prompt_column": prompt_column,
        "answer_column": answer_column,
        "options.demonstration_column": demonstration_column,
        "options.id_column": id_column,
    }
    for role, name in named.items():
        if name is not None and not _present(sample, name):
            raise TaskError(f"{role} = {name!r} is not among the columns: {', '.join(found)}")
    prompt, context = (prompt_column, None) if prompt_column else _prompt_column(sample, found)
    demonstration = demonstration_column or _demonstration_column(sample, found, prompt)
    if answer_column is None:
        answer_column = _answer_column(sample, found, prompt, demonstration)
    form: AnswerForm = "plain"
    if answer_column is not None:
        form = answer_form([_answer_value(row, answer_column, prompt) for row in sample])
    if demonstration is None and form != "plain":
        demonstration = answer_column
    return Columns(
        prompt=prompt,
        answer=answer_column,
        answer_form=form,
        demonstration=demonstration,
        context=context,
        id=id_column or next((name for name in ID_COLUMNS if name in found), None),
        found=found,
    )


def column_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, None where there is none; "a.b" is b inside a if no column has that name."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head) if dot else None
    return column_value(inner, rest) if isinstance(inner, Mapping) else None


def _present(sample: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(column_value(row, name) is not None for row in sample) or any(name in row for row in sample)


def _candidates(sample: Sequence[Mapping[str, Any]], found: Sequence[str], names: Sequence[str]) -> list[str]:
    """Columns called like one of ``names``, in the order of ``names``; upper and lower case are the same."""
    lower = {column.lower(): column for column in reversed(found)}
    result = []
    for name in names:
        if "." in name and any(column_value(row, name) is not None for row in sample):
            result.append(name)
        elif name in lower and any(row.get(lower[name]) is not None for row in sample):
            result.append(lower[name])
    return result


def _prompt_column(sample: Sequence[Mapping[str, Any]], found: Sequence[str]) -> tuple[str, str | None]:
    """(prompt column, context column)."""
    candidates = _candidates(sample, found, PROMPT_COLUMNS)
    if not candidates:
        raise TaskError(
            f"no prompt column found. Columns: {', '.join(found)}. "
            f'Name it: prompt_column = "..." (known names: {", ".join(PROMPT_COLUMNS)})'
        )
    if [name.lower() for name in candidates] == ["instruction", "input"]:
        return candidates[0], candidates[1]
    first = candidates[0]
    for other in candidates[1:]:
        if any(_prompt_text(row, first) != _prompt_text(row, other) for row in sample):
            raise TaskError(_ambiguous("prompt", first, other, found))
    return first, None


def _answer_column(
    sample: Sequence[Mapping[str, Any]], found: Sequence[str], prompt: str, demonstration: str | None
) -> str | None:
    """A column of answers; else one of worked answers that mark their result, or called "solution"."""
    candidates = [name for name in _candidates(sample, found, ANSWER_COLUMNS) if name != prompt]
    for other in candidates[1:]:
        if any(_gold(row, candidates[0], prompt) != _gold(row, other, prompt) for row in sample):
            raise TaskError(_ambiguous("answer", candidates[0], other, found))
    if candidates:
        return candidates[0]
    if demonstration is None:
        return None
    marked = answer_form([_answer_value(row, demonstration, prompt) for row in sample]) != "plain"
    return demonstration if marked or demonstration.lower() == "solution" else None


def _demonstration_column(sample: Sequence[Mapping[str, Any]], found: Sequence[str], prompt: str) -> str | None:
    candidates = [name for name in _candidates(sample, found, WORKED_COLUMNS) if name != prompt]
    if candidates:
        return candidates[0]
    turns = [column_value(row, prompt) for row in sample]
    has_last_turn = any(is_conversation(value) and _split(value)[1] is not None for value in turns)
    return LAST_TURN if has_last_turn else None


def _answer_value(row: Mapping[str, Any], name: str, prompt: str) -> Any:
    if name != LAST_TURN:
        return column_value(row, name)
    turns = column_value(row, prompt)
    return _split(turns)[1] if is_conversation(turns) else None


def _split(value: Any) -> tuple[tuple[Turn, ...], str | None]:
    """``split_conversation``; rows it refuses count as empty here, they are listed when they are read."""
    try:
        return split_conversation(value)
    except TaskError:
        return (), None


def _gold(row: Mapping[str, Any], name: str, prompt: str) -> str | None:
    """The answer in its shortest form, to compare two columns."""
    try:
        value = plain_text(_answer_value(row, name, prompt))
    except TaskError:
        return None
    return None if value is None else extract_answer(value, answer_form([value]))


def _prompt_text(row: Mapping[str, Any], name: str) -> str | None:
    """The prompt as comparable text: a conversation counts by its user turns."""
    value = column_value(row, name)
    if is_conversation(value):
        turns, _ = _split(value)
        return "\n".join(turn["content"] for turn in turns if turn["role"] == "user").strip()
    return None if value is None else str(value).strip()


def _ambiguous(role: Literal["prompt", "answer"], first: str, second: str, found: Sequence[str]) -> str:
    return (
        f"two columns could be the {role} and differ: {first!r} and {second!r}. Columns: {', '.join(found)}. "
        f'Name the one you mean: {role}_column = "{first}" or {role}_column = "{second}"'
    )
