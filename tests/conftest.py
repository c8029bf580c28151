"""What every test starts from and leaves behind: one thread, no network, no global state of torch, no thread."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

# Before anything imports torch or the hub's client; processes that tests start inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, where Ctrl-C could not be tested
    signal.signal(signal.SIGINT, signal.default_int_handler)

THREADS = int(os.environ["OMP_NUM_THREADS"])
GRACE_S = 10.0


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Threads, default dtype, gradient mode and determinism are torch's globals; a test may set them for itself."""
    torch.set_num_threads(THREADS)
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    assert torch.is_grad_enabled(), "the test left gradients off"


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A thread that outlives its test makes forking unsafe for every test after it."""
    before = set(threading.enumerate())
    yield
    if left := _others(before):
        gc.collect()  # an idle executor's threads end with it
        for thread in left:
            thread.join(GRACE_S / len(left))
        assert not _others(before), f"threads left behind: {_others(before)}"


def _others(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads started since, but for tqdm's monitor, which there is one of for the life of a process."""
    return [thread for thread in threading.enumerate() if thread not in before and thread.name != "tqdm_monitor"]
