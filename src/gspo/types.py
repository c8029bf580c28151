"""The types that flow through a run, in the order of the river.

prompts -> requests -> completions -> rollouts -> groups -> train batch -> report. Frozen dataclasses over numpy
arrays, without torch and without logic beyond small properties. What makes and reads each type is said beside it.

Log-probs say whose they are: ``sampled`` (the engine that sampled), ``proximal`` (the learner before this step's
updates), ``current`` (the policy being trained), ``reference`` (the frozen reference). All are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why an engine stopped a completion. Closed: an engine maps its own words to these."""

    STOP = "stop"  # an end-of-sequence id; it stays in the ids and is scored
    STOP_STRING = "stop_string"  # a stop string; its tokens stay in the ids
    LENGTH = "length"  # the request's max_new_tokens
    CONTEXT_LENGTH = "context_length"  # the model's context window
    INTERRUPTED = "interrupted"  # Engine.interrupt(); may hold 0 tokens
    ERROR = "error"  # the engine refused or failed this request; see Completion.error


TRUNCATED = frozenset({FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH})


class Grading(StrEnum):
    """What became of a rollout's reward. Only GRADED members enter a group's statistics."""

    PENDING = "pending"
    GRADED = "graded"
    NOT_APPLICABLE = "not_applicable"  # every reward function returned None
    FAILED = "failed"  # a reward function raised, returned a wrong type or a non-finite value
    TIMEOUT = "timeout"  # a reward function outlived its deadline; its worker was killed
    CRASHED = "crashed"  # a reward worker died (segfault, os._exit, out of memory)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item. Born in ``tasks``; read by the collector and by rewards.

    Exactly one of ``text`` and ``messages`` is set; ``messages`` are chat turns ``{"role", "content"}``.
    ``metadata`` holds every other column of the row (``metadata["demonstration"]``: a worked answer, used by the
    cold start).
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    answer: str | None = None
    task: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples. ``temperature`` 0 is greedy, whose log-probs are reported at temperature 1.

    Nothing truncates the distribution (no top-p, top-k, min-p): the log-probs are those of softmax(logits / T) over
    the whole vocabulary, as the learner computes them.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What one engine call continues: the prompt's ids, or the prompt's and a sampled prefix's.

    ``seed`` (0 .. 2**63 - 1) fixes the completion whatever else is in the batch: token at absolute position p draws
    its noise from (seed, p), so that a resubmitted prefix continues the stream. ``id`` is unique per attempt.
    """

    id: str
    token_ids: IntArray  # [P]
    sampling: Sampling
    seed: int
    group_id: str = ""
    purpose: str = "train"  # or "eval"


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned for a request. The stop token stays in the ids."""

    request_id: str
    token_ids: IntArray  # [T] sampled ids
    logprobs: FloatArray  # [T] log-prob of each sampled token under the temperature used
    versions: IntArray  # [T] policy version that sampled each token
    finish_reason: FinishReason
    routes: npt.NDArray[np.int16] | None = None  # [T, layers, k] expert indices, -1 = not recorded
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Token ids of one continuous context."""

    token_ids: IntArray  # [L]
    sampled_mask: BoolArray  # [L] True where the policy sampled the token
    sampled_logprobs: FloatArray  # [L] 0 where not sampled
    versions: IntArray  # [L] -1 where not sampled
    routes: npt.NDArray[np.int16] | None = None

    @property
    def num_scored(self) -> int:
        """Number of tokens the policy sampled, |y|."""
        return int(self.sampled_mask.sum())


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory of one prompt. Built by the collector only."""

    prompt: Prompt
    index: int  # 0 .. num_generations - 1 within its group
    rows: tuple[TokenRow, ...]
    finish_reason: FinishReason
    text: str  # decoded completion, special tokens dropped
    reward: float | None = None  # weighted sum over the parts that applied
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    grading: Grading = Grading.PENDING
    grading_error: str | None = None

    @property
    def num_scored(self) -> int:
        """Number of sampled tokens over all rows, |y|."""
        return sum(row.num_scored for row in self.rows)

    @property
    def truncated(self) -> bool:
        """Whether a length limit ended it."""
        return self.finish_reason in TRUNCATED


@dataclass(frozen=True, slots=True)
class Group:
    """The ``num_generations`` rollouts of one prompt, by explicit id."""

    id: str
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One step's rollouts as arrays. ``Learner.score`` fills it, ``Learner.update`` reads it.

    S sequences, N scored tokens in sequence order. ``valid`` is False for sequences that leave the update
    (ungraded, masked truncation, no scored token): they count in no denominator.
    """

    rows: tuple[tuple[TokenRow, ...], ...]  # [S] the rows of each sequence
    group_ids: IntArray  # [S] dense
    sequence_ids: IntArray  # [N] dense 0 .. S-1
    advantages: FloatArray  # [N]
    valid: BoolArray  # [S]
    sampled_logprobs: FloatArray  # [N]
    proximal_logprobs: FloatArray | None = None  # [N]
    reference_logprobs: FloatArray | None = None  # [N]
    entropies: FloatArray | None = None  # [N] of the proximal policy

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a finished step says of itself. Wall-clock values live apart: they are outside bit-identity."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]
    timings: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
