"""What a run says in the terminal: what the settings mean, one line a step, samples before and after.

Everything a model wrote is shown as plain characters: escape sequences, control and direction characters are
made visible, rich's markup is not interpreted. NO_COLOR and terminals of 80 columns are honoured.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from gspo.types import Grading, Prompt, Rollout, StepReport

SETTINGS_TITLE = "What the settings mean"


def settings_table(rows: Sequence[tuple[str, str, str]], *, console: Console | None = None) -> None:
    """Print the rows (setting, value, what it means) as a table."""
    console = console or Console()
    table = Table(title=SETTINGS_TITLE, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("setting", style="bold", overflow="fold")
    table.add_column("value", style="cyan", justify="right", overflow="fold")
    table.add_column("meaning", ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*(_plain(cell, console) for cell in row))
    console.print(table)


class ConsoleTracker:
    """Progress of a run: a line for each step, and under it a bar where the output is a terminal.

    A tracker: ``log(report)``, ``close()``; also a context manager. ``every``: steps between lines where the
    output is not a terminal; evaluations, notes and the last step are always shown.
    """

    def __init__(self, steps: int, *, first_step: int = 0, every: int = 1, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = steps
        self._every = max(1, every)
        self._seconds: deque[float] = deque(maxlen=20)
        self._accuracy: float | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[rate]}"),
                console=self._console,
                expand=True,
                auto_refresh=False,  # no thread: graders are forked from this process
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("", total=steps, completed=first_step, rate="")
            self._progress.start()

    def log(self, report: StepReport) -> None:
        """Print the step's line."""
        self._accuracy = report.metrics.get("eval/accuracy", self._accuracy)
        trained = "reward" in report.metrics or "completions/count" in report.metrics
        seconds = step_seconds(report)
        if trained and seconds:
            self._seconds.append(seconds)
        last = report.step + 1 >= self._steps
        evaluated = "eval/accuracy" in report.metrics
        if self._progress is not None or report.step % self._every == 0 or last or evaluated or report.notes:
            self._console.print(_plain(self._line(report, trained), self._console), soft_wrap=True)
        for note in report.notes:
            self._console.print(_plain(f"  note: {note}", self._console), style="yellow")
        if self._progress is not None and trained:
            self._progress.update(self._task, completed=report.step + 1, rate=f"ETA {self._eta(report)}", refresh=True)

    def close(self) -> None:
        """Stop the bar and give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _line(self, report: StepReport, trained: bool) -> str:
        metrics = report.metrics
        width = len(str(self._steps))
        head = f"{report.step + trained:>{width}}/{self._steps}"
        if not trained:
            parts = [f"held-out {_number(metrics.get('eval/accuracy'))}"]
            if "eval/accuracy_se" in metrics:
                parts.append(f"+/- {metrics['eval/accuracy_se']:.3f}")
            if "eval/items" in metrics:
                parts.append(f"on {metrics['eval/items']:.0f} items")
            return " ".join([head, *parts])
        seconds = step_seconds(report)
        tokens = metrics.get("completions/num_tokens")
        rate = f"{_short(tokens / seconds)} tok/s" if tokens and seconds else ""
        parts = [
            f"reward {_number(metrics.get('reward'))}",
            f"held-out {_number(self._accuracy)}",
            f"clip {_number(metrics.get('clip/sequence'), 2)}",
            f"len {_short(metrics['completions/mean_length'])}" if "completions/mean_length" in metrics else "",
            rate,
            f"ETA {self._eta(report)}",
        ]
        return " ".join([head, *(part for part in parts if part)])

    def _eta(self, report: StepReport) -> str:
        if not self._seconds:
            return "-"
        left = max(0, self._steps - report.step - 1)
        return duration(left * sum(self._seconds) / len(self._seconds))


def step_seconds(report: StepReport) -> float:
    """Wall-clock seconds of a step: the sum of its phases."""
    return float(sum(report.timings.values()))


def duration(seconds: float) -> str:
    """``45s``, ``3m20s``, ``2h05m``, ``3d04h``."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def show_samples(
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    *,
    limit: int = 3,
    max_characters: int = 600,
    console: Console | None = None,
) -> None:
    """Print what the model wrote before and after, side by side, for the prompts that both have."""
    console = console or Console()
    later = {rollout.prompt.id: rollout for rollout in reversed(after)}
    pairs = [(first, later[first.prompt.id]) for first in before if first.prompt.id in later]
    for first, last in pairs[:limit]:
        table = Table(title_justify="left", expand=True, show_lines=False)
        table.title = _plain("Prompt: " + _clip(prompt_text(first.prompt), max_characters), console)
        for head, rollout in (("before", first), ("after", last)):
            table.add_column(_plain(f"{head} ({_verdict(rollout)})", console), ratio=1, overflow="fold")
        table.add_row(*(_plain(_clip(rollout.text, max_characters), console) for rollout in (first, last)))
        console.print(table)


def prompt_text(prompt: Prompt) -> str:
    """What the prompt asks: its text, or the content of its last message."""
    if prompt.text is not None:
        return prompt.text
    return prompt.messages[-1].get("content", "") if prompt.messages else ""


def neutral(text: str) -> str:
    """Make what a terminal would act on visible: ``ESC`` becomes ``\\x1b``, U+202E ``\\u202e``.

    Newlines and tabs stay (a tab as 4 spaces). Unicode categories Cc, Cf, Cs, Co, Zl and Zp are written as
    escapes; the joiners that scripts and emoji need stay.
    """
    return "".join(_visible(character) for character in text.replace("\r\n", "\n").replace("\t", "    "))


_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_JOINERS = frozenset("\u200c\u200d")


def _visible(character: str) -> str:
    if character == "\n" or character in _JOINERS or unicodedata.category(character) not in _ESCAPED:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _plain(text: str, console: Console) -> Text:
    """Neutral text in the characters that the output can encode."""
    safe = neutral(text).encode(console.encoding, "backslashreplace").decode(console.encoding)
    return Text(safe)


def _clip(text: str, limit: int) -> str:
    text = text.strip()
    return text if len(text) <= limit else f"{text[:limit]} [{len(text) - limit} more characters]"


def _verdict(rollout: Rollout) -> str:
    words = [f"reward {rollout.reward:.2f}" if rollout.reward is not None else rollout.grading.value]
    if rollout.grading is Grading.PENDING:
        words = ["not graded"]
    if rollout.truncated:
        words.append("cut")
    return ", ".join(words)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _short(value: float) -> str:
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"
