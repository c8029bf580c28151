"""The curves of a run as one picture, drawn from ``metrics.jsonl`` alone. People look before they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gspo.errors import GspoError, MissingExtra
from gspo.observe.trackers import read_reports

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]
Series = Mapping[str, tuple[FloatArray, FloatArray]]  # steps and values by metric

PLOT_FILE = "curves.png"
_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_COLORS = ("#0b6e99", "#d9730d", "#448361")
_LEGEND = "pale: every step; bold: running mean over a twentieth of the run"
_MANY_POINTS = 40  # below it every point gets a marker


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: its title, the y label with its unit, and (metric, legend) lines."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    share: bool = False  # the y axis starts at 0 and ends at 1 at most


PANELS = (
    Panel("Reward", "mean reward", (("reward", "training rollouts"),)),
    Panel("Held-out accuracy", "score, +/- 2 standard errors", (("eval/accuracy", "held-out"),)),
    Panel("Groups that teach", "share of groups", (("groups/informative", "rewards differ"),), share=True),
    Panel(
        "Clip fraction",
        "share, all updates of a step",
        (("clip/sequence", "of sequences"), ("clip/token", "of tokens")),
        share=True,
    ),
    Panel("Completion length", "tokens, mean", (("completions/mean_length", "all"),)),
    Panel("Cut by the length limit", "share of completions", (("completions/clipped_ratio", "cut"),), share=True),
)


def plot_run(run_dir: Path, output: Path | None = None) -> Path:
    """Draw reward, held-out accuracy, clip fractions and lengths of a run; returns the PNG's path.

    ``output``: the file to write, ``<run_dir>/curves.png`` by default. A torn last line of ``metrics.jsonl`` is left
    out. Raises GspoError where there is nothing to draw, MissingExtra without matplotlib.
    """
    run_dir = Path(run_dir)
    series = _read(run_dir)
    if not series:
        raise GspoError(f"{run_dir}: metrics.jsonl holds no step yet. Plot once the first step has ended.")
    figure = _figure(run_dir.resolve().name, series)
    path = Path(output) if output is not None else run_dir / PLOT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150, facecolor="white", metadata={"Software": "gspo"})
    return path


def smooth(values: FloatArray, window: int) -> FloatArray:
    """Running mean [n] over ``window`` points around each; at the ends over those that are there."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _read(run_dir: Path) -> Series:
    wanted = {metric for panel in PANELS for metric, _ in panel.lines} | {"eval/accuracy_se"}
    points: dict[str, list[tuple[int, float]]] = {}
    for report in read_reports(run_dir):
        for name in wanted & report.metrics.keys():
            points.setdefault(name, []).append((report.step, report.metrics[name]))
    arrays = {name: np.asarray(pairs, dtype=np.float64) for name, pairs in points.items()}
    return {name: (pairs[:, 0], pairs[:, 1]) for name, pairs in arrays.items()}


def _figure(name: str, series: Series) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "A plot") from error
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    last = max(steps[-1] for steps, _ in series.values())
    axes: Sequence[Axes] = figure.subplots(2, 3, sharex=True).ravel()
    for panel, axis in zip(PANELS, axes, strict=True):
        _draw(axis, panel, series)
        axis.set_xlim(0, max(1.0, last))
    figure.align_ylabels()
    for axis in axes[3:]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("step (rollout batch)", color=_MUTED)
    figure.suptitle(name, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK, parse_math=False)
    if max(_window(values) for _, values in series.values()) > 1:
        figure.text(0.99, 0.975, _LEGEND, ha="right", va="top", fontsize=9, color=_MUTED)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    return figure


def _draw(axis: Axes, panel: Panel, series: Series) -> None:
    present = [(metric, label) for metric, label in panel.lines if metric in series]
    for color, (metric, label) in zip(_COLORS, present, strict=False):
        if metric == "eval/accuracy":
            _evaluations(axis, series, color)
        else:
            _curve(axis, *series[metric], color=color, label=label)
    if not present:
        axis.text(0.5, 0.5, "not measured in this run", transform=axis.transAxes, ha="center", color=_MUTED)
    axis.set_title(panel.title, loc="left", fontsize=11, color=_INK)
    axis.set_ylabel(panel.unit, color=_MUTED)
    axis.grid(True, color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_MUTED, length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)
    if panel.share:
        axis.set_ylim(0, min(1.05, max(0.05, axis.get_ylim()[1])))
    if len(present) > 1:
        axis.legend(frameon=False, labelcolor=_INK, fontsize=9)


def _curve(axis: Axes, steps: FloatArray, values: FloatArray, *, color: str, label: str) -> None:
    """The raw values pale, the running mean over a twentieth of the run on top."""
    window = _window(values)
    if window == 1:
        marker = "o" if len(values) < _MANY_POINTS else None
        axis.plot(steps, values, color=color, linewidth=1.8, marker=marker, markersize=3.5, label=label)
        return
    axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    axis.plot(steps, smooth(values, window), color=color, linewidth=2.0, label=label)


def _window(values: FloatArray) -> int:
    """A twentieth of the points; 1, no smoothing, where that is less than 3."""
    return len(values) // 20 if len(values) >= 60 else 1


def _evaluations(axis: Axes, series: Series, color: str) -> None:
    """Every evaluation a point, with two standard errors where they were measured at all of them."""
    steps, values = series["eval/accuracy"]
    errors = series.get("eval/accuracy_se")
    if errors is not None and len(errors[1]) == len(values):
        low, high = values - 2 * errors[1], values + 2 * errors[1]
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axis.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4, clip_on=False)
    rises = values[-1] >= values[0]
    for end, side, place in ((0, "left", (6, -12 if rises else 8)), (-1, "right", (0, 8))):
        point = (float(steps[end]), float(values[end]))
        axis.annotate(f"{point[1]:.3f}", point, place, textcoords="offset points", ha=side, fontsize=9, color=color)
