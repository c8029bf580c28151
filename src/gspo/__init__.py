"""gspo: post-train language models by reinforcement learning with Group Sequence Policy Optimization.

Three altitudes, the same names at each: ``gspo.train("quickstart")``; components and ``for report in gspo.loop(run)``;
pure functions for anybody's trainer, ``gspo.algorithms.gspo(...)``. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo import algorithms
    from gspo.config import Recipe
    from gspo.errors import GspoError
    from gspo.recipe import load_recipe
    from gspo.training.api import resume, train
    from gspo.training.loop import Run, loop

__version__ = "0.1.0"
__all__ = ["GspoError", "Recipe", "Run", "__version__", "algorithms", "load_recipe", "loop", "resume", "train"]

_HOME = {
    "GspoError": "gspo.errors",
    "Recipe": "gspo.config",
    "Run": "gspo.training.loop",
    "load_recipe": "gspo.recipe",
    "loop": "gspo.training.loop",
    "resume": "gspo.training.api",
    "train": "gspo.training.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562): torch stays out of ``import gspo``."""
    if name == "algorithms":
        return importlib.import_module("gspo.algorithms")
    if name not in _HOME:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return vars(importlib.import_module(_HOME[name]))[name]


def __dir__() -> list[str]:
    return sorted(__all__)
