"""Chat turns as they stand in data: "role"/"content", or ShareGPT's "from"/"value"; text parts are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.errors import TaskError

Turn = Mapping[str, str]
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_KNOWN = ("system", "developer", "user", "assistant", "tool")


def is_conversation(value: Any) -> bool:
    """Whether a column's value is a non-empty list of chat turns."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(turn, Mapping) and bool({"role", "from"} & set(turn)) for turn in value)
    )


def split_conversation(value: Sequence[Mapping[str, Any]]) -> tuple[tuple[Turn, ...], str | None]:
    """(turns up to the last user's, the text of a last assistant turn or None).

    TaskError where a role is unknown, a content is no text, or nothing but an assistant's turn is left.
    """
    turns = tuple(_turn(turn) for turn in value)
    if turns[-1]["role"] != "assistant":
        return turns, None
    if len(turns) == 1:
        raise TaskError("the conversation holds an assistant turn only; a user turn is needed")
    return turns[:-1], turns[-1]["content"]


def _turn(turn: Mapping[str, Any]) -> Turn:
    role = str(turn.get("role") or turn.get("from"))
    role = _ROLES.get(role, role)
    if role not in _KNOWN:
        raise TaskError(f"unknown chat role {role!r}; known: {', '.join(_KNOWN)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list | tuple):
        content = "".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise TaskError(f"the content of the {role} turn is {type(content).__name__}, not text")
    return {"role": role, "content": content}


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TaskError(f"a chat turn holds a part of kind {kind!r}; only text is supported")
