r"""The built-in ``math`` reward: is the completion's final answer the reference answer?

Where the answer stands is declared (``extract``), what it says is read by a closed grammar at bounded cost
(``notation``, ``expression``), and two answers are compared exactly (``compare``); math-verify judges what
that grammar does not know (``fallback``). An answer is right, wrong, absent (counted apart), or too costly
to check (wrong, counted apart); a reference answer that cannot be read makes the rollout ungraded, never
wrong.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Literal

from gspo.errors import RewardError
from gspo.rewards.arithmetic import TooCostly, Unreadable
from gspo.rewards.compare import readable, same
from gspo.rewards.extract import AnswerFormat, extract_answer
from gspo.rewards.notation import MAX_LENGTH, Leaf, Node, Words, read, squeezed, words_of
from gspo.types import Rollout

BUDGET_S = 1.0
"""Time for one comparison, on top of the guards; only where a timer can interrupt it (a process's main
thread).
"""


_GIVEN_UP = (
    TooCostly,
    RecursionError,
    MemoryError,
    ArithmeticError,
    TypeError,
    ValueError,
    AttributeError,
    NotImplementedError,
)
"""Too costly, or the algebra systems stumbled over the answer."""


@dataclass(frozen=True, slots=True)
class Gold:
    """A reference answer as it can be graded. ``reason`` says why not; then ``readings`` is empty."""

    readings: tuple[Node, ...] = ()
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether answers can be graded against it."""
        return not self.reason


def math_reward(
    rollout: Rollout,
    *,
    answer_format: AnswerFormat = "boxed",
    percent: Literal["value", "ignore"] = "value",
    accept_fbox: bool = False,
) -> dict[str, float]:
    r"""1 if the completion's answer equals ``rollout.prompt.answer``, else 0.

    ``answer_format``: where the answer stands (``extract.extract_answer``). ``percent``: "value" reads 10% as
    0.1 (so that 10 is not 10%), "ignore" drops percent signs on both sides. ``accept_fbox``: ``\fbox`` is a box
    too. Parts beside the reward: ``parsed`` is 1 if there was an answer, ``unresolved`` 1 if checking it was
    given up (too costly). Raises ``RewardError`` for a reference answer that cannot be graded: the rollout is
    then ungraded.
    """
    gold = parse_gold(rollout.prompt.answer, percent=percent)
    if not gold.ok:
        raise RewardError(f"the reference answer {rollout.prompt.answer!r} cannot be graded: {gold.reason}")
    answer = extract_answer(rollout.text, answer_format, accept_fbox=accept_fbox)
    if answer is None:
        return {"reward": 0.0, "parsed": 0.0, "unresolved": 0.0}
    verdict = grade_answer(gold, answer, percent=percent)
    return {"reward": float(verdict is True), "parsed": 1.0, "unresolved": float(verdict is None)}


def grade_answer(gold: Gold, answer: str, *, percent: Literal["value", "ignore"] = "value") -> bool | None:
    """Whether ``answer`` (already extracted) is ``gold``; None where the comparison was given up."""
    if any(isinstance(node, Words) and node.text == words_of(answer) for node in gold.readings):
        return True
    try:
        with _budget(BUDGET_S):
            readings = _readings(answer, percent)
            return any(same(g, a) for g in gold.readings for a in readings)
    except Unreadable:
        return False
    except _GIVEN_UP:
        return None


@lru_cache(maxsize=4096)
def parse_gold(answer: str | None, *, percent: Literal["value", "ignore"] = "value") -> Gold:
    r"""Read a reference answer: plain or LaTeX, boxed or not, or a worked solution ending in ``#### 72``.

    ``Gold.ok`` False, with a reason, for None, an empty one, a sentence, or notation that cannot be read.
    """
    if answer is None or not answer.strip():
        return Gold(reason="it is empty")
    text = _final(answer)
    try:
        with _budget(BUDGET_S):
            readings = _readings(text, percent)
            readable(readings)
    except Unreadable as error:
        if re.fullmatch(r"[A-Za-z]+", text):
            return Gold((Words(squeezed(text)),))
        return Gold(reason=f"it cannot be read as mathematics ({error}); put words in \\text{{}}, or use `exact`")
    except _GIVEN_UP as error:
        return Gold(reason=f"it cannot be evaluated ({error or type(error).__name__})")
    return Gold(readings)


def gold_problem(answer: str | None) -> str | None:
    """Why ``math`` could not grade against this reference answer; None where it can. For tasks, at load
    time.
    """
    return parse_gold(answer).reason or None


def _final(answer: str) -> str:
    for answer_format in ("####", "boxed"):
        if found := extract_answer(answer, answer_format):  # type: ignore[arg-type]
            return found
    return answer.strip()


_PROSE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]{2,}\b")
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_WORD = re.compile(r"[A-Za-z]{3,}")
_KNOWN_WORDS = re.compile(r"\b(?:and|or|sqrt|pi|sin|cos|tan|log|ln|exp|infty|oo|infinity|inf)\b")


def _readings(text: str, percent: str) -> tuple[Node, ...]:
    if len(text) > MAX_LENGTH:  # before any pattern that could take quadratic time
        raise TooCostly(f"longer than {MAX_LENGTH} characters")
    if percent == "ignore":
        text = text.replace("\\%", "").replace("%", "")
    stripped = text.strip().strip("$").strip()
    if _INTEGER.fullmatch(stripped):
        return (Leaf(stripped),)
    if _WORD.fullmatch(stripped) and not _KNOWN_WORDS.fullmatch(stripped):
        return (Words(squeezed(stripped)),)
    if _PROSE.search(_KNOWN_WORDS.sub(" ", re.sub(r"\\[a-z]+\s*\{[^{}]*\}|[\d})]\s+[A-Za-z ]+$", " ", stripped))):
        raise Unreadable("a sentence")
    return read(text)


@contextlib.contextmanager
def _budget(seconds: float) -> Iterator[None]:
    """Interrupt the block with ``TooCostly`` where a timer can: in the main thread, with no other timer
    running.
    """
    usable = threading.current_thread() is threading.main_thread() and not any(signal.getitimer(signal.ITIMER_REAL))
    if not usable:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _OutOfTime as error:
        raise TooCostly(f"took more than {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


class _OutOfTime(BaseException):
    """Passes through ``except Exception``, of which the algebra systems have many."""


def warm_up() -> None:
    """Import and exercise what grading needs, once, so that workers share it and no deadline pays for it."""
    for gold, answer in ((r"\sqrt{2}+x", r"x+2/\sqrt{2}"), (r"\mathbb{R}", r"\mathbb{Z}")):
        grade_answer(parse_gold(gold), answer)
