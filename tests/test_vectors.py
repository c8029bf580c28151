"""Our losses, advantages, corrections and KL against the numbers that other trainers' own code produced.

The folder of numbers lies beside the repository; where it does not, these tests are skipped. Where a peer departs
from the paper its reading is in ``reference``, and the last tests hold which is which.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gspo.algorithms import Algorithm
from reference import advantages, swift, trl, verl
from reference.vectors import FOLDER, Case, LeftOut, Outcome, error, load, outcome, topics

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no reference numbers at {FOLDER}")

RUNNERS = {
    "trl_gmpo": trl.gmpo,
    "trl_async_packed": trl.packed,
    "trl_rloo": lambda case: trl.rloo(case)[1],
    "verl_agg_loss": verl.agg_loss,
    "verl_kl": verl.kl,
    "verl_policy_rollout": verl.rollout,
}
PEERS = {"trl": trl.run, "verl": verl.run, "swift": swift.run}
ADVANTAGES = {
    "trl_advantages": advantages.trl,
    "trl_advantages_float32": advantages.trl,
    "swift_advantages": advantages.swift,
    "verl_advantages": advantages.verl,
}
OTHER = {"trl_accumulation", "verl_rollout_correction"}
LOSS_TOPICS = [t for peer in PEERS for t in topics(peer) if t not in ADVANTAGES and t not in OTHER]
REASONS = {
    "vespo": "trl",
    "entropy mask and bonus": "trl",
    "entropy mask": "swift",
    "real": "swift",
    "fipo": "swift",
    "dppo": "verl",
    "covariance clipping draws tokens at random": "verl",
    "covariance penalty": "verl",
    "a squared log-ratio penalty in place of a clip": "verl",
    "the absolute log-ratio as a KL": "verl",
}


def run(case: Case) -> Outcome:
    """The case by its topic's or its peer's runner."""
    return RUNNERS.get(case.topic, PEERS[case.topic.split("_")[0]])(case)


def tolerance(case: Case) -> float:
    """verl adds 1e-8 to the token counts of a float64 mask, a relative error of as much."""
    return 1e-8 if case.settings.get("mask_dtype") == "float64" else case.tolerance


def wrong_by_design(case: Case) -> bool:
    """Whether the peer's number is one that no user wants: NaN in padding, or exp without a bound."""
    s = case.settings
    return not all(finite(case)) or (s.get("extreme_ratio", False) and not s["nonfinite_peer"])


@pytest.mark.parametrize("topic", LOSS_TOPICS)
def test_loss_and_gradient(topic: str) -> None:
    compared = 0
    for case in load(topic):
        try:
            result = run(case)
        except LeftOut as reason:
            assert str(reason).split(":")[0] in REASONS, case.id
            continue
        compared += 1
        if wrong_by_design(case) and "with_zero_padding" not in case.expected:
            assert result.loss.isfinite() and result.grad.isfinite().all(), case.id
            continue
        expected = case.expected.get("with_zero_padding", case.expected)
        grad = expected.get("grad_current_logprobs", expected.get("grad_loss_mat"))
        assert error(result.loss, expected["loss"]) <= tolerance(case), case.id
        assert error(result.grad, grad) <= tolerance(case), case.id
    assert compared or topic in {"trl_entropy", "swift_entropy_mask", "verl_policy_cov", "verl_policy_dppo"}


def fractions(case: Case, result: Outcome) -> dict[str, float]:
    """The peer's clip metrics as counts, from ours, in the peer's unit."""
    assert result.output is not None
    sums = result.output.per_sequence
    low, high, tokens = sums["clipped_low"], sums["clipped_high"], sums["tokens"]
    peer, level = case.topic.split("_")[0], case.settings.get("importance_sampling_level", "token")
    if peer == "verl":
        return {"actor/pg_clipfrac": float((low + high).sum() / tokens.sum().clamp(min=1))}
    delta = case.settings.get("delta")
    if delta is not None and delta <= 1 + case.settings.get("epsilon_high", 0.2):
        high = torch.zeros_like(high)  # both take the metric after delta
    varying = isinstance(case.inputs.get("advantages", [0.0])[0], list)
    by_rows = case.topic == "trl_rloo" or (level == "sequence" and not varying)
    if peer == "swift":
        by_rows = case.mask.shape[1] == 1
    if by_rows:
        low, high, tokens = (low > 0).double(), (high > 0).double(), torch.ones_like(tokens)
    total = tokens.sum().clamp(min=1)
    return {"clip_ratio/low_mean": float(low.sum() / total), "clip_ratio/high_mean": float(high.sum() / total)}


