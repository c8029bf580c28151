"""Micro-batch plans, collation, and the split of a step into updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.policy.packing import collate, plan_microbatches, plan_updates
from gspo.types import TokenRow


def row(length: int, prompt: int) -> TokenRow:
    mask = np.zeros(length, dtype=bool)
    mask[prompt:] = True
    return TokenRow(np.arange(1, length + 1), mask, np.zeros(length, np.float32), np.full(length, -1))


def test_a_plan_by_hand() -> None:
    # Longest first: 8 alone in 10 tokens; 5 and 4 pad to 2 x 5 = 10; 2 goes alone.
    assert plan_microbatches([[4], [8], [5], [2]], 10) == [[1], [2, 0], [3]]


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    assert plan_microbatches([[3], [50], [3]], 6) == [[1], [0, 2]]


def test_rows_of_one_sequence_stay_together() -> None:
    assert plan_microbatches([[4, 4], [4]], 8) == [[0], [1]]


lengths = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=20)


@given(lengths, st.integers(1, 200))
def test_every_sequence_once_and_within_budget(row_lengths: list[list[int]], budget: int) -> None:
    plan = plan_microbatches(row_lengths, budget)
    assert sorted(s for part in plan for s in part) == list(range(len(row_lengths)))
    for part in plan:
        rows = sum(len(row_lengths[s]) for s in part)
        width = max(max(row_lengths[s]) for s in part)
        assert rows * width <= budget or len(part) == 1


def test_collate_pads_on_the_right_and_scores_sampled_tokens_only() -> None:
    batch = collate([row(3, 1), row(5, 4)], torch.device("cpu"))
    assert batch.token_ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.scored.tolist() == [[False, True, True, False, False], [False, False, False, False, True]]


def test_updates_keep_groups_whole() -> None:
    group_ids = np.repeat(np.arange(6), 4)
    parts = plan_updates(group_ids, 3, minibatches="groups", seed=5)
    assert [len(part) for part in parts] == [8, 8, 8]
    for part in parts:
        assert sorted(np.bincount(group_ids[part], minlength=6).tolist(), reverse=True) == [4, 4, 0, 0, 0, 0]
    assert sorted(np.concatenate(parts).tolist()) == list(range(24))


def test_updates_of_single_rollouts() -> None:
    group_ids = np.repeat(np.arange(6), 4)
    parts = plan_updates(group_ids, 3, minibatches="rollouts", seed=5)
    assert sorted(np.concatenate(parts).tolist()) == list(range(24))
    assert any(len(np.unique(group_ids[part])) > 2 for part in parts)


def test_the_split_follows_from_the_seed() -> None:
    group_ids = np.repeat(np.arange(8), 2)
    once, again, other = (plan_updates(group_ids, 4, minibatches="groups", seed=s) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(once, other, strict=True))


def test_updates_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 updates do not divide 3 groups"):
        plan_updates(np.repeat(np.arange(3), 2), 4, minibatches="groups", seed=0)
