"""The embedded engine: samples any transformers causal LM in this process, on the learner's own parameters
or a copy.

Prompts that are equal go through the model once for all their rows; rows that end leave the batch and
waiting ones take their place. Log-probs are those of the learner's function,
``gspo.policy.logprobs.logprobs_of``. The caller drives it by ``poll`` from one thread. Prompts, rewards and
groups are the collector's.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gspo.engines.base import Capabilities
from gspo.engines.causal import CausalModel
from gspo.engines.kv import Prefill, RowCache, WaveCache, rows_can_join
from gspo.engines.rows import Row, Stretch
from gspo.engines.stops import StopWatch, TokenTexts
from gspo.engines.weights import copy_weights
from gspo.errors import EngineDied, EngineError
from gspo.policy.logprobs import LogitTransform, ScaleAndCap
from gspo.seeding import MAX_SEED
from gspo.types import Completion, FinishReason, Request

STRETCH = 64  # decode steps between two copies of the cache into a larger one
PREFILL_TOKENS = 16_384  # prompt tokens, padding included, in one forward
JOIN_SHARE = 8  # rows join, and finished ones are dropped, when 1/8 of the batch has become free


class LocalEngine:
    """An ``Engine`` over a transformers causal LM (or a peft model around one).

    Args:
        model: on any device, in any dtype; its training flags are restored after every ``poll``.
        tokenizer: only for stop strings.
        max_batch_size: rows decoded together.
        max_model_len: prompt and completion together; None takes the model's context window.
        version: policy version of the weights it starts with.
        shared: the parameters are the learner's own, so ``load_weights`` only moves the version. False: a
            copy,
            which ``load_weights`` fills from (name, tensor) pairs.
        logit_transform: applied to the logits that the model returns. They already hold what the model's own
            configuration asks for (soft caps, scales), so this is None except in experiments.

    Raises:
        EngineError: a model that cannot be sampled with a cache, or impossible sizes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        max_batch_size: int = 64,
        max_model_len: int | None = None,
        version: int = 0,
        shared: bool = True,
        logit_transform: LogitTransform | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise EngineError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if isinstance(logit_transform, ScaleAndCap):
            raise EngineError(
                "the model's logits hold its configuration's transform already; leave logit_transform out"
            )
        self._model: CausalModel | None = CausalModel(model)
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._max_batch_size = max_batch_size
        self._max_model_len = _context_window(self._model.max_positions, max_model_len)
        self._version, self._shared, self._logit_transform = version, shared, logit_transform
        self._joins = rows_can_join(self._model.config)
        self._waiting: list[tuple[Request, bytes]] = []
        self._prefills: dict[bytes, Prefill] = {}  # of prompts that more rows wait for
        self._finished: list[Completion] = []
        self._in_flight: set[str] = set()
        self._failed: str | None = None
        self._clear_rows()

    @property
    def capabilities(self) -> Capabilities:
        """Seeds continue over a resubmitted prefix; log-probs are over the whole vocabulary."""
        return Capabilities(
            stop_strings=self._texts is not None,
            max_model_len=self._max_model_len,
            vocab_size=self._open().vocab_size,
            weight_sources=("shared",) if self._shared else ("tensors",),
        )

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; see ``Engine.submit``."""
        self._check_usable()
        repeated = [name for name, count in Counter(r.id for r in requests).items() if count > 1]
        repeated += [request.id for request in requests if request.id in self._in_flight]
        if repeated:
            raise EngineError(f"request ids {repeated[:3]} are in flight; give every attempt its own id")
        for request in requests:
            self._in_flight.add(request.id)
            refusal = self._refusal(request)
            if refusal is not None:
                self._finished.append(_empty(request, FinishReason.ERROR, refusal))
                continue
            key = np.asarray(request.token_ids, dtype=np.int64).tobytes()
            self._waiting.append((request, key))

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Decode until at least one completion is finished or the time is up; at least one step is made."""
        self._check_usable()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._open().sampling():
            while not self._finished and (self._waiting or self._alive):
                self._step()
                if time.monotonic() >= deadline:
                    break
        finished, self._finished = self._finished, []
        self._in_flight.difference_update(completion.request_id for completion in finished)
        return finished

    def interrupt(self) -> list[Completion]:
        """Stop everything in flight; also makes an engine usable again whose last step raised.

        Completions that had finished before it are left for the next ``poll``.
        """
        self._open()
        self._flush()
        partial = [row.completion(FinishReason.INTERRUPTED, self._version) for row in self._rows if row is not None]
        partial += [_empty(request, FinishReason.INTERRUPTED) for request, _ in self._waiting]
        self._in_flight.difference_update(completion.request_id for completion in partial)
        self._waiting.clear()
        self._clear_rows()
        return partial

    def load_weights(self, weights: Iterable[tuple[str, Any]] | str, version: int) -> None:
        """Take the weights of ``version``, with nothing in flight.

        Shared parameters: ``weights`` is not read. A copy: names, shapes and dtypes of the whole set are
        checked before the first is written; after an error the engine stays failed until a set loads.
        """
        model = self._open()
        if self._waiting or self._alive:
            raise EngineError("load_weights with requests in flight; poll them all or interrupt() first")
        if not self._shared:
            self._failed = "the last load_weights did not finish"
            copy_weights(model.given, weights)
        self._failed = None
        self._version = version

    def close(self) -> None:
        """Let go of the model and everything in flight. Idempotent."""
        self._model = None
        self._waiting.clear()
        self._finished.clear()
        self._in_flight.clear()
        self._clear_rows()

    # --- requests -------------------------------------------------------------------------------------------

    def _open(self) -> CausalModel:
        if self._model is None:
            raise EngineDied("the engine is closed; make a new one")
        return self._model

    def _check_usable(self) -> None:
        self._open()
        if self._failed is not None:
            raise EngineError(f"no complete set of weights: {self._failed}; load one that fits")
        if self._stepping:
            raise EngineError("the last step raised an error; interrupt() returns what was sampled before it")

    def _refusal(self, request: Request) -> str | None:
        """Why a request cannot be sampled, or None."""
        ids, sampling, vocab_size = np.asarray(request.token_ids), request.sampling, self._open().vocab_size
        if ids.ndim != 1 or len(ids) == 0:
            return "the prompt is empty; a request needs at least one token id"
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            return f"a prompt id is outside the vocabulary of {vocab_size}"
        if self._max_model_len and len(ids) >= self._max_model_len:
            return f"the prompt has {len(ids)} tokens; the context window holds {self._max_model_len}"
        if sampling.max_new_tokens < 1:
            return f"max_new_tokens is {sampling.max_new_tokens}; at least 1 is needed"
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            return f"temperature is {sampling.temperature}; it must be finite and at least 0"
        if not 0 <= request.seed <= MAX_SEED:
            return f"seed {request.seed} is outside 0 .. 2**63 - 1"
        if sampling.stop and self._texts is None:
            return "stop strings need the engine's tokenizer: LocalEngine(model, tokenizer=...)"
        if "" in sampling.stop:
            return "an empty stop string would end every completion at once"
        return None

    def _row(self, request: Request) -> Row:
        budget = request.sampling.max_new_tokens
        context = self._max_model_len - len(request.token_ids) if self._max_model_len else budget
        watch = StopWatch(self._texts, request.sampling.stop) if self._texts and request.sampling.stop else None
        reason = FinishReason.LENGTH if budget <= context else FinishReason.CONTEXT_LENGTH
        return Row(request, min(budget, context), reason, watch)

    # --- rows -----------------------------------------------------------------------------------------------

    def _clear_rows(self) -> None:
        self._rows: list[Row | None] = []  # None: finished, but still in the tensors
        self._alive = 0
        self._cache: RowCache | WaveCache = RowCache() if self._joins else WaveCache()
        self._stretch: Stretch | None = None
        self._stepping = False
        self._prefills.clear()

    def _step(self) -> None:
        """Admit what fits, then one token for every row."""
        self._stepping = True
        taken = self._next_requests()
        if taken:
            self._admit(taken)
        elif self._must_recompose():
            self._recompose([])
        if self._alive and self._stretch is not None:
            tokens, positions = self._stretch.last
            logits = self._open().decode(tokens, self._cache, positions)
            self._sample(self._stretch, self._rows, logits)
        if not self._alive:
            self._rows, self._stretch = [], None
        self._stepping = False

    def _must_recompose(self) -> bool:
        """When the stretch is full, or the finished rows are worth a copy of the rest."""
        if self._stretch is None or not self._alive:
            return False
        finished = len(self._rows) - self._alive
        return self._stretch.column == self._stretch.room or finished >= max(1, len(self._rows) // JOIN_SHARE)

    def _next_requests(self) -> list[tuple[Request, bytes]]:
        """The waiting requests to admit now, still in the queue."""
        free = self._max_batch_size - self._alive
        if free < min(len(self._waiting), max(1, self._max_batch_size // JOIN_SHARE)):
            return []
        if self._joins:
            return list(itertools.islice(self._waiting, free))
        if self._alive or not self._waiting:
            return []
        length = len(self._waiting[0][1])
        return list(itertools.islice((item for item in self._waiting if len(item[1]) == length), free))

    def _admit(self, taken: list[tuple[Request, bytes]]) -> None:
        """Prefill, draw first tokens, and let the rows that go on join the batch."""
        by_prompt: dict[bytes, list[Row | None]] = {}
        for request, key in taken:
            by_prompt.setdefault(key, []).append(self._row(request))
        prefills = self._prefilled(by_prompt)
        self._dequeue(taken)
        if self._joins:
            self._prefills = {key: prefills[key] for _, key in self._waiting if key in prefills}
        rows = list(itertools.chain.from_iterable(by_prompt.values()))
        self._alive += len(rows)
        logits = torch.stack([prefills[key].logits for key, group in by_prompt.items() for _ in group])
        first = Stretch([row for row in rows if row], room=1, device=logits.device)
        self._sample(first, rows, logits)
        self._read(first, rows)
        ends = itertools.accumulate(len(group) for group in by_prompt.values())
        spans = zip(by_prompt, ends, strict=True)
        groups = [(prefills[key], rows[end - len(by_prompt[key]) : end]) for key, end in spans]
        self._recompose([(prefill, [row for row in group if row]) for prefill, group in groups])

    def _prefilled(self, prompts: Iterable[bytes]) -> dict[bytes, Prefill]:
        """Each prompt's prefill, from an earlier call where more rows of its group had been waiting."""
        new = sorted((key for key in prompts if key not in self._prefills), key=len)
        model, done = self._open(), dict(self._prefills)
        while new:
            ids = [torch.frombuffer(bytearray(key), dtype=torch.long) for key in new]
            size = max(1, PREFILL_TOKENS // len(ids[-1])) if self._joins else len(new)
            part, new, ids = new[-size:], new[:-size], ids[-size:]
            done.update(zip(part, model.prefill(ids, joinable=self._joins), strict=True))
        return done

    def _dequeue(self, taken: list[tuple[Request, bytes]]) -> None:
        """Take admitted requests out of the queue; keep the prefills that others still wait for."""
        if self._joins:
            self._waiting = self._waiting[len(taken) :]
        else:
            gone = {request.id for request, _ in taken}
            self._waiting = [item for item in self._waiting if item[0].id not in gone]

    def _recompose(self, joining: list[tuple[Prefill, list[Row]]]) -> None:
        """Drop finished rows, add joining ones, and start a new stretch."""
        self._flush()
        keep = [index for index, row in enumerate(self._rows) if row is not None]
        rows = [row for row in self._rows if row is not None]
        rows += [row for _, group in joining for row in group]
        self._rows = list(rows)
        if not rows:
            return
        room = min(STRETCH, max(row.remaining for row in rows))
        self._cache.recompose(keep, [(prefill, len(group)) for prefill, group in joining if group], room=room)
        self._stretch = Stretch(rows, room=room, device=self._open().device)

    def _sample(self, stretch: Stretch, rows: list[Row | None], logits: Tensor) -> None:
        """Draw one token for each row and finish those that end with it."""
        if self._logit_transform is not None:
            logits = self._logit_transform(logits)
        stretch.draw(logits)
        ended = dict.fromkeys(stretch.ended(), False) | dict.fromkeys(_stopped(stretch, rows), True)
        if not ended:
            return
        for index, (token_ids, logprobs) in zip(ended, stretch.read(ended), strict=True):
            row, rows[index] = rows[index], None
            assert row is not None
            row.extend(token_ids, logprobs)
            self._finished.append(row.completion(row.reason_to_end(ended[index]), self._version))
            self._alive -= 1
        stretch.retire(ended)

    def _flush(self) -> None:
        """Move what the stretch holds into its rows."""
        if self._stretch is not None:
            self._read(self._stretch, self._rows)
            self._stretch = None

    def _read(self, stretch: Stretch, rows: list[Row | None]) -> None:
        going = {index: row for index, row in enumerate(rows) if row is not None}
        for row, (token_ids, logprobs) in zip(going.values(), stretch.read(going), strict=True):
            row.extend(token_ids, logprobs)


def _stopped(stretch: Stretch, rows: Sequence[Row | None]) -> list[int]:
    """Rows whose stop string is complete with the newest token."""
    watched = [(index, row.watch) for index, row in enumerate(rows) if row is not None and row.watch]
    if not watched:
        return []
    newest = stretch.newest()
    return [index for index, watch in watched if watch.push(newest[index])]


def _context_window(limit: int, wanted: int | None) -> int:
    if wanted is None:
        return limit
    if wanted < 2 or (limit and wanted > limit):
        most = limit or "any number of"
        raise EngineError(f"max_model_len is {wanted}; this model takes 2 to {most} tokens")
    return wanted


def _empty(request: Request, reason: FinishReason, error: str | None = None) -> Completion:
    ids = np.zeros(0, dtype=np.int64)
    return Completion(request.id, ids, ids.astype(np.float32), ids, reason, error=error)
