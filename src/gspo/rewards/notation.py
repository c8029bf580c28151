r"""Reading the notation around expressions: lists, sets, tuples, intervals, relations, matrices, words,
units.

``read`` turns an answer's text into a small tree whose leaves are expressions still in text form;
``expression`` gives those a value. Nothing is evaluated here, and every step is linear or bounded by
``MAX_LENGTH``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gspo.rewards.arithmetic import TooCostly, Unreadable
from gspo.rewards.extract import closing_braces

MAX_LENGTH = 2_000
MAX_ITEMS = 50
MAX_NESTING = 20


@dataclass(frozen=True, slots=True)
class Leaf:
    """An expression in text form, with the unit that followed it."""

    text: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, as lower-case letters and digits."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several answers. ``kind``: "list" (no order: bare or in braces), "union", "matrix RxC", or the two
    brackets of a tuple or interval, such as "()" and "[)".
    """

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain ``parts[0] operators[0] parts[1] ...``; operators: = < > <= >= !=."""

    operators: tuple[str, ...]
    parts: tuple[Leaf, ...]


Node = Leaf | Words | Items | Relation

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
        "√": r"\sqrt ", "∞": r"\infty ", "≤": "<=", "≥": ">=", "≠": "!=", "∪": r"\cup ", "°": "", "²": "^2",
        "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "±": r"\pm ", "％": "%",
        "，": ",", "（": "(", "）": ")", "\u00a0": " ", "\u200b": "",
    }
)  # fmt: skip
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\", "\n"),  # a matrix row's end; before anything else that starts with a backslash
        (r"\{,\}|,\\!", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\\(?:displaystyle|limits|textstyle)(?![a-zA-Z])", " "),
        (r"\\[()\[\]$]|\$|\*\*(?=\S.*\*\*\s*$)|\*\*\s*$", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\(?:degrees?|circ)(?![a-zA-Z])", ""),
        (r"\\l?dots(?![a-zA-Z])", "…"),
        (r"\\leq?(?:slant)?(?![a-zA-Z])", "<="),
        (r"\\geq?(?:slant)?(?![a-zA-Z])", ">="),
        (r"\\neq?(?![a-zA-Z])", "!="),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\%", "%"),
        (r"\\l(?:brace|angle)(?![a-zA-Z])", r"\\{"),
        (r"\\r(?:brace|angle)(?![a-zA-Z])", r"\\}"),
        (r"\\operatorname\s*\{([a-zA-Z]+)\}", r"\\\1 "),
    )
)
_TEXT = re.compile(r"\\(text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mbox|rm|bf)\s*\{([^{}]*)\}")
_UNIT_JOINTS = (
    (re.compile(r"⟧\s*\^\s*\{?\s*(-?\d)\s*\}?"), r"^\1⟧"),
    (re.compile(r"⟧\s*(?:/|\\cdot(?![a-zA-Z]))?\s*⟦"), "/"),
)
_UNIT_WORD = re.compile(
    r"^(.*[\d})])\s+((?:mm|cm|dm|km|mi|ft|in|yd|kg|mg|lb|lbs|oz|ml|mL|min|hr|hrs|sec|cents?|mph|kph"
    r"|[a-zA-Z]{4,})(?:\s+[a-zA-Z]+)*\.?)$"
)
_OPERATOR = re.compile(r"<=|>=|!=|=|<|>")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+)+\s*(?:⟦[^⟧]*⟧)?")
_MATRIX = re.compile(r"\s*\\begin\{([pbvV]?matrix)\}(.*)\\end\{\1\}\s*", re.DOTALL)
_OPEN, _CLOSE = "⟦", "⟧"


def clean(text: str) -> str:
    """Without delimiters, spacing commands, sizes, degree signs and bold; ``\\text{...}`` as a bracketed
    token.
    """
    if len(text) > MAX_LENGTH:
        raise TooCostly(f"longer than {MAX_LENGTH} characters")
    text = text.replace(_OPEN, "").replace(_CLOSE, "").translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _TEXT.sub(_word_token, text)
    for pattern, replacement in _UNIT_JOINTS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,").strip()


def _word_token(match: re.Match[str]) -> str:
    command, inner = match.group(1), match.group(2).strip()
    if inner in ("and", "or"):
        return f" {inner} "
    before = match.string[max(0, match.start() - 20) : match.start()]
    is_unit = (
        inner[:1].isalpha() and command in ("text", "mathrm", "rm", "mbox") and re.search(r"[\d})]\s*/?\s*$", before)
    )
    if not re.search(r"[a-zA-Z]{2}", inner) and not is_unit:
        return f" {inner} "
    return f"{_OPEN}{inner}{_CLOSE}"


def read(text: str) -> tuple[Node, ...]:
    """The readings of an answer: one, or two where 1,204 may be a number or a list.

    Raises ``Unreadable`` for text that has no reading and ``TooCostly`` for one too long.
    """
    cleaned = clean(text)
    if _GROUPED.fullmatch(cleaned):
        return Leaf(cleaned.replace(",", "")), _listed(cleaned.split(","), 0)
    return (_node(cleaned, 0),)


def _node(text: str, depth: int) -> Node:
    text = text.strip()
    if depth > MAX_NESTING:
        raise TooCostly("lists nested too deep")
    if not text:
        raise Unreadable("an empty item")
    if text[0] == _OPEN and text.find(_CLOSE) == len(text) - 1:
        return Words(squeezed(text))
    if _GROUPED.fullmatch(text):
        return Leaf(text.replace(",", ""))
    if _RATIO.fullmatch(text):
        return Items(":", tuple(_leaf(part) for part in text.split(":")))
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix.group(2), depth)
    parts = _split(text)
    if len(parts) > 1:
        return _listed(parts, depth)
    inner = _bracketed(text)
    if inner is not None:
        return _enclosed(*inner, depth)
    if "\\cup" in text:
        return Items("union", tuple(_node(part, depth + 1) for part in re.split(r"\\cup(?![a-zA-Z])", text)))
    if re.search(r"\\pm(?![a-zA-Z])", text):
        return _plus_or_minus(text, depth)
    return _relation_or_leaf(text)


def _listed(parts: list[str], depth: int) -> Items:
    if len(parts) > MAX_ITEMS:
        raise TooCostly(f"more than {MAX_ITEMS} items")
    return Items("list", tuple(_node(part, depth + 1) for part in parts))


def _enclosed(opening: str, content: str, closing: str, depth: int) -> Node:
    parts = _split(content)
    if opening == "\\{":
        return _listed(parts, depth) if content.strip() else Items("list", ())
    if len(parts) == 1:
        return _node(content, depth + 1) if opening + closing in ("()", "[]") else Leaf(opening + content + closing)
    return Items(opening + closing, _listed(parts, depth).items)


def _plus_or_minus(text: str, depth: int) -> Items:
    signs = (("+", "-"), ("-", "+"))
    variants = [re.sub(r"\\mp(?![a-zA-Z])", m, re.sub(r"\\pm(?![a-zA-Z])", p, text)) for p, m in signs]
    return Items("list", tuple(_node(variant, depth + 1) for variant in variants))


def _matrix(content: str, depth: int) -> Items:
    rows = [row.split("&") for row in content.strip().split("\n") if row.strip()]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise Unreadable("a matrix with uneven rows")
    cells = [cell for row in rows for cell in row]
    return Items(f"matrix {len(rows)}x{len(rows[0])}", _listed(cells, depth).items)


def _split(text: str) -> list[str]:
    """At commas, semicolons, "and", "or" that no bracket or brace encloses."""
    parts, start, level, i = [], 0, 0, 0
    connector = re.compile(r"(?:,|;)(?:\s*(?:and|or)\b)?|\b(?:and|or)\b")
    while i < len(text):
        char = text[i]
        if char == "\\" and text[i + 1 : i + 2] not in ("{", "}"):
            i += 2
            continue
        if char in "([{" + _OPEN:
            level += 1
        elif char in ")]}" + _CLOSE:
            level -= 1
        elif level == 0 and (match := connector.match(text, i)) and not (i and text[i - 1].isalpha()):
            parts.append(text[start:i])
            start = i = match.end()
            continue
        i += 1
    parts.append(text[start:])
    return parts


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """(opening, content, closing) where the first bracket encloses all of the text."""
    opening = text[:2] if text.startswith("\\{") else text[:1]
    if opening not in ("(", "[", "\\{", "]"):
        return None
    level, i = 1, len(opening)
    while i < len(text):
        char = text[i]
        if char in "([{":
            level += 1
        elif char in ")]}":
            level -= 1
            if level == 0:
                break
        i += 1
    if i != len(text) - 1 or (opening == "\\{") != (text[i - 1 :] == "\\}"):
        return None
    end = i - 1 if opening == "\\{" else i
    return opening, text[len(opening) : end], text[end:]


def _relation_or_leaf(text: str) -> Node:
    text = re.split(r"\\(?:approx|sim)(?:eq)?(?![a-zA-Z])|≈", text)[0].strip()
    if member := re.fullmatch(r"[a-zA-Z]\w*\s*\\in(?![a-zA-Z])(.*)", text, re.DOTALL):
        return _node(member.group(1), 1)
    operators = tuple(_OPERATOR.findall(text))
    if operators and text.count("{") == len(closing_braces(text)):
        parts = tuple(_leaf(part) for part in _OPERATOR.split(text))
        if any(not part.text for part in parts):
            raise Unreadable("a relation without one of its sides")
        if set(operators) == {"="} and _bracketed(parts[-1].text):
            return _node(parts[-1].text, 1)  # (x, y) = (1, 2)
        return Relation(operators, parts)
    return _leaf(text)


def _leaf(text: str) -> Leaf:
    text = text.strip()
    if text.endswith(_CLOSE) and not text.startswith(_OPEN):
        text, _, unit = text[:-1].rpartition(_OPEN)
        return Leaf(text.strip(), squeezed(unit))
    if match := _UNIT_WORD.match(text):
        return Leaf(match.group(1), squeezed(match.group(2)))
    return Leaf(text)


def squeezed(text: str) -> str:
    """Lower-case letters and digits alone."""
    return "".join(char for char in text.casefold() if char.isalnum())


def words_of(text: str) -> str:
    """``squeezed``, without the names of LaTeX commands."""
    return squeezed(re.sub(r"\\[a-zA-Z]+", " ", text[:MAX_LENGTH]))
