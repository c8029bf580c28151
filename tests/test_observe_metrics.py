"""The fixed list of metrics and the numbers behind it, by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.algorithms import CATALOG, LossInputs, policy_loss
from gspo.observe.clip_metrics import length_bucket
from gspo.observe.metrics import (
    METRICS,
    UpdateTable,
    describe,
    metrics_page,
    rollout_metrics,
    update_metrics,
    update_table,
)
from gspo.observe.update_table import OPTIONAL, REQUIRED
from gspo.types import FinishReason, Grading, Group, Prompt, Rollout, TokenRow

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def rollout(prompt: str, reward: float | None, tokens: int = 3, **fields: object) -> Rollout:
    row = TokenRow(
        token_ids=np.zeros(tokens + 2, dtype=np.int64),
        sampled_mask=np.arange(tokens + 2) >= 2,
        sampled_logprobs=np.zeros(tokens + 2, dtype=np.float32),
        versions=np.zeros(tokens + 2, dtype=np.int64),
    )
    grading = Grading.GRADED if reward is not None else Grading.FAILED
    made = Rollout(Prompt(prompt, text="?"), 0, (row,), FinishReason.STOP, "", reward, {}, grading)
    return replace(made, **fields)


def group(name: str, *members: Rollout) -> Group:
    return Group(name, members)


def rewards(name: str, *values: float | None) -> Group:
    return group(name, *(rollout(name, value) for value in values))


def table(**columns: object) -> UpdateTable:
    size = len(columns["tokens"])
    updates = int(max(columns.get("update_index", [0]), default=0)) + 1
    zeros = {name: np.zeros(size) for name in REQUIRED}
    scalars = {
        "update_index": np.zeros(size, dtype=np.int64),
        "loss": np.ones(updates),
        "grad_norm": np.ones(updates),
        "learning_rate": np.full(updates, 1e-6),
        "skipped": np.zeros(updates, dtype=bool),
    }
    given = {name: np.asarray(values) for name, values in columns.items()}
    return UpdateTable(**{**zeros, **scalars, **given})


class TestRollouts:
    def test_reward_and_spread_by_hand(self) -> None:
        metrics = rollout_metrics([rewards("a", 1.0, 0.0, 0.0, 1.0), rewards("b", 2.0, 2.0)])
        assert metrics["reward"] == pytest.approx(1.0)
        assert metrics["reward_std"] == pytest.approx((math.sqrt(1 / 3) + 0.0) / 2)

    def test_kinds_of_groups_add_up(self) -> None:
        groups = [
            rewards("right", 1.0, 1.0, 1.0),
            rewards("wrong", 0.0, 0.0, None),
            rewards("mixed", 0.0, 1.0),
            rewards("alone", 1.0, None, None),
        ]
        metrics = rollout_metrics(groups)
        kinds = ("all_right", "all_wrong", "unusable", "informative")
        assert [metrics[f"groups/{kind}"] for kind in kinds] == [0.25, 0.25, 0.25, 0.25]
        assert metrics["frac_reward_zero_std"] == 0.75
        assert (metrics["groups/size_min"], metrics["groups/size_mean"]) == (1.0, 2.0)

    def test_rewards_equal_but_for_rounding_are_degenerate(self) -> None:
        assert rollout_metrics([rewards("a", 0.1 + 0.2, 0.3)])["frac_reward_zero_std"] == 1.0
        assert rollout_metrics([rewards("a", 0.3, 0.30001)])["frac_reward_zero_std"] == 0.0

    def test_an_empty_completion_is_not_a_member(self) -> None:
        members = (rollout("a", 100.0, tokens=0), rollout("a", 1.0, tokens=2))
        metrics = rollout_metrics([group("a", *members)])
        assert metrics["groups/unusable"] == 1.0
        assert metrics["reward"] == 1.0
        assert metrics["completions/empty_ratio"] == 0.5

    def test_a_failed_grading_is_never_a_zero(self) -> None:
        metrics = rollout_metrics([rewards("a", 1.0, None)])
        assert metrics["reward"] == 1.0
        assert metrics["grading/failed"] == 0.5

    @pytest.mark.parametrize("outcome", ["failed", "timeout", "crashed", "not_applicable"])
    def test_outcomes_are_told_apart(self, outcome: str) -> None:
        bad = rollout("a", None, grading=Grading(outcome))
        metrics = rollout_metrics([group("a", bad, rollout("a", 1.0), rollout("a", 0.0), rollout("a", 0.0))])
        shares = {name: value for name, value in metrics.items() if name.startswith("grading/") and value}
        assert shares == {"grading/graded": 0.75, f"grading/{outcome}": 0.25}

    def test_parts_leave_out_where_they_do_not_apply(self) -> None:
        parts = [{"math": 1.0, "style": None}, {"math": 0.0, "style": 0.5}, {"math": 1.0}]
        metrics = rollout_metrics([group("a", *(rollout("a", 1.0, reward_parts=part) for part in parts))])
        assert metrics["rewards/math/mean"] == pytest.approx(2 / 3)
        assert metrics["rewards/style/mean"] == 0.5
        assert "rewards/style/std" not in metrics

    def test_right_is_told_by_the_part_that_counts(self) -> None:
        parts = {"math": 0.0, "format": 1.0}
        groups = [group("a", *(rollout("a", 1.0, reward_parts=parts) for _ in range(2)))]
        assert rollout_metrics(groups)["groups/all_right"] == 1.0
        assert rollout_metrics(groups, correct_part="math")["groups/all_wrong"] == 1.0

    def test_unparsed(self) -> None:
        parts = [{"math/parsed": 0.0}, {"math/parsed": 1.0}, {"parsed": 1.0, "math/parsed": 0.0}, {"math": 1.0}]
        groups = [group("a", *(rollout("a", 0.0, reward_parts=part) for part in parts))]
        assert rollout_metrics(groups)["grading/unparsed"] == pytest.approx(2 / 3)

    def test_lengths_and_truncation(self) -> None:
        ends = [(4, FinishReason.STOP), (8, FinishReason.LENGTH), (6, FinishReason.STOP_STRING)]
        ends += [(2, FinishReason.ERROR)]
        members = [rollout("a", 0.0, tokens=tokens, finish_reason=reason) for tokens, reason in ends]
        metrics = rollout_metrics([group("a", *members)])
        assert metrics["completions/mean_length"] == 5.0
        assert metrics["completions/mean_terminated_length"] == 5.0
        assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (2.0, 8.0)
        assert metrics["completions/clipped_ratio"] == 0.25
        assert metrics["completions/failed_ratio"] == 0.25
        assert metrics["completions/num_tokens"] == 20.0

    def test_repeated_prompts_are_seen(self) -> None:
        metrics = rollout_metrics([rewards("a", 0.0, 1.0), rewards("a", 0.0, 1.0), rewards("b", 0.0, 1.0)])
        assert (metrics["prompts/unique"], metrics["groups/count"]) == (2.0, 3.0)

    def test_over_nothing_metrics_are_absent_not_nan(self) -> None:
        for groups in ([], [group("a")], [rewards("a", None, None)]):
            metrics = rollout_metrics(groups)
            assert "reward" not in metrics
            assert all(math.isfinite(value) for value in metrics.values())


class TestUpdates:
    def test_clip_fraction_by_sequence_and_by_token_differ(self) -> None:
        metrics = update_metrics(table(tokens=[2.0, 8.0], advantage=[1.0, -1.0], clipped_high=[2.0, 0.0]))
        assert metrics["clip/sequence"] == 0.5
        assert metrics["clip/token"] == 0.2
        assert metrics["clip_ratio/high_mean"] == 0.5
        assert metrics["clip_ratio/low_mean"] == 0.0
        assert metrics["clip_ratio/region_mean"] == metrics["clip/sequence"]

    def test_rows_without_tokens_are_never_counted(self) -> None:
        bare = table(tokens=[2.0, 8.0], advantage=[1.0, -1.0], clipped_high=[2.0, 0.0])
        padded = table(tokens=[2.0, 8.0, 0.0], advantage=[1.0, -1.0, 3.0], clipped_high=[2.0, 0.0, 0.0])
        assert update_metrics(bare) == update_metrics(padded)

    def test_informative_leaves_out_zero_advantages(self) -> None:
        metrics = update_metrics(table(tokens=[4.0, 4.0, 2.0], advantage=[1.0, 0.0, -1.0], clipped_low=[0.0, 0.0, 2.0]))
        assert metrics["clip/sequence"] == pytest.approx(1 / 3)
        assert metrics["clip/sequence_informative"] == 0.5
        assert metrics["clip/token"] == pytest.approx(2 / 10)
        assert metrics["clip/token_informative"] == pytest.approx(2 / 6)
        assert metrics["advantages/zero_ratio"] == pytest.approx(1 / 3)

    def test_by_side_and_sign(self) -> None:
        metrics = update_metrics(
            table(
                tokens=[2.0, 2.0, 4.0],
                advantage=[1.0, 2.0, -1.0],
                outside_low=[2.0, 0.0, 1.0],
                outside_high=[0.0, 2.0, 3.0],
            )
        )
        assert metrics["outside/low_positive"] == 0.5
        assert metrics["outside/high_positive"] == 0.5
        assert metrics["outside/low_negative"] == 0.25
        assert metrics["outside/high_negative"] == 0.75

    def test_by_update_and_by_length(self) -> None:
        metrics = update_metrics(
            table(
                update_index=[0, 0, 1, 1],
                tokens=[3.0, 16.0, 3.0, 63.0],
                advantage=[1.0, 1.0, 1.0, 1.0],
                clipped_high=[0.0, 0.0, 3.0, 0.0],
            )
        )
        assert metrics["clip/sequence/update_0"] == 0.0
        assert metrics["clip/sequence/update_1"] == 0.5
        assert metrics["clip/token/update_1"] == pytest.approx(3 / 66)
        assert metrics["clip/sequence/length_1_3"] == 0.5
        assert metrics["clip/token/length_16_63"] == 0.0
        assert "clip/sequence/length_4_15" not in metrics

    @pytest.mark.parametrize(
        ("length", "name"), [(1, "1_3"), (3, "1_3"), (4, "4_15"), (15, "4_15"), (16, "16_63"), (4096, "4096_16383")]
    )
    def test_buckets_are_powers_of_four(self, length: int, name: str) -> None:
        assert length_bucket(length) == name

    def test_ratios_by_hand(self) -> None:
        metrics = update_metrics(
            table(
                update_index=[0, 0, 1],
                tokens=[2.0, 4.0, 10.0],
                log_ratio_sum=[0.2, -0.4, 3.0],
                log_ratio_sq_sum=[0.02, 0.04, 1.0],
                kl_proximal_sum=[0.5, 0.5, 0.6],
            )
        )
        assert metrics["ratio/log_s_mean"] == pytest.approx(0.1)
        assert metrics["ratio/noise_floor"] == pytest.approx(0.1)
        assert metrics["ratio/log_s_mean/update_0"] == pytest.approx(0.0)
        assert metrics["ratio/log_s_std/update_0"] == pytest.approx(0.1)
        assert metrics["ratio/log_s_std/update_1"] == 0.0
        assert metrics["ratio/token_log_ratio_rms"] == pytest.approx(math.sqrt(1.06 / 16))
        assert metrics["kl_proximal/k1"] == pytest.approx(-2.8 / 16)
        assert metrics["kl_proximal/k3"] == pytest.approx(0.1)

    def test_token_means_and_weights(self) -> None:
        metrics = update_metrics(
            table(
                tokens=[2.0, 6.0],
                entropy_sum=[4.0, 4.0],
                kl_reference_sum=[0.0, 0.8],
                mismatch_abs_sum=[0.1, 0.3],
                mismatch_sum=[-0.1, -0.3],
                mismatch_max=[0.09, 0.2],
                correction_weight_sum=[2.0, 2.0],
                correction_weight_sq_sum=[2.0, 2.0],
                correction_dropped=[0.0, 4.0],
            )
        )
        assert metrics["entropy"] == 1.0
        assert metrics["kl"] == pytest.approx(0.1)
        assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.05)
        assert metrics["sampling/sampling_logp_difference/max"] == 0.2
        assert metrics["sampling/offset"] == pytest.approx(-0.05)
        assert metrics["sampling/importance_sampling_ratio/mean"] == 0.5
        assert metrics["sampling/effective_sample_size"] == pytest.approx(16 / (8 * 4))
        assert metrics["sampling/correction_dropped"] == 0.5

    def test_skipped_updates_are_counted_and_left_out(self) -> None:
        metrics = update_metrics(
            replace(
                table(tokens=[2.0, 2.0], update_index=[0, 2]),
                loss=np.array([1.0, 0.0, 3.0]),
                grad_norm=np.array([1.0, 0.0, 2.0]),
                learning_rate=np.array([1e-6, 2e-6, 3e-6]),
                skipped=np.array([False, True, False]),
            )
        )
        assert (metrics["loss"], metrics["grad_norm"], metrics["grad_norm_max"]) == (2.0, 1.5, 2.0)
        assert (metrics["updates/count"], metrics["updates/skipped"]) == (3.0, 1.0)
        assert metrics["learning_rate"] == 3e-6
        assert "loss/update_1" not in metrics

    def test_over_nothing_metrics_are_absent_not_nan(self) -> None:
        metrics = update_metrics(update_table([Update({}, 0.0, 0.0, 1e-6, True)]))
        assert metrics == {
            "learning_rate": 1e-6,
            "updates/count": 1.0,
            "updates/skipped": 1.0,
            "updates/sequences": 0.0,
            "ratio/clamped": 0.0,
        }

    def test_a_nan_component_takes_out_its_metric_alone(self) -> None:
        metrics = update_metrics(table(tokens=[2.0, 2.0], entropy_sum=[math.nan, 1.0], mismatch_sum=[1.0, 1.0]))
        assert "entropy" not in metrics
        assert metrics["sampling/offset"] == 0.5


@dataclass(frozen=True)
class Update:
    sequences: dict[str, np.ndarray]
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    skipped: bool = False


def loss_update(proximal: list[float], lengths: list[int], advantages: list[float], **knobs: float) -> Update:
    """An update of the real loss whose sequence i has log ratio -proximal[i] on each of its tokens."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    algorithm = replace(CATALOG["gspo"], **knobs)
    inputs = LossInputs(
        current_logprobs=torch.zeros(len(ids), dtype=torch.float64, requires_grad=True),
        proximal_logprobs=torch.tensor(proximal, dtype=torch.float64)[ids],
        sampled_logprobs=torch.tensor(proximal, dtype=torch.float64)[ids],
        advantages=torch.tensor(advantages, dtype=torch.float64)[ids],
        sequence_ids=ids,
        num_sequences=len(lengths),
        total_sequences=float(len(lengths)),
        total_tokens=float(len(ids)),
    )
    sums = {name: value.numpy() for name, value in policy_loss(inputs, algorithm).per_sequence.items()}
    return Update({**sums, "advantage": np.array(advantages)}, loss=0.5, grad_norm=1.0)


