"""The fixed list of metrics, and the functions that compute them.

Each metric's meaning, estimator and healthy range stand beside the code that computes it
(``rollout_metrics``, ``update_metrics``; evaluation's below). Where TRL has a metric, its name is used. A
metric over an empty set is absent, never NaN.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

from gspo.observe.metric import Metric
from gspo.observe.rollout_metrics import ROLLOUT_METRICS, rollout_metrics
from gspo.observe.update_metrics import UPDATE_METRICS, update_metrics
from gspo.observe.update_table import UpdateTable, update_table

__all__ = [
    "METRICS",
    "Metric",
    "UpdateTable",
    "describe",
    "metrics_page",
    "rollout_metrics",
    "update_metrics",
    "update_table",
]

EVAL_METRICS = (
    Metric(
        "eval/accuracy",
        "Held-out score; over samples it is avg@n, the unbiased estimate of pass@1.",
        "mean over items of the mean over graded samples of the score",
        "rises; falling while the reward rises means the reward is being gamed",
        "score",
    ),
    Metric(
        "eval/accuracy_se",
        "Standard error of eval/accuracy over items.",
        "sample standard deviation of the items' means / sqrt(items)",
        "small beside the change you want to see",
        "score",
    ),
    Metric("eval/items", "Held-out items.", "number of items", "at least 200 to see a change of 0.05", "count"),
    Metric(
        "eval/samples",
        "Completions sampled of each item.",
        "n of avg@n",
        "1, or more with temperature",
        "count",
    ),
    Metric("eval/ungraded", "Share of held-out completions without a score.", "ungraded / samples", "0", "share"),
    Metric("eval/mean_length", "Tokens of a held-out completion.", "mean of |y|", "as in training", "tokens"),
    Metric(
        "eval/truncated",
        "Share of held-out completions cut by a length limit.",
        "cut / samples",
        "below 0.1",
        "share",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for metric in (*ROLLOUT_METRICS, *UPDATE_METRICS, *EVAL_METRICS)}
)


def describe(name: str) -> Metric:
    """Look up a metric by its name in a report (``clip/token/update_2``) or in the list (``.../update_{k}``).

    KeyError, with the nearest names, for one that the list does not have.
    """
    if name in METRICS:
        return METRICS[name]
    for metric in METRICS.values():
        if "{" in metric.name and re.fullmatch(_expression(metric.name), name):
            return metric
    near = difflib.get_close_matches(name, METRICS, n=3)
    hint = f"; the nearest are {', '.join(near)}" if near else "; gspo.observe.metrics.METRICS lists them"
    raise KeyError(f"no metric is called {name!r}{hint}")


def _expression(name: str) -> str:
    fields = {"name": ".+", "k": r"\d+", "bucket": r"\d+_\d+"}
    parts = re.split(r"\{(\w+)\}", name)
    return "".join(fields[part] if i % 2 else re.escape(part) for i, part in enumerate(parts))


def metrics_page() -> str:
    """The documentation page of the list, in Markdown."""
    sections = (
        ("Rollouts", "One value a step, over the completions sampled in it.", ROLLOUT_METRICS),
        ("Updates", "One value a step, over all updates taken from its rollouts.", UPDATE_METRICS),
        ("Evaluation", "Held-out; in the steps that evaluate.", EVAL_METRICS),
    )
    lines = [_PAGE_HEAD]
    for title, words, metrics in sections:
        lines += [
            f"## {title}",
            "",
            words,
            "",
            "| name | meaning | estimator | healthy | unit |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(metric) for metric in metrics]
        lines.append("")
    return "\n".join(lines)


_PAGE_HEAD = """# Metrics

Written by `python -m gspo.observe.metrics > docs/metrics.md`; the list lives in the code.

Each step writes one line to `metrics.jsonl` in the run folder: the step, the policy version, and the metrics
below. A metric over nothing (no graded rollout, no reference model) is absent, never NaN. Wall-clock values
are in `timings.jsonl`. Names in braces stand for a reward's name, an update of the step counted from 0, or a
range of lengths in tokens. Symbols: `r_i` is the reward of rollout i; `|y|` the number of its sampled tokens;
its sequence ratio is `s = exp((1/|y|) sum_t (log current - log denominator))`, whose denominator is the
policy before this step's updates (or the engine, with `proximal_logprobs = "engine"`).
"""


def _row(metric: Metric) -> str:
    cells = (f"`{metric.name}`", metric.meaning, metric.estimator, metric.healthy, metric.unit)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(metrics_page(), end="")
