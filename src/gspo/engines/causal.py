"""One way to call any transformers causal LM, whatever its version names its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from gspo.engines.kv import Prefill, RowCache, WaveCache
from gspo.errors import EngineError


class CausalModel:
    """A model behind two calls: prefill whole prompts, decode one token a row. Knows its limits and
    device."""

    def __init__(self, model: nn.Module) -> None:
        self.given = model
        self.base = _base_model(model)
        self.config = self.base.config.get_text_config(decoder=True)
        arguments = inspect.signature(type(self.base).forward).parameters
        # transformers < 5.20 swallows an unknown `cache=` without a word and answers wrongly
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in arguments), None)
        if self._cache_name is None:
            raise EngineError(
                f"{type(self.base).__name__} takes neither cache= nor past_key_values=, so it cannot be "
                "sampled with a cache; use a transformers causal LM"
            )
        self._takes_positions = "position_ids" in arguments
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        return self.base.get_input_embeddings().weight.device

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have an embedding."""
        return self.base.get_input_embeddings().weight.shape[0]

    @property
    def max_positions(self) -> int:
        """The configuration's context window; 0 = not limited."""
        name = self.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # n_positions
        return int(self.config.to_dict().get(name) or 0)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Without gradient and dropout; every module's own training flag comes back."""
        training = [module for module in self.base.modules() if module.training]
        for module in training:
            module.training = False
        try:
            # not inference_mode: a buffer that the model fills here may be used in training too
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def prefill(self, prompts: Sequence[Tensor], *, joinable: bool) -> list[Prefill]:
        """Each prompt [P] through the model once, in one forward.

        ``joinable``: prompts of any lengths, padded on the left, for a ``RowCache``. Otherwise prompts of
        one length, on the cache the model itself would make, for a ``WaveCache``.
        """
        lengths = [len(prompt) for prompt in prompts]
        ids, mask = _left_padded(prompts, lengths)
        cache = DynamicCache() if joinable else DynamicCache(config=self.config)
        if mask is None:
            logits = self._forward(ids.to(self.device), cache, None, None)
        else:
            positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
            logits = self._forward(ids.to(self.device), cache, mask.to(self.device), positions.to(self.device))
        return [Prefill(logits[row], length, row, cache) for row, length in enumerate(lengths)]

    def decode(self, tokens: Tensor, rows: RowCache | WaveCache, positions: Tensor) -> Tensor:
        """Logits [R, V] after one more token [R] at these positions [R], which enters the cache."""
        logits = self._forward(tokens.unsqueeze(1), rows.cache, rows.mask(), positions.unsqueeze(1))
        rows.advance()
        return logits

    def _forward(self, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {self._cache_name or "": cache, **self._keep_last}
        if positions is not None and self._takes_positions:
            arguments["position_ids"] = positions
        output = self.base(input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **arguments)
        return output.logits[:, -1]


def _left_padded(prompts: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Token ids [U, P] and the mask of real ones; None when no prompt is padded."""
    width = max(lengths)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
    if min(lengths) == width:
        return ids, None
    starts = torch.tensor([width - length for length in lengths])
    return ids, (torch.arange(width) >= starts.unsqueeze(1)).long()


def _base_model(model: nn.Module) -> Any:
    """The transformers model itself; LoRA layers sit inside it, so peft's wrapper is not needed."""
    if isinstance(model, PreTrainedModel):
        return model
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise EngineError(
            f"the local engine samples transformers causal LMs and peft models, got {type(model).__name__}"
        )
    if model.active_peft_config.is_prompt_learning:
        raise EngineError("prompt-learning adapters are not supported by the local engine; use LoRA")
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise EngineError(f"the adapter wraps {type(base).__name__}, which is not a transformers model")
    return base
