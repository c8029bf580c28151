"""The picture of a run: drawn from metrics.jsonl alone, whatever it holds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gspo.errors import GspoError, MissingExtra
from gspo.observe.metrics import describe
from gspo.observe.plot import PANELS, plot_run, smooth
from gspo.observe.trackers import JsonlTracker
from gspo.types import StepReport


def write(folder: Path, steps: int, *names: str) -> None:
    tracker = JsonlTracker(folder)
    for step in range(steps):
        tracker.log(StepReport(step, step + 1, dict.fromkeys(names, 0.1 * (step % 7))))
    tracker.close()


def drawn(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)


def test_every_curve_is_a_listed_metric() -> None:
    for panel in PANELS:
        for metric, _ in panel.lines:
            assert describe(metric).name == metric


def test_a_whole_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, 120, *(metric for panel in PANELS for metric, _ in panel.lines), "eval/accuracy_se")
    path = plot_run(tmp_path)
    assert path == tmp_path / "curves.png"
    assert drawn(path).shape == (1050, 1950, 4)


def test_other_data_make_another_picture_and_the_same_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, metrics in (("a", ["reward"]), ("b", ["reward"]), ("c", ["clip/token"])):
        (tmp_path / name / "run").mkdir(parents=True)
        write(tmp_path / name / "run", 5, *metrics)
    a, b, c = (plot_run(tmp_path / name / "run", tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_has_just_begun(tmp_path: Path, steps: int) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, steps, "reward", "eval/accuracy")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "metr')
    assert drawn(plot_run(tmp_path, tmp_path / "new" / "folder" / "x.png")).size


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(GspoError, match=r"metrics\.jsonl does not exist"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(GspoError, match="holds no step yet"):
        plot_run(tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, "reward")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"gspo\[plot\]"):
        plot_run(tmp_path)


def test_smoothing_by_hand() -> None:
    values = np.array([0.0, 3.0, 6.0, 0.0])
    assert smooth(values, 3) == pytest.approx([1.5, 3.0, 3.0, 3.0])
    assert smooth(values, 1) == pytest.approx(values)
