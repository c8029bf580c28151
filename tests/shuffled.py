"""The control of the learning test: rewards shuffled between rollouts carry no information."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithms import estimate_advantages


def shuffled(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, lengths: Tensor, token_rewards: Tensor | None
) -> Tensor:
    """Group advantages of rewards permuted over all rollouts of the step, whatever their prompt."""
    generator = torch.Generator().manual_seed(int(1000 * rewards.sum()) + len(rewards))
    order = torch.randperm(len(rewards), generator=generator)
    return estimate_advantages("group", rewards[order], group_ids, valid, lengths=lengths)
