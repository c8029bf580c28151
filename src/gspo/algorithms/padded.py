"""Every named algorithm on ``[B, T]`` tensors and a mask, for anybody's trainer.

    loss = gspo(current_logprobs, proximal_logprobs, advantages, mask).loss

``mask``: non-zero = scored; what lies under a zero has no effect, NaN included. ``advantages`` [B], or [B, T].
``proximal_logprobs`` None = current, detached (the first update after a rollout). Log-probs are natural logarithms at
the sampling temperature. All return a ``LossOutput`` whose ``loss`` is the batch's; for corrections, a KL, or one
micro-batch of several, make the inputs with ``padded_inputs`` and call ``policy_loss`` with
``dataclasses.replace(CATALOG[name], ...)``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gspo.algorithms.catalog import CATALOG
from gspo.algorithms.inputs import LossInputs, LossOutput, padded_inputs
from gspo.algorithms.loss import policy_loss


def gspo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float = 4e-4,
) -> LossOutput:
    """GSPO, -1/B sum_i min(s_i A_i, clip(s_i, 1 - epsilon, 1 + epsilon_high) A_i) (arXiv 2507.18071, Eq. 5 and 7).

    s_i = exp(1/|y_i| sum_t log(current / proximal)). B counts the rows with a scored token.
    """
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("gspo", inputs, epsilon, epsilon_high)


def gspo_token(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float = 4e-4,
) -> LossOutput:
    """GSPO-token: GSPO's ratio with the gradient of each token's own log-prob (arXiv 2507.18071, Eq. 13-17).

    For advantages that vary inside a sequence; for constant ones it is GSPO.
    """
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("gspo_token", inputs, epsilon, epsilon_high)


def grpo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.27,
) -> LossOutput:
    """GRPO, the clipped token ratio, mean over each sequence, then over sequences (arXiv 2402.03300)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("grpo", inputs, epsilon, epsilon_high)


def dapo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
) -> LossOutput:
    """DAPO's loss: the clipped token ratio, mean over all scored tokens (arXiv 2503.14476)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("dapo", inputs, epsilon, epsilon_high)


def dr_grpo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_constant: float,
    epsilons: tuple[float, float] = (0.2, 0.2),
) -> LossOutput:
    """Dr. GRPO: the clipped token ratio, summed and divided by B * ``loss_constant`` (arXiv 2503.20783).

    The constant is a number of tokens that never changes, such as the longest completion; ``epsilons`` = (low, high).
    """
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    algorithm = replace(CATALOG["dr_grpo"], epsilon=epsilons[0], epsilon_high=epsilons[1], loss_constant=loss_constant)
    return policy_loss(inputs, algorithm)


def cispo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float | None = None,
    epsilon_high: float = 4.0,
) -> LossOutput:
    """CISPO: log-probs weighted by the detached ratio, at most 1 + epsilon_high (arXiv 2506.13585).

    ``epsilon`` None: no lower bound.
    """
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("cispo", inputs, epsilon, epsilon_high)


def gmpo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.4,
    epsilon_high: float = 0.4,
) -> LossOutput:
    """GMPO: token log-ratios clipped to [-epsilon, epsilon_high], then their geometric mean (arXiv 2507.20673)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("gmpo", inputs, epsilon, epsilon_high)


def sapo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossOutput:
    """SAPO: a sigmoid gate on the token ratio in place of a clip (arXiv 2511.20347)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return policy_loss(inputs, replace(CATALOG["sapo"], tau_positive=tau_positive, tau_negative=tau_negative))


def luspo(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 2e-3,
    epsilon_high: float = 2.5e-3,
) -> LossOutput:
    """LUSPO: GSPO with each sequence's loss multiplied by its length (arXiv 2602.05261)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("luspo", inputs, epsilon, epsilon_high)


def rloo(current_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> LossOutput:
    """REINFORCE for the leave-one-out advantage, -1/B sum_i A_i sum_t log pi (arXiv 2402.14740): one update only."""
    return policy_loss(padded_inputs(current_logprobs, None, advantages, mask), CATALOG["rloo"])


def reinforce_pp_baseline(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
) -> LossOutput:
    """REINFORCE++-baseline's loss: the clipped token ratio, mean over all scored tokens (arXiv 2501.03262)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask)
    return _clipped("reinforce_pp_baseline", inputs, epsilon, epsilon_high)


def minirl(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    sampled_logprobs: Tensor | None = None,
    correction_max: float = 5.0,
) -> LossOutput:
    """MiniRL: token mask on current/proximal at 0.8 and 1.27, weight current/sampled up to 5 (arXiv 2512.01374)."""
    inputs = padded_inputs(current_logprobs, proximal_logprobs, advantages, mask, sampled_logprobs=sampled_logprobs)
    return policy_loss(inputs, replace(CATALOG["minirl"], correction_max=correction_max))


def _clipped(name: str, inputs: LossInputs, epsilon: float | None, epsilon_high: float) -> LossOutput:
    return policy_loss(inputs, replace(CATALOG[name], epsilon=epsilon, epsilon_high=epsilon_high))
