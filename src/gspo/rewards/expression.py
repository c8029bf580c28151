r"""Reading one mathematical expression, LaTeX or plain, into an exact value, at bounded cost.

A recursive-descent parser over a closed set of commands: names in the text are looked up in tables here and
nothing in it is ever evaluated as code. Texts too long, too deep or of too many symbols are refused with
``TooCostly``, as ``arithmetic`` refuses numbers too large.
"""

from __future__ import annotations

import re
from fractions import Fraction

from gspo.rewards.arithmetic import (
    TooCostly,
    Unreadable,
    Value,
    add,
    apply,
    binomial,
    divide,
    factorial_of,
    multiply,
    negate,
    power,
)

MAX_LENGTH = 1_000
MAX_TOKENS = 400
MAX_DEPTH = 40

GREEK = frozenset(
    {
        *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta"),
        *("iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi"),
        *("chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega"),
        *("ell", "hbar"),
    }
)
FUNCTIONS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
    "ln": "log", "log": "log", "exp": "exp", "asin": "asin", "acos": "acos", "atan": "atan", "abs": "Abs",
}  # fmt: skip
_WORDS = sorted([*FUNCTIONS, "sqrt", "pi", "infty", "infinity", "oo"], key=len, reverse=True)
_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>\d*\.\d*\\overline\s*\{\d+\})"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
    r"|\\(?P<command>[a-zA-Z]+|[%|{}$#])"
    rf"|(?P<word>(?:{'|'.join(_WORDS)})(?![a-zA-Z]))"
    r"|(?P<letter>[a-zA-Z])"
    r"|(?P<sign>\*\*|[-+*/^_!()\[\]{}|%]))"
)
_PRODUCT = {"*", "cdot", "times"}
_QUOTIENT = {"/", "div"}


def evaluate(text: str) -> Value:
    """The value of ``text``. Raises ``Unreadable`` or ``TooCostly``."""
    if len(text) > MAX_LENGTH:
        raise TooCostly(f"longer than {MAX_LENGTH} characters")
    return _Parser(_tokens(text)).whole()


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"unexpected {text[position : position + 10]!r}")
        kind = match.lastgroup or ""
        tokens.append((kind, match.group(kind)))
        position = match.end()
    if len(tokens) > MAX_TOKENS:
        raise TooCostly(f"more than {MAX_TOKENS} symbols")
    if not tokens:
        raise Unreadable("empty")
    return tokens


