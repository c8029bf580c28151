"""The process that holds the loaded reward functions and forks the workers that run them.

It is single-threaded and never holds a model, so forking it is cheap and safe at any time of a run. Its
parent (see ``workers``) speaks to it over a socket: JSON lines, and a descriptor with each order to fork.
It ends, with all its descendants, when that socket closes or its parent is gone. Reward functions can print
nothing here: their standard streams are the null device.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import GspoError, RewardError
from gspo.rewards.calls import execute, failure
from gspo.rewards.contract import Outcome, RewardSpec, load_reward, warm_up
from gspo.types import Grading, Rollout

HEADER = struct.Struct("!Q")
PARENT_POLL_S = 2.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
}

Batch = list[tuple[int, int, tuple[Rollout, ...]]]
"""What a worker receives, pickled: (call id, function index, rollouts)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a zygote needs to know: the functions and their unique names, and a worker's memory limit."""

    specs: tuple[RewardSpec, ...]
    names: tuple[str, ...]
    memory_limit_bytes: int | None = None


def main(descriptor: int) -> None:
    """Entry of a spawned zygote: the setup comes first over the socket, pickled."""
    control = socket.socket(fileno=descriptor)
    size = HEADER.unpack(_read_exactly(control, HEADER.size))[0]
    serve(control, pickle.loads(_read_exactly(control, size)))


def serve(control: socket.socket, setup: Setup) -> None:
    """Load the functions, say so, then obey until the socket closes. Never returns."""
    try:
        _settle()
        functions = _load(control, setup)
        if functions is not None:
            gc.freeze()  # workers share these pages until a collection touches them
            _Nursery(control, setup, functions).run()
    finally:
        os._exit(0)


def _settle() -> None:
    with contextlib.suppress(PermissionError):  # already a session leader (spawned)
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(ONE_THREAD)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    faulthandler.disable()  # it may hold a copy of the parent's stderr
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # a daemon made by a double fork comes back here, to be ended


def _load(control: socket.socket, setup: Setup) -> list[Callable[..., Any]] | None:
    try:
        functions = [load_reward(spec.function, spec.options) for spec in setup.specs]
        warm_up(setup.specs)
    except GspoError as error:
        _say(control, {"error": str(error)})
        return None
    except BaseException as error:  # noqa: BLE001 - grader worker: importing user code may raise anything
        _say(control, {"error": f"cannot load the reward functions: {type(error).__name__}: {error}"})
        return None
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    _say(control, {"ready": True})
    return functions


class _Nursery:
    """The zygote's loop: forks workers and ends them, and reaps whatever they leave behind."""

    def __init__(self, control: socket.socket, setup: Setup, functions: Sequence[Callable[..., Any]]) -> None:
        self.control = control
        self.setup = setup
        self.functions = functions
        self.parent = os.getppid()
        self.workers: set[int] = set()

    def run(self) -> None:
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        try:
            while os.getppid() == self.parent:
                if not poller.poll(PARENT_POLL_S * 1000):
                    self.reap_strays()
                    continue
                message, descriptors, _, _ = socket.recv_fds(self.control, 4096, 1)
                if not message:
                    return
                self.obey(json.loads(message), descriptors)
        finally:
            for pid in list(self.workers):
                self.end(pid)

    def obey(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if order["order"] == "fork":
            _say(self.control, {"pid": self.fork(descriptors[0])})
        else:
            _say(self.control, {"status": self.end(order["pid"])})

    def fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self.control.close()
                run_worker(socket.socket(fileno=descriptor), self.setup, self.functions)
            finally:
                os._exit(0)
        os.close(descriptor)
        self.workers.add(pid)
        return pid

    def end(self, pid: int) -> int:
        """SIGKILL a worker's process group and its escaped descendants; its wait status."""
        if pid not in self.workers:
            return 0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        self.workers.discard(pid)
        self.end_strays()
        return status

    def end_strays(self) -> None:
        """Kill children that are no workers: what a worker daemonised. Killing one may hand over its own."""
        while strays := [pid for pid in _children() if pid not in self.workers]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def reap_strays(self) -> None:
        for pid in _children():
            if pid not in self.workers:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # not Linux, or a kernel without this list
        return []


def run_worker(connection: socket.socket, setup: Setup, functions: Sequence[Callable[..., Any]]) -> None:
    """Answer each call of each batch, in order, with one JSON line, until the connection closes."""
    zygote = os.getppid()
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:  # it died before it could take us along
        return
    _offer_to_the_oom_killer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if setup.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_limit_bytes, setup.memory_limit_bytes))
    me = os.getpid()
    while header := _read_exactly(connection, HEADER.size):
        data = _read_exactly(connection, HEADER.unpack(header)[0])
        try:
            batch: Batch = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - grader worker: unpickling imports the user's classes
            _say(connection, {"unreadable": f"{type(error).__name__}: {error}"})
            continue
        for call, index, rollouts in batch:
            answer = _answer(setup, functions, index, rollouts)
            if os.getpid() != me:  # the function forked and its child came back here
                os._exit(0)
            _say(connection, {"call": call, **answer})


def _answer(
    setup: Setup, functions: Sequence[Callable[..., Any]], index: int, rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    try:
        outcomes = execute(setup.specs[index], setup.names[index], functions[index], rollouts)
    except RewardError as error:
        return {"shape": str(error)}
    except KeyboardInterrupt as error:  # the signal is ignored here: the function itself raised it
        line = failure(setup.names[index], rollouts[0].prompt.id, error)
        outcomes = [Outcome(grading=Grading.FAILED, error=line) for _ in rollouts]
    return {"outcomes": [_plain(outcome) for outcome in outcomes]}


def _plain(outcome: Outcome) -> list[Any]:
    return [outcome.value, dict(outcome.parts), str(outcome.grading), outcome.error]


def _offer_to_the_oom_killer() -> None:
    """Out of memory, the kernel shall end a grader rather than the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    """``size`` bytes, or none at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        block = connection.recv(min(size - len(data), 1 << 20))
        if not block:
            return b""
        data += block
    return bytes(data)
