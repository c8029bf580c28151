"""The rows a local engine decodes together: what each request still needs, and the tensors of a stretch of
steps.

Bookkeeping is in tensors: a step writes one column, and Python looks at a row only when it ends (or at every
token where it has stop strings).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gspo.engines.noise import draw, uniforms
from gspo.engines.stops import StopWatch
from gspo.types import Completion, FinishReason, Request


@dataclass(slots=True)
class Row:
    """One request in progress."""

    request: Request
    limit: int  # tokens it may sample
    limit_reason: FinishReason  # what ends it there: LENGTH or CONTEXT_LENGTH
    watch: StopWatch | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Absolute position of the last token, counted from 0."""
        return len(self.request.token_ids) + len(self.token_ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens it may still sample."""
        return self.limit - len(self.token_ids)

    def extend(self, token_ids: list[int], logprobs: list[float]) -> None:
        """Take over what a stretch sampled."""
        self.token_ids += token_ids
        self.logprobs += logprobs

    def reason_to_end(self, stopped: bool) -> FinishReason:
        """Why a row ends that has reached its limit or a stop: the first that holds of error,
        end-of-sequence id, stop string, limit."""
        if not math.isfinite(self.logprobs[-1]):
            return FinishReason.ERROR
        if self.token_ids[-1] in self.request.sampling.eos_token_ids:
            return FinishReason.STOP
        return FinishReason.STOP_STRING if stopped else self.limit_reason

    def completion(self, reason: FinishReason, version: int) -> Completion:
        """What its request gets back; the token that had no finite log-prob is left out."""
        error = None
        if reason is FinishReason.ERROR:
            del self.token_ids[-1], self.logprobs[-1]
            error = f"the model's logits were not finite at token {len(self.token_ids)} of the completion"
        return Completion(
            request_id=self.request.id,
            token_ids=np.array(self.token_ids, dtype=np.int64),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.full(len(self.token_ids), version, dtype=np.int64),
            finish_reason=reason,
            error=error,
        )


class Stretch:
    """Up to ``room`` tokens of R rows that advance in step, one column a step."""

    def __init__(self, rows: Sequence[Row], *, room: int, device: torch.device) -> None:
        self.room, self.column = room, 0
        self._last = torch.tensor([row.token_ids[-1] if row.token_ids else 0 for row in rows], device=device)
        starts = torch.tensor([row.position for row in rows], device=device).unsqueeze(1)
        self._limits = torch.tensor([row.remaining for row in rows], device=device)
        # a finished row stops at its limit: learned positions end at the context window
        steps = torch.minimum(torch.arange(room, device=device), self._limits.unsqueeze(1))
        self._positions = starts + steps
        self.token_ids = torch.zeros((len(rows), room), dtype=torch.long, device=device)
        self.logprobs = torch.zeros((len(rows), room), device=device)
        self._alive = torch.ones(len(rows), dtype=torch.bool, device=device)
        temperatures = [row.request.sampling.temperature for row in rows]
        greedy = [temperature == 0 for temperature in temperatures]
        self._temperature = torch.tensor([t or 1.0 for t in temperatures], device=device)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._noise = None if all(greedy) else _noise(rows, room, device)
        self._ends = _end_ids(rows, device)

    @property
    def last(self) -> tuple[Tensor, Tensor]:
        """The newest token ids [R] and their positions [R]: what the model reads next."""
        if self.column == 0:
            return self._last, self._positions[:, 0]
        return self.token_ids[:, self.column - 1], self._positions[:, self.column]

    def draw(self, logits: Tensor) -> None:
        """Draw the next column from logits [R, V]."""
        noise = None if self._noise is None else self._noise[:, self.column]
        tokens, logprobs = draw(logits, noise, temperature=self._temperature, greedy=self._greedy)
        self.token_ids[:, self.column] = tokens
        self.logprobs[:, self.column] = logprobs
        self.column += 1

    def ended(self) -> list[int]:
        """Rows that end with the newest column: an end-of-sequence id, the limit, or no finite log-prob."""
        tokens, logprobs = self.token_ids[:, self.column - 1], self.logprobs[:, self.column - 1]
        done = (self._limits <= self.column) | ~logprobs.isfinite()
        if self._ends is not None:
            done |= (tokens.unsqueeze(1) == self._ends).any(dim=1)
        done &= self._alive
        return done.nonzero().squeeze(1).tolist()  # the step's one wait for the device

    def retire(self, rows: Iterable[int]) -> None:
        """Rows that are finished; they stay in the tensors and are not looked at again."""
        self._alive[list(rows)] = False

    def newest(self) -> list[int]:
        """Token ids of the newest column."""
        return self.token_ids[:, self.column - 1].tolist()

    def read(self, rows: Iterable[int]) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs of these rows so far."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.token_ids.device)
        token_ids = self.token_ids[index, : self.column].tolist()
        logprobs = self.logprobs[index, : self.column].tolist()
        return list(zip(token_ids, logprobs, strict=True))


def _noise(rows: Sequence[Row], room: int, device: torch.device) -> Tensor:
    """[R, room]; float32 where a device has no float64."""
    seeds = torch.tensor([row.request.seed for row in rows]).unsqueeze(1)
    positions = torch.tensor([row.position + 1 for row in rows]).unsqueeze(1) + torch.arange(room)
    noise = uniforms(seeds, positions)
    return noise.to(device, torch.float32 if device.type == "mps" else torch.float64)


def _end_ids(rows: Sequence[Row], device: torch.device) -> Tensor | None:
    """End-of-sequence ids [R, K], short lists filled with -1; None when no row has any."""
    ends = [row.request.sampling.eos_token_ids for row in rows]
    most = max(map(len, ends))
    if most == 0:
        return None
    return torch.tensor([[*ids, *[-1] * (most - len(ids))] for ids in ends], device=device)
