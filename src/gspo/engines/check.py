"""``check_engine``: tests any engine against the ``Engine`` contract, weights or none.

Each check is one function that says what it found; a failed one does not stop the others. How well an engine samples
or how fast is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gspo.engines.base import Engine
from gspo.errors import EngineDied, EngineError
from gspo.types import Completion, FinishReason, Request, Sampling

Score = Callable[[Sequence[int], Sequence[int], float], Sequence[float]]

BUDGET = 8
POLLS = 10_000  # without a completion, after which an engine counts as stuck


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found. ``skipped``: the engine does not claim what it tests."""

    name: str
    passed: bool
    detail: str = ""
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every check is given."""

    make: Callable[[], Engine]
    prompts: Sequence[Sequence[int]]
    score: Score | None
    weights: Iterable[tuple[str, Any]] | str | None
    tolerance: float

    def request(self, name: str, prompt: int = 0, *, seed: int = 11, sampling: Sampling | None = None) -> Request:
        ids = np.array(self.prompts[prompt % len(self.prompts)], dtype=np.int64)
        return Request(name, ids, sampling or Sampling(max_new_tokens=BUDGET), seed=seed)


class _Broken(Exception):
    """A check's finding."""


def check_engine(
    make_engine: Callable[[], Engine],
    prompts: Sequence[Sequence[int]],
    *,
    score: Score | None = None,
    weights: Iterable[tuple[str, Any]] | str | None = None,
    tolerance: float = 1e-4,
) -> tuple[Check, ...]:
    """Test an engine against the contract.

    Args:
        make_engine: builds a fresh engine; called once a check.
        prompts: at least two prompts of token ids that the engine accepts, of different lengths.
        score: (prompt ids, completion ids, temperature) -> the log-probs that another implementation, the learner
            say, gives the completion; None leaves that comparison out.
        weights: a complete set that ``load_weights`` takes more than once; an engine that shares its parameters
            needs none.
        tolerance: largest difference of a log-prob, to ``score`` and between batches.

    Returns:
        one ``Check`` each, in a fixed order; ``all(check.passed for check in ...)`` is the verdict.
    """
    if len(prompts) < 2:
        raise ValueError("check_engine needs at least two prompts")
    bench = _Bench(make_engine, prompts, score, weights, tolerance)
    return tuple(_run(name, function, bench) for name, function in _CHECKS)


def drain(engine: Engine) -> dict[str, Completion]:
    """Poll until nothing is in flight; completions by request id."""
    completions: dict[str, Completion] = {}
    for _ in range(POLLS):
        finished = engine.poll()
        if not finished:
            return completions
        for completion in finished:
            _expect(completion.request_id not in completions, f"{completion.request_id} came back twice")
            completions[completion.request_id] = completion
    raise _Broken(f"poll still returns completions after {POLLS} calls")


