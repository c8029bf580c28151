"""What a run says while it goes, in one object that ``training.run`` talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gspo.errors import MissingExtra
from gspo.observe.console import ConsoleTracker, settings_table, show_samples
from gspo.observe.diagnosis import clip_notes, explain_stall
from gspo.observe.plot import plot_run
from gspo.types import Rollout, StepReport

WINDOW = 5  # steps without any signal before it is explained


def changed_first(before: Sequence[Rollout], after: Sequence[Rollout]) -> tuple[list[Rollout], Sequence[Rollout]]:
    """Samples whose reward changed before the others: people look at three."""
    later = {rollout.prompt.id: rollout.reward for rollout in after}
    return sorted(before, key=lambda rollout: rollout.reward == later.get(rollout.prompt.id)), after


class RunConsole:
    """Prints to the terminal; ``quiet`` prints nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console or Console(quiet=quiet, highlight=False)
        self._tracker: ConsoleTracker | None = None
        self._recent: list[StepReport] = []
        self._explained = False
        self._said: set[str] = set()
        self._clip: tuple[float, float, bool] | None = None

    def note(self, text: str) -> None:
        """A line that is no step."""
        self._console.print(Text(text))

    def settings(self, rows: Sequence[tuple[str, str, str]], notes: Sequence[str] = ()) -> None:
        """The table before step 0, and what is unusual about the settings."""
        settings_table(rows, console=self._console)
        for note in notes:
            self._console.print(Text(f"note: {note}", style="yellow"))

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int, float], None]]:
        """A phase with a countable progress (done, total, loss)."""

        def progress(done: int, total: int, loss: float) -> None:
            if done == 1 or done == total or done % max(1, total // 5) == 0:
                self.note(f"{name}: batch {done}/{total}, loss {loss:.3f}")

        yield progress

    @contextmanager
    def training(self, steps: int, first_step: int) -> Iterator[None]:
        """The step lines and the bar."""
        every = max(1, steps // 25)
        with ConsoleTracker(steps, first_step=first_step, every=every, console=self._console) as tracker:
            self._tracker = tracker
            yield
        self._tracker = None

    def report(self, report: StepReport) -> None:
        """One step or evaluation."""
        if self._tracker is not None:
            self._tracker.log(report)
        if "reward" in report.metrics or "grad_norm" in report.metrics:
            self._recent = [*self._recent, report][-WINDOW:]
            reason = explain_stall(self._recent, window=WINDOW)
            if reason and not self._explained:
                self._console.print(Text(f"note: {reason}", style="yellow"))
            self._explained = bool(reason)
            self._clip_notes()

    def watch_clip(self, epsilon: float, epsilon_high: float, *, sequence_level: bool) -> None:
        """Say, once each, what the clip fractions tell about this range."""
        self._clip = (epsilon, epsilon_high, sequence_level)

    def _clip_notes(self) -> None:
        if self._clip is None or len(self._recent) < WINDOW:
            return
        epsilon, epsilon_high, sequence_level = self._clip
        notes = clip_notes(
            self._recent, epsilon=epsilon, epsilon_high=epsilon_high, sequence_level=sequence_level, window=WINDOW
        )
        for note in notes:
            kind = note.split(":")[0][:40]
            if kind not in self._said:
                self._said.add(kind)
                self._console.print(Text(f"note: {note}", style="yellow"))

    def finished(self, folder: Path, samples: tuple[list[Rollout], list[Rollout]] | None) -> None:
        """What the model wrote before and after, the curves, and where everything is."""
        if samples is not None:
            show_samples(*changed_first(*samples), console=self._console)
        try:
            self.note(f"curves: {plot_run(folder)}")
        except MissingExtra as missing:
            self.note(f"no curves drawn: {missing}")
        self.note(f"run folder: {folder}")
        self.note(f"read what it wrote: gspo show {folder}")
