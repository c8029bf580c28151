"""Advantages: hand-computed numbers, degenerate groups, members that do not count, and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo import algorithms as alg
from gspo.algorithms import ADVANTAGES, degenerate_groups, estimate_advantages, group_advantages
from gspo.errors import NumericsError

GROUP_BASED = sorted(set(ADVANTAGES) - {"reinforce_pp", "reinforce_pp_sequence", "reinforce_pp_baseline"})


def f64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(
    name: str,
    rewards: list[float] | Tensor,
    groups: list[int],
    valid: list[int] | None = None,
    lengths: list[int] | None = None,
) -> Tensor:
    values = rewards if isinstance(rewards, Tensor) else f64(rewards)
    usable = torch.ones(len(groups), dtype=torch.bool) if valid is None else torch.tensor(valid).bool()
    sizes = torch.ones(len(groups), dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    return estimate_advantages(name, values, torch.tensor(groups), usable, lengths=sizes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # rewards 1, 0, 0, 0 | 2, 1: means 0.25, 1.5; sample stds 0.5, 0.70711
        ("group", [1.5, -0.5, -0.5, -0.5, 0.707107, -0.707107]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25, 0.5, -0.5]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3, 1.0, -1.0]),
        ("rloo_group_std", [2.0, -2 / 3, -2 / 3, -2 / 3, 1.414214, -1.414214]),
        # all rewards: mean 2/3, sample variance 2/3; centred: sum of squares 1.25, variance 0.25
        ("group_mean_reward_std", [0.918559, -0.306186, -0.306186, -0.306186, 0.612372, -0.612372]),
        ("group_mean_batch_std", [1.5, -0.5, -0.5, -0.5, 1.0, -1.0]),
        ("rloo_reward_std", [1.224745, -0.408248, -0.408248, -0.408248, 1.224745, -1.224745]),
        ("reinforce_pp_baseline_sequence", [1.5, -0.5, -0.5, -0.5, 1.0, -1.0]),
        ("reinforce_pp_sequence", [0.408248, -0.816497, -0.816497, -0.816497, 1.632993, 0.408248]),
        ("passk", [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        ("passk_group_std", [2.0, 0.0, 0.0, 0.0, 1.414214, 0.0]),
        ("gpg", [1.5, -0.5, -0.5, -0.5, 1.0, -1.0]),  # 6 sequences, 3 with a reward
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    actual = estimate(name, [1.0, 0.0, 0.0, 0.0, 2.0, 1.0], [7, 7, 7, 7, 3, 3])
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


def test_length_weighted_baseline() -> None:
    actual = estimate("opo", [1.0, 0.0], [0, 0], lengths=[1, 3])
    assert actual.tolist() == pytest.approx([0.75, -0.25])


def test_token_whitening_weighs_by_length() -> None:
    # centred 0.5, -0.5 with lengths 1 and 3: mean -0.25 over tokens, variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    actual = estimate("reinforce_pp_baseline", [1.0, 0.0], [0, 0], lengths=[1, 3])
    assert actual.tolist() == pytest.approx([1.5, -0.5])
    plain = estimate("reinforce_pp", [1.0, 0.0], [0, 1], lengths=[1, 3])
    assert plain.tolist() == pytest.approx([1.5, -0.5])


def test_binary_closed_form() -> None:
    for size, right in ((8, 1), (8, 5), (16, 4)):
        rewards = [1.0] * right + [0.0] * (size - right)
        p, sample = right / size, math.sqrt((size - 1) / size)
        actual = estimate("group", rewards, [0] * size)
        assert float(actual[0]) == pytest.approx(sample * math.sqrt((1 - p) / p))
        assert float(actual[-1]) == pytest.approx(-sample * math.sqrt(p / (1 - p)))


@pytest.mark.parametrize("name", GROUP_BASED)
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6, -2e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name: str, value: float, dtype: torch.dtype) -> None:
    rewards = torch.tensor([value] * 7 + [1.0, 0.0], dtype=dtype)
    actual = estimate(name, rewards, [0] * 7 + [1] * 2)
    assert actual[:7].tolist() == [0.0] * 7
    assert float(actual[7]) > 0.0 and actual.dtype == dtype


def test_float32_rewards_are_computed_in_float64() -> None:
    rewards = torch.tensor([1000.1, 1000.2, 1000.4, 999.9])
    exact = estimate("group", rewards.double(), [0] * 4)
    assert estimate("group", rewards, [0] * 4).tolist() == exact.float().tolist()


def test_rewards_equal_up_to_rounding() -> None:
    assert estimate("group", [0.1 + 0.2, 0.3], [0, 0]).tolist() == [0.0, 0.0]
    assert estimate("group", [1e9, 1e9 + 100], [0, 0]).tolist() == [0.0, 0.0]  # 1e-7 of their size
    assert estimate("group", [0.0, 2e-6], [0, 0]).tolist() == pytest.approx([-0.707107, 0.707107], abs=1e-6)


def test_degenerate_groups() -> None:
    rewards = f64([1.0, 1.0, 1.0, 0.0, 5.0, math.nan, 2.0])
    groups = torch.tensor([4, 4, 9, 9, 2, 2, 1])
    valid = torch.tensor([1, 1, 1, 1, 1, 0, 1]).bool()
    expected = [True, True, False, False, True, True, True]  # two equal; differ; one usable member; a group of one
    assert degenerate_groups(rewards, groups, valid).tolist() == expected
    assert degenerate_groups(rewards[:0], groups[:0], valid[:0]).tolist() == []
    assert degenerate_groups(rewards, groups, torch.zeros(7).bool()).tolist() == [True] * 7


def test_groups_go_by_id_and_not_by_position() -> None:
    assert estimate("group", [1.0, 0.0, 1.0, 0.0], [0, 1, 0, 1]).tolist() == [0.0] * 4


def test_a_missing_member_enters_no_statistic() -> None:
    rewards = f64([1.0, 0.0, math.nan])
    actual = group_advantages(rewards, torch.tensor([0, 0, 0]))
    assert actual.tolist() == pytest.approx([0.707107, -0.707107, 0.0], abs=1e-6)
    for name in ADVANTAGES:
        assert bool(estimate(name, rewards, [0, 0, 0], [1, 1, 0]).isfinite().all())
        assert float(estimate(name, rewards, [0, 0, 0], [1, 1, 0])[2]) == 0.0


def test_a_member_without_tokens_is_not_usable() -> None:
    assert estimate("group", [100.0, 1.0], [0, 0], lengths=[0, 2]).tolist() == [0.0, 0.0]


def test_a_group_of_one_gets_zero() -> None:
    for name in GROUP_BASED:
        assert estimate(name, [1.0], [0]).tolist() == [0.0]


def test_a_low_outlier_is_kept() -> None:
    actual = estimate("rloo", [0.0] + [0.95] * 7, [0] * 8)
    assert float(actual[0]) == pytest.approx(-0.95) and bool((actual[1:] > 0).all())


def test_a_valid_reward_must_be_finite() -> None:
    with pytest.raises(NumericsError, match="NaN or infinite"):
        estimate("group", [1.0, math.nan], [0, 0])
    with pytest.raises(NumericsError, match="NaN or infinite"):
        estimate("group", [1.0, math.inf], [0, 0])


def test_names_and_shapes() -> None:
    with pytest.raises(ValueError, match="did you mean 'group_mean'"):
        estimate("group_means", [1.0, 0.0], [0, 0])
    with pytest.raises(ValueError, match="group_ids is"):
        estimate("group", [1.0, 0.0], [0, 0, 0])
    with pytest.raises(ValueError, match="does not read token_rewards"):
        ones = torch.ones(2, dtype=torch.int64)
        estimate_advantages("group", f64([1.0, 0.0]), ones, ones.bool(), lengths=ones, token_rewards=f64([0.0, 0.0]))


def test_an_estimator_of_ones_own() -> None:
    def raw(rewards: Tensor, group_ids: Tensor, valid: Tensor, lengths: Tensor, token_rewards: Tensor | None) -> Tensor:
        return torch.where(valid, rewards - 1.0, 0.0)

    ones = torch.ones(3, dtype=torch.int64)
    actual = estimate_advantages(raw, f64([3.0, 1.0, 0.5]), ones, ones.bool(), lengths=torch.tensor([1, 2, 0]))
    assert actual.tolist() == [2.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="must be"):
        estimate_advantages(lambda *_: f64([1.0]), f64([3.0, 1.0, 0.5]), ones, ones.bool(), lengths=ones)


def test_discounted_returns() -> None:
    rewards, lengths = f64([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([3, 0, 2])
    actual = alg.discounted_returns(rewards, lengths, gamma=0.5)
    assert actual.tolist() == [3.0, 4.0, 4.0, 16.0, 16.0]
    long = alg.discounted_returns(torch.ones(1000, dtype=torch.float64), torch.tensor([1000]), gamma=0.9)
    assert float(long[0]) == pytest.approx(10.0, abs=1e-12) and float(long[-1]) == 1.0


def test_token_rewards_make_token_advantages() -> None:
    lengths, ones = torch.tensor([2, 1]), torch.ones(2).bool()
    actual = estimate_advantages(
        "reinforce_pp", f64([0.0, 0.0]), torch.tensor([0, 1]), ones, lengths=lengths, token_rewards=f64([1.0, 2.0, 0.0])
    )
    assert actual.tolist() == pytest.approx([0.872872, 0.218218, -1.091089], abs=1e-6)  # returns 3, 2, 0, whitened
    without = alg.reinforce_pp_advantages(f64([1.0, 0.0]), torch.tensor([0, 1]), ones, lengths, None, gamma=0.5)
    assert without.tolist() == pytest.approx([0.0, 1.0, -1.0])  # returns 0.5, 1, 0


def test_several_rewards_are_normalised_apart() -> None:
    rewards = f64([[1.0, 100.0], [0.0, 100.0], [1.0, math.nan], [0.0, 0.0]])
    actual = alg.multi_reward_advantages(rewards, torch.tensor([0, 0, 0, 0]), torch.ones(4).bool())
    # columns: (.866, -.866, .866, -.866) and (.577, .577, absent, -1.155); over the std of their sum
    column = 0.8660254
    total = f64([column + 0.5773503, -column + 0.5773503, column, -column - 1.1547005])
    assert actual.tolist() == pytest.approx((total / total.std()).tolist(), abs=1e-6)
    twice = alg.multi_reward_advantages(
        rewards, torch.tensor([0, 0, 0, 0]), torch.ones(4).bool(), weights=f64([0.0, 1.0])
    )
    assert float(twice[2]) == 0.0
    with pytest.raises(ValueError, match="one column a function"):
        alg.multi_reward_advantages(f64([1.0]), torch.tensor([0]), torch.ones(1).bool())


rewards_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=4, max_size=24)


@settings(max_examples=60, deadline=None)
@given(rewards=rewards_lists, scale=st.floats(0.25, 50.0), shift=st.floats(-20.0, 20.0), split=st.integers(1, 5))
def test_group_advantage_invariants(rewards: list[float], scale: float, shift: float, split: int) -> None:
    """Sum 0, sample variance 1, invariant to a r + b; RLOO = n/(n-1) (r - mean)."""
    groups = [i % split for i in range(len(rewards))]
    ours = estimate("group", rewards, groups)
    moved = estimate("group", [scale * r + shift for r in rewards], groups)
    assert moved.tolist() == pytest.approx(ours.tolist(), abs=1e-7)
    mean, loo = estimate("group_mean", rewards, groups), estimate("rloo", rewards, groups)
    for g in set(groups):
        members = torch.tensor([i for i, h in enumerate(groups) if h == g])
        part, n = ours[members], len(members)
        assert float(part.sum()) == pytest.approx(0.0, abs=1e-9)
        flat = len({rewards[i] for i in members.tolist()}) == 1
        assert flat == (not part.any())
        if not flat:
            assert float(part.square().sum()) == pytest.approx(n - 1)
            assert loo[members].tolist() == pytest.approx((mean[members] * n / (n - 1)).tolist())


@settings(max_examples=40, deadline=None)
@given(rewards=rewards_lists, data=st.data())
def test_order_and_ids_do_not_matter(rewards: list[float], data: st.DataObject) -> None:
    groups = [i % 3 for i in range(len(rewards))]
    lengths = [1 + i % 4 for i in range(len(rewards))]
    order = data.draw(st.permutations(range(len(rewards))))
    for name in ADVANTAGES:
        ours = estimate(name, rewards, groups, lengths=lengths)
        shuffled = estimate(
            name, [rewards[i] for i in order], [groups[i] * 17 + 5 for i in order], lengths=[lengths[i] for i in order]
        )
        if name.startswith("passk"):  # of two best ones either may win, with a lead of 0
            assert float(shuffled.sum()) == pytest.approx(float(ours.sum()))
        else:
            assert shuffled.tolist() == pytest.approx([float(ours[i]) for i in order], abs=1e-9)