@pytest.mark.parametrize("topic", LOSS_TOPICS)
def test_clip_fraction(topic: str) -> None:
    for case in load(topic):
        try:
            result = run(case)
        except LeftOut:
            continue
        metrics = case.expected.get("metrics") or {}
        special = case.settings.get("loss_mode") in ("cispo", "geo_mean") or case.settings.get("extreme_ratio")
        if result.output is None or special or wrong_by_design(case):
            continue
        for name, fraction in fractions(case, result).items():
            wanted = metrics.get(name)
            if isinstance(wanted, float):
                assert abs(fraction - wanted) < 1e-6, (case.id, name)  # a ratio of counts below 100, in float32


@pytest.mark.parametrize("topic", ["trl_soft_losses", "trl_token_losses", "verl_policy_cispo", "swift_core"])
def test_cispo_counts_what_lies_outside(topic: str) -> None:
    for case in load(topic):
        metrics, settings = case.expected["metrics"], case.settings
        if "cispo" not in (settings.get("loss_type"), settings.get("loss_mode")):
            continue
        sums = run(case).output.per_sequence  # type: ignore[union-attr]
        if topic == "verl_policy_cispo":
            outside, wanted = (sums["outside_low"] + sums["outside_high"]).sum(), metrics["actor/pg_clipfrac"]
        else:  # positive advantages alone
            positive = case.tensor("advantages") > 0
            outside, wanted = sums["outside_high"][positive].sum(), metrics["cispo_clip_ratio"]
            if settings["importance_sampling_level"] == "sequence" and topic.startswith("trl"):
                continue
        assert int(outside) == round(wanted * float(sums["tokens"].sum())), case.id


@pytest.mark.parametrize("topic", ["verl_policy_vanilla"])
def test_dual_clip_counts_apart(topic: str) -> None:
    for case in load(topic):
        sums = run(case).output.per_sequence  # type: ignore[union-attr]
        wanted = case.expected["metrics"]["actor/pg_clipfrac_lower"]
        assert int(sums["clipped_delta"].sum()) == round(wanted * float(sums["tokens"].sum())), case.id


@pytest.mark.parametrize("case", load("trl_accumulation"), ids=lambda case: case.id)
def test_parts_add_up(case: Case) -> None:
    losses, grad = trl.accumulation(case)
    assert error(torch.stack(losses), case.expected["losses"]) <= 1e-10
    assert error(grad, case.expected["grad_current_logprobs"]) <= 1e-10


def test_correction_weights() -> None:
    compared = 0
    for case in load("verl_rollout_correction"):
        if case.settings.get("rollout_is"):
            assert error(verl.weights_of(case), case.expected["weights"]) <= 1e-10, case.id
            compared += 1
    for case in load("trl_sampler_correction"):
        if case.settings["loss_type"] == "vespo" or case.settings.get("mask_truncated_completions"):
            continue
        sums = run(case).output.per_sequence  # type: ignore[union-attr]
        ratio = torch.tensor(case.expected["importance_sampling_ratio"], dtype=torch.float64)
        wanted = torch.where(case.mask, ratio.expand(case.mask.shape), 0.0).sum(1)
        assert error(sums["correction_weight_sum"], wanted.tolist()) <= 1e-9, case.id
        compared += 1
    assert compared > 10


def advantage_tolerance(case: Case) -> float:
    """What the peer's own arithmetic allows: float32 factors in verl's whitening, gpg and vectorised grpo."""
    kind = case.settings.get("adv_estimator", "")
    whitened = kind.startswith("reinforce_plus_plus") or kind == "gdpo"
    rough = whitened or kind in ("gpg", "grpo_vectorized") or case.settings.get("scale_rewards") == "gdpo"
    return 1e-5 if case.dtype == torch.float32 else 1e-7 if rough else 1e-10


def leaks(case: Case) -> bool:
    """Equal rewards in float32 that the peer does not see as equal; the right advantage is 0."""
    return case.dtype == torch.float32 and (
        case.settings.get("leak", False)
        or (case.topic == "swift_advantages" and case.settings.get("num_generations") == 7)
        or case.settings.get("adv_estimator") == "grpo"
    )


@pytest.mark.parametrize("topic", sorted(ADVANTAGES))
def test_advantages(topic: str) -> None:
    compared = 0
    for case in load(topic):
        try:
            ours = ADVANTAGES[topic](case, 1e-4)
        except LeftOut:
            assert case.settings["adv_estimator"] in {
                "remax",
                "gae",
                "optimal_token_baseline",
                "tir_optimal_token_baseline",
            }
            continue
        compared += 1
        if leaks(case):
            continue  # see test_equal_rewards_leak_at_the_peers_and_not_here
        assert error(ours, case.expected["advantages"]) <= advantage_tolerance(case), case.id
    assert compared


@pytest.mark.parametrize("topic", sorted(ADVANTAGES))
def test_the_peers_epsilon_is_the_only_difference(topic: str) -> None:
    """With its epsilon sent to 0 a peer's advantage becomes ours, where it has no degenerate group."""
    for case in load(topic):
        if leaks(case) or topic == "verl_advantages":
            continue
        tiny, none = ADVANTAGES[topic](case, 1e-13), ADVANTAGES[topic](case, 0.0)
        assert error(tiny, none.tolist()) <= 1e-6, case.id


