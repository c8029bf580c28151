"""Metrics of a step's rollouts: rewards, groups, gradings, lengths; each defined beside its code.

Only usable rollouts (graded, with at least one sampled token) enter reward and group statistics; failed
gradings are counted apart and are never a zero reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gspo.observe.metric import Metric, finite, mean, ratio, std
from gspo.types import FinishReason, Grading, Group, Rollout

RIGHT_ABOVE = 0.5  # a rollout counts as right above this reward
EQUAL_WITHIN = 1e-6  # rewards of a group that differ by less, relative to max(1, |r|), are equal

ROLLOUT_METRICS = (
    Metric(
        "reward",
        "Mean reward of the usable rollouts.",
        "mean of r_i over usable rollouts",
        "rises over the run; judge by eval/accuracy, not by this alone",
        "reward",
    ),
    Metric(
        "reward_std",
        "Spread of the reward inside a group: what the advantages are made of.",
        "mean over groups with at least 2 usable members of the sample standard deviation (n - 1) of r_i",
        "above 0; it shrinks towards 0 as the task is solved",
        "reward",
    ),
    Metric(
        "rewards/{name}/mean",
        "Mean of one part of the reward, before its weight.",
        "mean over the rollouts to which the part applies",
        "depends on the part",
        "reward",
    ),
    Metric(
        "rewards/{name}/std",
        "Spread of one part of the reward over all rollouts.",
        "sample standard deviation over the rollouts to which the part applies (at least 2)",
        "depends on the part",
        "reward",
    ),
    Metric(
        "frac_reward_zero_std",
        "Share of groups that teach nothing: all rewards equal, or fewer than 2 usable members.",
        "groups with max r - min r <= 1e-6 max(1, |r|), or fewer than 2 usable members / groups",
        "below 0.7; at 1 nothing is learnt",
        "share",
    ),
    Metric(
        "groups/all_right",
        "Share of groups without signal because every member is right: the task is too easy.",
        "degenerate groups of at least 2 usable members with mean score > 0.5 / groups",
        "below 0.5; above it, take harder prompts",
        "share",
    ),
    Metric(
        "groups/all_wrong",
        "Share of groups without signal because every member is wrong: the task is too hard.",
        "degenerate groups of at least 2 usable members with mean score <= 0.5 / groups",
        "below 0.5; above it, take easier prompts or more generations",
        "share",
    ),
    Metric(
        "groups/unusable",
        "Share of groups with fewer than 2 usable members.",
        "groups with fewer than 2 members graded and not empty / groups",
        "0",
        "share",
    ),
    Metric(
        "groups/informative",
        "Share of groups whose rewards differ: only these move the weights.",
        "1 - frac_reward_zero_std",
        "above 0.3",
        "share",
    ),
    Metric("groups/count", "Groups of the step.", "number of groups", "prompts_per_step", "count"),
    Metric(
        "groups/size_mean",
        "Usable members of a group.",
        "mean over groups of the number of usable members",
        "num_generations",
        "count",
    ),
    Metric(
        "groups/size_min",
        "Usable members of the smallest group.",
        "min over groups of the number of usable members",
        "num_generations",
        "count",
    ),
    Metric(
        "prompts/unique",
        "Different prompts of the step.",
        "number of distinct prompt ids",
        "groups/count",
        "count",
    ),
    Metric(
        "grading/graded",
        "Share of rollouts with a reward.",
        "rollouts graded / rollouts",
        "1",
        "share",
    ),
    Metric(
        "grading/failed",
        "Share of rollouts whose reward function raised or returned no usable number.",
        "rollouts with grading failed / rollouts",
        "0; a run stops above grading.max_failure_rate",
        "share",
    ),
    Metric(
        "grading/timeout",
        "Share of rollouts whose reward function outlived its deadline.",
        "rollouts with grading timeout / rollouts",
        "0",
        "share",
    ),
    Metric(
        "grading/crashed",
        "Share of rollouts whose reward worker died.",
        "rollouts with grading crashed / rollouts",
        "0",
        "share",
    ),
    Metric(
        "grading/not_applicable",
        "Share of rollouts to which no reward function applied.",
        "rollouts for which every function returned None / rollouts",
        "0, unless the rewards are meant for some tasks only",
        "share",
    ),
    Metric(
        "grading/unparsed",
        "Share of completions in which the reward found no answer.",
        "rollouts with a reward part named parsed that is 0 / rollouts with such a part",
        "below 0.1; above it the prompt does not say the answer's format, or completions are cut",
        "share",
    ),
    Metric(
        "completions/mean_length",
        "Sampled tokens of a completion.",
        "mean over rollouts of |y|",
        "below max_completion_length",
        "tokens",
    ),
    Metric("completions/min_length", "Shortest completion.", "min over rollouts of |y|", "above 1", "tokens"),
    Metric(
        "completions/max_length",
        "Longest completion.",
        "max over rollouts of |y|",
        "at most max_completion_length",
        "tokens",
    ),
    Metric(
        "completions/mean_terminated_length",
        "Sampled tokens of a completion that ended by itself.",
        "mean of |y| over rollouts that no length limit cut",
        "near completions/mean_length",
        "tokens",
    ),
    Metric(
        "completions/clipped_ratio",
        "Share of completions cut by a length limit (truncation, not ratio clipping).",
        "rollouts with finish reason length or context_length / rollouts",
        "below 0.1",
        "share",
    ),
    Metric(
        "completions/failed_ratio",
        "Share of completions that the engine did not finish.",
        "rollouts with finish reason error or interrupted / rollouts",
        "0",
        "share",
    ),
    Metric("completions/empty_ratio", "Share of completions without a token.", "|y| = 0 / rollouts", "0", "share"),
    Metric("completions/count", "Rollouts of the step.", "number of rollouts", "prompts x generations", "count"),
    Metric(
        "completions/num_tokens",
        "Sampled tokens of the step.",
        "sum over rollouts of |y|",
        "steady",
        "tokens",
    ),
)


def rollout_metrics(groups: Sequence[Group], *, correct_part: str | None = None) -> dict[str, float]:
    """Describe a step's rollouts.

    ``correct_part``: the reward part whose value says whether a rollout is right (above 0.5); the weighted
    sum by default. It tells groups that are all right from all wrong ones. Metrics over nothing are absent.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        **_reward_metrics(groups, rollouts),
        **_group_metrics(groups, correct_part),
        **_grading_metrics(rollouts),
        **_length_metrics(rollouts),
    }


