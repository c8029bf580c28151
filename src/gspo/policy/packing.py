"""Rollouts to micro-batches: which sequences share a forward pass, and the tensors they become.

The plan is one deterministic function of lengths, made before anything runs. It changes memory and speed, never the
gradient: denominators are counted over the whole update. Rows are padded on the right; the padding is masked and
never scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo.types import TokenRow


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass: b rows of at most T tokens."""

    token_ids: Tensor  # [b, T] int64, 0 in the padding
    attention_mask: Tensor  # [b, T] int64, 1 = token, 0 = padding
    scored: Tensor  # [b, T] bool, True where the policy sampled the token


def plan_microbatches(row_lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``max_tokens`` padded tokens.

    ``row_lengths[s]`` holds the lengths of the rows of sequence s; all rows of a sequence stay together. Sequences
    are taken by falling length, so that little is padded; a sequence longer than the budget goes alone.
    """
    longest = [max(lengths) for lengths in row_lengths]
    order = sorted(range(len(row_lengths)), key=lambda s: (-longest[s], s))
    plan: list[list[int]] = []
    rows = width = 0
    for s in order:
        fits = plan and (rows + len(row_lengths[s])) * max(width, longest[s]) <= max_tokens
        if not fits:
            plan.append([])
            rows = width = 0
        plan[-1].append(s)
        rows += len(row_lengths[s])
        width = max(width, longest[s])
    return plan


def collate(rows: Sequence[TokenRow], device: torch.device) -> MicroBatch:
    """Pad rows on the right into one micro-batch. A token at position 0 is never scored: nothing predicts it."""
    width = max(len(row.token_ids) for row in rows)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    attention_mask = np.zeros((len(rows), width), dtype=np.int64)
    scored = np.zeros((len(rows), width), dtype=np.bool_)
    for i, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[i, :length] = row.token_ids
        attention_mask[i, :length] = 1
        scored[i, :length] = row.sampled_mask
    return MicroBatch(
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(attention_mask).to(device),
        torch.from_numpy(scored).to(device),
    )


def plan_updates(group_ids: np.ndarray, updates: int, *, minibatches: str, seed: int) -> list[np.ndarray]:
    """Which sequences each of the step's updates takes: [updates] arrays of sequence indices.

    ``minibatches="groups"`` keeps groups whole, in seeded shuffled order; "rollouts" shuffles single rollouts.
    Raises ValueError where the updates do not divide the units (the recipe layer names the valid sizes before).
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    if minibatches == "rollouts":
        units = generator.permutation(len(group_ids))
        if len(units) % updates:
            raise ValueError(f"{updates} updates do not divide {len(units)} rollouts")
        return [np.sort(part) for part in np.split(units, updates)]
    groups = generator.permutation(np.unique(group_ids))
    if len(groups) % updates:
        raise ValueError(f"{updates} updates do not divide {len(groups)} groups")
    return [np.flatnonzero(np.isin(group_ids, part)) for part in np.split(groups, updates)]
