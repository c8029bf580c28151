"""math-verify, for the notation that ``expression`` does not read, behind a closed list of what it may see.

math-verify can take unbounded time and memory on powers, factorials, sums and integrals, and its parser
knows commands that build arrays of any size. So only texts made of listed commands, with short numbers, no
factorial and no power inside a power are handed over; its own timeouts (signals, main thread only) stay
off. Its parser builds expressions from a grammar and does not evaluate text as code; the closed list also
keeps out underscored and quoted names, should that change.
"""

from __future__ import annotations

import logging
import re

_COMMANDS = frozenset(
    {
        *("frac", "sqrt", "cdot", "times", "pi", "infty", "mathbb", "mathbf", "cup", "cap", "setminus", "in"),
        *("emptyset", "varnothing", "mid", "vec", "overline", "sin", "cos", "tan", "log", "ln", "theta", "alpha"),
        *("beta", "gamma", "lambda", "mu", "phi", "omega", "notin", "subset", "subseteq"),
    }
)
_CHARACTERS = re.compile(r"[A-Za-z0-9\s\\{}()\[\],.+\-*/^_=<>|:]*")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_LONG_NUMBER = re.compile(r"\d{13}")
_LONG_EXPONENT = re.compile(r"\^\s*\{?\s*-?\d{4}")
_NESTED_POWER = re.compile(r"\^[^^]*\{[^{}]*\^|\^\s*\{?\s*[^{}\s]\s*\^")
_DANGEROUS = re.compile(r"__|[A-Za-z]{13}|\b(?:import|eval|exec|lambda|open|os|sys)\b")
MAX_LENGTH = 120
MAX_POWERS = 4
MAX_BRACKETS = 16


def may_be_handed_over(text: str) -> bool:
    """Whether the text is made only of what is known to be cheap and harmless."""
    return (
        len(text) <= MAX_LENGTH
        and bool(_CHARACTERS.fullmatch(text))
        and all(command in _COMMANDS for command in _COMMAND.findall(text))
        and text.count("^") <= MAX_POWERS
        and sum(text.count(bracket) for bracket in "([{|") <= MAX_BRACKETS
        and not any(p.search(text) for p in (_LONG_NUMBER, _LONG_EXPONENT, _NESTED_POWER))
        and not _DANGEROUS.search(_COMMAND.sub(" ", text))
    )


def same_by_math_verify(gold: str, answer: str) -> bool:
    """math-verify's verdict on two LaTeX expressions; False where it may not see or cannot read one."""
    if not may_be_handed_over(gold) or not may_be_handed_over(answer):
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off; ours are on
    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    ours, theirs = (
        parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]
        for text in (gold, answer)
    )
    return bool(ours and theirs and verify(ours, theirs, timeout_seconds=None))
