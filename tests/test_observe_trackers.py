"""Where the numbers go: lines without gap or duplicate, failures contained, memory bounded."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import tracemalloc
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import ConfigError, GspoError, MissingExtra
from gspo.observe.trackers import JsonlTracker, Trackers, build_trackers, read_reports
from gspo.types import StepReport


def report(step: int, notes: tuple[str, ...] = (), **metrics: float) -> StepReport:
    return StepReport(step, step + 1, metrics or {"reward": step / 3}, {"rollout": 0.1}, notes)


def write(folder: Path, *reports: StepReport) -> None:
    tracker = JsonlTracker(folder)
    for one in reports:
        tracker.log(one)
    tracker.close()


def log_to_wandb(folder: Path) -> None:
    trackers = build_trackers(["wandb"], folder, {"run": {"seed": 0}})
    trackers.log(report(0))
    trackers.close()


def steps(folder: Path) -> list[int]:
    return [one.step for one in read_reports(folder)]


class Spy:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = False

    def log(self, report: StepReport) -> None:
        self.seen.append(report.step)

    def close(self) -> None:
        self.closed = True


class Broken(Spy):
    def log(self, report: StepReport) -> None:
        super().log(report)
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("still none")


def make_spy(run_dir: Path, config: Mapping[str, Any]) -> Spy:
    return Spy()


def make_nothing(run_dir: Path, config: Mapping[str, Any]) -> object:
    return object()


class TestJsonl:
    def test_the_bytes_of_a_line(self, tmp_path: Path) -> None:
        write(tmp_path, StepReport(0, 1, {"b": 0.1, "a": 1, "nan": math.nan}, {"rollout": 2.0}, ("slow",)))
        line = '{"step": 0, "policy_version": 1, "metrics": {"a": 1.0, "b": 0.1}}\n'
        assert (tmp_path / "metrics.jsonl").read_text() == line
        assert json.loads((tmp_path / "timings.jsonl").read_text()) == {
            "step": 0,
            "timings": {"rollout": 2.0},
            "notes": ["slow"],
        }

    def test_metrics_hold_no_wall_clock(self, tmp_path: Path) -> None:
        for name, seconds in (("a", 1.0), ("b", 2.0)):
            (tmp_path / name).mkdir()
            write(tmp_path / name, StepReport(0, 1, {"reward": 0.5}, {"rollout": seconds}))
        assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()

    def test_floats_come_back_exactly(self, tmp_path: Path) -> None:
        value = 0.1 + 0.2
        write(tmp_path, report(0, reward=value))
        assert next(read_reports(tmp_path)).metrics["reward"] == value

    def test_each_line_is_there_as_soon_as_it_is_logged(self, tmp_path: Path) -> None:
        tracker = JsonlTracker(tmp_path)
        tracker.log(report(0))
        assert steps(tmp_path) == [0]
        tracker.close()

    @given(total=st.integers(1, 12), stop=st.integers(1, 12), resume=st.integers(0, 12), torn=st.integers(0, 40))
    def test_a_resumed_run_has_neither_gap_nor_duplicate(
        self, tmp_path_factory: pytest.TempPathFactory, total: int, stop: int, resume: int, torn: int
    ) -> None:
        whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
        stop = min(stop, total)
        resume = min(resume, stop, total - 1)
        write(whole, *map(report, range(total)))
        write(cut, *map(report, range(stop)))
        if torn:
            with (cut / "metrics.jsonl").open("ab") as file:
                file.write((whole / "metrics.jsonl").read_bytes()[:torn].rstrip(b"\n"))
        write(cut, *map(report, range(resume, total)))
        assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert (cut / "timings.jsonl").read_bytes() == (whole / "timings.jsonl").read_bytes()

    def test_an_evaluation_joins_the_line_of_its_step(self, tmp_path: Path) -> None:
        write(tmp_path, StepReport(0, 0, {"eval/accuracy": 0.3}, {}, ("n",)), report(0, reward=0.5), report(1))
        first, second = read_reports(tmp_path)
        assert first.metrics == {"eval/accuracy": 0.3, "reward": 0.5}
        assert (first.policy_version, second.step) == (1, 1)

    def test_a_torn_last_line_is_left_out_when_reading(self, tmp_path: Path) -> None:
        write(tmp_path, report(0), report(1))
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-4])
        assert steps(tmp_path) == [0]

    def test_damage_before_the_end_is_named(self, tmp_path: Path) -> None:
        write(tmp_path, report(0), report(1), report(2))
        path = tmp_path / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(lines[0] + b"{oops\n" + lines[2])
        with pytest.raises(GspoError, match="line 2"):
            steps(tmp_path)

    def test_no_run_folder(self, tmp_path: Path) -> None:
        with pytest.raises(GspoError, match=r"is .* a run folder"):
            steps(tmp_path)

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(GspoError, match=r"metrics\.jsonl: cannot write step 0"):
            write(tmp_path, report(0))

    def test_memory_does_not_grow_with_the_run(self, tmp_path: Path) -> None:
        tracker = build_trackers([], tmp_path, {})
        metrics = {f"metric/{i}": float(i) for i in range(30)}
        for step in range(50):
            tracker.log(StepReport(step, step, metrics))
        tracemalloc.start()
        for step in range(50, 2050):
            tracker.log(StepReport(step, step, metrics))
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tracker.close()
        assert grown < 100_000


class TestFanOut:
    def test_a_failing_tracker_is_warned_about_once_and_the_run_goes_on(self) -> None:
        record, broken, spy = Spy(), Broken(), Spy()
        trackers = Trackers(record, {"broken": broken, "spy": spy})
        with pytest.warns(RuntimeWarning, match="'broken' failed .*no route to host"):
            trackers.log(report(0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trackers.log(report(1))
            trackers.close()
        assert record.seen == broken.seen == spy.seen == [0, 1]
        assert record.closed and spy.closed

    def test_a_failing_record_stops_the_run(self) -> None:
        spy = Spy()
        with pytest.raises(ConnectionError):
            Trackers(Broken(), {"spy": spy}).log(report(0))
        assert spy.seen == []


class TestBuild:
    def test_jsonl_always_and_a_dotted_path(self, tmp_path: Path) -> None:
        name = f"{__name__}:make_spy"
        trackers = build_trackers([name], tmp_path / "run", {})
        trackers.log(report(0))
        trackers.close()
        assert steps(tmp_path / "run") == [0]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("tensorbord", "is not a tracker"),
            ("no_such_module:thing", "cannot be imported"),
            (f"{__name__}:nothing", "cannot be imported"),
            (f"{__name__}:make_nothing", "lacks log"),
        ],
    )
    def test_what_is_no_tracker(self, tmp_path: Path, name: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            build_trackers([name], tmp_path, {})

    @pytest.mark.parametrize("package", ["tensorboard", "wandb"])
    def test_a_missing_package_names_the_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtra, match=rf"gspo\[{package}\]"):
            build_trackers([package], tmp_path, {})

    def test_tensorboard_reads_what_was_written(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for first in (0, 2):
            trackers = build_trackers(["tensorboard"], tmp_path, {})
            for step in range(first, first + 4):
                trackers.log(report(step, reward=step + 10.0 * first))
            trackers.close()
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        read = [(event.step, event.value) for event in events.Scalars("reward")]
        assert read == [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0), (4, 24.0), (5, 25.0)]


class TestWandb:
    def test_offline_run_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("wandb")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        # Its service threads live as long as their process.
        process = multiprocessing.get_context("spawn").Process(target=log_to_wandb, args=(tmp_path,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))

    def test_calls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, Any]] = []
        run = types.SimpleNamespace(
            log=lambda values, step: calls.append(("log", (step, values))),
            finish=lambda: calls.append(("finish", None)),
        )

        def init(**options: Any) -> Any:
            calls.append(("init", options))
            return run

        fake = types.SimpleNamespace(init=init, Settings=lambda **options: options)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        for _ in range(2):
            trackers = build_trackers(["wandb"], tmp_path, {"run": {"seed": 0}})
            trackers.log(report(3, reward=0.5))
            trackers.close()
        (_, first), (_, logged), (ended, _), (_, second), *_ = calls
        assert first["mode"] == "offline"
        assert first["config"] == {"run": {"seed": 0}}
        assert first["id"] == second["id"]
        assert logged == (3, {"reward": 0.5, "timings/rollout": 0.1})
        assert ended == "finish"
