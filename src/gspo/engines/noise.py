"""Where the local engine's randomness comes from, and how a token is drawn from logits.

Noise is a counter hash: one uniform number per (seed, absolute token position), in tensor operations.
Nothing else enters it, so a rollout does not depend on what else is in the batch, and a resubmitted prefix
continues its stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.policy.logprobs import logprobs_of

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
# increment and # the two multipliers of its finaliser, written as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLY_2 = 0x94D049BB133111EB - 2**64
_BLOCK = 512  # vocabulary entries summed together before the search inside one block


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) of (seed, position), 53 bits each.

    ``seeds`` and ``positions`` are int64 and broadcast against each other. Returns float64 of the broadcast
    shape. The seed goes through the finaliser before it becomes a stream, so neighbouring seeds are
    unrelated.
    """
    bits = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def draw(
    logits: Tensor, noise: Tensor | None, *, temperature: Tensor, greedy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token for each row, and its log-prob under softmax(logits / temperature).

    Args:
        logits: [R, V], the model's own.
        noise: float64 [R] in [0, 1); None when every row is greedy.
        temperature: float32 [R], > 0 (1 in greedy rows).
        greedy: bool [R], rows that take the largest logit; None when there is none.

    Returns:
        token ids int64 [R] and log-probs float32 [R]; a row whose logits are not finite has a NaN log-prob.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if noise is None:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = inverse_cdf(torch.softmax(logits / temperature.unsqueeze(-1), dim=-1), noise)
        if greedy is not None:
            tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs_of(logits, tokens, temperature)


def inverse_cdf(probs: Tensor, noise: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds ``noise``: int64 [R].

    ``probs`` [R, V] need not sum to exactly 1; sums are float64. A token of probability 0 is never drawn: its
    cumulative sum equals its predecessor's, and the target is kept below the total.
    """
    rows, vocab_size = probs.shape
    if vocab_size <= 2 * _BLOCK:
        return _search(probs, noise * probs.sum(dim=-1, dtype=torch.float64))
    padding = -vocab_size % _BLOCK
    blocks = torch.nn.functional.pad(probs, (0, padding)).view(rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)  # [R, V / block]
    target = noise * sums.sum(dim=-1)
    block = _search(sums, target)
    before = (sums.cumsum(dim=-1) - sums).gather(1, block.unsqueeze(1)).squeeze(1)
    inside = blocks[torch.arange(rows, device=probs.device), block]
    tokens = block * _BLOCK + _search(inside, target - before)
    return tokens.clamp_max(vocab_size - 1)  # rows of NaN end up in the padding


def _search(weights: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds ``target``, never one of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(target, below).clamp_min(0.0)
    index = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return index.clamp_max(weights.shape[-1] - 1)  # NaN rows search past the end


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MULTIPLY_1
    state = (state ^ _shift_right(state, 27)) * _MULTIPLY_2
    return state ^ _shift_right(state, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: torch's shifts the sign in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
