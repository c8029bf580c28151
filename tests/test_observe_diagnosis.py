"""Sick runs are explained, healthy ones are left alone."""

from __future__ import annotations

import pytest

from gspo.observe.diagnosis import clip_notes, explain_stall
from gspo.types import StepReport

STALLED = {
    "frac_reward_zero_std": 1.0,
    "grad_norm": 0.0,
    "grading/graded": 1.0,
    "grading/unparsed": 0.0,
    "groups/all_right": 0.0,
    "groups/all_wrong": 1.0,
    "completions/clipped_ratio": 0.0,
}
GSPO = {"epsilon": 3e-4, "epsilon_high": 4e-4}
HEALTHY = {
    "clip/sequence": 0.15,
    "clip/sequence_informative": 0.18,
    "clip_ratio/low_mean": 0.08,
    "clip_ratio/high_mean": 0.07,
    "outside/low_positive": 0.05,
    "outside/high_negative": 0.05,
    "ratio/log_s_std": 4e-4,
    "ratio/noise_floor": 1e-6,
    "sampling/offset": -1e-6,
}


def run(metrics: dict[str, float], steps: int = 5, **changes: float) -> list[StepReport]:
    return [StepReport(step, step + 1, {**metrics, **changes}) for step in range(steps)]


class TestStall:
    @pytest.mark.parametrize(
        ("changes", "said", "advice"),
        [
            ({}, "100% in groups that are all wrong", "easier prompts"),
            ({"groups/all_wrong": 0.0, "groups/all_right": 1.0}, "100% in groups that are all right", "harder prompts"),
            ({"completions/clipped_ratio": 0.9}, "90% cut by the length limit", "max_completion_length"),
            ({"completions/clipped_ratio": 0.1}, "10% cut by the length limit", "easier prompts"),
            ({"grading/unparsed": 0.7}, "70% without an answer", "answer's format"),
            ({"grading/graded": 0.1, "groups/all_wrong": 0.0}, "90% ungraded", "gspo check reward"),
            ({"groups/all_wrong": 0.6, "groups/all_right": 0.4}, "40% in groups that are all right", "easier"),
        ],
    )
    def test_the_cause_and_what_to_try(self, changes: dict[str, float], said: str, advice: str) -> None:
        text = explain_stall(run(STALLED, **changes))
        assert text is not None
        assert said in text
        assert advice in text.split("What to try")[1]

    def test_the_earlier_cause_is_named_where_several_hold(self) -> None:
        everything = {"completions/clipped_ratio": 1.0, "grading/unparsed": 1.0}
        text = explain_stall(run(STALLED, **everything))
        assert text is not None
        assert "max_completion_length" in text.split("What to try")[1]

    def test_shares_are_averaged_over_the_window(self) -> None:
        reports = run(STALLED, 4) + run(STALLED, 1, **{"groups/all_wrong": 0.5, "groups/all_right": 0.5})
        assert "90% in groups that are all wrong" in (explain_stall(reports) or "")

    def test_without_any_usable_rollout_there_is_no_gradient_to_report(self) -> None:
        nothing = {"frac_reward_zero_std": 1.0, "groups/unusable": 1.0, "grading/graded": 0.0}
        assert "100% ungraded" in (explain_stall(run(nothing)) or "")

    def test_one_informative_group_is_a_signal(self) -> None:
        assert explain_stall(run(STALLED, 4) + run(STALLED, 1, frac_reward_zero_std=0.9)) is None

    def test_a_gradient_is_a_signal_unless_it_is_the_kl_s(self) -> None:
        assert explain_stall(run(STALLED, grad_norm=1e-3)) is None
        assert explain_stall(run(STALLED, grad_norm=1e-3, kl=0.01)) is not None

    def test_not_before_the_window_is_full(self) -> None:
        assert explain_stall(run(STALLED, 4)) is None
        assert explain_stall(run(STALLED, 2), window=2) is not None
        assert explain_stall([]) is None

    def test_evaluations_are_passed_over(self) -> None:
        reports = run(STALLED)
        reports[2:2] = [StepReport(2, 2, {"eval/accuracy": 0.0})]
        assert explain_stall(reports) is not None

    def test_a_recovered_run_is_left_alone(self) -> None:
        assert explain_stall(run(STALLED, 5) + run(STALLED, 1, frac_reward_zero_std=0.5, grad_norm=1.0)) is None


class TestClipNotes:
    def test_the_paper_s_clip_fraction_is_no_fault(self) -> None:
        assert clip_notes(run(HEALTHY), **GSPO) == ()

    def test_a_token_sized_epsilon_never_clips(self) -> None:
        unclipped = {name: 0.0 for name in HEALTHY if name.startswith(("clip", "outside"))}
        (note,) = clip_notes(run({**HEALTHY, **unclipped}), epsilon=0.2, epsilon_high=0.27)
        assert "0.2 never clips" in note and "4.0e-04" in note

    def test_a_wide_epsilon_that_clips_is_left_alone(self) -> None:
        assert clip_notes(run(HEALTHY), epsilon=0.2, epsilon_high=0.27) == ()

    def test_a_coin_flip(self) -> None:
        (note,) = clip_notes(run(HEALTHY, **{"clip/sequence_informative": 0.45}), **GSPO)
        assert "45%" in note and "coin flip" in note

    def test_a_noise_floor_beside_epsilon(self) -> None:
        (note,) = clip_notes(run(HEALTHY, **{"ratio/noise_floor": 2e-4}), **GSPO)
        assert "2.0e-04 before any weight has moved" in note

    def test_ratios_shifted_as_a_whole_hint_at_the_engine(self) -> None:
        shifted = {
            "clip_ratio/low_mean": 0.3,
            "clip_ratio/high_mean": 0.0,
            "outside/low_positive": 0.6,
            "outside/high_negative": 0.0,
            "sampling/offset": -1e-3,
        }
        (note,) = clip_notes(run(HEALTHY, **shifted), **GSPO)
        assert "negative advantages" in note and "below 1" in note and "-1.0e-03" in note
        assert (
            clip_notes(run(HEALTHY, **{**shifted, "sampling/offset": 6.9e-9}), **GSPO) == ()
        )  # rounding, not an engine

    def test_one_sided_clipping_that_learning_explains_is_left_alone(self) -> None:
        pushed = {
            "clip_ratio/low_mean": 0.3,
            "clip_ratio/high_mean": 0.0,
            "outside/low_positive": 0.0,
            "outside/high_negative": 0.01,
        }
        assert clip_notes(run(HEALTHY, **pushed), **GSPO) == ()

    def test_token_ratios_are_not_judged_by_gspo_s_range(self) -> None:
        sick = {"clip/sequence_informative": 0.45, "ratio/noise_floor": 2e-4}
        assert clip_notes(run(HEALTHY, **sick), **GSPO, sequence_level=False) == ()

    def test_not_before_the_window_is_full(self) -> None:
        assert clip_notes(run(HEALTHY, 4, **{"clip/sequence_informative": 0.45}), **GSPO) == ()
