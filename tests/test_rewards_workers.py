"""Containment: whatever a reward function does, it is a typed outcome of the one rollout it happened on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gspo.errors import RewardError
from gspo.rewards import Grader, RewardSpec
from gspo.types import FinishReason, Grading, Prompt, Rollout, TokenRow

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUMBER = 1


def rollout(text: str, *, prompt: str = "p", answer: str | None = "1", **metadata: object) -> Rollout:
    ids = np.array([5, 6, 7, 2])
    row = TokenRow(
        token_ids=ids,
        sampled_mask=np.array([False, True, True, True]),
        sampled_logprobs=np.zeros(4, np.float32),
        versions=np.array([-1, 0, 0, 0]),
        routes=np.zeros((4, 2, 2), np.int16),
    )
    source = Prompt(id=prompt, text="question", answer=answer, metadata=metadata)
    return Rollout(prompt=source, index=0, rows=(row,), finish_reason=FinishReason.STOP, text=text)


def misbehave(r: Rollout) -> object:
    """Does what the completion says; length of the text otherwise."""
    actions = {
        "raise": lambda: int("x"),
        "hang": spin,
        "sleep": lambda: time.sleep(1000),
        "c hang": lambda: ctypes.CDLL(None).pause(),
        "deaf": deaf,
        "exit": lambda: sys.exit(0),
        "_exit": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(1),
        "recursion": lambda: recurse(0),
        "memory": lambda: bytearray(1 << 40),
        "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "interrupt": keyboard_interrupt,
        "nan": lambda: float("nan"),
        "string": lambda: "1",
        "tuple": lambda: (1.0,),
        "nested": lambda: {"a": {"b": 1}},
        "inf part": lambda: {"a": float("inf")},
        "print": lambda: print("x" * 100_000) or 1.0,
        "none": lambda: None,
        "child": child_returns,
        "close all": lambda: os.closerange(3, 100),
        "escape": lambda: int("\x1b[31m\ud800"),
    }
    return actions[r.text]() if r.text in actions else float(len(r.text))


def spin() -> None:
    while True:
        pass


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    spin()


def recurse(n: int) -> int:
    return recurse(n + 1) + 1


def keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def child_returns() -> float:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return 2.0


def daemonise(r: Rollout) -> float:
    """Leave a daemon in a session of its own, say its pid, and hang."""
    if r.text != "daemon":
        return 1.0
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(r.prompt.metadata["pidfile"]).write_text(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    time.sleep(1000)
    return 0.0


def count(r: Rollout) -> float:
    """One line in the rollout's file per call."""
    with open(r.prompt.metadata["file"], "a") as file:
        file.write(r.text + "\n")
    if r.text == "hang":
        spin()
    if r.text == "die":
        os._exit(1)
    return 1.0


async def slow_length(r: Rollout) -> float:
    await asyncio.sleep(0.001)
    return float(len(r.text))


def parts(r: Rollout) -> dict[str, float | None]:
    return {"form": 0.5, "content": len(r.text) / 4, "style": None}


def valued(r: Rollout) -> dict[str, float]:
    return {"reward": 1.0, "parsed": 0.0}


def spec(function: object = misbehave, **settings: object) -> RewardSpec:
    return RewardSpec(function=function, **settings)  # type: ignore[arg-type]


