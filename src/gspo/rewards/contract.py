"""What a reward function is: how a recipe names it, how it is found, and what is said of a rollout.

How a function is called and its return read is in ``calls``; where it runs, and what becomes of one that
hangs or dies, in ``workers``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from gspo.errors import RewardError
from gspo.types import Grading

BUILTINS: Mapping[str, str] = {
    "math": "gspo.rewards.math:math_reward",
    "exact": "gspo.rewards.text:exact_reward",
    "format": "gspo.rewards.text:format_reward",
    "length": "gspo.rewards.text:length_reward",
    "reasoning_gym": "gspo.rewards.gym:reasoning_gym_reward",
}
"""Name in a recipe -> dotted path."""

WARM_UPS: Mapping[str, str] = {
    "math": "gspo.rewards.math:warm_up",
    "reasoning_gym": "gspo.rewards.gym:warm_up",
}
"""Called once before workers are forked, so that slow imports are shared and count against no deadline."""

REWARD_KEY = "reward"
"""The key of a returned dict that is the function's value; the other keys are then logged only."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function of a recipe.

    ``function``: a built-in name, ``"module:function"``, or a callable. ``weight`` multiplies its value in
    the sum. ``options``: keyword arguments of the function. ``name`` labels its parts; derived from the
    function if empty. Raises ``RewardError`` for a weight that is not finite or a function that is neither
    text nor callable.
    """

    function: str | Callable[..., Any]
    weight: float = 1.0
    signature: Literal["gspo", "trl"] = "gspo"
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) and not callable(self.function):
            raise RewardError(f"reward function is a {type(self.function).__name__}; give a name or a callable")
        if not math.isfinite(self.weight):
            raise RewardError(f"reward weight is {self.weight}; give a finite number")
        if self.signature not in ("gspo", "trl"):
            raise RewardError(f'reward signature is "{self.signature}"; give "gspo" or "trl"')
        object.__setattr__(self, "name", self.name or derived_name(self.function))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all reward functions together say of one rollout.

    ``reward`` = sum of weight x value over the functions that applied; None unless ``grading`` is GRADED.
    ``parts``: the unweighted value of each function under its name, and what it returned beside it as
    ``"name/part"``.
    """

    reward: float | None
    parts: Mapping[str, float | None]
    grading: Grading
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one function says of one rollout; ``value`` None with GRADED means that it does not apply."""

    value: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    grading: Grading = Grading.GRADED
    error: str | None = None


def derived_name(function: str | Callable[..., Any]) -> str:
    """The label of a function: its last name, without module."""
    if isinstance(function, str):
        return function.rsplit(":", 1)[-1].rsplit(".", 1)[-1]
    if isinstance(function, partial):
        return derived_name(function.func)
    if inspect.isroutine(function) or inspect.isclass(function):
        return "reward" if function.__name__ == "<lambda>" else function.__name__
    return type(function).__name__


def unique_names(specs: Sequence[RewardSpec]) -> tuple[str, ...]:
    """The specs' names; the second of the same name gets ``_2``, and so on."""
    names: list[str] = []
    for spec in specs:
        candidates = (spec.name if n == 1 else f"{spec.name}_{n}" for n in itertools.count(1))
        names.append(next(name for name in candidates if name not in names))
    return tuple(names)


def dotted_path(function: str | Callable[..., Any]) -> str | None:
    """``"module:name"`` under which another process finds this function; None for lambdas, closures and
    scripts.
    """
    if isinstance(function, str):
        return BUILTINS.get(function, function)
    if not inspect.isroutine(function) or function.__module__ in ("__main__", None):
        return None
    try:
        found = operator.attrgetter(function.__qualname__)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return None
    return f"{function.__module__}:{function.__qualname__}" if found is function else None


def resolve(path: str) -> Any:
    """Import ``"module:name"``. Raises ``RewardError`` that says which of the two was not found."""
    module_name, _, attribute = path.partition(":")
    if not attribute:
        near = difflib.get_close_matches(path, BUILTINS, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"built-in: {', '.join(BUILTINS)}"
        raise RewardError(f'no reward function "{path}": {hint}; your own is named "module:function"')
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(
            f'cannot import the module of reward "{path}": {error} (looked in {os.getcwd()} and sys.path)'
        ) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise RewardError(f'module "{module_name}" has no "{attribute}" for reward "{path}"{hint}') from error


def load_reward(function: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The callable behind a built-in name, a dotted path, or a callable itself, with its options bound.

    Raises ``RewardError`` if it is not found, is not callable, or does not take an option.
    """
    found = resolve(BUILTINS.get(function, function)) if isinstance(function, str) else function
    if not callable(found):
        raise RewardError(f'reward "{function}" is a {type(found).__name__}, not a function')
    if not options:
        return found
    _check_options(derived_name(function), found, options)
    return partial(found, **options)


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C do not tell
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            near = difflib.get_close_matches(option, parameters, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"it takes {', '.join(list(parameters)[1:]) or 'none'}"
            raise RewardError(f'reward "{name}" has no option "{option}": {hint}')


def warm_up(specs: Sequence[RewardSpec]) -> None:
    """Run the preparations of the built-ins among ``specs``."""
    for spec in specs:
        if isinstance(spec.function, str) and spec.function in WARM_UPS:
            resolve(WARM_UPS[spec.function])()
