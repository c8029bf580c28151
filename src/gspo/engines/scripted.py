"""An engine without a model: it says what a script says. For tests of collectors, loops and plug-ins.

It keeps the whole ``Engine`` contract (limits, end-of-sequence ids, refusals, interruption, versions), needs no torch
and no weights, and is as deterministic as its script.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo import seeding
from gspo.engines.base import Capabilities
from gspo.engines.stops import StopWatch, TokenTexts
from gspo.errors import EngineDied, EngineError
from gspo.types import Completion, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Reply:
    """What a script answers. It is cut at an end-of-sequence id, a stop string and the limits, like a model's text.

    ``logprobs`` None means -1.0 for every token. ``finish_reason`` overrules what the engine would say.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    finish_reason: FinishReason | None = None


Answer = Reply | Sequence[int]
Script = Callable[[Request, int], Answer]  # (request, policy version) -> what follows its token ids


def table(replies: Mapping[tuple[int, ...], Sequence[Answer]]) -> Script:
    """A script that hands out each prompt's replies in turn, and starts again after the last."""
    turns = dict.fromkeys(replies, 0)

    def script(request: Request, version: int) -> Answer:
        prompt = tuple(int(token) for token in request.token_ids)
        if prompt not in replies:
            raise EngineError(f"the script has no reply to the prompt {prompt}; it knows {list(replies)[:3]}")
        turns[prompt] += 1
        return replies[prompt][(turns[prompt] - 1) % len(replies[prompt])]

    return script


def uniform(vocab_size: int) -> Script:
    """A script that draws every token uniformly from a hash of (seed, absolute position), with its true log-prob.

    So a seed fixes a completion, and a resubmitted prefix continues it. At temperature 0 the seed counts as 0.
    """

    def script(request: Request, version: int) -> Answer:
        stream = request.seed if request.sampling.temperature else 0
        start, count = len(request.token_ids), request.sampling.max_new_tokens
        tokens = [seeding.seed(stream, "token", position) % vocab_size for position in range(start, start + count)]
        return Reply(tokens, [-math.log(vocab_size)] * count)

    return script