def descendants(ancestor: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = stat.read_text().split(" (", 1)
            parents[int(pid)] = int(rest.rsplit(") ", 1)[1].split()[1])
    found = {ancestor}
    while more := {p for p, q in parents.items() if q in found} - found:
        found |= more
    return found - {ancestor}


@pytest.fixture(scope="module")
def grader():
    with Grader([spec()], workers=2, timeout_s=0.8) as made:
        yield made


@pytest.mark.parametrize(
    ("action", "grading", "words"),
    [
        ("raise", Grading.FAILED, "ValueError: invalid literal"),
        ("hang", Grading.TIMEOUT, "still running after 0.8 s"),
        ("sleep", Grading.TIMEOUT, "still running"),
        ("c hang", Grading.TIMEOUT, "still running"),
        ("deaf", Grading.TIMEOUT, "still running"),
        ("exit", Grading.FAILED, "SystemExit: 0"),
        ("_exit", Grading.CRASHED, "exited with code 3"),
        ("segfault", Grading.CRASHED, "SIGSEGV"),
        ("recursion", Grading.FAILED, "RecursionError"),
        ("memory", Grading.FAILED, "MemoryError"),
        ("sigkill", Grading.CRASHED, "SIGKILL (out of memory?)"),
        ("interrupt", Grading.FAILED, "KeyboardInterrupt"),
        ("nan", Grading.FAILED, "returned nan"),
        ("string", Grading.FAILED, "returned a str ('1')"),
        ("tuple", Grading.FAILED, "returned a tuple"),
        ("nested", Grading.FAILED, "returned a dict"),
        ("inf part", Grading.FAILED, "returned inf"),
        ("none", Grading.NOT_APPLICABLE, "no reward function applies"),
        ("close all", Grading.CRASHED, "misbehave"),
    ],
)
def test_each_misdeed_is_typed_and_hurts_nobody_else(grader, action, grading, words):
    verdicts = grader.grade([rollout("aa"), rollout(action, prompt="bad"), rollout("bbb"), *[rollout("c")] * 5])
    assert [v.reward for v in verdicts] == [2.0, None, 3.0] + [1.0] * 5
    assert verdicts[1].grading is grading
    assert words in (verdicts[1].error or "")
    if grading is not Grading.NOT_APPLICABLE:
        assert '"misbehave"' in verdicts[1].error and '"bad"' in verdicts[1].error


def test_an_exception_says_where_in_the_users_code_it_came_from(grader):
    (verdict,) = grader.grade([rollout("raise")])
    assert "test_rewards_workers.py:" in verdict.error


def test_what_the_model_wrote_is_escaped_in_errors(grader):
    (verdict,) = grader.grade([rollout("escape")])
    assert verdict.error.isprintable() and verdict.error.encode("utf-8")


def test_printing_and_forking_inside_a_reward_do_no_harm(grader, capfd):
    verdicts = grader.grade([rollout("print"), rollout("child"), rollout("aa")])
    assert [v.reward for v in verdicts] == [1.0, 2.0, 2.0]
    assert capfd.readouterr() == ("", "")


def test_order_is_kept_over_many_rollouts_and_an_empty_batch_is_fine(grader):
    texts = ["x" * (i * 7 % 13) for i in range(300)]
    assert [v.reward for v in grader.grade([rollout(t) for t in texts])] == [float(len(t)) for t in texts]
    assert grader.grade([]) == []


def test_all_hang_and_the_next_batch_is_served(grader):
    verdicts = grader.grade([rollout("hang")] * 4)
    assert [v.grading for v in verdicts] == [Grading.TIMEOUT] * 4
    assert grader.grade([rollout("aa")])[0].reward == 2.0


def test_every_rollout_is_graded_exactly_once_around_a_hang_and_a_crash(tmp_path):
    texts = [f"r{i}" for i in range(40)]
    texts[7], texts[23] = "hang", "die"
    log = tmp_path / "log"
    with Grader([spec(count)], workers=2, timeout_s=0.6) as grader:
        verdicts = grader.grade([rollout(t, file=str(log)) for t in texts])
    assert sorted(log.read_text().split()) == sorted(texts)
    assert [i for i, v in enumerate(verdicts) if v.grading is not Grading.GRADED] == [7, 23]
    assert verdicts[7].grading is Grading.TIMEOUT and verdicts[23].grading is Grading.CRASHED


@linux
def test_a_double_forked_daemon_dies_with_its_worker(tmp_path):
    pidfile = tmp_path / "pid"
    with Grader([spec(daemonise)], workers=1, timeout_s=1.0) as grader:
        verdicts = grader.grade([rollout("daemon", pidfile=str(pidfile)), rollout("fine")])
        assert [v.grading for v in verdicts] == [Grading.TIMEOUT, Grading.GRADED]
        assert not Path(f"/proc/{pidfile.read_text()}").exists()


@linux
def test_processes_and_descriptors_return_to_the_start():
    before = descendants(os.getpid()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Grader([spec()], workers=2, timeout_s=0.6) as grader:
            grader.grade([rollout("hang"), rollout("_exit"), rollout("aa")] * 2)
    assert (descendants(os.getpid()), len(os.listdir("/proc/self/fd"))) == before


@linux
def test_no_worker_outlives_a_killed_parent(tmp_path):
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from test_rewards_workers import spec, rollout, misbehave\n"
        "from gspo.rewards import Grader\n"
        "g = Grader([spec()], workers=2); g.grade([rollout('aa')] * 4)\n"
        "print('up', flush=True); g.grade([rollout('hang')] * 2)\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"up\n"
    family = descendants(parent.pid)
    assert len(family) >= 3  # a zygote and two workers
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(500):
        if not any(Path(f"/proc/{pid}").exists() for pid in family):
            return
        time.sleep(0.01)
    pytest.fail("workers outlived their parent")


def test_a_memory_limit_makes_an_allocation_fail_in_the_worker_only():
    def hoard(r: Rollout) -> float:
        return float(len("a" * int(r.text)))

    with Grader([spec(hoard)], workers=1, memory_limit_bytes=4 << 30) as grader:
        verdicts = grader.grade([rollout("10"), rollout(str(10**10)), rollout("20")])
    assert [v.reward for v in verdicts] == [10.0, None, 20.0]
    assert "MemoryError" in verdicts[1].error


@linux
def test_a_lost_zygote_is_replaced():
    with Grader([spec()], workers=1) as grader:
        assert grader.grade([rollout("aa")])[0].reward == 2.0
        os.kill(grader._pool._zygote.pid, signal.SIGKILL)
        for _ in range(3):  # the old worker may still answer, or die before it has
            assert grader.grade([rollout("aaa")])[0].reward == 3.0


@linux
def test_a_reward_that_kills_the_zygote_is_a_crash_of_its_rollout_only():
    def regicide(r: Rollout) -> float:
        if r.text == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        return 1.0

    with Grader([spec(regicide)], workers=2, timeout_s=5) as grader:
        verdicts = grader.grade([rollout(t) for t in ("a", "kill", "b", "c")])
    assert [v.reward for v in verdicts] == [1.0, None, 1.0, 1.0]
    assert verdicts[1].grading is Grading.CRASHED


def test_an_interrupted_grade_leaves_a_usable_grader():
    with Grader([spec()], workers=2, timeout_s=20) as grader:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            grader.grade([rollout("hang")] * 3)
        timer.join()
        assert [v.reward for v in grader.grade([rollout("aa")] * 3)] == [2.0] * 3


@pytest.mark.parametrize("method", ["_order", "_reply"])
def test_an_interrupt_while_speaking_to_the_zygote_replaces_it(monkeypatch, method):
    def interrupted(*args):
        raise KeyboardInterrupt

    with Grader([spec()], workers=1) as grader:
        assert grader.grade([rollout("aa")])[0].reward == 2.0
        with monkeypatch.context() as patch:
            patch.setattr(grader._pool._zygote, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                grader.grade([rollout("_exit")])
        assert grader.grade([rollout("aaa")])[0].reward == 3.0


def test_it_works_from_threads_and_from_asyncio(grader):
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(grader.grade, [rollout("x" * i)] * 3) for i in range(8)]
        assert [[v.reward for v in job.result()] for job in jobs] == [[float(i)] * 3 for i in range(8)]

    async def main() -> list[float | None]:
        return [v.reward for v in await asyncio.to_thread(grader.grade, [rollout("abc")])]

    assert asyncio.run(main()) == [3.0]


def test_a_grader_built_beside_another_thread_is_spawned_and_works():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with Grader([spec("test_rewards_workers:misbehave"), spec(misbehave)], timeout_s=0.6) as grader:
            assert grader._pool._zygote._process is not None
            verdicts = grader.grade([rollout("aa"), rollout("hang"), rollout("_exit")])
            assert verdicts[0].parts == {"misbehave": 2.0, "misbehave_2": 2.0}
            gradings = [v.grading for v in verdicts]
            assert gradings == [Grading.GRADED, Grading.TIMEOUT, Grading.CRASHED]
        with pytest.raises(RewardError, match=r"lambda.*in_process=True"):
            Grader([spec(lambda r: 1.0)])
    finally:
        stop.set()
        thread.join()


def test_async_functions_and_closures():
    bonus = 0.25
    with Grader([spec(slow_length), spec(lambda r: bonus, weight=4.0)], workers=1) as grader:
        verdicts = grader.grade([rollout("ab"), rollout("")])
    assert [v.reward for v in verdicts] == [3.0, 1.0]
    assert verdicts[0].parts == {"slow_length": 2.0, "reward": 0.25}


def test_parts_are_summed_unless_one_is_the_reward():
    with Grader([spec(parts), spec(valued, weight=2.0)], workers=1) as grader:
        (verdict,) = grader.grade([rollout("ab")])
    assert verdict.reward == 3.0  # (0.5 + 0.5) + 2 x 1
    assert verdict.parts == {
        "parts": 1.0,
        "parts/form": 0.5,
        "parts/content": 0.5,
        "parts/style": None,
        "valued": 1.0,
        "valued/parsed": 0.0,
    }


def test_none_leaves_the_sum_of_that_rollout_only():
    first = {"a": 1.0, "b": 0.0, "c": None}
    second = {"a": None, "b": 0.0, "c": None}
    specs = [spec(lambda r: first[r.text], name="first"), spec(lambda r: second[r.text], name="second")]
    with Grader(specs, workers=1) as grader:
        verdicts = grader.grade([rollout(t) for t in "abc"])
    assert [v.reward for v in verdicts] == [1.0, 0.0, None]
    assert [v.grading for v in verdicts] == [Grading.GRADED, Grading.GRADED, Grading.NOT_APPLICABLE]
    assert verdicts[0].parts == {"first": 1.0, "second": None}


def test_one_failing_function_leaves_the_rollout_ungraded_and_keeps_the_others_part():
    with Grader([spec(misbehave), spec(lambda r: 1.0)], workers=1, timeout_s=0.6) as grader:
        verdict = grader.grade([rollout("hang")])[0]
    assert (verdict.reward, verdict.grading) == (None, Grading.TIMEOUT)
    assert verdict.parts == {"misbehave": None, "reward": 1.0}


def test_in_process_contains_exceptions_only():
    with Grader([spec()], in_process=True) as grader:
        verdicts = grader.grade([rollout("aa"), rollout("raise"), rollout("exit")])
        assert [v.reward for v in verdicts] == [2.0, None, None]
        assert [v.grading for v in verdicts[1:]] == [Grading.FAILED] * 2
        with pytest.raises(KeyboardInterrupt):
            grader.grade([rollout("interrupt")])


def test_in_process_async_inside_a_running_loop():
    async def main() -> float | None:
        return grader.grade([rollout("abcd")])[0].reward

    with Grader([spec(slow_length)], in_process=True) as grader:
        assert asyncio.run(main()) == 4.0


def test_an_unsendable_prompt_is_named(grader):
    with pytest.raises(RewardError, match=r"'odd'.*metadata"):
        grader.grade([rollout("a", prompt="odd", lock=threading.Lock())])
    assert grader.grade([rollout("aa")])[0].reward == 2.0


def test_a_closed_grader_says_so():
    grader = Grader([spec()], workers=1)
    grader.close()
    grader.close()
    with pytest.raises(RewardError, match="closed"):
        grader.grade([rollout("a")])


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("maths", {}, 'did you mean "math"'),
        ("nowhere_at_all:f", {}, "cannot import"),
        ("test_rewards_workers:misbehav", {}, 'did you mean "misbehave"'),
        ("test_rewards_workers:NUMBER", {}, "is a int, not a function"),
        ("test_rewards_workers:valued", {"scale": 2}, 'no option "scale"'),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_at_the_start(function, options, words):
    for in_process in (True, False):
        with pytest.raises(RewardError, match=words), Grader([spec(function, options=options)], in_process=in_process):
            pass


def test_no_functions_and_wrong_settings():
    with pytest.raises(RewardError, match="no reward function"):
        Grader([])
    with pytest.raises(RewardError, match="finite"):
        spec(weight=float("nan"))
    with pytest.raises(RewardError, match="workers"):
        Grader([spec()], workers=0)
    with pytest.raises(RewardError, match="callable"):
        spec(3)
    with pytest.raises(RewardError, match="signature"):
        spec(signature="verl")
