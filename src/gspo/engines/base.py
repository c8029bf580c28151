"""The Engine protocol: what the collector asks of whoever samples.

The synchronous case submits everything and polls until nothing is left; asynchronous and multi-turn collectors use
the same five calls. ``gspo.engines.check.check_engine`` tests a new engine against this contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gspo.types import Completion, Request


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; the recipe layer refuses what it cannot."""

    routes: bool = False  # records expert routes
    seeds: bool = True  # a request's seed fixes its completion
    resume_seed: str = "continues"  # "continues" | "restarts": the noise of a resubmitted prefix
    stop_strings: bool = True
    max_model_len: int = 0  # 0 = not limited
    vocab_size: int = 0
    weight_sources: tuple[str, ...] = ("tensors",)  # "tensors", "path", "shared"
    logprobs_over: str = "full_vocabulary"  # what log-probs are normalised over


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Ids are unique per attempt; a duplicate in flight is an EngineError.

        A request the engine refuses (too long, empty, id outside the vocabulary) comes back from ``poll`` as a
        completion with finish reason ``error``.
        """
        ...

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Completions finished since the last call; ``[]`` when nothing is in flight or the time is up.

        None waits until at least one completion is finished. Raises EngineDied.
        """
        ...

    def interrupt(self) -> list[Completion]:
        """Stop everything in flight; return the partial completions (finish reason ``interrupted``)."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Any]] | str, version: int) -> None:
        """Take a complete set of weights, with nothing in flight. Names, shapes and dtypes are checked first and
        caches are reset; an error inside leaves the engine failed."""
        ...

    def close(self) -> None:
        """Give back what the engine holds. Idempotent."""
        ...
