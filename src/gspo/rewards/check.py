"""Trying a reward function out before a run depends on it: ``check_reward``, behind ``gspo check reward``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo.errors import RewardError
from gspo.rewards.contract import RewardSpec, Verdict
from gspo.rewards.workers import Grader
from gspo.types import FinishReason, Grading, Prompt, Rollout, TokenRow

SLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class RewardReport:
    """What a reward function did on examples. ``problems`` is empty where nothing is wrong with it."""

    name: str
    verdicts: tuple[Verdict, ...]
    seconds_per_call: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it can be used as it is."""
        return not self.problems

    def __str__(self) -> str:
        lines = [f"reward {self.name}: {len(self.verdicts)} examples, {self.seconds_per_call * 1e3:.2f} ms a call"]
        lines += [f"  {i}: {_shown(verdict)}" for i, verdict in enumerate(self.verdicts)]
        return "\n".join(lines + [f"  problem: {problem}" for problem in self.problems])


def example(
    text: str,
    *,
    prompt: str = "",
    answer: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    num_tokens: int | None = None,
) -> Rollout:
    """A rollout made by hand, to call a reward on. Its token ids stand for nothing; ``num_tokens`` is their
    number (a quarter of the characters by default).
    """
    count = max(1, len(text) // 4) if num_tokens is None else num_tokens
    row = TokenRow(
        token_ids=np.zeros(count + 1, np.int64),
        sampled_mask=np.arange(count + 1) > 0,
        sampled_logprobs=np.zeros(count + 1, np.float32),
        versions=np.zeros(count + 1, np.int64),
    )
    source = Prompt(id="example", text=prompt, answer=answer, task="example", metadata=metadata or {})
    return Rollout(prompt=source, index=0, rows=(row,), finish_reason=FinishReason.STOP, text=text)


def check_reward(
    spec: RewardSpec, examples: Sequence[Rollout], *, timeout_s: float = 10.0, in_process: bool = False
) -> RewardReport:
    """Run a reward function on ``examples`` as a run would, twice, and say what is wrong with it.

    Problems: examples it leaves ungraded (with the reason), answers that differ between the two passes, the
    same value for every example, more than ``SLOW_S`` seconds a call. Raises ``RewardError`` where it
    cannot be loaded, or for a wrong shape (TRL's signature), or without examples.
    """
    if not examples:
        raise RewardError("check_reward needs at least one example: gspo.rewards.example(text, answer=...)")
    with Grader([spec], workers=1, timeout_s=timeout_s, in_process=in_process) as grader:
        start = time.perf_counter()
        verdicts = grader.grade(examples)
        seconds = (time.perf_counter() - start) / len(examples)
        again = grader.grade(examples)
    return RewardReport(spec.name, tuple(verdicts), seconds, tuple(_problems(verdicts, again, seconds)))


def _problems(verdicts: Sequence[Verdict], again: Sequence[Verdict], seconds: float) -> list[str]:
    found = [
        f"example {i} is {verdict.grading}: {verdict.error}"
        for i, verdict in enumerate(verdicts)
        if verdict.grading is not Grading.GRADED
    ]
    for i, (first, second) in enumerate(zip(verdicts, again, strict=True)):
        if first.reward != second.reward:
            found.append(f"example {i} got {first.reward}, then {second.reward}: a reward should not vary")
    rewards = {verdict.reward for verdict in verdicts}
    if len(verdicts) > 1 and len(rewards) == 1 and None not in rewards:
        found.append(f"every example got {rewards.pop()}: nothing can be learned from a constant")
    if seconds > SLOW_S:
        found.append(f"{seconds:.1f} s a call: with many rollouts a step this will dominate the run")
    return found


def _shown(verdict: Verdict) -> str:
    if verdict.grading is not Grading.GRADED:
        return f"{verdict.grading}: {verdict.error}"
    parts = ", ".join(f"{name} {value}" for name, value in verdict.parts.items())
    return f"{verdict.reward}" + (f" ({parts})" if len(verdict.parts) > 1 else "")
