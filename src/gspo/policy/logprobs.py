"""Log-probs of chosen tokens, the one definition that the engine and the learner share.

``logprobs_of`` starts from logits, ``selected_logprobs`` from hidden states and never holds ``[tokens,
vocab]``: it works through the tokens in chunks and computes each chunk's logits again in backward. Which
tokens are scored, how they are packed and what becomes of the log-probs is the business of others.

The policy is softmax(z / T) over the whole vocabulary, where z are the logits the model itself would return:
logits are divided by the temperature, never log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Float32 logits held at once; forward and backward need about three times as much. On CPU not below 32 MiB: up to
# there glibc keeps freed blocks in its heap, and the peak was measured to rise by half. A GPU wants wider matrices.
CHUNK_BYTES_CPU = 48 * 2**20
CHUNK_BYTES = 64 * 2**20
_NO_IGNORED_TARGET = -(2**62)  # a real -100 must fail like any id outside the vocabulary, not score 0

LogitTransform = Callable[[Tensor], Tensor]


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probs of ``targets`` under softmax(logits / temperature): ``z_y / T - logsumexp(z / T)``.

    Args:
        logits: [N, V], any floating dtype; computed in float32 whatever autocast says, float64 stays float64.
        targets: int64 [N], each in 0 .. V - 1.
        temperature: > 0, one number or one per row [N].

    Returns:
        float32 (float64 for float64 logits) [N], differentiable in ``logits``.

    Raises:
        ValueError: a temperature that is not > 0, or shapes that do not match.
        IndexError: a target outside the vocabulary (on CPU; CUDA asserts).
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits must be [N, V] and targets [N], got {tuple(logits.shape)} and {tuple(targets.shape)}")
    scaled = _tempered(logits, temperature)
    return -functional.cross_entropy(scaled, targets, reduction="none", ignore_index=_NO_IGNORED_TARGET)


def selected_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    logit_transform: LogitTransform | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of ``targets`` from hidden states, a chunk of tokens at a time.

    Equals ``logprobs_of(logit_transform(head(hidden)), targets, temperature)`` in value and gradient.
    Gradients reach ``hidden`` and every parameter of ``head`` (tied embeddings, bias, LoRA). A plain
    ``nn.Linear`` accumulates its weight's gradient in place; any other head is recomputed by activation
    checkpointing.

    Args:
        hidden: [N, H], N may be 0.
        head: maps [n, H] to logits [n, V]: a module, or a callable that closes over one.
        targets: int64 [N].
        temperature: > 0.
        chunk_size: tokens held at once; None picks it so that the float32 logits of a chunk take
            ``CHUNK_BYTES`` (``CHUNK_BYTES_CPU``).
        logit_transform: what the model applies after its head, see ``logit_transform_of``.
        with_entropy: also return the entropy of softmax(z / T) in nats, without gradient.

    Returns:
        float32 [N] log-probs (float64 for float64 logits), and entropies of that shape or None.

    Raises:
        ValueError: shapes that do not match, ``chunk_size`` or ``temperature`` not > 0.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden must be [N, H] and targets [N], got {tuple(hidden.shape)} and {tuple(targets.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
    score = _Score(temperature, logit_transform, with_entropy)
    size = chunk_size or _default_chunk(head, hidden)
    if len(targets) <= size:  # one chunk: recomputing it would save nothing
        return score(head(hidden), targets)
    if _is_plain_linear(head) and torch.is_grad_enabled():
        logprobs, entropies = _LinearLogprobs.apply(hidden, head.weight, head.bias, targets, score, size)
        return logprobs, entropies if with_entropy else None
    return _checkpointed(hidden, head, targets, score, size)


def logit_transform_of(config: Any) -> LogitTransform | None:
    """What a transformers causal LM does to its head's output before it returns logits; None for most.

    Gemma's ``final_logit_softcapping`` c: ``c * tanh(z / c)``; Granite's ``logits_scaling`` divides
    (HyperCLOVA X's multiplies); Cohere's ``logit_scale`` multiplies. ``config`` is the model's; a multimodal
    one is searched by its text part. So ``logit_transform_of(config)(head(hidden))`` equals the model's own
    logits.
    """
    fields = config.get_text_config(decoder=True).to_dict()
    multiply = 1.0
    for name in ("logit_scale", "output_multiplier"):
        multiply *= fields.get(name) or 1.0
    scaling = fields.get("logits_scaling") or 1.0
    multiply = multiply * scaling if fields.get("model_type") == "hyperclovax" else multiply / scaling
    softcap = fields.get("final_logit_softcapping") or fields.get("logits_soft_cap")
    if multiply == 1.0 and softcap is None:
        return None
    return ScaleAndCap(multiply, softcap)


@dataclass(frozen=True, slots=True)
class ScaleAndCap:
    """``c * tanh(m z / c)``, or ``m z`` without a cap: a transform that a model applies itself."""

    multiply: float
    softcap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits if self.multiply == 1.0 else logits * self.multiply
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


@dataclass(frozen=True, slots=True)
class _Score:
    """From a chunk's head output to its log-probs and entropies."""

    temperature: float
    logit_transform: LogitTransform | None
    with_entropy: bool

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.logit_transform is not None:
            logits = self.logit_transform(logits)
        logprobs = logprobs_of(logits, targets, self.temperature)
        return logprobs, _entropy(logits.detach(), self.temperature) if self.with_entropy else None


def _tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Float32 logits / T. Rows may differ in temperature."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if isinstance(temperature, Tensor):
        return logits / temperature.to(logits.dtype).unsqueeze(-1)
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; a greedy token is scored at temperature 1")
    return logits if temperature == 1.0 else logits / temperature


@torch.no_grad()
def _entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / T), [N]."""
    return torch.special.entr(torch.softmax(_tempered(logits, temperature), dim=-1)).sum(dim=-1)


def _default_chunk(head: Callable[[Tensor], Tensor], hidden: Tensor) -> int:
    """Tokens whose float32 logits fill the byte budget. A head of unknown width is asked with no tokens."""
    if _is_plain_linear(head):
        vocab_size = head.out_features
    else:
        with torch.no_grad():
            vocab_size = head(hidden[:0]).shape[-1]
    budget = CHUNK_BYTES_CPU if hidden.device.type == "cpu" else CHUNK_BYTES
    return max(1, budget // (4 * vocab_size))


def _is_plain_linear(head: Any) -> TypeGuard[nn.Linear]:
    """Whether ``head`` computes exactly x W' + b, with no subclass or hook that would be skipped."""
    if type(head) is not nn.Linear:
        return False
    return not (head._forward_hooks or head._forward_pre_hooks or head._backward_hooks)


