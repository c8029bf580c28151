"""Exact arithmetic at bounded cost: rationals as ``Fraction``, everything else as sympy expressions.

Whatever would make a number of more than ``MAX_BITS`` bits, or a tower of powers, is refused with
``TooCostly`` before it is computed. sympy is imported only when something is not rational.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial
from typing import Any

MAX_BITS = 100_000
MAX_BITS_IN_FUNCTION = 4_096
MAX_FACTORIAL = 5_000
MAX_GROWTH = 10_000
MAX_EXPONENT = 10**9
MAX_TOWER = 2


class Unreadable(Exception):
    """The text is no expression of the grammar."""


class TooCostly(Exception):
    """The text is readable, but finding its value would cost too much."""


@dataclass(frozen=True, slots=True)
class Value:
    """An exact rational, or a sympy expression.

    ``tower``: how many powers with irrational exponents are stacked. ``growth``: product of the rational
    exponents applied so far.
    """

    rational: Fraction | None
    expression: Any = None
    tower: int = 0
    growth: int = 1

    def sympy(self) -> Any:
        """The value as a sympy expression."""
        if self.rational is None:
            return self.expression
        import sympy

        return sympy.Rational(self.rational.numerator, self.rational.denominator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _small(value: Value) -> Any:
    if value.rational is not None and _bits(value.rational) > MAX_BITS_IN_FUNCTION:
        raise TooCostly("a number too large for a function or a root")
    return value.sympy()


def _checked(value: Fraction) -> Value:
    if _bits(value) > MAX_BITS:
        raise TooCostly(f"a number of more than {MAX_BITS} bits")
    return Value(value)


def _joined(result: Any, left: Value, right: Value) -> Value:
    if result.is_Rational:
        return _checked(Fraction(int(result.p), int(result.q)))
    if not result.free_symbols and result.is_comparable is False and str(result) in ("nan", "zoo"):
        raise Unreadable("an undefined value")
    return Value(None, result, max(left.tower, right.tower), max(left.growth, right.growth))


def negate(value: Value) -> Value:
    """-value."""
    return multiply(Value(Fraction(-1)), value)


def add(left: Value, right: Value) -> Value:
    """left + right."""
    if left.rational is not None and right.rational is not None:
        return _checked(left.rational + right.rational)
    return _joined(_small(left) + _small(right), left, right)


def multiply(left: Value, right: Value) -> Value:
    """left * right."""
    if left.rational is not None and right.rational is not None:
        return _checked(left.rational * right.rational)
    return _joined(_small(left) * _small(right), left, right)


def divide(left: Value, right: Value) -> Value:
    """left / right. ``Unreadable`` for a division by zero."""
    if right.rational == 0:
        raise Unreadable("division by zero")
    if left.rational is not None and right.rational is not None:
        return _checked(left.rational / right.rational)
    return _joined(_small(left) / _small(right), left, right)


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent, exact where both are rational and the result is."""
    if exponent.rational is None:
        tower = max(base.tower, exponent.tower + 1)
        _check_exponent(exponent, tower)
        result = _small(base) ** _small(exponent)
        return _joined(result, Value(None, tower=tower, growth=base.growth), exponent)
    if _bits(exponent.rational) > 64:
        raise TooCostly("an exponent too large")
    if base.rational is not None and exponent.rational.denominator == 1:
        return _rational_power(base.rational, int(exponent.rational))
    growth = base.growth * max(1, int(abs(exponent.rational)))
    if growth > MAX_GROWTH or growth * _coefficient_bits(base) > MAX_BITS:
        raise TooCostly("an exponent too large")
    return _joined(_small(base) ** _small(exponent), Value(None, tower=base.tower, growth=growth), exponent)


def _check_exponent(exponent: Value, tower: int) -> None:
    if tower > MAX_TOWER:
        raise TooCostly("a tower of powers")
    _check_magnitude(exponent, MAX_EXPONENT)


def _coefficient_bits(value: Value) -> int:
    """Bits of the rational factor of a product: sympy raises it to a power at once."""
    factor = value.sympy().as_coeff_Mul()[0]
    return max(int(factor.p).bit_length(), int(factor.q).bit_length()) if factor.is_Rational else 0


def _rational_power(base: Fraction, exponent: int) -> Value:
    if base == 0 and exponent < 0:
        raise Unreadable("division by zero")
    if base not in (0, 1, -1) and _bits(base) * abs(exponent) > MAX_BITS:
        raise TooCostly(f"a power of more than {MAX_BITS} bits")
    return Value(base**exponent)


def factorial_of(value: Value) -> Value:
    """value! for a non-negative integer, and for what has variables."""
    if value.rational is None:
        import sympy

        _check_variable(value)
        return Value(None, sympy.factorial(value.expression), tower=1, growth=value.growth)
    if value.rational.denominator != 1 or value.rational < 0:
        raise Unreadable("factorial of a fraction or a negative number")
    if value.rational > MAX_FACTORIAL:
        raise TooCostly(f"a factorial above {MAX_FACTORIAL}!")
    return Value(Fraction(factorial(int(value.rational))))


def binomial(upper: Value, lower: Value) -> Value:
    """n choose k for integers 0 <= k <= n, and for what has variables."""
    n, k = upper.rational, lower.rational
    if n is not None and k is not None:
        if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
            raise Unreadable("binomial of other than integers 0 <= k <= n")
        if n > MAX_FACTORIAL:
            raise TooCostly("a binomial too large")
        return Value(Fraction(comb(int(n), int(k))))
    import sympy

    for side in (upper, lower):
        _check_variable(side)
    return Value(None, sympy.binomial(_small(upper), _small(lower)), tower=1)


def _check_variable(value: Value) -> None:
    """sympy computes n! and binomials of constants at once, and expands them: only small and symbolic ones."""
    if value.rational is not None:
        if value.rational.denominator != 1 or abs(value.rational) > 20:
            raise TooCostly("a binomial with a large or fractional constant")
    elif value.tower or value.growth > 1 or not value.expression.free_symbols:
        raise TooCostly("a factorial of a constant or a power")


def _check_magnitude(value: Value, limit: int) -> None:
    """Refuse what is larger than ``limit``, or undefined, at two points; a power of it would be enormous, and
    reducing an argument of n bits takes n bits of pi.
    """
    import sympy

    for point in (sympy.Rational(-30719, 10_000), sympy.Rational(31173, 10_000)):
        expression = _small(value)
        number = abs(expression.evalf(5, subs=dict.fromkeys(expression.free_symbols, point)))
        if not number.is_number or not number.is_comparable or number > limit:
            raise TooCostly("an enormous number")


def apply(function: str, value: Value) -> Value:
    """A sympy function of one argument, by a name from ``FUNCTIONS`` (or floor, ceiling, Abs)."""
    import sympy

    known = {
        "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec,
        "csc": sympy.csc, "asin": sympy.asin, "acos": sympy.acos, "atan": sympy.atan, "sinh": sympy.sinh,
        "cosh": sympy.cosh, "tanh": sympy.tanh, "log": sympy.log, "exp": sympy.exp, "Abs": sympy.Abs,
        "floor": sympy.floor, "ceiling": sympy.ceiling,
    }  # fmt: skip
    if value.tower and function not in ("log", "Abs", "exp"):
        _check_magnitude(value, 2**MAX_BITS_IN_FUNCTION)
    tower = value.tower
    if function in ("exp", "sinh", "cosh", "tanh"):
        tower += 1
        _check_exponent(value, tower)
    return _joined(known[function](_small(value)), Value(None, tower=tower, growth=value.growth), value)
