"""Where a run's numbers go: JSONL files always; TensorBoard, Weights & Biases or your own object besides.

``metrics.jsonl`` is inside bit-identity (sorted keys, shortest exact float form); wall-clock values and notes
go to ``timings.jsonl``. A tracker that fails is warned about once and does not stop the run; the JSONL files
are the run's record, so a failure to write them does.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from gspo.errors import ConfigError, GspoError, MissingExtra
from gspo.types import StepReport

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"


@runtime_checkable
class Tracker(Protocol):
    """Two methods: take a report, and end."""

    def log(self, report: StepReport) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """Writes ``metrics.jsonl`` and ``timings.jsonl`` into the run folder, one line a step, flushed at once.

    The first report decides where the files go on: lines of its step and later ones, and a torn last line,
    are dropped, so that a resumed run has neither a gap nor a duplicate. A second report of the same step (an
    evaluation before it) joins that step's line. Memory does not grow with the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics = _StepLines(run_dir / METRICS_FILE)
        self._timings = _StepLines(run_dir / TIMINGS_FILE)

    def log(self, report: StepReport) -> None:
        """Write the step's lines, without values that are not finite. Raises GspoError where it cannot."""
        metrics = {name: float(value) for name, value in report.metrics.items() if math.isfinite(value)}
        timings = {name: float(value) for name, value in report.timings.items() if math.isfinite(value)}
        self._metrics.write({"step": report.step, "policy_version": report.policy_version, "metrics": metrics})
        self._timings.write({"step": report.step, "timings": timings, "notes": list(report.notes)})

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._timings.close()


class _StepLines:
    """A JSONL file with one line a step, in rising order of steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._last: dict[str, Any] = {}
        self._offset = 0  # of the last line

    def write(self, entry: dict[str, Any]) -> None:
        try:
            self._write(entry)
        except OSError as error:
            raise GspoError(
                f"{self._path}: cannot write step {entry['step']} ({error}). Free some space or make "
                f"the folder writable, then resume the run."
            ) from error

    def _write(self, entry: dict[str, Any]) -> None:
        file = self._file
        if file is None:
            file = self._file = self._path.open("r+b" if self._path.exists() else "w+b")
        if not self._last or entry["step"] < self._last["step"]:
            self._offset = _end_before(file, entry["step"])
        elif entry["step"] == self._last["step"]:
            entry = _joined(self._last, entry)
        else:
            self._offset = file.seek(0, os.SEEK_END)
        line = json.dumps(_sorted(entry), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        file.seek(self._offset)
        file.truncate()
        file.write(line)
        file.flush()
        self._last = entry

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._last = {}


def _end_before(file: BinaryIO, step: int) -> int:
    """Offset at which the lines of ``step`` and later ones, or a torn line, begin."""
    offset = file.seek(0)
    for line in file:
        entry = _parsed(line)
        if entry is None or entry["step"] >= step:
            break
        offset += len(line)
    return offset


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A complete line's entry, or None for a torn one."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(second)
    for key, value in first.items():
        if isinstance(value, dict):
            out[key] = {**value, **second[key]}
        elif isinstance(value, list):
            out[key] = [*value, *(item for item in second[key] if item not in value)]
    return out


def _sorted(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(sorted(value.items())) if isinstance(value, dict) else value for key, value in entry.items()}


def read_reports(run_dir: Path) -> Iterator[StepReport]:
    """Read ``metrics.jsonl`` back, line by line. A torn last line is left out.

    Raises GspoError where the file is missing or a line before the last is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise GspoError(f"{path} does not exist: is {run_dir} a run folder, and has its first step ended?")
    with path.open("rb") as file:
        damaged: int | None = None
        for number, line in enumerate(file, start=1):
            if damaged is not None:
                raise GspoError(f"{path}, line {damaged}: not a metrics line. Restore the file or cut it there.")
            entry = _parsed(line)
            if entry is None or not isinstance(entry.get("metrics"), dict):
                damaged = number
                continue
            yield StepReport(entry["step"], entry.get("policy_version", -1), entry["metrics"])