class _Parser:
    """sum: product (+|- product)*; product: power ((*|/|nothing) power)*; power: atom postfix* (^ script)?"""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def whole(self) -> Value:
        value = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable(f"unexpected {self.tokens[self.at][1]!r}")
        return value

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self, text: str) -> bool:
        if self.peek()[1] == text and self.peek()[0] in ("sign", "command"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"expected {text!r}, found {self.peek()[1]!r}")

    def sum(self) -> Value:
        value = self.signed_product()
        while self.peek()[1] in ("+", "-") and self.peek()[0] == "sign":
            minus = self.peek()[1] == "-"
            self.at += 1
            term = self.signed_product()
            value = add(value, negate(term) if minus else term)
        return value

    def signed_product(self) -> Value:
        minus = False
        while self.peek() in (("sign", "-"), ("sign", "+")):
            minus ^= self.peek()[1] == "-"
            self.at += 1
        value = self.product()
        return negate(value) if minus else value

    def product(self) -> Value:
        value = self.power()
        while True:
            kind, text = self.peek()
            if kind in ("sign", "command") and text in _PRODUCT | _QUOTIENT:
                self.at += 1
                minus = self.take("-")
                factor = self.power()
                factor = negate(factor) if minus else factor
                value = multiply(value, factor) if text in _PRODUCT else divide(value, factor)
            elif self.starts_factor(kind, text):
                value = multiply(value, self.power())
            else:
                return value

    def starts_factor(self, kind: str, text: str) -> bool:
        if kind == "number":  # "2 3" is no product, "x 2" hardly ever meant
            return False
        if kind == "sign":
            return text in "([{"
        if kind == "command":
            return text in ("frac", "sqrt", "pi", "binom", "lfloor", "lceil", "infty", "lbrace") or (
                text in FUNCTIONS or text in GREEK
            )
        return kind in ("letter", "word")

    def power(self) -> Value:
        value = self.postfix(self.atom())
        if self.take("^") or self.take("**"):
            exponent = self.script()
            if self.peek()[1] in ("^", "**"):
                raise Unreadable("a^b^c without braces")
            return self.postfix(power(value, exponent))
        return value

    def postfix(self, value: Value) -> Value:
        while True:
            if self.take("!"):
                value = factorial_of(value)
            elif self.take("%"):
                value = divide(value, Value(Fraction(100)))
            else:
                return value

    def script(self) -> Value:
        """An exponent: a group, a number or one atom."""
        return negate(self.atom()) if self.take("-") else self.atom()

    def command_argument(self) -> Value:
        r"""As ``script``, but of a number only its first digit: \frac12 is 1/2."""
        kind, text = self.peek()
        if kind == "number" and text.isdigit() and len(text) > 1:
            self.tokens[self.at] = ("number", text[1:])
            return Value(Fraction(int(text[0])))
        return self.atom()

    def atom(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooCostly(f"nested deeper than {MAX_DEPTH}")
        kind, text = self.peek()
        self.at += 1
        value = self.atom_of(kind, text)
        self.depth -= 1
        return value

    def atom_of(self, kind: str, text: str) -> Value:
        if kind == "number":
            return self.number(text)
        if kind == "repeating":
            return Value(_repeating(text))
        if kind == "sign" and text in "([{|":
            return self.group(text)
        if kind == "letter":
            return self.letter(text)
        if kind in ("command", "word"):
            return self.named(text)
        raise Unreadable(f"unexpected {text!r}" if text else "unexpected end")

    def number(self, text: str) -> Value:
        if len(text) > 10_000:
            raise TooCostly("a number of more than 10,000 digits")
        value = Fraction(text.replace(",", "").rstrip(".") or "0")
        if text.isdigit() and self.peek() == ("command", "frac"):
            value += self.mixed_part()
        return Value(value)

    def mixed_part(self) -> Fraction:
        r"""The fraction of a mixed number 1\frac{1}{2}; 0, and nothing read, before any other \frac."""
        parts = [text for _, text in self.tokens[self.at + 1 : self.at + 7]]
        if len(parts) < 6 or parts[0::3] != ["{", "{"] or parts[2::3] != ["}", "}"]:
            return Fraction(0)
        if not parts[1].isdigit() or not parts[4].isdigit() or int(parts[4]) == 0:
            return Fraction(0)
        self.at += 7
        return Fraction(int(parts[1]), int(parts[4]))

    def group(self, opening: str) -> Value:
        value = self.sum()
        self.expect({"(": ")", "[": "]", "{": "}", "|": "|"}[opening])
        return apply("Abs", value) if opening == "|" else value

    def letter(self, text: str) -> Value:
        import sympy

        if text == "e":
            return Value(None, sympy.E)
        if text == "i":
            return Value(None, sympy.I)
        return Value(None, sympy.Symbol(text + self.subscript()))

    def subscript(self) -> str:
        if not self.take("_"):
            return ""
        if not self.take("{"):
            self.at += 1
            return "_" + self.tokens[self.at - 1][1] if self.at <= len(self.tokens) else ""
        start = self.at
        while not self.take("}"):
            if self.peek()[0] not in ("number", "letter", "command"):
                raise Unreadable("odd subscript")
            self.at += 1
        return "_" + "".join(text for _, text in self.tokens[start : self.at - 1])

    def named(self, name: str) -> Value:
        import sympy

        if name == "pi":
            return Value(None, sympy.pi)
        if name in ("infty", "infinity", "oo"):
            return Value(None, sympy.oo)
        if name in ("frac", "binom"):
            upper, lower = self.command_argument(), self.command_argument()
            return divide(upper, lower) if name == "frac" else binomial(upper, lower)
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil"):
            value = self.sum()
            self.expect("r" + name[1:])
            return apply("floor" if name == "lfloor" else "ceiling", value)
        if name in ("|", "lvert", "vert"):
            value = self.sum()
            self.expect({"lvert": "rvert"}.get(name, name))
            return apply("Abs", value)
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return Value(None, sympy.Symbol("\\" + name + self.subscript()))
        raise Unreadable(f"unknown command {name!r}")

    def root(self) -> Value:
        degree = Value(Fraction(2))
        if self.take("["):
            degree = self.sum()
            self.expect("]")
        return power(self.atom(), divide(Value(Fraction(1)), degree))

    def function(self, name: str) -> Value:
        base = None
        exponent = None
        if name == "log" and self.take("_"):
            base = self.command_argument()
        if self.take("^"):
            exponent = self.script()
        if exponent is not None and exponent.rational == -1:
            raise Unreadable("f^-1 is an inverse or a reciprocal")
        argument = self.argument()
        value = apply(FUNCTIONS[name], argument)
        if base is not None:
            value = divide(value, apply("log", base))
        return value if exponent is None else power(value, exponent)

    def argument(self) -> Value:
        """What a function without parentheses applies to: sin 2x, log 8, but sin x cos y is a product."""
        if self.peek()[1] in ("(", "[", "{", "|"):
            return self.atom()
        value = self.power()
        while self.peek()[0] == "letter" or self.peek()[1] == "pi":
            value = multiply(value, self.power())
        return value


def _repeating(text: str) -> Fraction:
    whole, _, rest = text.partition(".")
    fixed, _, cycle = rest.partition("\\overline")
    cycle = cycle.strip().strip("{}")
    if len(text) > 60:
        raise TooCostly("a long repeating decimal")
    scale = 10 ** len(fixed)
    head = Fraction(int(whole or "0") * scale + int(fixed or "0"), scale)
    return head + Fraction(int(cycle), (10 ** len(cycle) - 1) * scale)