def test_rloo_advantages() -> None:
    for case in load("trl_rloo"):
        assert error(trl.rloo(case)[0], case.expected["advantages"]) <= 1e-10, case.id


# Which reading is whose.


def test_a_token_correction_under_gspo_is_verls_reading() -> None:
    """One value, two gradients: ours weights each token, TRL's broadcasts the mean weight."""
    differs = 0
    for case in load("trl_sampler_correction"):
        if case.settings["loss_type"] == "vespo" or not trl.is_broadcast_correction(trl.algorithm_of(case)):
            continue
        advs = torch.tensor(case.expected["advantages"], dtype=case.dtype)
        rows = case.mask.shape[0]
        ours = outcome(case, trl.algorithm_of(case), advantages=advs, **trl.totals_of(case, case.mask, rows))
        assert error(ours.loss, case.expected["loss"]) <= 1e-10
        differs += error(ours.grad, case.expected["grad_current_logprobs"]) > 1e-4
    assert differs > 0


def test_the_unbiased_kl_takes_the_token_ratio() -> None:
    """TRL multiplies by the sequence ratio at sequence level, for which its own estimator is not unbiased."""
    differs = 0
    for case in load("trl_kl"):
        s = case.settings
        if s["loss_type"] == "vespo" or s["importance_sampling_level"] != "sequence" or not s["use_bias_correction_kl"]:
            continue
        ours = outcome(case, trl.algorithm_of(case), **trl.totals_of(case, case.mask, case.mask.shape[0]))
        differs += error(ours.loss, case.expected["loss"]) > 1e-6
    assert differs > 0


def test_ours_does_not_count_empty_rows() -> None:
    differs = 0
    for case in load("trl_edges"):
        empty = bool((~case.mask.any(1)).any()) and bool(case.mask.any())
        if empty and case.settings["loss_type"] == "grpo":
            ours, algorithm = outcome(case, trl.algorithm_of(case)), trl.algorithm_of(case)
            share = float(case.mask.any(1).sum()) / case.mask.shape[0]
            assert algorithm.reduction == "sequence_mean_token_mean"
            assert error(ours.loss * share, case.expected["loss"]) <= 1e-10
            differs += 1
    assert differs > 0


def test_nan_in_padding_changes_nothing() -> None:
    """The peers' numbers there are NaN or a row dropped in silence; ours are those of clean padding, to the bit."""
    seen = 0
    for topic in ("verl_policy_edge", "trl_edges", "swift_padding"):
        for case in load(topic):
            if all(finite(case)):
                continue
            try:
                algorithm = algorithm_of(case)
            except LeftOut:
                continue
            ours, tidy = outcome(case, algorithm), outcome(cleaned(case), algorithm)
            assert torch.equal(ours.loss, tidy.loss) and torch.equal(ours.grad, tidy.grad), case.id
            seen += 1
    assert seen > 2


def algorithm_of(case: Case) -> Algorithm:
    """The peer's settings on our axes."""
    peer = {"trl": trl, "verl": verl, "swift": swift}[case.topic.split("_")[0]]
    return peer.algorithm_of(case)


def finite(case: Case) -> list[bool]:
    """Whether each log-prob tensor of the case is finite."""
    names = ("current_logprobs", "proximal_logprobs", "reference_logprobs", "sampled_logprobs")
    return [bool(case.tensor(name).isfinite().all()) for name in names if case.tensor(name) is not None]


def cleaned(case: Case) -> Case:
    """The case with zeros under the mask."""
    names = ("current_logprobs", "proximal_logprobs", "reference_logprobs", "sampled_logprobs")
    inputs = dict(case.inputs)
    for name in names:
        if case.tensor(name) is not None:
            inputs[name] = torch.where(case.mask, case.tensor(name), 0.0).tolist()
    return replace(case, inputs=inputs)


def test_a_log_ratio_without_bound_is_cut_and_counted() -> None:
    for case in load("trl_edges"):
        if case.settings.get("extreme_ratio"):
            result = run(case)
            assert result.loss.isfinite() and result.grad.isfinite().all(), case.id
            assert result.output.per_sequence["clamped"].sum() == 1, case.id  # type: ignore[union-attr]


def test_equal_rewards_leak_at_the_peers_and_not_here() -> None:
    leaking = 0
    for topic in ADVANTAGES:
        for case in load(topic):
            if not leaks(case):
                continue
            ours = ADVANTAGES[topic](case, 0.0)
            peer = torch.tensor(case.expected["advantages"])
            leaked = peer[(ours == 0) & (peer != 0)]
            leaking += leaked.numel() > 0
            real = ours.abs() > 0
            if case.settings.get("scale_rewards") != "gdpo" and real.any():
                assert bool(((ours - peer).abs()[real] < 1e-3).all()), case.id
    assert leaking > 3