class TestOfTheLoss:
    """The table from the sums that the loss itself returns."""

    def test_first_of_two_sequences_clipped(self) -> None:
        metrics = update_metrics(update_table([loss_update([-0.1, 0.0], [2, 8], [1.0, 1.0])]))
        assert metrics["clip/sequence"] == 0.5
        assert metrics["clip/token"] == 0.2
        assert metrics["clip/token/length_1_3"] == 1.0
        assert metrics["ratio/log_s_std"] == pytest.approx(0.05)

    def test_on_policy_nothing_is_clipped_and_no_reference_no_kl(self) -> None:
        metrics = update_metrics(update_table([loss_update([0.0, 0.0], [2, 8], [1.0, -1.0])]))
        assert metrics["clip/sequence"] == metrics["clip/token"] == metrics["ratio/noise_floor"] == 0.0
        assert metrics["kl_proximal/k3"] == 0.0
        assert "kl" not in metrics

    def test_a_skipped_update_keeps_its_index(self) -> None:
        updates = [Update({}, skipped=True), loss_update([-0.1], [3], [1.0])]
        metrics = update_metrics(update_table(updates))
        assert metrics["clip/sequence/update_1"] == 1.0
        assert "clip/sequence/update_0" not in metrics

    def test_a_missing_column_is_named(self) -> None:
        update = loss_update([0.0], [3], [1.0])
        columns = {name: value for name, value in update.sequences.items() if name != "clipped_low"}
        with pytest.raises(KeyError, match="clipped_low"):
            update_table([replace(update, sequences=columns)])

    def test_every_column_of_the_table_is_known(self) -> None:
        scalars = {"update_index", "loss", "grad_norm", "learning_rate", "skipped"}
        assert {field.name for field in fields(UpdateTable)} == scalars | set(REQUIRED) | set(OPTIONAL)


