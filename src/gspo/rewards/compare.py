r"""Whether two answers are the same, exactly and strictly.

Rationals are compared exactly. Constants such as \sqrt{2}/2 are compared to 50 digits, relatively, so that
two tiny numbers do not become equal. Expressions with variables are equal if they agree, to 40 digits, at
fixed rational points (a polynomial identity test: no simplification, so bounded cost). A decimal stands for
another value only if it has at least six significant digits and is that value correctly rounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from gspo.rewards.arithmetic import Unreadable, Value, add, negate
from gspo.rewards.expression import evaluate
from gspo.rewards.fallback import same_by_math_verify
from gspo.rewards.notation import Items, Leaf, Node, Relation, Words, squeezed

MIN_SIGNIFICANT_DIGITS = 6
CONSTANT_DIGITS = 50
POINT_DIGITS = 40
MIN_POINTS = 3
_POINTS = ((137, 100), (-83, 100), (271, 128), (17, 32), (-311, 200), (1009, 400), (-5, 16), (733, 256))
_DECIMAL = re.compile(r"[-+]?(\d*)\.(\d+)")
_TARGET = re.compile(r"\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?(?:\s*\([a-zA-Z,\s]*\))?|[a-zA-Z](?:\s*[-+]\s*[a-zA-Z])+")
_FLIPPED = {"=": "=", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_BASED = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")


def same(gold: Node, answer: Node) -> bool:
    """Whether ``answer`` is ``gold``. Raises ``TooCostly``."""
    gold, answer = _single(gold), _single(answer)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _words(gold) == _words(answer) != ""
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relation(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_assigned(gold, answer)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _same_items(gold, answer)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _same_leaf(gold, answer)
    return False


def _single(node: Node) -> Node:
    """A list of one, or of one repeated, is its item."""
    if isinstance(node, Items) and node.kind == "list":
        distinct = tuple(dict.fromkeys(node.items))
        return distinct[0] if len(distinct) == 1 else Items("list", distinct)
    return node


def _words(node: Node) -> str:
    if isinstance(node, Words):
        return node.text
    if isinstance(node, Leaf) and "\\" not in node.text:
        return squeezed(node.text)
    return ""


def _same_items(gold: Items, answer: Items) -> bool:
    if gold.kind != answer.kind or len(gold.items) != len(answer.items):
        return False
    if gold.kind not in ("list", "union"):
        return all(same(g, a) for g, a in zip(gold.items, answer.items, strict=True))
    rest = list(answer.items)
    for item in gold.items:
        match = next((i for i, candidate in enumerate(rest) if same(item, candidate)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _same_assigned(gold: Node, answer: Node) -> bool:
    """One is "x = value", the other a value: the last side counts, if the first names something or is a
    chain.
    """
    relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
    if not isinstance(relation, Relation) or not isinstance(other, Leaf) or set(relation.operators) != {"="}:
        return False
    first, value = relation.parts[0], relation.parts[-1]
    if not _TARGET.fullmatch(first.text) and not _same_leaf(value, first):
        return False
    return _same_leaf(value, other) if relation is gold else _same_leaf(other, value)


def _same_relation(gold: Relation, answer: Relation) -> bool:
    flipped = Relation(tuple(_FLIPPED[o] for o in gold.operators[::-1]), gold.parts[::-1])
    for reading in (gold, flipped):
        if reading.operators == answer.operators and all(
            _same_leaf(g, a) for g, a in zip(reading.parts, answer.parts, strict=True)
        ):
            return True
    if len(gold.operators) > 1 or len(answer.operators) > 1:
        return False
    ours, theirs = _difference(gold), _difference(answer)
    if ours.rational is not None or theirs.rational is not None:
        return False  # an equation between constants says nothing
    factor = _constant_factor(ours.sympy(), theirs.sympy())
    if factor is None:
        return False
    operator = answer.operators[0]
    return gold.operators[0] == (operator if factor > 0 or operator in ("=", "!=") else _FLIPPED[operator])


def _difference(relation: Relation) -> Value:
    left, right = (evaluate(part.text) for part in relation.parts)
    return add(left, negate(right))


def _constant_factor(ours: Any, theirs: Any) -> float | None:
    """c where ours = c * theirs at every point, or None."""
    pairs = [(a, b) for a, b in _values(ours, theirs) if b != 0]
    if len(pairs) < MIN_POINTS or pairs[0][0] == 0:
        return None
    first = pairs[0][0] / pairs[0][1]
    if not first.is_real or any(not _close(a, first * b, POINT_DIGITS - 3) for a, b in pairs):
        return None
    return float(first)


def _same_leaf(gold: Leaf, answer: Leaf) -> bool:
    if gold.unit and answer.unit and gold.unit.rstrip("s") != answer.unit.rstrip("s"):
        return False
    if gold.text.replace(" ", "") == answer.text.replace(" ", ""):
        return True
    based = _BASED.fullmatch(gold.text), _BASED.fullmatch(answer.text)
    if any(based):
        return _same_based(gold.text, answer.text)
    try:
        ours = evaluate(gold.text)
    except Unreadable:
        return same_by_math_verify(gold.text, answer.text)
    try:
        theirs = evaluate(answer.text)
    except Unreadable:
        return False
    return _same_value(ours, theirs, gold.text, answer.text)


def _same_based(gold: str, answer: str) -> bool:
    """1011_2: the same digits, and the same base where both name one."""
    (digits, base), (their_digits, their_base) = (
        (match.group(1), match.group(2)) if (match := _BASED.fullmatch(text)) else (text, None)
        for text in (gold.strip(), answer.strip())
    )
    return digits.casefold() == their_digits.casefold() and (not base or not their_base or base == their_base)


def _same_value(gold: Value, answer: Value, gold_text: str, answer_text: str) -> bool:
    if gold.rational is not None and answer.rational is not None and gold.rational == answer.rational:
        return True
    if _rounds_to(gold_text, answer) or _rounds_to(answer_text, gold):
        return True
    if gold.rational is not None and answer.rational is not None:
        return False
    ours, theirs = gold.sympy(), answer.sympy()
    if ours == theirs:
        return True
    if ours.is_infinite or theirs.is_infinite:
        return False
    if not ours.free_symbols and not theirs.free_symbols:
        if ours.is_zero or theirs.is_zero:
            return _vanishes(theirs if ours.is_zero else ours)
        return _close(ours.evalf(CONSTANT_DIGITS + 10), theirs.evalf(CONSTANT_DIGITS + 10), CONSTANT_DIGITS)
    if ours.free_symbols != theirs.free_symbols and len(ours.free_symbols) == len(theirs.free_symbols):
        return False
    pairs = _values(ours, theirs)
    return len(pairs) >= MIN_POINTS and all(_close(a, b, POINT_DIGITS - 3) for a, b in pairs)


def _vanishes(constant: Any) -> bool:
    """Whether a constant is 0: no precision up to 400 digits finds a digit of it."""
    from sympy.core.evalf import PrecisionExhausted

    try:
        return bool(constant.evalf(5, maxn=400, strict=True) == 0)
    except PrecisionExhausted:
        return True


def _rounds_to(text: str, value: Value) -> bool:
    """Whether ``text`` is a decimal of enough digits, and ``value`` correctly rounded to it."""
    match = _DECIMAL.fullmatch(text.replace(" ", ""))
    if not match or len((match.group(1) + match.group(2)).lstrip("0")) < MIN_SIGNIFICANT_DIGITS:
        return False
    half = Fraction(1, 2 * 10 ** len(match.group(2)))
    decimal = Fraction(text.replace(" ", ""))
    if value.rational is not None:
        return abs(value.rational - decimal) <= half
    if value.expression.free_symbols or not value.expression.is_real:
        return False
    return bool(abs(value.expression - Value(decimal).sympy()).evalf(CONSTANT_DIGITS) <= Value(half).sympy())


def _values(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """Both expressions at the points where both have a finite value; the real ones if there are enough."""
    import sympy

    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    pairs = []
    for start in range(len(_POINTS)):
        chosen = {
            symbol: sympy.Rational(*_POINTS[(start + 3 * i) % len(_POINTS)]) + sympy.Rational(i * i, 7)
            for i, symbol in enumerate(symbols)
        }
        pair = [side.evalf(POINT_DIGITS + 10, subs=chosen) for side in (ours, theirs)]
        if all(value.is_number and value.is_finite for value in pair):
            pairs.append((pair[0], pair[1]))
    real = [pair for pair in pairs if pair[0].is_real and pair[1].is_real]
    return real if len(real) >= MIN_POINTS else pairs


def _close(left: Any, right: Any, digits: int) -> bool:
    """Equal relative to the larger, to so many digits; exact zeros equal only what vanishes at that
    precision.
    """
    scale = max(abs(left), abs(right))
    if scale < Fraction(1, 10**digits) and (left == 0 or right == 0):
        return True
    return bool(abs(left - right) <= scale * Value(Fraction(1, 10**digits)).sympy())


def readable(nodes: Sequence[Node]) -> None:
    """Raise ``Unreadable`` or ``TooCostly`` unless some reading of ``nodes`` can be given a value."""
    problem: Unreadable | None = None
    for node in nodes:
        try:
            _check(node)
            return
        except Unreadable as error:
            problem = error
    if problem is not None:
        raise problem


def _check(node: Node) -> None:
    if isinstance(node, Words):
        if not node.text:
            raise Unreadable("words without letters")
    elif isinstance(node, Leaf):
        _check_leaf(node)
    else:
        for part in node.items if isinstance(node, Items) else node.parts:
            _check(part)


def _check_leaf(leaf: Leaf) -> None:
    if _BASED.fullmatch(leaf.text):
        return
    try:
        evaluate(leaf.text)
    except Unreadable:
        if not same_by_math_verify(leaf.text, leaf.text):
            raise