class TensorBoardTracker:
    """Scalars for TensorBoard in ``<run_dir>/tensorboard``. Needs the package ``tensorboard``, not torch."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", 'The tracker "tensorboard"') from error
        self._event, self._summary = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._started = False

    def log(self, report: StepReport) -> None:
        """Add one event with all metrics and timings of the step."""
        if not self._started:  # a resumed run: TensorBoard drops what it has of this step and later ones
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(step=report.step, session_log=start))
            self._started = True
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in _flat(report).items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(step=report.step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run in ``<run_dir>/wandb``, offline unless the environment has WANDB_MODE=online.

    Offline runs are uploaded later with ``wandb sync``; a resumed run goes on under the same id.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb", 'The tracker "wandb"') from error
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gspo"),
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            id=_run_id(run_dir),
            resume="allow",
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=wandb.Settings(console="off"),  # its capture of the terminal would fight the progress bar
        )

    def log(self, report: StepReport) -> None:
        """Log all metrics and timings of the step."""
        self._run.log(_flat(report), step=report.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """The id kept in the run folder, so that a resumed run goes on as the same one."""
    path = run_dir / "wandb-id.txt"
    if not path.exists():
        path.write_text(os.urandom(6).hex(), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _flat(report: StepReport) -> dict[str, float]:
    values = {**report.metrics, **{f"timings/{name}": value for name, value in report.timings.items()}}
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


class Trackers:
    """Hands every report to all trackers: the record first, then the others, whose failures are contained."""

    def __init__(self, record: Tracker, others: Mapping[str, Tracker]) -> None:
        self._record = record
        self._others = dict(others)
        self._warned: set[str] = set()

    def log(self, report: StepReport) -> None:
        """Log everywhere. A failing tracker is warned about once and tried again at the next step."""
        self._record.log(report)
        for name, tracker in self._others.items():
            self._contain(name, partial(tracker.log, report))

    def close(self) -> None:
        """Close all."""
        for name, tracker in self._others.items():
            self._contain(name, tracker.close)
        self._record.close()

    def _contain(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  a tracker is somebody else's code; the run outlives it
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"the tracker {name!r} failed ({type(error).__name__}: {error}); the run goes on, "
                    f"its numbers are in {METRICS_FILE}, and further failures of it are not shown",
                    RuntimeWarning,
                    stacklevel=3,
                )


def build_trackers(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> Trackers:
    """The JSONL files and the trackers named.

    ``names``: "tensorboard", "wandb", or "module:attribute", a callable ``(run_dir, config)`` that returns an
    object with ``log(StepReport)`` and ``close()``. ``config`` is the resolved recipe as plain values. Raises
    ConfigError for a name that is none of these, MissingExtra where a package is not installed.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    others = {name: _build(name, run_dir, config) for name in dict.fromkeys(names) if name != "jsonl"}
    return Trackers(JsonlTracker(run_dir), others)


def _build(name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    if name == "tensorboard":
        return TensorBoardTracker(run_dir)
    if name == "wandb":
        return WandbTracker(run_dir, config)
    module, separator, attribute = name.partition(":")
    if not (separator and module and attribute):
        raise ConfigError(
            f'run.trackers: {name!r} is not a tracker. Use "tensorboard", "wandb", or "module:attribute".'
        )
    try:
        factory: Callable[[Path, Mapping[str, Any]], object] = vars(importlib.import_module(module))[attribute]
    except (ImportError, KeyError) as error:
        raise ConfigError(
            f"run.trackers: {name!r} cannot be imported ({type(error).__name__}: {error}). Is the module on "
            f"PYTHONPATH, and is {attribute!r} defined in it?"
        ) from error
    tracker = factory(run_dir, config)
    if not isinstance(tracker, Tracker):
        raise ConfigError(f"run.trackers: {name!r} gave a {type(tracker).__name__}, which lacks log() or close().")
    return tracker
