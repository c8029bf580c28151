"""The built-in rewards on text and length: ``exact``, ``format``, ``length``."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from gspo.errors import RewardError
from gspo.rewards.extract import after_marker, after_thinking, boxed
from gspo.types import Rollout

_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def exact_reward(rollout: Rollout, *, marker: str | None = "####", ignore_case: bool = False) -> dict[str, float]:
    r"""1 if the text after the last ``marker`` is the reference answer, after normalisation of both; else 0.

    ``marker``: the answer is the rest of its line; ``"boxed"``: the last ``\boxed{}``; None: the whole
    completion after its thinking. A reference answer that contains the marker counts from there, too
    (GSM8K's ``#### 72``). Normalisation: Unicode NFC, white space runs become one space, a final period,
    dollar signs and the commas of 1,204 dropped. ``parsed`` is 0 where the marker is missing. Raises
    ``RewardError`` for a missing answer.
    """
    reference = rollout.prompt.answer
    if reference is None or not reference.strip():
        raise RewardError("the prompt has no reference answer")
    gold = normalised(_located(reference, marker) or reference, ignore_case=ignore_case)
    answer = _located(after_thinking(rollout.text), marker)
    if answer is None:
        return {"reward": 0.0, "parsed": 0.0}
    return {"reward": float(normalised(answer, ignore_case=ignore_case) == gold), "parsed": 1.0}


def _located(text: str, marker: str | None) -> str | None:
    if marker is None:
        return text.strip() or None
    return boxed(text) if marker == "boxed" else after_marker(text, marker)


def normalised(text: str, *, ignore_case: bool = False) -> str:
    """As ``exact_reward`` compares it."""
    text = " ".join(unicodedata.normalize("NFC", text).split()).removesuffix(".").replace("$", "").strip()
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"the format pattern {pattern!r} is no regular expression: {error}") from error


def format_reward(
    rollout: Rollout, *, pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", search: bool = False
) -> float:
    r"""1 if the whole completion matches ``pattern`` (a Python regular expression; . matches line ends),
    else 0.

    ``search``: anywhere in it is enough, for example ``pattern = '\\boxed\{'``. A pattern that takes
    exponential time ends at the worker's deadline, and the rollout is ungraded.
    """
    compiled = _compiled(pattern)
    match = compiled.search(rollout.text) if search else compiled.fullmatch(rollout.text)
    return float(match is not None)


def length_reward(rollout: Rollout, *, max_length: int, cache_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), on |y| = number of sampled tokens.

    0 if |y| <= max_length - cache_length; ((max_length - cache_length) - |y|) / cache_length up to
    max_length; -1 beyond. Raises ``RewardError`` unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length:
        raise RewardError(
            f"the length reward needs 0 < cache_length <= max_length, not {cache_length} and {max_length}"
        )
    expected = max_length - cache_length
    length = rollout.num_scored
    if length <= expected:
        return 0.0
    return (expected - length) / cache_length if length <= max_length else -1.0
