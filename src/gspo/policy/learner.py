"""One learner: scores rollouts with the policy and takes optimizer updates from them.

The loop sees ``score``, ``update``, ``weights``, ``state``, ``load_state``, ``close``; a group of learners fits behind
the same calls. The denominators of a loss are counted once per update over all its sequences, so that any split into
micro-batches gives the same gradient. After an exception a learner is unusable.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gspo.algorithms import Algorithm, LossInputs, policy_loss
from gspo.errors import NumericsError
from gspo.policy.model import Policy, require_no_noise, require_trainable
from gspo.policy.packing import collate, plan_microbatches
from gspo.types import FloatArray, Grading, Rollout, TokenRow, TrainBatch

MISMATCH = ("mismatch_sum", "mismatch_abs_sum", "mismatch_sq_sum")
"""Sums of log proximal/sampled: 0 by construction, not by agreement, where the proximal log-probs are the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """Settings of the updates. ``total_updates`` is the length of the learning-rate schedule."""

    algorithm: Algorithm
    total_updates: int
    temperature: float = 1.0
    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_updates: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_tokens_per_microbatch: int = 16384
    mask_truncated_completions: bool = False


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update says: sums and counts per sequence, scalars per update."""

    sequences: Mapping[str, np.ndarray]  # [n] each; "sequence" holds indices into the batch
    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    notes: tuple[str, ...] = ()


class Learner:
    """The policy with its optimizer, on one device.

    Dropout is off from here on: noise between two passes would move ratios off 1. Raises ModelError for a policy
    with nothing trainable, or one whose dropout cannot be turned off (activation checkpointing needs train mode).
    """

    def __init__(self, policy: Policy, options: LearnerOptions) -> None:
        require_trainable(policy)
        require_no_noise(policy)
        self.policy = policy
        self.options = options
        self.updates_done = 0
        self.max_tokens = options.max_tokens_per_microbatch
        self._notes: list[str] = []  # for the next update's result
        self._dump: Callable[[dict[str, np.ndarray]], str] | None = None
        # The copy is taken before any checkpoint is loaded: the reference stays the initial policy on a resume.
        needs_copy = options.algorithm.beta > 0 and not policy.has_adapter
        self.reference = policy.frozen_copy() if needs_copy else None
        self.optimizer = torch.optim.AdamW(
            [p for _, p in policy.trainable()],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
        )

    def dump_with(self, write: Callable[[dict[str, np.ndarray]], str]) -> None:
        """Have the inputs of a stopped update written by ``write``, which returns where."""
        self._dump = write

    # -- scoring ---------------------------------------------------------------------------------------------------

    def score(self, rollouts: Sequence[Rollout], *, first_update: np.ndarray | None = None) -> TrainBatch:
        """Arrays of a step's rollouts with the learner's own log-probs; advantages are left 0 for the loop to fill.

        ``first_update``: sequences whose proximal log-probs update 1 takes from its own forward pass (NaN until
        then): weights have not moved, so they are the same numbers, without a second pass.
        """
        batch = make_batch(rollouts, mask_truncated=self.options.mask_truncated_completions)
        mode = self.options.algorithm.proximal_logprobs
        if mode == "engine":
            batch = replace(batch, proximal_logprobs=batch.sampled_logprobs)
        elif mode == "recompute":
            skip = np.zeros(batch.num_sequences, dtype=np.bool_)
            if first_update is not None:
                skip[first_update] = True
            batch = replace(batch, proximal_logprobs=self._logprobs(batch, batch.valid & ~skip, self.policy))
        if self.options.algorithm.beta > 0:
            with self._reference_policy() as reference:
                batch = replace(batch, reference_logprobs=self._logprobs(batch, batch.valid, reference))
        return batch

    @contextlib.contextmanager
    def _reference_policy(self) -> Iterator[Policy]:
        if self.reference is not None:
            yield self.reference
        else:
            with self.policy.adapter_disabled():
                yield self.policy

    @torch.no_grad()
    def _logprobs(self, batch: TrainBatch, wanted: np.ndarray, policy: Policy) -> FloatArray:
        """[N] log-probs of the wanted sequences, NaN elsewhere."""
        out = np.full(len(batch.sequence_ids), np.nan, dtype=np.float32)
        indices = np.flatnonzero(wanted)

        def run(sequences: list[int]) -> None:
            rows = [row for s in sequences for row in batch.rows[s]]
            logprobs, _ = policy(collate(rows, policy.device), temperature=self.options.temperature)
            out[_tokens_of(batch, sequences)] = logprobs.float().cpu().numpy()

        self._until_it_fits(batch, indices, lambda: self._in_microbatches(batch, indices, run))
        return out

    # -- updating --------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, sequence_indices: np.ndarray) -> UpdateResult:
        """One optimizer step over the valid ones of these sequences.

        A non-finite loss or gradient raises NumericsError before the weights change. Without a valid sequence the
        step is skipped and counted; the schedule counts it too.
        """
        learning_rate = self.learning_rate()
        indices = np.asarray(sequence_indices)[batch.valid[sequence_indices]]
        self.updates_done += 1
        if len(indices) == 0:
            return UpdateResult({}, 0.0, 0.0, learning_rate, skipped=True)
        loss, tables, notes = self._accumulate(batch, indices)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_([p for _, p in self.policy.trainable()], self.options.max_grad_norm)
        )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._non_finite(batch, indices, loss, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        sequences = {key: np.concatenate([table[key] for table in tables]) for key in tables[0]}
        return UpdateResult(sequences, loss, grad_norm, learning_rate, skipped=False, notes=notes)

    def learning_rate(self) -> float:
        """The learning rate of the next update: linear warm-up, then the schedule; a function of the count alone."""
        options, update = self.options, self.updates_done
        if update < options.warmup_updates:
            return options.learning_rate * (update + 1) / options.warmup_updates
        if options.schedule == "constant":
            return options.learning_rate
        span = max(1, options.total_updates - options.warmup_updates)
        progress = min(1.0, (update - options.warmup_updates) / span)
        shape = 1.0 - progress if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return options.learning_rate * shape

    def _accumulate(
        self, batch: TrainBatch, indices: np.ndarray
    ) -> tuple[float, list[dict[str, np.ndarray]], tuple[str, ...]]:
        """Gradients of the whole update, and what was said of memory since the last one."""
        counts = np.bincount(batch.sequence_ids, minlength=batch.num_sequences)[indices]
        totals = (float(len(indices)), float(counts.sum()))
        losses: list[float] = []
        tables: list[dict[str, np.ndarray]] = []

        def run(sequences: list[int]) -> None:
            loss, table = self._backward(batch, sequences, totals)
            losses.append(loss)
            tables.append(table)

        def attempt() -> None:
            self._zero_gradients()
            losses.clear()
            tables.clear()
            self._in_microbatches(batch, indices, run)

        self._until_it_fits(batch, indices, attempt)
        notes, self._notes = tuple(self._notes), []
        return math.fsum(losses), tables, notes

    def _until_it_fits(self, batch: TrainBatch, indices: np.ndarray, attempt: Callable[[], None]) -> None:
        """Make a pass over these sequences; when memory runs out, again from its start with half the token budget."""
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                longest = max(len(row.token_ids) for s in indices for row in batch.rows[s])
                if self.max_tokens <= longest:
                    raise
                self.max_tokens = max(longest, self.max_tokens // 2)
            # Outside the handler: the traceback would keep the failed pass's tensors alive.
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self._notes.append(
                f"out of memory: optim.max_tokens_per_microbatch is now {self.max_tokens} "
                f"and the pass was repeated (the gradient is the same)"
            )

    def _backward(
        self, batch: TrainBatch, sequences: list[int], totals: tuple[float, float]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Forward, loss and backward of one micro-batch."""
        rows = [row for s in sequences for row in batch.rows[s]]
        current, entropy = self.policy(
            collate(rows, self.policy.device), temperature=self.options.temperature, with_entropy=True
        )
        inputs = self._loss_inputs(batch, sequences, current, totals)
        output = policy_loss(inputs, self.options.algorithm)
        output.loss.backward()
        assert entropy is not None
        local = inputs.sequence_ids
        table = {key: value.float().cpu().numpy() for key, value in output.per_sequence.items()}
        table["sequence"] = np.asarray(sequences)
        if self.options.algorithm.proximal_logprobs == "engine":
            table = {key: value for key, value in table.items() if key not in MISMATCH}
        else:
            table["mismatch_max"] = _mismatch_max(inputs)
        table["entropy_sum"] = _segment_sum(entropy, local, len(sequences))
        table["advantage"] = _segment_sum(inputs.advantages, local, len(sequences)) / np.maximum(table["tokens"], 1)
        return float(output.loss.detach()), table

    def _loss_inputs(
        self, batch: TrainBatch, sequences: list[int], current: Tensor, totals: tuple[float, float]
    ) -> LossInputs:
        tokens = _tokens_of(batch, sequences)
        counts = np.bincount(batch.sequence_ids, minlength=batch.num_sequences)[sequences]

        def on_device(values: FloatArray | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values[tokens]).to(current.device)

        proximal = on_device(batch.proximal_logprobs)
        if proximal is not None:  # NaN: update 1's own forward pass is the proximal policy's
            proximal = torch.where(proximal.isnan(), current.detach(), proximal)
        advantages = on_device(batch.advantages)
        assert advantages is not None
        return LossInputs(
            current_logprobs=current,
            advantages=advantages,
            sequence_ids=torch.from_numpy(np.repeat(np.arange(len(sequences)), counts)).to(current.device),
            num_sequences=len(sequences),
            total_sequences=totals[0],
            total_tokens=totals[1],
            proximal_logprobs=proximal,
            sampled_logprobs=on_device(batch.sampled_logprobs),
            reference_logprobs=on_device(batch.reference_logprobs),
        )

    def _in_microbatches(self, batch: TrainBatch, indices: np.ndarray, run: Callable[[list[int]], None]) -> None:
        lengths = [[len(row.token_ids) for row in batch.rows[s]] for s in indices]
        for part in plan_microbatches(lengths, self.max_tokens):
            run([int(indices[i]) for i in part])

    def _zero_gradients(self) -> None:
        """Zeros, never None: AdamW moves the same whether or not a parameter was reached."""
        for _, parameter in self.policy.trainable():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _non_finite(self, batch: TrainBatch, indices: np.ndarray, loss: float, grad_norm: float) -> NumericsError:
        tokens = _tokens_of(batch, list(indices))
        arrays = {
            "sequence_ids": batch.sequence_ids[tokens],
            "advantages": batch.advantages[tokens],
            "sampled_logprobs": batch.sampled_logprobs[tokens],
            "token_ids": np.concatenate([row.token_ids for s in indices for row in batch.rows[s]]),
        }
        for name in ("proximal_logprobs", "reference_logprobs"):
            values = batch.proximal_logprobs if name == "proximal_logprobs" else batch.reference_logprobs
            if values is not None:
                arrays[name] = values[tokens]
        where = f" The batch was written to {self._dump(arrays)}." if self._dump else ""
        return NumericsError(
            f"update {self.updates_done}: loss {loss}, gradient norm {grad_norm}. The weights were not changed.{where} "
            f'Try a lower optim.learning_rate, model.autocast = "none", or look at the rollouts of this step.'
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def weights(self, dtype: torch.dtype | None = None) -> WeightView:
        """A re-iterable stream of (name, tensor), cast to ``dtype`` if given."""
        return WeightView(self.policy.model, dtype)

    def state(self) -> dict[str, Tensor]:
        """Named tensors of trainable weights (``model.``) and optimizer (``exp_avg.``, ``exp_avg_sq.``, ``step.``)."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.policy.trainable():
            out[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{key}.{name}"] = value.detach() if value.dim() else value.detach().reshape(1)
        return out

    def load_state(self, tensors: Mapping[str, Tensor], *, updates_done: int) -> None:
        """Take what ``state`` gave. Raises KeyError for a missing tensor, ValueError for another one or its shape."""
        own = {f"model.{name}" for name, _ in self.policy.trainable()}
        unknown = sorted(name for name in tensors if name.startswith("model.") and name not in own)
        if unknown:
            raise ValueError(f"{unknown[0].removeprefix('model.')} is not trained here")
        for name, parameter in self.policy.trainable():
            value = tensors[f"model.{name}"]
            if value.shape != parameter.shape:
                raise ValueError(f"{name}: shape {tuple(value.shape)} in the checkpoint, {tuple(parameter.shape)} here")
            with torch.no_grad():
                parameter.copy_(value)
            if f"exp_avg.{name}" in tensors:
                self.optimizer.state[parameter] = {
                    "step": tensors[f"step.{name}"].reshape(()).clone(),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device).clone(),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device).clone(),
                }
        self.updates_done = updates_done

    def close(self) -> None:
        """Give back the optimizer's memory."""
        self.optimizer.state.clear()


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that a device's or the host's memory ran out; only CUDA has a type for it."""
    words = ("MPS backend out of memory", "DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


@dataclass(frozen=True, slots=True)
class WeightView:
    """The complete weights of a module, iterable more than once."""

    model: torch.nn.Module
    dtype: torch.dtype | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            floating = self.dtype is not None and tensor.is_floating_point()
            yield name, tensor.detach().to(self.dtype) if floating else tensor.detach()


def make_batch(rollouts: Sequence[Rollout], *, mask_truncated: bool = False) -> TrainBatch:
    """Flat arrays of a step's rollouts. Advantages are 0; a rollout that cannot be learned from is not ``valid``.

    Not valid: ungraded, without a sampled token, or truncated where ``mask_truncated``.
    """
    names = {key: i for i, key in enumerate(dict.fromkeys(r.prompt.id for r in rollouts))}
    rows = tuple(r.rows for r in rollouts)
    counts = np.array([r.num_scored for r in rollouts], dtype=np.int64)
    valid = [
        r.grading is Grading.GRADED and r.num_scored > 0 and not (mask_truncated and r.truncated) for r in rollouts
    ]
    sampled = [_scored_values(row) for sequence in rows for row in sequence]
    return TrainBatch(
        rows=rows,
        group_ids=np.array([names[r.prompt.id] for r in rollouts], dtype=np.int64),
        sequence_ids=np.repeat(np.arange(len(rollouts)), counts),
        advantages=np.zeros(int(counts.sum()), dtype=np.float32),
        valid=np.array(valid, dtype=np.bool_),
        sampled_logprobs=np.concatenate(sampled) if sampled else np.zeros(0, dtype=np.float32),
    )


def _scored_values(row: TokenRow) -> FloatArray:
    return row.sampled_logprobs[row.sampled_mask].astype(np.float32)


def _tokens_of(batch: TrainBatch, sequences: Sequence[int]) -> np.ndarray:
    """Positions in the flat arrays of these sequences' tokens, in the order given."""
    starts = np.searchsorted(batch.sequence_ids, sequences, side="left")
    ends = np.searchsorted(batch.sequence_ids, sequences, side="right")
    return np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)] or [np.zeros(0, dtype=np.int64)])


def _mismatch_max(inputs: LossInputs) -> np.ndarray:
    """[S] largest |learner's - engine's log-prob| of each sequence's tokens."""
    learner = inputs.current_logprobs if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    assert inputs.sampled_logprobs is not None
    difference = (learner.detach() - inputs.sampled_logprobs).abs()
    out = torch.zeros(inputs.num_sequences, dtype=difference.dtype, device=difference.device)
    return out.scatter_reduce(0, inputs.sequence_ids, difference, "amax").float().cpu().numpy()


def _segment_sum(values: Tensor, ids: Tensor, size: int) -> np.ndarray:
    return np.bincount(ids.cpu().numpy(), weights=values.detach().float().cpu().numpy(), minlength=size)
