"""Keys and values of the rows that the local engine decodes together, and how rows join and leave.

``RowCache`` serves models whose layers cache one key and one value per token: rows are aligned at their
right end, padded on the left, and may come and go. ``WaveCache`` serves every other cache that transformers
knows (linear attention, chunked attention, ...): rows of one prompt length start together and only leave.
Which rows, and when, is decided by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that went through the model once, for any number of rows."""

    logits: Tensor  # [V] for the first sampled token
    length: int
    row: int  # its row in ``cache``
    cache: Cache

    def layer(self, number: int) -> KeyValue:
        """Keys and values of one layer as views, without padding: [heads, P, d] each."""
        layer: Any = self.cache.layers[number]
        keys, values = layer.keys[self.row], layer.values[self.row]
        start = keys.shape[1] - self.length
        return keys[:, start:], values[:, start:]


def rows_can_join(config: Any) -> bool:
    """Whether ``RowCache`` is right for a model of this configuration.

    Sliding-window layers are kept whole there: the window is in the mask, whose distances count columns, and
    within a row columns are contiguous. Chunked attention counts from absolute columns, so it is left out.
    """
    text_config = config.get_text_config(decoder=True)
    if "chunked_attention" in (text_config.to_dict().get("layer_types") or ()):
        return False
    layers = DynamicCache(config=text_config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class GrowingLayer(DynamicLayer):
    """A layer with room to grow: a token is written in place, where transformers' own copies the whole layer."""

    def __init__(self, buffers: KeyValue, width: int) -> None:
        """``buffers`` are keys and values [R, heads, capacity, d], filled up to ``width``."""
        super().__init__()
        self.buffers, self.width = buffers, width
        self.keys, self.values = self.filled()
        self.dtype, self.device = buffers[0].dtype, buffers[0].device
        self.is_initialized = True

    def filled(self) -> KeyValue:
        """Keys and values [R, heads, width, d]."""
        keys, values = self.buffers
        return keys[:, :, : self.width], values[:, :, : self.width]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Append [R, heads, n, d] to keys and values; the signature is transformers'."""
        start, self.width = self.width, self.width + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.width] = states
        self.keys, self.values = filled = self.filled()
        return filled


class RowCache:
    """The cache of R rows; row r's tokens are the last ``lengths[r]`` of ``width`` columns."""

    def __init__(self) -> None:
        self.cache: Cache = DynamicCache()
        self.lengths: list[int] = []
        self._layers: list[GrowingLayer] = []
        self._mask: Tensor | None = None  # [R, capacity], or None when no row is padded

    @property
    def width(self) -> int:
        """Columns filled so far."""
        return self._layers[0].width

    def mask(self) -> Tensor | None:
        """[R, width + 1] for the step that adds a column, 1 where a row has a token; None without padding."""
        return None if self._mask is None else self._mask[:, : self.width + 1]

    def advance(self) -> None:
        """Count the column that a decode step has written."""
        self.lengths = [length + 1 for length in self.lengths]

    def recompose(self, keep: Sequence[int], joining: Sequence[tuple[Prefill, int]], *, room: int) -> None:
        """Keep some rows, add ``count`` rows for each prefill behind them, leave ``room`` free columns."""
        kept = [self.lengths[row] for row in keep]
        lengths = kept + [prefill.length for prefill, count in joining for _ in range(count)]
        width, old = max(lengths), self._layers if keep else []
        layers = []
        for number in range(len(old) or len(joining[0][0].cache.layers)):
            sources = [(prefill.layer(number), count) for prefill, count in joining]
            if old:
                rows = old[number].filled()
                index = torch.tensor(list(keep), device=rows[0].device)
                newest = [part[:, :, part.shape[-2] - max(kept) :].index_select(0, index) for part in rows]
            else:
                newest = []
            layers.append(_merged(newest, sources, width=width, capacity=width + room))
        self._layers, self.cache, self.lengths = layers, Cache(layers=list(layers)), lengths
        self._mask = _padding_mask(lengths, width + room, layers[0].buffers[0].device)


class WaveCache:
    """The model's own cache, for rows that start together with prompts of one length."""

    def __init__(self) -> None:
        self.cache: Cache = DynamicCache()

    def mask(self) -> Tensor | None:
        """Never any padding."""
        return None

    def advance(self) -> None:
        """The cache counts its columns itself."""

    def recompose(self, keep: Sequence[int], joining: Sequence[tuple[Prefill, int]], *, room: int) -> None:
        """Start a wave with ``joining``, all of one prefill call, or go on with the rows to keep."""
        rows = list(keep)
        if joining:
            self.cache = joining[0][0].cache
            rows = [prefill.row for prefill, count in joining for _ in range(count)]
        self.cache.reorder_cache(torch.tensor(rows))  # type: ignore[arg-type]


def _merged(
    newest: Sequence[Tensor], sources: Sequence[tuple[KeyValue, int]], *, width: int, capacity: int
) -> GrowingLayer:
    """One layer's rows: those kept (keys and values, or none), then ``count`` of each source, right-aligned."""
    buffers = []
    for part in range(2):
        tensors = [(newest[part], len(newest[part]))] if newest else []
        tensors += [(source[part].unsqueeze(0), count) for source, count in sources]
        rows = sum(count for _, count in tensors)
        _, heads, _, size = tensors[0][0].shape
        buffer = tensors[0][0].new_zeros((rows, heads, capacity, size))
        start = 0
        for tensor, count in tensors:
            buffer[start : start + count, :, width - tensor.shape[2] : width] = tensor
            start += count
        buffers.append(buffer)
    return GrowingLayer((buffers[0], buffers[1]), width)


def _padding_mask(lengths: Sequence[int], capacity: int, device: torch.device) -> Tensor | None:
    width = max(lengths)
    if min(lengths) == width:
        return None
    columns = torch.arange(capacity, device=device)
    starts = torch.tensor([width - length for length in lengths], device=device)
    return (columns >= starts.unsqueeze(1)).long()
