"""The parent's side of the workers: starting the zygote, handing out calls, keeping deadlines, naming deaths.

A worker answers its calls in order, one line each, so its first unanswered call is the one that is running: a
deadline or a death is attributed to that call, and the calls behind it, never begun, go to another worker.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo.errors import RewardError
from gspo.rewards import zygote
from gspo.rewards.contract import Outcome, dotted_path
from gspo.types import Grading, Rollout

MAX_BATCH = 32
"""Calls a worker receives at once."""

READY_TIMEOUT_S = 300.0
SEND_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0

_SPAWN = "import sys; from gspo.rewards import zygote; zygote.main(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one function: one rollout, or for TRL's signature all of them."""

    id: int
    function: int
    positions: tuple[int, ...]


@dataclass(slots=True)
class Worker:
    """A worker process and what it has been given but not answered."""

    pid: int
    connection: socket.socket
    home: ZygoteHandle
    calls: deque[Call] = field(default_factory=deque)
    deadline: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class ZygoteLost(Exception):
    """The zygote is gone; another can be started."""


class ZygoteHandle:
    """The zygote process as seen by its parent. Raises ``RewardError`` where none can be started."""

    def __init__(self, setup: zygote.Setup) -> None:
        self.lost = False
        self._ready = False
        self._received = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        if start_method(setup) == "fork":
            self._fork(setup)
        else:
            self._spawn(setup)

    def _fork(self, setup: zygote.Setup) -> None:
        self._control, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._control.close()
                zygote.serve(theirs, setup)
            finally:
                os._exit(0)
        theirs.close()

    def _spawn(self, setup: zygote.Setup) -> None:
        specs = tuple(replace(spec, function=_path_of(spec.function)) for spec in setup.specs)
        data = pickle.dumps(replace(setup, specs=specs))
        self._control, theirs = socket.socketpair()
        environment = {
            **os.environ,
            **zygote.ONE_THREAD,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SPAWN, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        theirs.close()
        self._control.sendall(zygote.HEADER.pack(len(data)) + data)

    def wait_ready(self) -> None:
        """Wait for the functions to be loaded; ``RewardError`` if one cannot be."""
        if self._ready:
            return
        self._control.settimeout(READY_TIMEOUT_S)
        try:
            reply = self._reply()
        except (ZygoteLost, TimeoutError) as error:
            raise RewardError(
                "the process that loads the reward functions died or hung while importing them; "
                "import their modules by hand to see why, or try in_process = true"
            ) from error
        if "error" in reply:
            raise RewardError(reply["error"])
        self._ready = True
        self._control.settimeout(SEND_TIMEOUT_S)

    def fork_worker(self) -> Worker:
        """A new worker, in milliseconds."""
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT_S)
        with theirs:
            pid = self._order({"order": "fork"}, [theirs.fileno()])["pid"]
        return Worker(pid=pid, connection=ours, home=self)

    def end_worker(self, worker: Worker) -> str:
        """SIGKILL a worker with its process group and descendants; how it ended, in words."""
        worker.connection.close()
        return _how_it_ended(self._order({"order": "end", "pid": worker.pid}, [])["status"])

    def _order(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        if self.lost:
            raise ZygoteLost
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))
            return self._reply()
        except OSError as error:
            self.lost = True
            raise ZygoteLost from error
        except BaseException:  # interrupted between order and reply: the next reply would be the wrong one
            self.lost = True
            raise

    def _reply(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            block = self._control.recv(1 << 16)
            if not block:
                self.lost = True
                raise ZygoteLost
            self._received += block
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """Let it end its workers and itself; SIGKILL after some seconds. Reaps it."""
        self._control.close()
        limit = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._ended():
            if time.monotonic() > limit:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)

    def _ended(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:  # reaped by somebody else's wait
            return True


def start_method(setup: zygote.Setup) -> str:
    """``"fork"`` or ``"spawn"``; ``RewardError`` where a function can travel by neither."""
    torch = sys.modules.get("torch")
    linux = sys.platform == "linux"
    forkable = linux and "ipykernel" not in sys.modules and threading.active_count() == 1
    if forkable and torch is None:
        return "fork"
    stuck = [name for spec, name in zip(setup.specs, setup.names, strict=True) if not dotted_path(spec.function)]
    if not stuck:
        return "spawn"
    # A zygote uses one thread, so torch's idle pools do not matter to it; an initialised CUDA does.
    if forkable and torch is not None and not torch.cuda.is_initialized():
        return "fork"
    raise RewardError(
        f'reward "{stuck[0]}" is a lambda, a closure, or defined in a script or notebook, and forking '
        "a process here is unsafe (threads, CUDA, a notebook, or not Linux): put it in a module and name it "
        '"module:function", build the Grader before the model, or pass in_process=True'
    )


def _path_of(function: Any) -> str:
    path = dotted_path(function)
    assert path is not None  # start_method has seen to it
    return function if isinstance(function, str) else path


def _how_it_ended(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(number).name}{hint}"


class Pool:
    """Workers under one zygote, and the loop that gives them calls. Not thread-safe: its owner takes
    turns.
    """

    def __init__(self, setup: zygote.Setup, *, num_workers: int, timeout_s: float) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._zygote = ZygoteHandle(setup)
        self._workers: list[Worker] = []
        self._retried: set[int] = set()

    def wait_ready(self) -> None:
        """Wait until the functions are loaded; a lost zygote is started anew."""
        if self._zygote.lost:
            self._zygote.close()
            self._zygote = ZygoteHandle(self._setup)
        self._zygote.wait_ready()

    def close(self) -> None:
        """End every worker and the zygote."""
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()
        self._zygote.close()

    def run(self, calls: Sequence[Call], rollouts: Sequence[Rollout]) -> dict[int, list[Outcome]]:
        """Every call once; its outcomes by call id. Raises ``RewardError`` as ``Grader.grade``."""
        pending = deque(calls)
        results: dict[int, list[Outcome]] = {}
        self._retried.clear()
        try:
            while pending or any(worker.calls for worker in self._workers):
                self._hand_out(pending, rollouts)
                self._collect(pending, results, rollouts)
        except BaseException:
            for worker in [w for w in self._workers if w.calls]:  # their answers are wanted by nobody
                self._dismiss(worker)
            raise
        return results

    def _hand_out(self, pending: deque[Call], rollouts: Sequence[Rollout]) -> None:
        while pending:
            idle = [worker for worker in self._workers if not worker.calls]
            if not idle and len(self._workers) >= self._num_workers:
                return
            worker = idle[0] if idle else self._hire()
            if not _is_quiet(worker.connection):  # died, or wrote out of turn, since its last answer
                self._dismiss(worker)
                continue
            size = min(MAX_BATCH, math.ceil(len(pending) / (2 * self._num_workers)))
            batch = [pending.popleft() for _ in range(size)]
            try:
                worker.connection.sendall(_packed(batch, rollouts))
            except OSError:
                self._dismiss(worker)
                pending.extendleft(reversed(batch))
                continue
            worker.calls.extend(batch)
            worker.deadline = time.monotonic() + self._timeout_s

    def _hire(self) -> Worker:
        for _ in range(2):
            self.wait_ready()
            with contextlib.suppress(ZygoteLost):
                worker = self._zygote.fork_worker()
                self._workers.append(worker)
                return worker
        raise RewardError("the process that holds the reward functions keeps dying; is the memory exhausted?")

    def _dismiss(self, worker: Worker) -> str | None:
        """How it ended; None where that cannot be known, since the zygote has died too."""
        self._workers.remove(worker)
        try:
            return worker.home.end_worker(worker)
        except ZygoteLost:
            return None

    def _collect(self, pending: deque[Call], results: dict[int, list[Outcome]], rollouts: Sequence[Rollout]) -> None:
        busy = [worker for worker in self._workers if worker.calls]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            wait_s = min(worker.deadline for worker in busy) - time.monotonic()
            ready = [key.data for key, _ in selector.select(max(wait_s, 0.0))]
        for worker in ready:
            if not self._read(worker, results):
                self._fail(worker, pending, results, rollouts, Grading.CRASHED)
        for worker in busy:
            if worker.calls and worker not in ready and time.monotonic() >= worker.deadline:
                self._fail(worker, pending, results, rollouts, Grading.TIMEOUT)

    def _read(self, worker: Worker, results: dict[int, list[Outcome]]) -> bool:
        """Take in what a worker wrote; False where its stream has ended or makes no sense."""
        try:
            block = worker.connection.recv(1 << 18)
        except OSError:
            return False
        worker.received += block
        *lines, rest = bytes(worker.received).split(b"\n")
        worker.received = bytearray(rest)
        for line in lines:
            answer = json.loads(line)
            if "unreadable" in answer:
                raise RewardError(f"a reward worker cannot unpickle the rollouts: {answer['unreadable']}")
            if "shape" in answer:
                raise RewardError(answer["shape"])
            call = worker.calls.popleft()
            results[call.id] = [_outcome(item) for item in answer["outcomes"]]
            worker.deadline = time.monotonic() + self._timeout_s
        return bool(block)

    def _fail(
        self,
        worker: Worker,
        pending: deque[Call],
        results: dict[int, list[Outcome]],
        rollouts: Sequence[Rollout],
        grading: Grading,
    ) -> None:
        how = self._dismiss(worker)
        if not worker.calls:  # died after its last answer: nobody is hurt
            return
        call = worker.calls.popleft()
        pending.extendleft(reversed(worker.calls))
        if how is None and call.id not in self._retried:  # it died with the zygote, hardly by its own doing
            self._retried.add(call.id)
            pending.appendleft(call)
            return
        name = self._setup.names[call.function]
        if grading is Grading.TIMEOUT:
            how = f"was still running after {self._timeout_s:g} s; its worker was killed"
        else:
            how = f"ended its worker, which {how or 'died twice together with its parent (out of memory?)'}"
        results[call.id] = [
            Outcome(grading=grading, error=f'reward "{name}" on prompt "{rollouts[i].prompt.id}" {how}')
            for i in call.positions
        ]


def _packed(batch: Sequence[Call], rollouts: Sequence[Rollout]) -> bytes:
    message = [(call.id, call.function, tuple(rollouts[i] for i in call.positions)) for call in batch]
    try:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        prompts = sorted({rollouts[i].prompt.id for call in batch for i in call.positions})[:3]
        raise RewardError(
            f"cannot send rollouts of prompts {prompts} to reward workers: {error}; "
            "keep plain values in the prompts' metadata, or set in_process = true"
        ) from error
    return zygote.HEADER.pack(len(data)) + data


def _outcome(item: Sequence[Any]) -> Outcome:
    value, parts, grading, error = item
    return Outcome(value=value, parts=parts, grading=Grading(grading), error=error)


def _is_quiet(connection: socket.socket) -> bool:
    """Whether an idle worker's stream is open and empty."""
    try:
        connection.setblocking(False)
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(SEND_TIMEOUT_S)
    return False
