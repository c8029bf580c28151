"""Why a run does not learn, in words, from its reports alone: no signal, or a clip range that does not fit.

The rules know GSPO: its clip range bounds nats a token averaged over a sequence, so a clip fraction of 0.15
is by design and not a fault. Whether a reward is being gamed (reward up, held-out flat) is not looked at here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gspo.types import StepReport

NEVER_CLIPS = 0.05  # nats a token: a sequence ratio hardly ever moves so far within one step
ROUNDING = 1e-5  # nats a token between an engine and a learner that agree in float32
COIN_FLIP = 0.4  # with log s symmetric around 0, a clip far narrower than its spread takes half of the sequences
ONE_SIDED = 5.0  # times more often outside on one side than on the other
WORTH_A_WORD = 0.02  # share below which sides are not compared

_CAUSES = (
    (
        "ungraded",
        "ungraded",
        "look at grading/failed, grading/timeout and grading/crashed and run `gspo check reward`",
    ),
    (
        "truncated",
        "cut by the length limit",
        "raise rollout.max_completion_length, or ask for shorter answers in the prompt",
    ),
    (
        "unparsed",
        "without an answer that the reward could read",
        "say the answer's format in task.system_prompt, or fine-tune on it first (`gspo coldstart`)",
    ),
    (
        "all wrong",
        "in groups that are all wrong",
        "take easier prompts, more rollout.num_generations, or fine-tune first (`gspo coldstart`)",
    ),
    (
        "all right",
        "in groups that are all right",
        "the task is solved at this difficulty: take harder prompts, or stop here",
    ),
)


def explain_stall(reports: Sequence[StepReport], window: int = 5) -> str | None:
    """Say why nothing was learnt when every one of the last ``window`` training steps had no signal.

    No signal: rewards equal inside every group and a gradient of 0 (with a KL to the reference the gradient
    is not looked at: it never vanishes). None while there is a signal, or not enough steps. Evaluations
    are passed over.
    """
    steps = [report.metrics for report in reports if "frac_reward_zero_std" in report.metrics][-window:]
    if len(steps) < window or not all(_without_signal(metrics) for metrics in steps):
        return None
    shares = _shares(steps)
    found = [(shares[key], key, words, advice) for key, words, advice in _CAUSES if shares.get(key, 0.0) > 0]
    listed = ", ".join(f"{_percent(share)} {words}" for share, _, words, _ in found)
    head = (
        f"No learning signal for {window} steps: rewards are equal inside every group and the gradient is 0. "
        f"Of the completions: {listed or 'nothing stands out'}."
    )
    # An earlier cause explains a later one: what is cut cannot be parsed, what is not parsed is wrong.
    cause = next((entry for entry in found if entry[0] >= 0.5), max(found, default=None, key=lambda e: e[0]))
    return head if cause is None else f"{head} What to try: {cause[3]}."


def clip_notes(
    reports: Sequence[StepReport],
    *,
    epsilon: float,
    epsilon_high: float,
    sequence_level: bool = True,
    window: int = 5,
) -> tuple[str, ...]:
    """What the clip fractions of the last ``window`` training steps say about the clip range.

    ``sequence_level``: ratios are GSPO's, of whole sequences; notes on the range's size hold for these alone.
    """
    steps = [report.metrics for report in reports if "clip/sequence" in report.metrics][-window:]
    if len(steps) < window:
        return ()
    notes = [_one_sided(steps)]
    if sequence_level:
        notes = [_never(steps, min(epsilon, epsilon_high)), _coin_flip(steps), _noise(steps, epsilon), *notes]
    return tuple(note for note in notes if note)


def _without_signal(metrics: Mapping[str, float]) -> bool:
    spread = metrics["frac_reward_zero_std"] < 1.0
    moving = metrics.get("grad_norm", 0.0) > 0.0 and "kl" not in metrics
    return not spread and not moving


def _shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {
        "truncated": "completions/clipped_ratio",
        "unparsed": "grading/unparsed",
        "all wrong": "groups/all_wrong",
        "all right": "groups/all_right",
    }
    shares = {key: _average(steps, name) for key, name in names.items()}
    graded = _average(steps, "grading/graded")
    shares["ungraded"] = None if graded is None else 1.0 - graded
    return {key: share for key, share in shares.items() if share is not None}


def _never(steps: Sequence[Mapping[str, float]], epsilon: float) -> str | None:
    if epsilon < NEVER_CLIPS or (_average(steps, "clip/sequence") or 0.0) > 0:
        return None
    spread = _average(steps, "ratio/log_s_std") or 0.0
    return (
        f"epsilon {epsilon:g} never clips: it bounds nats a token averaged over a sequence, whose "
        f"spread is {spread:.1e} here. GSPO's range is 3e-4 to 4e-4 for long completions; "
        "`gspo calibrate` measures yours."
    )


def _coin_flip(steps: Sequence[Mapping[str, float]]) -> str | None:
    share = _average(steps, "clip/sequence_informative") or 0.0
    if share <= COIN_FLIP:
        return None
    return (
        f"{_percent(share)} of the informative sequences are clipped: the range is far narrower than the "
        f"spread of log s, so the clip is a coin flip. Lower optim.learning_rate, "
        "or widen epsilon (`gspo calibrate`)."
    )


def _noise(steps: Sequence[Mapping[str, float]], epsilon: float) -> str | None:
    floor = _average(steps, "ratio/noise_floor") or 0.0
    if floor <= epsilon / 3:
        return None
    return (
        f"log s is {floor:.1e} before any weight has moved, beside an epsilon of {epsilon:g}: rounding, "
        f"routing or the engine's log-probs use up the clip range. "
        'Try model.autocast = "none", or '
        'algorithm.proximal_logprobs = "recompute".'
    )


def _one_sided(steps: Sequence[Mapping[str, float]]) -> str | None:
    low = _average(steps, "clip_ratio/low_mean") or 0.0
    high = _average(steps, "clip_ratio/high_mean") or 0.0
    if max(low, high) < WORTH_A_WORD or max(low, high) < ONE_SIDED * min(low, high):
        return None
    sign, side, other = ("negative", "below", "low_positive") if low > high else ("positive", "above", "high_negative")
    mirror = "high_negative" if low > high else "low_positive"
    if (_average(steps, f"outside/{other}") or 0.0) <= (_average(steps, f"outside/{mirror}") or 0.0):
        return None  # only the sign that is pushed there lies outside: that is learning, not an offset
    offset = _average(steps, "sampling/offset")
    if offset is not None and abs(offset) < ROUNDING:
        return None  # engine and learner agree: the weights moved, nothing else
    measured = "" if offset is None else f" (sampling/offset is {offset:.1e} nats a token)"
    return (
        f"Clipping falls almost only on {sign} advantages: ratios lie {side} 1 as a whole. Engine and "
        f"learner may disagree{measured}; compare their log-probs with `gspo check engine`."
    )


def _average(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [metrics[name] for metrics in steps if name in metrics]
    return math.fsum(values) / len(values) if values else None


def _percent(share: float) -> str:
    return f"{share:.0%}"
