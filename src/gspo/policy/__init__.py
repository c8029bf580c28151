"""The model being trained: loading, selected log-probs, micro-batches, one update.

Leaves sampling to ``engines`` and the mathematics of the loss to ``algorithms``.
"""
