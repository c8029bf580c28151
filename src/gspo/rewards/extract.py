"""Finding the answer in what the model wrote. Text to text, in time linear in its length; nothing is
evaluated.

The answer format is declared, never guessed: an answer that is not where the recipe says it must be is no
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from gspo.errors import RewardError

AnswerFormat = Literal["boxed", "####", "answer_tag", "last_number", "any", "text"]

_BOX = re.compile(r"\\boxed\s*\{")
_BOX_OR_FBOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_JOINT = re.compile(r"(?:[\s,$;]|\\[,;!\s()\[\]]|\band\b|\\text\s*\{\s*and\s*\}|\\quad)*")
_SEPARATOR = re.compile(r",|\band\b")
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:\s?/\s?\d+)?\s?%?")
_PHRASE = re.compile(r"answer\s*(?:is\b|:|=|\*\*:|:\*\*)[ \t*:]*([^\n]+)", re.IGNORECASE)


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; nothing where a ``<think>`` was never closed."""
    end = text.rfind("</think>")
    if end >= 0:
        return text[end + len("</think>") :]
    return "" if "<think>" in text else text


def closing_braces(text: str) -> dict[int, int]:
    """Position of each balanced opening brace -> position of its closing one. Escaped braces do not count."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    escaped = False
    for i, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            stack.append(i)
        elif char == "}" and stack:
            pairs[stack.pop()] = i
    return pairs


def boxed(text: str, *, accept_fbox: bool = False) -> str | None:
    r"""Content of the last balanced ``\boxed{}``; None where there is none or it is empty.

    The last box together with those before it that only commas or "and" separate from it is one list,
    joined by commas. A box inside a box is unwrapped.
    """
    pattern = _BOX_OR_FBOX if accept_fbox else _BOX
    pairs = closing_braces(text)
    boxes: list[tuple[int, int, str]] = []
    reached = 0
    for match in pattern.finditer(text):
        brace = match.end() - 1
        if match.start() >= reached and brace in pairs:
            reached = pairs[brace] + 1
            boxes.append((match.start(), reached, text[brace + 1 : reached - 1]))
    if not boxes:
        return None
    items = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        between = text[end:start]
        if not _JOINT.fullmatch(between) or not _SEPARATOR.search(between):
            break
        items.insert(0, content)
    unwrapped = [_unwrap(item, pattern) for item in items]
    if any(not item for item in unwrapped):
        return None
    return ", ".join(dict.fromkeys(unwrapped))


def _unwrap(content: str, pattern: re.Pattern[str]) -> str:
    text = content.strip()
    start, end = 0, len(text)
    pairs = closing_braces(text)
    while (match := pattern.match(text, start, end)) and pairs.get(match.end() - 1) == end - 1:
        start, end = match.end(), end - 1
    return text[start:end].strip()


def after_marker(text: str, marker: str) -> str | None:
    """The rest of the line after the last ``marker``, stripped; None where there is none or nothing
    follows.
    """
    _, found, rest = text.rpartition(marker)
    line = rest.strip().split("\n", 1)[0].strip() if found else ""
    return line or None


def answer_tag(text: str) -> str | None:
    """Content of the last ``<answer>...</answer>``, of its box if it holds one."""
    contents: list[str] = _TAG.findall(text)
    if not contents:
        return None
    return boxed(contents[-1]) or contents[-1].strip() or None


def last_number(text: str) -> str | None:
    """The last integer, decimal or simple fraction, with its percent sign."""
    numbers = [match.group().strip() for match in _NUMBER.finditer(text) if match.group().strip()]
    return numbers[-1] if numbers else None


def _phrase(text: str) -> str | None:
    lines: list[str] = _PHRASE.findall(text)
    return lines[-1].strip().rstrip(".").strip("* ") or None if lines else None


def _any(text: str) -> str | None:
    return boxed(text) or answer_tag(text) or after_marker(text, "####") or _phrase(text)


def _whole(text: str) -> str | None:
    return text.strip() or None


_EXTRACTORS: Mapping[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "####": lambda text: after_marker(text, "####"),
    "answer_tag": answer_tag,
    "last_number": last_number,
    "any": _any,
    "text": _whole,
}


def extract_answer(text: str, answer_format: AnswerFormat = "boxed", *, accept_fbox: bool = False) -> str | None:
    r"""The answer that ``text`` gives after its thinking, or None.

    ``boxed``: last balanced ``\boxed{}``. ``####``: what follows the last ``####`` on its line.
    ``answer_tag``: last ``<answer>``. ``last_number``: the last number. ``any``: the first of box, tag,
    ``####`` and "answer is" that is there. ``text``: all of it. Raises ``RewardError`` for another format.
    """
    if answer_format not in _EXTRACTORS:
        raise RewardError(f'no answer_format "{answer_format}": one of {", ".join(_EXTRACTORS)}')
    visible = after_thinking(text)
    if answer_format == "boxed":
        return boxed(visible, accept_fbox=accept_fbox)
    return _EXTRACTORS[answer_format](visible)
