"""Engine and rewards together make groups.

Only this room builds rollouts. Leaves sampling to ``engines``, verdicts to ``rewards``, learning to ``training``.
"""

from gspo.rollouts.collector import Collector, SamplingPlan

__all__ = ["Collector", "SamplingPlan"]
