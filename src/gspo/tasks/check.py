"""``check_task``: what a task holds, and what would go wrong, before a run is started with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo.tasks.load import load_task
from gspo.tasks.sources import is_dotted_path
from gspo.tasks.task import LoadReport, Task, TaskOptions, content_id
from gspo.types import Prompt


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What ``check_task`` found. ``str(report)`` is for people, ``ok`` for programs."""

    name: str
    prompts: int
    load: LoadReport
    prompt_characters: tuple[int, int, int]  # shortest, median, longest
    answers: int  # prompts with an answer
    distinct_answers: int
    most_common_answer: tuple[str, int] | None
    demonstrations: int
    chat: int  # prompts that hold messages
    repeated_prompts: int  # prompts whose text occurs earlier
    first: Prompt | None
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row can be used and nothing is suspicious."""
        return not self.load.problems and not self.warnings

    def __str__(self) -> str:
        columns = ", ".join(f"{role} = {column}" for role, column in self.load.columns.items())
        shortest, median, longest = self.prompt_characters
        lines = [
            f"task {self.name}: {self.prompts} prompts of {self.load.rows_read} rows ({self.load.source})",
            f"columns: {columns or 'given as prompts'}",
            f"prompt characters: {shortest} to {longest}, median {median}; {self.chat} are chat messages",
            f"answers: {self.answers}, {self.distinct_answers} distinct",
            f"demonstrations: {self.demonstrations}",
        ]
        if self.first is not None:
            lines.append(f"first prompt: {_spoken(self.first)[:200]!r} -> {self.first.answer!r}")
        lines += [f"note: {note}" for note in self.load.notes]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.load.problems:
            lines.append(f"{len(self.load.problems)} rows cannot be used:")
            lines += [f"  {line}" for line in self.load.problem_lines()]
        return "\n".join(lines)


def check_task(task: Task | TaskOptions, *, default_seed: int = 0) -> TaskReport:
    """Report on a task, or on options: those are loaded with bad rows listed instead of raised.

    A "module:function" is called twice, since a resumed run must find the same prompts in the same order.
    """
    warnings = []
    if isinstance(task, TaskOptions):
        options = replace(task, bad_rows="drop")
        if "bad_rows" in options.options:
            options = replace(options, options={**options.options, "bad_rows": "drop"})
        task = load_task(options, default_seed=default_seed)
        if isinstance(options.source, str) and is_dotted_path(options.source):
            again = load_task(options, default_seed=default_seed)
            if again.fingerprint != task.fingerprint:
                warnings.append(f"{options.source} gave other prompts at its second call: a resume would not match")
    return _report(task, warnings)


def _report(task: Task, warnings: Sequence[str]) -> TaskReport:
    texts = [_spoken(prompt) for prompt in task.prompts]
    lengths = sorted(map(len, texts)) or [0]
    answers = Counter(prompt.answer for prompt in task.prompts if prompt.answer is not None)
    common = answers.most_common(1)
    distinct = len({content_id(prompt.text, prompt.messages, None) for prompt in task.prompts})
    found = list(warnings)
    if common and common[0][1] > max(10, len(task) // 2):
        found.append(f"{common[0][1]} of {len(task)} answers are {common[0][0]!r}: guessing it is rewarded")
    return TaskReport(
        name=task.name,
        prompts=len(task),
        load=task.report,
        prompt_characters=(lengths[0], lengths[len(lengths) // 2], lengths[-1]),
        answers=sum(answers.values()),
        distinct_answers=len(answers),
        most_common_answer=common[0] if common else None,
        demonstrations=sum("demonstration" in prompt.metadata for prompt in task.prompts),
        chat=sum(prompt.messages is not None for prompt in task.prompts),
        repeated_prompts=len(task) - distinct,
        first=task.prompts[0] if task.prompts else None,
        warnings=tuple(found),
    )


def _spoken(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt.messages or ())
