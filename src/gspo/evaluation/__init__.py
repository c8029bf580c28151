"""Held-out evaluation: greedy accuracy or the mean over n samples of each item."""

from gspo.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