def _usable(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return [r for r in rollouts if r.grading is Grading.GRADED and r.reward is not None and r.num_scored > 0]


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    return [r.reward for r in _usable(rollouts) if r.reward is not None]


def _reward_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    spreads = [std(_rewards(group.rollouts), ddof=1) for group in groups]
    found = [spread for spread in spreads if spread is not None]
    metrics = {"reward": mean(_rewards(rollouts)), "reward_std": mean(found)}
    for name in sorted({name for rollout in rollouts for name in rollout.reward_parts}):
        values = [value for r in rollouts if (value := r.reward_parts.get(name)) is not None]
        metrics[f"rewards/{name}/mean"] = mean(values)
        metrics[f"rewards/{name}/std"] = std(values, ddof=1)
    return finite(metrics)


def _group_metrics(groups: Sequence[Group], correct_part: str | None) -> dict[str, float]:
    kinds = [_kind(_usable(group.rollouts), correct_part) for group in groups]
    sizes = [len(_usable(group.rollouts)) for group in groups]
    prompts = {rollout.prompt.id for group in groups for rollout in group.rollouts}
    total = len(groups)
    return finite(
        {
            "frac_reward_zero_std": ratio(total - kinds.count("informative"), total),
            "groups/all_right": ratio(kinds.count("all_right"), total),
            "groups/all_wrong": ratio(kinds.count("all_wrong"), total),
            "groups/unusable": ratio(kinds.count("unusable"), total),
            "groups/informative": ratio(kinds.count("informative"), total),
            "groups/count": total,
            "groups/size_mean": mean(sizes),
            "groups/size_min": min(sizes, default=None),
            "prompts/unique": len(prompts),
        }
    )


def _kind(members: Sequence[Rollout], correct_part: str | None) -> str:
    if len(members) < 2:
        return "unusable"
    rewards = [member.reward or 0.0 for member in members]
    if max(rewards) - min(rewards) > EQUAL_WITHIN * max(1.0, *(abs(reward) for reward in rewards)):
        return "informative"
    scores = [member.reward_parts.get(correct_part) if correct_part else member.reward for member in members]
    score = mean([score for score in scores if score is not None])
    return "all_right" if score is not None and score > RIGHT_ABOVE else "all_wrong"


def _grading_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    outcomes = (Grading.GRADED, Grading.FAILED, Grading.TIMEOUT, Grading.CRASHED, Grading.NOT_APPLICABLE)
    shares = {f"grading/{o.value}": ratio(sum(r.grading is o for r in rollouts), len(rollouts)) for o in outcomes}
    parsed = [flags for rollout in rollouts if (flags := _parsed(rollout))]
    shares["grading/unparsed"] = ratio(sum(min(flags) <= 0 for flags in parsed), len(parsed))
    return finite(shares)


def _parsed(rollout: Rollout) -> list[float]:
    parts = rollout.reward_parts.items()
    return [value for name, value in parts if name.split("/")[-1] == "parsed" and value is not None]


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.num_scored for rollout in rollouts]
    failed = (FinishReason.ERROR, FinishReason.INTERRUPTED)
    ended = [r.num_scored for r in rollouts if not r.truncated and r.finish_reason not in failed]
    total = len(rollouts)
    return finite(
        {
            "completions/mean_length": mean(lengths),
            "completions/min_length": min(lengths, default=None),
            "completions/max_length": max(lengths, default=None),
            "completions/mean_terminated_length": mean(ended),
            "completions/clipped_ratio": ratio(sum(r.truncated for r in rollouts), total),
            "completions/failed_ratio": ratio(sum(r.finish_reason in failed for r in rollouts), total),
            "completions/empty_ratio": ratio(lengths.count(0), total),
            "completions/count": total,
            "completions/num_tokens": sum(lengths),
        }
    )
