"""The mathematics: pure functions over tensors, no I/O, no configuration, no model.

Three doors. One named algorithm on ``[B, T]`` tensors (``gspo``, ``grpo``, ...); ``policy_loss`` on flat
``LossInputs`` with any ``Algorithm``, which is what the learner calls; the axes themselves, module by module.
"""

from gspo.algorithms.advantages import (
    ADVANTAGES,
    TOKEN_ESTIMATORS,
    AdvantageEstimator,
    degenerate_groups,
    discounted_returns,
    estimate_advantages,
    group_advantages,
    multi_reward_advantages,
    reinforce_pp_advantages,
)
from gspo.algorithms.catalog import CATALOG, LEVELS, RULES, Algorithm
from gspo.algorithms.corrections import CORRECTIONS, correction_weights, off_policy_keep
from gspo.algorithms.inputs import LossInputs, LossOutput, padded_inputs
from gspo.algorithms.kl import KL_ESTIMATORS, kl_terms
from gspo.algorithms.loss import policy_loss
from gspo.algorithms.padded import (
    cispo,
    dapo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    luspo,
    minirl,
    reinforce_pp_baseline,
    rloo,
    sapo,
)
from gspo.algorithms.ratios import importance_log_ratio, sequence_mean_log_ratio
from gspo.algorithms.reductions import REDUCTIONS, reduce_tokens
from gspo.algorithms.segments import Segments

__all__ = [
    "ADVANTAGES",
    "CATALOG",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LEVELS",
    "REDUCTIONS",
    "RULES",
    "TOKEN_ESTIMATORS",
    "AdvantageEstimator",
    "Algorithm",
    "LossInputs",
    "LossOutput",
    "Segments",
    "cispo",
    "correction_weights",
    "dapo",
    "degenerate_groups",
    "discounted_returns",
    "dr_grpo",
    "estimate_advantages",
    "gmpo",
    "group_advantages",
    "grpo",
    "gspo",
    "gspo_token",
    "importance_log_ratio",
    "kl_terms",
    "luspo",
    "minirl",
    "multi_reward_advantages",
    "off_policy_keep",
    "padded_inputs",
    "policy_loss",
    "reduce_tokens",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline",
    "rloo",
    "sapo",
    "sequence_mean_log_ratio",
]
