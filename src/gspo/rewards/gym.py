"""The built-in ``reasoning_gym`` reward: the generator's own scorer, on the entry kept in the prompt's
metadata.

Some of reasoning-gym's scorers (read in 0.1.25) pass the answer to ``eval`` or to sympy's ``parse_expr``,
which evaluates it: those see only answers made of what their task needs, and no scorer sees an answer that
calls or imports something dangerous. Such an answer scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from gspo.errors import MissingExtra, RewardError
from gspo.rewards.extract import AnswerFormat, extract_answer
from gspo.types import Rollout

_ARITHMETIC = re.compile(r"(?!.*(?:\*\*|//))[0-9\s+\-*/().]*")
_NAMES = r"(?:sin|cos|tan|exp|log|ln|sqrt|asin|acos|atan|Integral)"
_ALGEBRA = re.compile(
    r"(?!.*\*\*\s*(?!-?\d{1,2}(?![\d.])|\(-?\d{1,2}(?:/\d{1,2})?\)))"  # exponents: short numbers, 3/2 in parentheses
    r"(?!(?:.*\)\s*\*\*){4})(?!.*\*\*\s*-?\d+\s*\*\*)(?!.*\d{13})"
    rf"(?:[0-9\s+\-*/(),]|\.(?![A-Za-z_])|(?<![A-Za-z])(?:[A-Za-z](?![A-Za-z_(])|{_NAMES}(?=\()|pi(?![A-Za-z_(])))*",
    re.DOTALL,
)
_LITERAL = re.compile(r"""(?!.*__)[A-Za-z0-9\s\[\],.'"_\-]*""", re.DOTALL)
EVALUATED: Mapping[str, re.Pattern[str]] = {
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "polynomial_multiplication": _ALGEBRA,
    "simple_integration": _ALGEBRA,
    "intermediate_integration": _ALGEBRA,
    "string_insertion": _LITERAL,
    "spiral_matrix": _LITERAL,
    "binary_matrix": _LITERAL,
    "n_queens": _LITERAL,
}
"""Generators whose scorer evaluates the answer -> what an answer may consist of."""

_NEVER = re.compile(
    r"__|\blambda\b|\b(?:eval|exec|compile|open|getattr|setattr|globals|locals|vars|input|breakpoint|help|exit|quit)"
    r"\s*\("
)
MAX_EVALUATED_LENGTH = 2_000
_STUMBLES = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError)


def reasoning_gym_reward(
    rollout: Rollout, *, answer_format: AnswerFormat = "answer_tag", entry_key: str = "entry"
) -> dict[str, float]:
    """reasoning-gym's ``score_answer(answer, entry)``, in 0 .. 1.

    ``answer_format``: where the answer stands (``extract.extract_answer``); no answer scores 0 with
    ``parsed`` 0. ``entry_key``: the metadata key of the generator's entry, a dict with ``question``,
    ``answer`` and ``metadata`` (whose ``source_dataset`` names the generator); without that key the
    prompt's metadata itself is the entry. An answer over which the scorer stumbles scores 0 with
    ``unresolved`` 1, if it scores the entry's own answer. Raises ``RewardError`` for an entry that is none,
    ``MissingExtra`` without the package.
    """
    entry = entry_of(rollout, entry_key)
    generator = entry["metadata"]["source_dataset"]
    score = _scorer(generator)
    answer = extract_answer(rollout.text, answer_format)
    if answer is None:
        return {"reward": 0.0, "parsed": 0.0, "unresolved": 0.0}
    if not may_be_scored(generator, answer):
        return {"reward": 0.0, "parsed": 1.0, "unresolved": 1.0}
    try:
        return {"reward": float(score(answer, entry)), "parsed": 1.0, "unresolved": 0.0}
    except _STUMBLES:
        score(entry["answer"], entry)  # raises where the entry, not the answer, is at fault
        return {"reward": 0.0, "parsed": 1.0, "unresolved": 1.0}


def may_be_scored(generator: str, answer: str) -> bool:
    """Whether the generator's scorer may see the answer: see the module's text."""
    pattern = EVALUATED.get(generator)
    if _NEVER.search(answer):
        return False
    return pattern is None or (len(answer) <= MAX_EVALUATED_LENGTH and pattern.fullmatch(answer) is not None)


def entry_of(rollout: Rollout, entry_key: str) -> dict[str, Any]:
    """The generator's entry of a rollout's prompt. Raises ``RewardError`` if it is not one."""
    metadata = rollout.prompt.metadata
    entry = metadata.get(entry_key, metadata)
    inner = entry.get("metadata", entry) if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(inner, Mapping) or "source_dataset" not in inner:
        raise RewardError(
            f'prompt "{rollout.prompt.id}" has no reasoning-gym entry under metadata["{entry_key}"] '
            "(a dict whose metadata names its source_dataset): use a reasoning-gym task with this reward"
        )
    return {"answer": rollout.prompt.answer, **entry, "metadata": dict(inner)}


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "reasoning-gym", "the reasoning_gym reward") from error
    return reasoning_gym


def warm_up() -> None:
    """Import the package once, so that workers share it. Raises ``MissingExtra`` without it."""
    _package()


@lru_cache(maxsize=128)
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    reasoning_gym = _package()
    try:
        scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    except (ValueError, KeyError) as error:
        raise RewardError(f'reasoning-gym has no generator "{dataset}": {error}') from error
    return scorer
