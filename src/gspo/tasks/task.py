"""What a task is once it is loaded: prompts in a fixed order, and which of them a step takes.

Nothing here has state: the data position follows from the step, so a resume has nothing to restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gspo.errors import TaskError
from gspo.seeding import seed as derive_seed
from gspo.types import IntArray, Prompt

AnswerCheck = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Where prompts come from and how a row becomes one; plain arguments, no configuration object."""

    source: str | Sequence[Mapping[str, Any]] | Iterable[Prompt]
    """A .jsonl, .json or .parquet file, a hub data set or a folder saved by ``datasets``,
    ``reasoning_gym:NAME``, a generator (``addition``), ``module:function``, a list of dicts, or Prompts."""
    name: str | None = None
    """Name in logs and file names; the source's by default."""
    split: str | None = None
    """Split of a hub data set ("train" by default), or part of a generator ("train" or "test")."""
    subset: str | None = None
    """Configuration of a hub data set."""
    size: int | None = None
    """Rows to take: the first of a file, or how many a generator makes."""
    seed: int | None = None
    """Seed of a generator; ``default_seed`` of ``load_task`` by default."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a generator; for rows: ``bad_rows``, ``answer_required``, ``id_column``,
    ``demonstration_column``."""
    prompt_column: str | None = None
    """Column with the prompt, "a.b" for a nested one; found by its usual names when not given."""
    answer_column: str | None = None
    """Column with the reference answer; likewise."""
    system_prompt: str | None = None
    """System message put before each prompt."""
    prompt_template: str | None = None
    """Text with {prompt} in it, put around each prompt."""
    answer_required: bool = True
    """Whether a row without an answer is a bad row; False for rewards that need no reference answer."""
    check_answer: AnswerCheck | None = None
    """Says why an answer cannot be graded, or None where it can."""
    bad_rows: Literal["error", "drop"] = "error"
    """What becomes of rows that cannot be used: an error before step 0, or dropped and listed."""


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why one row cannot be used. ``line`` counts from 1: the file's line, or the row's number."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Overlong:
    """A prompt that was dropped for its length in tokens."""

    id: str
    length: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened while a task was loaded."""

    source: str
    rows_read: int
    unit: str = "line"  # what RowProblem.line counts: "line" of a file, "row" of anything else
    columns: Mapping[str, str] = field(default_factory=dict)  # role -> column: prompt, answer, ...
    problems: tuple[RowProblem, ...] = ()
    overlong: tuple[Overlong, ...] = ()  # dropped by encode_task
    notes: tuple[str, ...] = ()

    def problem_lines(self, limit: int = 10) -> list[str]:
        """The first ``limit`` problems, a line each, and how many more there are."""
        lines = [f"{self.unit} {problem.line}: {problem.reason}" for problem in self.problems[:limit]]
        if len(self.problems) > limit:
            lines.append(f"... and {len(self.problems) - limit} more")
        return lines


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts with unique ids in the source's order. Built by ``load_task``; ``encode_task`` adds ``ids``."""

    name: str
    prompts: tuple[Prompt, ...]
    report: LoadReport
    ids: Mapping[str, IntArray] = field(default_factory=dict)  # prompt id -> token ids [P] int64

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def fingerprint(self) -> str:
        """Hash of all ids and answers in order, 16 hex digits: a resume compares it to see the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            digest.update(f"{prompt.id}\x1f{prompt.answer}\x1e".encode())
        return digest.hexdigest()

    def order(self, seed: int, epoch: int) -> IntArray:
        """The epoch's permutation of 0 .. n-1, [n] int64, the same on every machine; no state."""
        generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "task_order", epoch)))
        return generator.permutation(len(self.prompts)).astype(np.int64)

    def batch(self, step: int, prompts_per_step: int, seed: int) -> list[Prompt]:
        """The prompts of ``step`` (from 0).

        Step k takes positions k * prompts_per_step onwards of the epochs laid end to end; each epoch is a
        fresh permutation and holds every prompt exactly once. Where a batch straddles two epochs, those of
        the new epoch's first prompts that the batch already holds are moved back, so no batch repeats a
        prompt. Raises TaskError where ``prompts_per_step`` is not in 1 .. n.
        """
        size = len(self.prompts)
        if not 1 <= prompts_per_step <= size:
            raise TaskError(
                f"prompts_per_step = {prompts_per_step} does not fit task {self.name!r} with {size} prompts: "
                f"a step takes each prompt at most once. Valid sizes are 1 to {size}; or use a larger task."
            )
        epoch, start = divmod(step * prompts_per_step, size)
        indices = self._epoch_order(epoch, prompts_per_step, seed)[start : start + prompts_per_step]
        if len(indices) < prompts_per_step:
            following = self._epoch_order(epoch + 1, prompts_per_step, seed)
            indices = np.concatenate([indices, following[: prompts_per_step - len(indices)]])
        return [self.prompts[int(index)] for index in indices]

    def _epoch_order(self, epoch: int, prompts_per_step: int, seed: int) -> IntArray:
        """``order`` with the repeats inside straddling batches moved back."""
        size = len(self.prompts)
        first = epoch
        while first > 0 and (first * size) % prompts_per_step:
            first -= 1
            if size >= 2 * prompts_per_step:
                break  # moves then never reach an epoch's last batch, so one epoch back is enough
        indices = self.order(seed, first)
        for later in range(first + 1, epoch + 1):
            held = indices[size - (later * size) % prompts_per_step :]
            indices = _without_repeats(self.order(seed, later), held, prompts_per_step - len(held))
        return indices


def _without_repeats(indices: IntArray, held: IntArray, head: int) -> IntArray:
    """``indices`` with its first ``head`` entries free of ``held``: clashes trade places with later ones."""
    result = indices.copy()
    taken = set(held.tolist())
    spare = head
    for position in range(head):
        if int(result[position]) not in taken:
            continue
        while int(result[spare]) in taken:
            spare += 1
        result[[position, spare]] = result[[spare, position]]
        spare += 1
    return result


def shared_prompts(first: Task, second: Task) -> list[str]:
    """Ids in ``second`` whose prompt also occurs in ``first``: leaks of training into a held-out task."""
    seen = {content_id(prompt.text, prompt.messages, None) for prompt in first.prompts}
    return [p.id for p in second.prompts if content_id(p.text, p.messages, None) in seen]


def content_id(text: str | None, messages: Sequence[Mapping[str, str]] | None, answer: str | None) -> str:
    """A stable id from what a prompt says: 16 hex digits of BLAKE2b over text or turns, and answer."""
    parts = [text or ""]
    parts += [f"{turn['role']}\x1f{turn['content']}" for turn in messages or ()]
    parts.append(answer or "")
    data = "\x1e".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()
