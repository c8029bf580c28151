"""Calling a reward function and reading what it returned.

A function of the ``gspo`` signature takes one ``Rollout`` and returns a number, a dict of parts, or None
(does not apply to this rollout); it may be ``async``. A function of the ``trl`` signature takes the whole
batch as columns and returns one number or None per completion. Either becomes ``Outcome`` records, which
``combine`` adds up.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from gspo.errors import RewardError
from gspo.rewards.contract import REWARD_KEY, Outcome, RewardSpec, Verdict
from gspo.types import Grading, Rollout


def as_number(value: Any) -> float | None:
    """A float for int, float, bool, fractions, numpy and torch scalars; None for None.

    Raises ``TypeError`` for anything else and ``ValueError`` for NaN and infinity.
    """
    if value is None:
        return None
    if _is_scalar_array(value):
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"returned {_shown(value)}; return a number, a dict of numbers, or None")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("returned a number too large for a float") from error
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; return a finite number, or None where it does not apply")
    return number


def _is_scalar_array(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.size == 1
    torch = sys.modules.get("torch")  # a tensor can only exist where torch has been imported
    return torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1


def as_outcome(value: Any) -> Outcome:
    """A function's return as an outcome. Errors as ``as_number``.

    A dict is a set of parts: its value is the entry ``"reward"`` if there is one (the others are logged
    only), else the sum of the parts that are not None; all None = does not apply.
    """
    if not isinstance(value, Mapping):
        return Outcome(value=as_number(value))
    parts: dict[str, float | None] = {}
    for key, part in value.items():
        if not isinstance(key, str):
            raise TypeError(f"returned a dict with the key {_shown(key)}; name parts by strings")
        parts[key] = as_number(part)
    if REWARD_KEY in parts:
        return Outcome(value=parts.pop(REWARD_KEY), parts=parts)
    applied = [part for part in parts.values() if part is not None]
    return Outcome(value=math.fsum(applied) if applied else None, parts=parts)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text[:60] + '...' if len(text) > 60 else text})"


def call_reward(function: Callable[..., Any], name: str, rollout: Rollout) -> Outcome:
    """Call a function of the ``gspo`` signature once; whatever it does short of killing its process is an
    outcome.
    """
    try:
        value = function(rollout)
        if inspect.isawaitable(value):
            value = _await(value)
        return as_outcome(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - grader worker: user code may raise anything, SystemExit too
        return Outcome(grading=Grading.FAILED, error=failure(name, rollout.prompt.id, error))


def call_trl(function: Callable[..., Any], name: str, rollouts: Sequence[Rollout]) -> list[Outcome]:
    """Call a function of the ``trl`` signature once for the whole batch.

    Raises ``RewardError`` for a return of the wrong shape; an exception inside leaves every rollout ungraded.
    """
    try:
        values = function(**trl_columns(rollouts))
        if inspect.isawaitable(values):
            values = _await(values)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - grader worker: user code may raise anything, SystemExit too
        return [Outcome(grading=Grading.FAILED, error=failure(name, rollout.prompt.id, error)) for rollout in rollouts]
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = list(values)
    where = f'reward "{name}" (signature "trl") returned'
    if not isinstance(values, list):
        raise RewardError(f"{where} {_shown(values)}; return a list of {len(rollouts)} numbers")
    if len(values) != len(rollouts):
        edge = min(len(values), len(rollouts))
        raise RewardError(f"{where} {len(values)} values for {len(rollouts)} completions: they part at index {edge}")
    return [_trl_outcome(value, name, i, rollouts[i]) for i, value in enumerate(values)]


def _trl_outcome(value: Any, name: str, index: int, rollout: Rollout) -> Outcome:
    try:
        return Outcome(value=as_number(value))
    except TypeError as error:
        raise RewardError(f'reward "{name}" (signature "trl") at index {index}: {error}') from error
    except ValueError as error:
        return Outcome(grading=Grading.FAILED, error=failure(name, rollout.prompt.id, error))


def trl_columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The keyword arguments of TRL's convention: prompts, completions, completion_ids, and a list per column.

    Completions are texts, or one-message lists where the prompt is a chat. Columns: ``answer``,
    ``solution`` (the answer again, unless the row has such a column), and every key of the prompts'
    metadata, None where absent.
    """
    columns: dict[str, Any] = {"prompts": [], "completions": [], "completion_ids": []}
    for rollout in rollouts:
        chat = rollout.prompt.messages is not None
        columns["prompts"].append([dict(m) for m in rollout.prompt.messages or ()] if chat else rollout.prompt.text)
        columns["completions"].append([{"role": "assistant", "content": rollout.text}] if chat else rollout.text)
        columns["completion_ids"].append(
            [int(token) for row in rollout.rows for token in row.token_ids[row.sampled_mask]]
        )
    keys = {key: None for rollout in rollouts for key in rollout.prompt.metadata}
    for key in keys:
        if key not in columns:
            columns[key] = [rollout.prompt.metadata.get(key) for rollout in rollouts]
    for key in ("answer", "solution"):
        columns.setdefault(key, [rollout.prompt.answer for rollout in rollouts])
    return columns


def _await(awaitable: Any) -> Any:
    async def run() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    box: list[Any] = []  # this thread already runs a loop: use one of its own

    def target() -> None:
        try:
            box.append((True, asyncio.run(run())))
        except BaseException as error:  # noqa: BLE001 - carried to the calling thread and raised there
            box.append((False, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    finished, value = box[0]
    if not finished:
        raise value
    return value


def failure(name: str, prompt_id: str, error: BaseException) -> str:
    """One line: which function, which prompt, the exception, and where in the user's code it came from."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    last = frames[-1] if frames else None
    place = f" ({os.path.basename(last.filename)}:{last.lineno} in {last.name})" if last else ""
    return f'reward "{name}" failed on prompt "{prompt_id}": {_printable(text[:500])}{place}'


def _printable(text: str) -> str:
    """Control characters and lone surrogates escaped: exceptions quote what the model wrote."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def combine(specs: Sequence[RewardSpec], names: Sequence[str], outcomes: Sequence[Outcome]) -> Verdict:
    """The weighted sum over the functions that apply. One that failed leaves the rollout ungraded, never
    0.
    """
    parts: dict[str, float | None] = {}
    for name, outcome in zip(names, outcomes, strict=True):
        parts[name] = outcome.value
        parts.update({f"{name}/{key}": part for key, part in outcome.parts.items()})
    failed = [outcome for outcome in outcomes if outcome.grading is not Grading.GRADED]
    if failed:
        return Verdict(None, parts, failed[0].grading, "; ".join(o.error or o.grading for o in failed))
    terms = [
        spec.weight * outcome.value for spec, outcome in zip(specs, outcomes, strict=True) if outcome.value is not None
    ]
    if not terms:
        return Verdict(None, parts, Grading.NOT_APPLICABLE, "no reward function applies (all returned None)")
    return Verdict(math.fsum(terms), parts, Grading.GRADED)


def execute(spec: RewardSpec, name: str, function: Callable[..., Any], rollouts: Sequence[Rollout]) -> list[Outcome]:
    """One call of either signature: the whole batch for ``trl``, one rollout for ``gspo``."""
    if spec.signature == "trl":
        return call_trl(function, name, rollouts)
    return [call_reward(function, name, rollout) for rollout in rollouts]
