"""Reward functions: plain functions of a rollout, and the worker processes that run them.

What a function is and how it is named: ``contract``. The built-ins: ``math``, ``text`` (exact, format,
length) and ``gym`` (reasoning-gym). Running them under deadlines, contained: ``workers``. Trying one out:
``check``.
"""

from gspo.rewards.check import RewardReport, check_reward, example
from gspo.rewards.contract import RewardSpec, Verdict, load_reward
from gspo.rewards.math import gold_problem
from gspo.rewards.workers import Grader

__all__ = [
    "Grader",
    "RewardReport",
    "RewardSpec",
    "Verdict",
    "check_reward",
    "example",
    "gold_problem",
    "load_reward",
]
