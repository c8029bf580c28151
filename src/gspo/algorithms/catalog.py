"""The named algorithms: each one line that combines the axes, with its own defaults and their source.

Six axes: advantage, unit of the ratio, trust-region rule, reduction, mismatch correction, KL. The functions compute
any combination; ``gspo.training.resolve`` refuses those that mean nothing in a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gspo.algorithms.corrections import JOINT

RULES = ("clip", "stop_gradient_clip", "clip_inside_mean", "soft_gate", "sign_mask", "reinforce")
LEVELS = ("token", "sequence", "sequence_token", "sequence_product")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm as a point on the six axes. Knobs that its rule does not read are ignored."""

    name: str
    advantage: str = "group"  # a name of advantages.ADVANTAGES, or a dotted path
    importance_sampling_level: str = "token"  # of LEVELS
    rule: str = "clip"  # of RULES
    reduction: str = "sequence_mean_token_mean"  # of reductions.REDUCTIONS
    epsilon: float | None = 0.2  # lower range; None = no lower bound (stop_gradient_clip)
    epsilon_high: float = 0.2  # upper range
    delta: float | None = None  # bound of the unclipped ratio (clip)
    tau_positive: float = 1.0  # soft_gate
    tau_negative: float = 1.05  # soft_gate
    loss_constant: float | None = None  # constant_length
    correction: str = "none"  # of corrections.CORRECTIONS
    correction_max: float = 2.0
    correction_min: float | None = None
    off_policy_mask_delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3_unbiased"  # of kl.KL_ESTIMATORS
    proximal_logprobs: str = "recompute"  # recompute, engine or detach; read by the learner


_ENTRIES = (
    # Sequence ratio, the paper's range and mean over sequences (arXiv 2507.18071, Eq. 5-7).
    Algorithm(name="gspo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    # The same value with per-token gradients, for advantages that vary inside a sequence (Eq. 13-17).
    Algorithm(name="gspo_token", importance_sampling_level="sequence_token", epsilon=3e-4, epsilon_high=4e-4),
    # Token ratio (arXiv 2402.03300); the range is the GSPO paper's "carefully tuned" baseline.
    Algorithm(name="grpo", epsilon=0.2, epsilon_high=0.27, kl_estimator="k3"),
    # Clip-higher and token mean (arXiv 2503.14476): DAPO's loss.
    Algorithm(name="dapo", reduction="token_mean", epsilon=0.2, epsilon_high=0.28),
    # No division by length or spread (arXiv 2503.20783); loss_constant is the user's number.
    Algorithm(name="dr_grpo", advantage="group_mean", reduction="constant_length", epsilon=0.2, epsilon_high=0.2),
    # A weight of at most 1 + 4, no lower bound (arXiv 2506.13585; the bound of ScaleRL, arXiv 2510.13786).
    Algorithm(name="cispo", rule="stop_gradient_clip", reduction="token_mean", epsilon=None, epsilon_high=4.0),
    # Geometric mean of token ratios clipped at e^-0.4 and e^0.4 (arXiv 2507.20673): epsilons are in log space.
    Algorithm(
        name="gmpo",
        importance_sampling_level="sequence",
        rule="clip_inside_mean",
        epsilon=0.4,
        epsilon_high=0.4,
    ),
    # A sigmoid gate in place of the clip (arXiv 2511.20347).
    Algorithm(name="sapo", rule="soft_gate", tau_positive=1.0, tau_negative=1.05),
    # GSPO with each sequence weighted by its length (arXiv 2602.05261).
    Algorithm(
        name="luspo",
        importance_sampling_level="sequence",
        reduction="length_weighted",
        epsilon=2e-3,
        epsilon_high=2.5e-3,
    ),
    # REINFORCE with the leave-one-out baseline, one update per step (arXiv 2402.14740).
    Algorithm(name="rloo", advantage="rloo", rule="reinforce", reduction="sequence_mean_token_sum"),
    # Group mean as baseline, then whitened over all tokens of the batch (arXiv 2501.03262).
    Algorithm(
        name="reinforce_pp_baseline",
        advantage="reinforce_pp_baseline",
        reduction="token_mean",
        epsilon=0.2,
        epsilon_high=0.2,
    ),
    # Token mask on current/proximal, weight current/sampled truncated at 5 (arXiv 2512.01374, Eq. 7).
    Algorithm(
        name="minirl",
        advantage="group_mean",
        rule="sign_mask",
        reduction="sequence_mean_token_sum",
        epsilon=0.2,
        epsilon_high=0.27,
        correction=JOINT,
        correction_max=5.0,
    ),
)

CATALOG: Mapping[str, Algorithm] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
