"""Reference answers as they stand in data: plain, behind GSM8K's "####", or in a "\\boxed{}".

Only reading: whether an answer can be graded is for ``rewards`` to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gspo.errors import TaskError

AnswerForm = Literal["plain", "hashes", "boxed"]
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def plain_text(value: Any) -> str | None:
    """A column's value as answer text, None where it is empty (None, "", NaN).

    Whole floats lose their ".0" (27.0 becomes "27"); a list or array of one is its element. TaskError for any
    other container.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, bool | int | float):
        return str(value)
    kind = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")
    raise TaskError(f"the answer is {kind}; one string or number is needed")


def answer_form(values: Sequence[Any]) -> AnswerForm:
    """The form that more than half of the non-empty texts have; "plain" where none has."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    for form in ("hashes", "boxed"):
        marked = sum(extract_answer(text, form) is not None for text in texts)
        if texts and 2 * marked > len(texts):
            return form
    return "plain"


def extract_answer(text: str, form: AnswerForm) -> str | None:
    """The answer in ``text``: all of it, what follows the last "####" (commas between thousands dropped), or
    the inside of the last balanced ``\\boxed{}``; None where the mark is missing or nothing follows it."""
    if form == "plain":
        return text.strip() or None
    if form == "hashes":
        _, mark, tail = text.rpartition("####")
        return (_THOUSANDS.sub("", tail.strip()) or None) if mark else None
    return last_boxed(text)


def last_boxed(text: str) -> str | None:
    """The inside of the last ``\\boxed{...}`` or ``\\fbox{...}`` with balanced braces, also ``\\boxed 5``."""
    for match in reversed(list(_BOX.finditer(text))):
        if text[match.end() : match.end() + 1] != "{":
            bare = re.match(r"[^\s$}\\]+", text[match.end() :])
            if bare and text[match.end() - 1].isspace():
                return bare.group()
            continue
        inside = _balanced(text, match.end())
        if inside is not None:
            return inside.strip() or None
    return None


def _balanced(text: str, start: int) -> str | None:
    """What lies between the brace at ``start`` and its partner; escaped braces do not count."""
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[start + 1 : position]
        position += 1
    return None
