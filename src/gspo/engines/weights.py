"""Checks a complete set of weights against a model's own, then copies it in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gspo.errors import EngineError


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Any]] | str) -> None:
    """Copy (name, tensor) pairs into ``model``, all of them or, when one does not fit, none.

    Names are those of ``model.state_dict()``; of tied parameters one name is enough. A tensor may be of a
    wider floating type than the model's (float32 into bfloat16), never of a narrower one. ``weights`` is
    read twice; an iterator is kept in memory for that.

    Raises:
        EngineError: a path instead of tensors, an unknown or missing name, another shape or a narrower dtype.
    """
    if isinstance(weights, str):
        raise EngineError(f"the local engine takes (name, tensor) pairs, not the path {weights!r}")
    pairs = list(weights) if isinstance(weights, Iterator) else weights
    own = model.state_dict()
    faults = _faults(own, pairs)
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise EngineError(f"weights do not fit the engine's model: {'; '.join(faults[:3])}{more}")
    with torch.no_grad():
        for name, tensor in pairs:
            own[name].copy_(tensor)


def _faults(own: dict[str, Tensor], pairs: Iterable[tuple[str, Any]]) -> list[str]:
    faults = []
    covered = set()
    for name, tensor in pairs:
        if name not in own:
            faults.append(f"{name} is unknown")
            continue
        covered.add(_storage(own[name]))
        if tuple(tensor.shape) != tuple(own[name].shape):
            faults.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
        elif torch.promote_types(tensor.dtype, own[name].dtype) != tensor.dtype:
            faults.append(f"{name} is {tensor.dtype}, which would lose precision in {own[name].dtype}")
    faults += [f"{name} is missing" for name, tensor in own.items() if _storage(tensor) not in covered]
    return faults


def _storage(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tied parameters, whose names all lead to one tensor."""
    return tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape)