class ScriptedEngine:
    """An ``Engine`` that answers from a script.

    Args:
        script: a function (see ``Script``), or a table from prompt ids to replies (see ``table``).
        vocab_size: ids at or above it are refused; 0 = any id is taken.
        max_model_len: prompt and completion together; 0 = not limited.
        tokens_per_poll: tokens that every request advances by in one ``poll``; None finishes all at once. With a
            number, ``interrupt`` finds partial completions.
        tokenizer: for stop strings; without one, requests that have them are refused.
        version: policy version it starts with.

    ``loads`` lists the versions given to ``load_weights``, ``requests`` everything that was submitted.
    """

    def __init__(
        self,
        script: Script | Mapping[tuple[int, ...], Sequence[Answer]],
        *,
        vocab_size: int = 0,
        max_model_len: int = 0,
        tokens_per_poll: int | None = None,
        tokenizer: Any = None,
        version: int = 0,
    ) -> None:
        self._script: Script = table(script) if isinstance(script, Mapping) else script
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._tokens_per_poll = tokens_per_poll
        self._capabilities = Capabilities(
            seeds=not isinstance(script, Mapping),
            stop_strings=tokenizer is not None,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            weight_sources=("tensors", "path", "shared"),
        )
        self._version = version
        self._active: dict[str, tuple[Completion, int]] = {}  # whole completion, tokens out so far
        self._closed = False
        self.loads: list[int] = []
        self.requests: list[Request] = []

    @property
    def capabilities(self) -> Capabilities:
        """A table has no seeds: it answers in the order of arrival."""
        return self._capabilities

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; the script is asked at once, at the version of this moment."""
        self._open()
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or any(name in self._active for name in ids):
            raise EngineError(f"a request id is in flight already: {ids[:3]}; give every attempt its own id")
        for request in requests:
            self.requests.append(request)
            self._active[request.id] = (self._answer(request), 0)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Advance every request; without a time limit, until at least one is finished."""
        self._open()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        finished: list[Completion] = []
        while self._active and not finished:
            for name, (whole, out) in self._active.items():
                out += self._tokens_per_poll or len(whole.token_ids)
                self._active[name] = (whole, out)
                if out >= len(whole.token_ids):
                    finished.append(whole)
            if time.monotonic() >= deadline:
                break
        for completion in finished:
            del self._active[completion.request_id]
        return finished

    def interrupt(self) -> list[Completion]:
        """What every request in flight has put out so far."""
        self._open()
        partial = [_cut(whole, out, FinishReason.INTERRUPTED) for whole, out in self._active.values()]
        self._active.clear()
        return partial

    def load_weights(self, weights: Iterable[tuple[str, Any]] | str, version: int) -> None:
        """Move the version; the weights are not read."""
        self._open()
        if self._active:
            raise EngineError("load_weights with requests in flight; poll them all or interrupt() first")
        self._version = version
        self.loads.append(version)

    def close(self) -> None:
        """End it. Idempotent."""
        self._closed = True
        self._active.clear()

    def _open(self) -> None:
        if self._closed:
            raise EngineDied("the engine is closed; make a new one")

    def _answer(self, request: Request) -> Completion:
        refusal = self._refusal(request)
        if refusal is not None:
            nothing = np.zeros(0, dtype=np.int64)
            floats = np.zeros(0, dtype=np.float32)
            return Completion(request.id, nothing, floats, nothing, FinishReason.ERROR, error=refusal)
        answer = self._script(request, self._version)
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        count, reason = self._end(request, reply)
        logprobs = [-1.0] * count if reply.logprobs is None else reply.logprobs[:count]
        return Completion(
            request_id=request.id,
            token_ids=np.array(reply.token_ids[:count], dtype=np.int64),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.full(count, self._version, dtype=np.int64),
            finish_reason=reply.finish_reason or reason,
        )

    def _refusal(self, request: Request) -> str | None:
        size, window = self._capabilities.vocab_size, self._capabilities.max_model_len
        if len(request.token_ids) == 0:
            return "the prompt is empty"
        if min(request.token_ids) < 0 or (size and max(request.token_ids) >= size):
            return f"a prompt id is outside the vocabulary of {size}"
        if window and len(request.token_ids) >= window:
            return f"the prompt has {len(request.token_ids)} tokens; the context window holds {window}"
        if request.sampling.max_new_tokens < 1:
            return f"max_new_tokens is {request.sampling.max_new_tokens}; at least 1 is needed"
        if request.sampling.stop and self._texts is None:
            return "stop strings need a tokenizer: ScriptedEngine(script, tokenizer=...)"
        return None

    def _end(self, request: Request, reply: Reply) -> tuple[int, FinishReason]:
        """How many of the reply's tokens come out, and why it ends there. A reply that just ends has stopped."""
        sampling, window = request.sampling, self._capabilities.max_model_len
        watch = StopWatch(self._texts, sampling.stop) if self._texts and sampling.stop else None
        context = window - len(request.token_ids) if window else sampling.max_new_tokens
        for count, token in enumerate(reply.token_ids, start=1):
            if token in sampling.eos_token_ids:
                return count, FinishReason.STOP
            if watch is not None and watch.push(token):
                return count, FinishReason.STOP_STRING
            if count == sampling.max_new_tokens:
                return count, FinishReason.LENGTH
            if count == context:
                return count, FinishReason.CONTEXT_LENGTH
        return len(reply.token_ids), FinishReason.STOP


def _cut(whole: Completion, count: int, reason: FinishReason) -> Completion:
    return Completion(whole.request_id, whole.token_ids[:count], whole.logprobs[:count], whole.versions[:count], reason)