def _checkpointed(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, score: _Score, size: int
) -> tuple[Tensor, Tensor | None]:
    """Chunks whose logits are computed again in backward, for any head."""

    def one(part: Tensor, part_targets: Tensor) -> tuple[Tensor, Tensor | None]:
        return score(head(part), part_targets)

    parts = [
        checkpoint(one, hidden[start : start + size], targets[start : start + size], use_reentrant=False)
        for start in range(0, len(targets), size)
    ]
    logprobs = torch.cat([logprobs for logprobs, _ in parts])
    return logprobs, torch.cat([entropy for _, entropy in parts]) if score.with_entropy else None


class _LinearLogprobs(torch.autograd.Function):
    """Chunked log-probs of a plain linear head; its weight's gradient is one buffer, added to chunk by chunk.

    Autograd over checkpointed chunks would hold the sum and each chunk's own [V, H] gradient at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        score: _Score,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.score, ctx.size, ctx.autocast = score, size, _autocast_dtype(hidden)
        weight, bias = _cast(ctx.autocast, weight, bias)
        parts = []
        for start in range(0, len(targets), size):
            part = _cast(ctx.autocast, hidden[start : start + size])[0]
            parts.append(score(functional.linear(part, weight, bias), targets[start : start + size]))
        logprobs = torch.cat([logprobs for logprobs, _ in parts])
        entropy = torch.cat([entropy for _, entropy in parts if entropy is not None] or [logprobs.new_empty(0)])
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grads = _LinearGrads(
            torch.empty_like(hidden) if wants_hidden else None,
            _accumulator(weight) if wants_weight else None,
            _accumulator(bias) if wants_bias else None,
        )
        score = _Score(ctx.score.temperature, ctx.score.logit_transform, with_entropy=False)
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight, cast_bias = _cast(ctx.autocast, weight, bias)
            for start in range(0, len(targets), ctx.size):
                rows = slice(start, start + ctx.size)
                part = _cast(ctx.autocast, hidden[rows])[0]
                logits = functional.linear(part, cast_weight, cast_bias)
                grad_logits = _grad_of_logits(logits, targets[rows], score, grad_logprobs[rows])
                grads.add(rows, part, cast_weight, grad_logits)
        return *grads.cast(weight, bias), None, None, None


@dataclass(slots=True)
class _LinearGrads:
    """Gradients of a linear head, filled chunk by chunk; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add(self, rows: slice, part: Tensor, weight: Tensor, grad_logits: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[rows] = grad_logits @ weight
        if self.weight is not None:
            if self.weight.dtype == grad_logits.dtype:
                self.weight.addmm_(grad_logits.t(), part)
            else:
                self.weight += grad_logits.t() @ part
        if self.bias is not None:
            self.bias += grad_logits.sum(dim=0, dtype=self.bias.dtype)

    def cast(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_weight = None if self.weight is None else self.weight.to(weight.dtype)
        grad_bias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return self.hidden, grad_weight, grad_bias


def _accumulator(parameter: Tensor) -> Tensor:
    """Zeros to add gradients to: float32 at least, since many bfloat16 additions would lose small ones."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _grad_of_logits(logits: Tensor, targets: Tensor, score: _Score, grad_logprobs: Tensor) -> Tensor:
    """Gradient of ``sum(grad * logprobs)`` in the head's output: ``grad (onehot(y) - softmax(z / T)) / T``."""
    if score.logit_transform is not None:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            return torch.autograd.grad(score(logits, targets)[0], logits, grad_logprobs)[0]
    weights = (grad_logprobs / score.temperature).unsqueeze(1)
    grad = torch.softmax(_tempered(logits, score.temperature), dim=-1).mul_(-weights)
    return grad.scatter_add_(1, targets.unsqueeze(1), weights).to(logits.dtype)


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast would run this matmul in; None when it is off, or leaves float64 alone."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    return [tensor if dtype is None or tensor is None else tensor.to(dtype) for tensor in tensors]
