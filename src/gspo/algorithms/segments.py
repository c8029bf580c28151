"""Sums over the tokens of each sequence, with the same bits on every run and every device.

Tokens are laid out in a padded [S, W] matrix by one scatter to distinct cells and summed along its rows: no atomic
additions, whose order varies on a GPU, in forward or backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Which of S sequences each of N tokens belongs to. Sequences may be empty, tokens in any order."""

    ids: Tensor  # [N] int64 in 0 .. S-1
    counts: Tensor  # [S] int64 tokens of each sequence
    cells: Tensor  # [N] int64 distinct cells of the [S, W] matrix
    width: int  # W, the longest sequence

    @classmethod
    def from_ids(cls, ids: Tensor, num_sequences: int) -> Segments:
        """Segments of tokens with ``ids`` [N] int64 in 0 .. num_sequences-1."""
        counts = torch.bincount(ids, minlength=num_sequences)
        if counts.shape[0] != num_sequences:
            raise ValueError(f"sequence_ids hold {counts.shape[0] - 1}, but num_sequences is {num_sequences}")
        order = torch.argsort(ids, stable=True)
        starts = counts.cumsum(0) - counts
        sorted_ids = ids[order]
        width = int(counts.max()) if num_sequences else 0
        sorted_cells = sorted_ids * width + torch.arange(ids.shape[0], device=ids.device) - starts[sorted_ids]
        cells = torch.empty_like(sorted_cells).scatter(0, order, sorted_cells)
        return cls(ids=ids, counts=counts, cells=cells, width=width)

    @classmethod
    def from_mask(cls, mask: Tensor) -> Segments:
        """Segments of ``x[mask]`` for a boolean ``mask`` [B, T]: row b is sequence b."""
        return cls.from_ids(mask.nonzero()[:, 0], mask.shape[0])

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.counts.shape[0]

    def padded(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """``values`` [..., N] as [..., S, W], ``fill`` where a sequence is shorter."""
        shape = (*values.shape[:-1], self.num_sequences * self.width)
        cells = self.cells.expand(values.shape)
        flat = torch.full(shape, fill, dtype=values.dtype, device=values.device).scatter(-1, cells, values)
        return flat.unflatten(-1, (self.num_sequences, self.width))

    def sum(self, values: Tensor) -> Tensor:
        """Sums of ``values`` [..., N] over each sequence: [..., S]; 0 for an empty one."""
        return self.padded(values).sum(-1)

    def mean(self, values: Tensor) -> Tensor:
        """Means of ``values`` [..., N] over each sequence: [..., S]; 0 for an empty one."""
        return self.sum(values) / self.counts.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Give every token its sequence's value: [S] to [N], differentiable."""
        matrix = values.unsqueeze(1).expand(self.num_sequences, self.width)
        return matrix.reshape(-1).gather(0, self.cells)
