"""The grader: reward functions in worker processes that can be killed, each call under a deadline.

A hang, a crash, an exception or a wrong return is a typed outcome of the one rollout it happened on; the
others are graded all the same. How the workers are made:

- *fork*: on Linux, from a process that has one Python thread and has not imported torch, a zygote is forked;
  lambdas and closures travel with it. This is why the grader is built before the model.
- *spawn*: elsewhere (a notebook, a model already built, macOS) a fresh interpreter imports the functions by
  name.
- ``in_process=True``: no workers, no deadline, no containment; only exceptions are.

Rollouts go to the workers pickled; what comes back is JSON, so nothing a worker writes can run here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from gspo.errors import RewardError
from gspo.rewards.calls import combine, execute
from gspo.rewards.contract import Outcome, RewardSpec, Verdict, load_reward, unique_names, warm_up
from gspo.rewards.pool import Call, Pool
from gspo.rewards.zygote import Setup
from gspo.types import Rollout


class Grader:
    """Grades rollouts with weighted reward functions in worker processes. A context manager.

    ``timeout_s``: deadline of one call, in seconds; for TRL's signature one call is the whole batch.
    ``memory_limit_bytes``: address space of a worker (RLIMIT_AS); an allocation beyond it is a MemoryError
    there. The constructor does not wait for the functions to load: ``wait_ready`` does, and entering the
    context, and the first ``grade``. ``grade`` may be called from any thread; calls take turns.

    Raises ``RewardError`` for no functions, a function that cannot be loaded or cannot reach a worker.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        in_process: bool = False,
        memory_limit_bytes: int | None = None,
    ) -> None:
        if not rewards:
            raise RewardError('no reward function: name at least one, for example function = "math"')
        if workers < 1 or timeout_s <= 0:
            raise RewardError(f"a grader needs workers >= 1 and timeout_s > 0, not {workers} and {timeout_s}")
        self.rewards = tuple(rewards)
        self.names = unique_names(self.rewards)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._functions = [load_reward(r.function, r.options) for r in self.rewards] if in_process else []
        if in_process:
            warm_up(self.rewards)
        setup = Setup(self.rewards, self.names, memory_limit_bytes)
        self._pool = None if in_process else Pool(setup, num_workers=workers, timeout_s=timeout_s)

    def __enter__(self) -> Grader:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Wait until every function is loaded. Raises ``RewardError`` for the first that cannot be."""
        with self._lock:
            if self._pool is not None:
                self._pool.wait_ready()

    def grade(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """One verdict per rollout, in order. Blocks.

        Raises ``RewardError`` only for a return of the wrong shape from a function of TRL's signature, for
        rollouts that cannot be pickled, and for a closed grader; all else is a verdict.
        """
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                raise RewardError("this Grader is closed or belongs to another process; build one here")
            calls = self._calls(len(rollouts))
            if self._pool is None:
                results = {call.id: self._inline(call, rollouts) for call in calls}
            else:
                self._pool.wait_ready()
                results = self._pool.run(calls, [_without_routes(rollout) for rollout in rollouts])
        rows: list[dict[int, Outcome]] = [{} for _ in rollouts]
        for call in calls:
            for position, outcome in zip(call.positions, results[call.id], strict=True):
                rows[position][call.function] = outcome
        order = range(len(self.rewards))
        return [combine(self.rewards, self.names, [row[f] for f in order]) for row in rows]

    def close(self) -> None:
        """End the workers, whatever they are doing. Idempotent."""
        with self._lock:
            if not self._closed and os.getpid() == self._owner and self._pool is not None:
                self._pool.close()
            self._closed = True

    def _calls(self, num_rollouts: int) -> list[Call]:
        if num_rollouts == 0:
            return []
        single = [f for f, spec in enumerate(self.rewards) if spec.signature == "gspo"]
        whole = [f for f, spec in enumerate(self.rewards) if spec.signature == "trl"]
        work = [(f, tuple(range(num_rollouts))) for f in whole]
        work += [(f, (i,)) for i in range(num_rollouts) for f in single]
        return [Call(i, function, positions) for i, (function, positions) in enumerate(work)]

    def _inline(self, call: Call, rollouts: Sequence[Rollout]) -> list[Outcome]:
        f = call.function
        chosen = [rollouts[i] for i in call.positions]
        return execute(self.rewards[f], self.names[f], self._functions[f], chosen)


def _without_routes(rollout: Rollout) -> Rollout:
    """Expert routes are by far the largest part of a rollout, and no reward reads them."""
    if all(row.routes is None for row in rollout.rows):
        return rollout
    return replace(rollout, rows=tuple(replace(row, routes=None) for row in rollout.rows))