@st.composite
def tables(draw: st.DrawFn) -> UpdateTable:
    size = draw(st.integers(0, 12))
    counts = st.integers(0, 50)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = np.array(draw(st.lists(counts, min_size=size, max_size=size)), dtype=np.float64)
    columns = {name: rng.normal(size=size) for name in (*REQUIRED, *OPTIONAL)}
    columns |= {name: np.abs(columns[name]) for name in columns if name.endswith("_sq_sum")}
    columns |= {"tokens": tokens, "advantage": rng.integers(-1, 2, size).astype(float)}
    columns |= {name: np.floor(rng.random(size) * (tokens + 1)) for name in ("clipped_low", "outside_low")}
    return table(**columns, update_index=rng.integers(0, 3, size))


class TestTheList:
    @given(tables())
    def test_every_reported_name_is_described_and_finite(self, given_table: UpdateTable) -> None:
        for name, value in update_metrics(given_table).items():
            assert describe(name).name in METRICS
            assert math.isfinite(value)

    @given(tables(), st.randoms(use_true_random=False))
    def test_the_order_of_rows_does_not_matter(self, given_table: UpdateTable, random: object) -> None:
        order = list(range(len(given_table.tokens)))
        random.shuffle(order)
        rows = {name: getattr(given_table, name)[order] for name in ("update_index", *REQUIRED, *OPTIONAL)}
        expected, shuffled = update_metrics(given_table), update_metrics(replace(given_table, **rows))
        assert shuffled == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def test_rollout_names_are_described(self) -> None:
        full = rollout("a", 1.0, reward_parts={"math": 1.0, "math/parsed": 1.0})
        for name in rollout_metrics([group("a", full, full)]):
            assert describe(name).name in METRICS

    @pytest.mark.parametrize(
        ("name", "entry"),
        [
            ("reward", "reward"),
            ("rewards/my/odd name/mean", "rewards/{name}/mean"),
            ("clip/token/update_12", "clip/token/update_{k}"),
            ("clip/sequence/length_16_63", "clip/sequence/length_{bucket}"),
            ("clip/token/update_{k}", "clip/token/update_{k}"),
        ],
    )
    def test_patterns(self, name: str, entry: str) -> None:
        assert describe(name).name == entry

    def test_an_unknown_name_names_the_nearest(self) -> None:
        with pytest.raises(KeyError, match="clip/sequence"):
            describe("clip/sequences")
        with pytest.raises(KeyError):
            describe("clip/token/update_x")

    def test_names_are_unique_and_every_field_is_filled(self) -> None:
        for name, metric in METRICS.items():
            assert metric.name == name
            assert metric.meaning.endswith(".")
            assert metric.estimator and metric.healthy and metric.unit

    def test_the_page_is_the_list(self) -> None:
        assert PAGE.read_text(encoding="utf-8") == metrics_page()
