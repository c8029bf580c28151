"""Estimators of the KL to the reference model, as token losses with the gradients they have.

d = log pi_ref - log pi. As a loss, k1 has no gradient in expectation, k2 has that of the reverse KL on-policy, k3
that of the forward KL; a differentiable ratio pi/pi_old in front of k1 or k3 gives the reverse KL's, off-policy too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithms.ratios import TOKEN_LOG_RATIO_LIMIT, cut, log_ratio, ratio_of

KL_ESTIMATORS = (
    "k1",
    "k2",
    "k3",
    "k1_unbiased",
    "k3_unbiased",
    "k1_with_k2_gradient",
    "k3_with_k2_gradient",
)


def kl_terms(
    current: Tensor, reference: Tensor, *, estimator: str, proximal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """KL estimate of each token, and which tokens had d cut at +-20: [N], [N] bool.

    k1 = -d, k2 = d^2/2, k3 = e^d - d - 1. ``*_unbiased``: times the token ratio current/proximal, differentiable
    (arXiv 2512.02556, Eq. 7; ``proximal`` None: current, detached). ``*_with_k2_gradient``: that value, k2's gradient.
    """
    d, clamped = cut(log_ratio(reference.detach(), current), TOKEN_LOG_RATIO_LIMIT)
    name = estimator.split("_", 1)[0]
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator is {estimator!r}; use one of {', '.join(KL_ESTIMATORS)}")
    values = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(d) - d}[name]()
    if estimator.endswith("_with_k2_gradient"):
        k2 = d.square() / 2
        values = values.detach() + (k2 - k2.detach())
    elif estimator.endswith("_unbiased"):
        base = current.detach() if proximal is None else proximal
        log_rho, cut_too = cut(log_ratio(current, base), TOKEN_LOG_RATIO_LIMIT)
        values, clamped = values * ratio_of(log_rho), clamped | cut_too
    return values, clamped
