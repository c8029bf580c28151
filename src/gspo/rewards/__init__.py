"""Reward functions: plain functions of a rollout, and the worker processes that run them.

What a function is and how it is named: ``contract``. The built-ins: ``math``, ``text`` (exact, format,
length) and ``gym`` (reasoning-gym). Running them under deadlines, contained: ``workers``. Trying one out:
``check``.
"""

from gspo.rewards.contract import RewardSpec, Verdict, load_reward
from gspo.rewards.workers import Grader

__all__ = ["Grader", "RewardSpec", "Verdict", "load_reward"]