def _run(name: str, function: Callable[[Engine, _Bench], str | None], bench: _Bench) -> Check:
    engine = bench.make()
    try:
        skipped = function(engine, bench)
    except _Broken as finding:
        return Check(name, False, str(finding))
    except (EngineError, ValueError, TypeError, IndexError, RuntimeError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    finally:
        engine.close()
    return Check(name, True, skipped or "", skipped is not None)


def _expect(condition: bool, finding: str) -> None:
    if not condition:
        raise _Broken(finding)


def _expect_error(kind: type[EngineError], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    raise _Broken(f"{what} does not raise {kind.__name__}")


def _run_all(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Completions in the order of the requests."""
    engine.submit(requests)
    completions = drain(engine)
    missing = {request.id for request in requests} ^ set(completions)
    _expect(not missing, f"ids that do not match between submit and poll: {sorted(missing)[:3]}")
    return [completions[request.id] for request in requests]


def _same(left: Completion, right: Completion, tolerance: float, what: str) -> None:
    _expect(np.array_equal(left.token_ids, right.token_ids), f"{what}: other token ids")
    _expect(np.allclose(left.logprobs, right.logprobs, rtol=0, atol=tolerance), f"{what}: other log-probs")


def _arrays(completion: Completion) -> tuple[Any, Any, Any]:
    return completion.token_ids, completion.logprobs, completion.versions


def _shapes(engine: Engine, bench: _Bench) -> None:
    requests = [bench.request(f"r{index}", index, seed=index) for index in range(5)]
    for completion in _run_all(engine, requests):
        count = len(completion.token_ids)
        _expect(completion.finish_reason is not FinishReason.ERROR, f"refused a request: {completion.error}")
        _expect(1 <= count <= BUDGET, f"{count} tokens where 1 to {BUDGET} were asked for")
        shapes = [np.shape(values) for values in _arrays(completion)]
        _expect(shapes == [(count,)] * 3, f"ids, log-probs and versions have shapes {shapes}")
        _expect(np.asarray(completion.token_ids).dtype == np.int64, "token_ids are not int64")
        _expect(np.asarray(completion.logprobs).dtype == np.float32, "logprobs are not float32")
        _expect(bool(np.all(np.isfinite(completion.logprobs))), "a log-prob is not finite")
        _expect(bool(np.all(completion.logprobs <= 1e-6)), "a log-prob is above 0")
        size = engine.capabilities.vocab_size
        _expect(not size or int(completion.token_ids.max()) < size, "a token outside the vocabulary")


def _idle(engine: Engine, bench: _Bench) -> None:
    _expect(engine.poll(0.0) == [], "poll with nothing in flight does not return []")
    _expect(engine.interrupt() == [], "interrupt with nothing in flight does not return []")


def _duplicates(engine: Engine, bench: _Bench) -> None:
    request = bench.request("same")
    engine.submit([request])
    _expect_error(EngineError, lambda: engine.submit([request]), "an id that is in flight")
    drain(engine)
    _run_all(engine, [request])  # an id that came back may be used again


def _refusals(engine: Engine, bench: _Bench) -> None:
    good = bench.request("good")
    bad = [replace(good, id="empty", token_ids=np.zeros(0, dtype=np.int64))]
    bad.append(replace(good, id="no budget", sampling=Sampling(max_new_tokens=0)))
    size, window = engine.capabilities.vocab_size, engine.capabilities.max_model_len
    if size:
        bad.append(replace(good, id="outside the vocabulary", token_ids=np.array([size], dtype=np.int64)))
    if window:
        bad.append(replace(good, id="too long", token_ids=np.resize(good.token_ids, window)))
    if not engine.capabilities.stop_strings:
        bad.append(replace(good, id="stop string", sampling=Sampling(max_new_tokens=BUDGET, stop=("\n",))))
    completions = _run_all(engine, [*bad, good])
    for completion in completions[:-1]:
        name = completion.request_id
        _expect(completion.finish_reason is FinishReason.ERROR, f"{name}: not refused")
        _expect(bool(completion.error), f"{name}: refused without saying why")
    _expect(completions[-1].finish_reason is not FinishReason.ERROR, "a good request failed beside refused ones")


def _limits(engine: Engine, bench: _Bench) -> None:
    (completion,) = _run_all(engine, [bench.request("short", sampling=Sampling(max_new_tokens=2))])
    _expect(len(completion.token_ids) == 2, "max_new_tokens = 2 did not give 2 tokens")
    _expect(completion.finish_reason is FinishReason.LENGTH, f"it says {completion.finish_reason}, not length")


def _context(engine: Engine, bench: _Bench) -> str | None:
    window = engine.capabilities.max_model_len
    if not 4 <= window <= 4096:
        return "no short context window"
    ids = np.resize(np.array(bench.prompts[0], dtype=np.int64), window - 2)
    (completion,) = _run_all(engine, [replace(bench.request("full"), token_ids=ids)])
    _expect(len(completion.token_ids) == 2, f"{len(completion.token_ids)} tokens in a window with room for 2")
    reason = completion.finish_reason
    _expect(reason is FinishReason.CONTEXT_LENGTH, f"it says {reason}, not context_length")
    return None


def _ends(engine: Engine, bench: _Bench) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=BUDGET)
    (free,) = _run_all(engine, [bench.request("free", sampling=greedy)])
    end = int(free.token_ids[-1])
    first = int(np.flatnonzero(free.token_ids == end)[0])
    never = next(token for token in range(BUDGET + 1) if token not in free.token_ids)
    stopping = replace(greedy, eos_token_ids=(never, end))
    (stopped,) = _run_all(engine, [bench.request("stopped", sampling=stopping)])
    expected = free.token_ids[: first + 1]
    _expect(np.array_equal(stopped.token_ids, expected), "an end-of-sequence id does not end it, or is not kept")
    _expect(stopped.finish_reason is FinishReason.STOP, f"it says {stopped.finish_reason}, not stop")


def _versions(engine: Engine, bench: _Bench) -> str | None:
    if bench.weights is None and "shared" not in engine.capabilities.weight_sources:
        return "no weights to load"
    for version in (5, 6):
        engine.load_weights(bench.weights or (), version)
        (completion,) = _run_all(engine, [bench.request(f"at {version}")])
        _expect(set(completion.versions.tolist()) == {version}, f"tokens not labelled with version {version}")
    return None


def _in_flight(engine: Engine, bench: _Bench) -> None:
    engine.submit([bench.request("waiting")])
    _expect_error(EngineError, lambda: engine.load_weights((), 1), "load_weights with a request in flight")
    _expect(len(engine.interrupt()) == 1, "interrupt lost a request")


def _interruption(engine: Engine, bench: _Bench) -> None:
    sampling = Sampling(max_new_tokens=64)
    requests = [bench.request(f"r{index}", index, seed=index, sampling=sampling) for index in range(3)]
    engine.submit(requests)
    back = [*engine.poll(0.0), *engine.interrupt()]
    _expect(sorted(c.request_id for c in back) == ["r0", "r1", "r2"], "requests lost or doubled by interrupt")
    for completion in back:
        _expect(
            len({len(values) for values in _arrays(completion)}) == 1,
            "a partial completion whose arrays differ in length",
        )
    _expect(engine.poll(0.0) == [], "something is still in flight after interrupt")
    _run_all(engine, requests)


def _greedy(engine: Engine, bench: _Bench) -> None:
    greedy = Sampling(temperature=0.0, max_new_tokens=BUDGET)
    pair = [bench.request(f"seed {seed}", seed=seed, sampling=greedy) for seed in (1, 2)]
    first, second = _run_all(engine, pair)
    _same(first, second, bench.tolerance, "temperature 0 depends on the seed")


def _seeds(engine: Engine, bench: _Bench) -> str | None:
    if not engine.capabilities.seeds:
        return "no seeds"
    requests = [bench.request(f"r{index}", index, seed=index) for index in range(6)]
    together = _run_all(engine, requests)
    alone = [_run_all(engine, [request])[0] for request in reversed(requests)][::-1]
    for left, right in zip(together, alone, strict=True):
        _same(left, right, bench.tolerance, "a seed's completion depends on its batch")
    siblings = _run_all(engine, [bench.request(f"s{seed}", seed=seed) for seed in range(8)])
    _expect(len({tuple(c.token_ids) for c in siblings}) > 1, "8 seeds gave one completion")
    return None


def _resumption(engine: Engine, bench: _Bench) -> str | None:
    if not engine.capabilities.seeds or engine.capabilities.resume_seed != "continues":
        return "a resumed seed restarts"
    request = bench.request("whole")
    (whole,) = _run_all(engine, [request])
    ids = np.concatenate([request.token_ids, whole.token_ids[:3]])
    rest = Sampling(max_new_tokens=BUDGET - 3)
    (resumed,) = _run_all(engine, [Request("rest", ids, rest, seed=request.seed)])
    _expect(np.array_equal(resumed.token_ids, whole.token_ids[3:]), "a resubmitted prefix goes on differently")
    return None


def _scores(engine: Engine, bench: _Bench) -> str | None:
    if bench.score is None:
        return "nothing to compare with"
    for temperature in (1.0, 0.7, 0.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=BUDGET)
        requests = [bench.request(f"{index}", index, seed=index, sampling=sampling) for index in range(4)]
        for request, completion in zip(requests, _run_all(engine, requests), strict=True):
            wanted = bench.score(request.token_ids.tolist(), completion.token_ids.tolist(), temperature or 1.0)
            worst = float(np.abs(np.asarray(wanted) - completion.logprobs).max())
            _expect(worst <= bench.tolerance, f"log-probs off by {worst:.2g} at temperature {temperature}")
    return None


def _closing(engine: Engine, bench: _Bench) -> None:
    engine.close()
    engine.close()
    _expect_error(EngineDied, engine.poll, "poll after close")


_CHECKS: tuple[tuple[str, Callable[[Engine, _Bench], str | None]], ...] = (
    ("completions have matching shapes, dtypes and finite log-probs", _shapes),
    ("an idle engine returns nothing", _idle),
    ("an id in flight is refused", _duplicates),
    ("bad requests come back as errors and harm no others", _refusals),
    ("max_new_tokens ends with reason length", _limits),
    ("the context window ends with reason context_length", _context),
    ("every end-of-sequence id ends it and stays in the ids", _ends),
    ("tokens carry the version that sampled them", _versions),
    ("load_weights is refused with requests in flight", _in_flight),
    ("interrupt returns every request once", _interruption),
    ("temperature 0 is greedy", _greedy),
    ("a seed fixes a completion whatever else is in the batch", _seeds),
    ("a resubmitted prefix continues its stream", _resumption),
    ("log-probs agree with another implementation", _scores),
    ("close is idempotent and final", _closing),
)
