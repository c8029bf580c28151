"""gspo: post-train language models by reinforcement learning with Group Sequence Policy Optimization."""

__version__ = "0.1.0"
__all__ = ["__version__"]
