"""Generators of our own: tasks that need no file. Here: addition with per-digit working.

A prompt is "47+85=" and its worked answer "7+5=12;4+8+1=13;#132": one clause a column from the least significant
digit, "+1" where a one was carried into it, the sum after "#". Item i of a seed is the i-th place of a keyed
permutation of all pairs: computed on its own, never twice in a task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from gspo.errors import TaskError
from gspo.seeding import seed as derive_seed
from gspo.types import Prompt

ANSWER_MARKER = "#"
_ROUNDS = 4


def generators() -> dict[str, Callable[..., list[Prompt]]]:
    """The generators by the name that ``source`` takes."""
    return {"addition": addition}


def addition(
    size: int | None = None,
    seed: int = 0,
    *,
    split: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """``size`` addition items, deterministic in (seed, index), without duplicates.

    ``options``: ``digits`` (2), the longest operand; ``min_digits`` (``digits``), the shortest; ``careless``
    (0.0), the share of worked answers that forget every carry (the reference answer stays right: a cold start
    on a careless teacher leaves something to learn); ``held_out_fraction`` (0.2). ``split`` "train" and "test"
    are disjoint whatever the seeds: a fixed permutation of all pairs is cut in two, and the seed only orders
    each part. None takes from all pairs. The
    default size is 4096, or the whole part where that is smaller. TaskError for a size beyond the part, which
    holds ``held_out_fraction`` of (10^digits - 10^(min_digits - 1))^2 pairs, or the rest of them.
    """
    low, high, fraction, careless = _addition_options(options or {})
    pairs = (high - low + 1) ** 2
    start, length = _part(pairs, split, fraction)
    size = min(4096, length) if size is None else size
    if not 1 <= size <= length:
        raise TaskError(
            f"addition: size = {size}, but split {split!r} holds {length} different items "
            f"of {low} .. {high}. Take at most {length}, or raise options.digits."
        )
    split_key = derive_seed(0, "addition_split", pairs)
    order_key = derive_seed(seed, "addition_order", pairs)
    prompts = []
    for index in range(size):
        place = start + _permuted(index, length, order_key)
        first, second = divmod(_permuted(place, pairs, split_key), high - low + 1)
        forgets = derive_seed(seed, "addition_careless", first, second) < careless * 2**63
        prompts.append(_addition_prompt(low + first, low + second, carry=not forgets))
    return prompts


def addition_alphabet() -> str:
    """Every character of addition prompts and worked answers, for a character-level tokenizer."""
    return "0123456789+=;" + ANSWER_MARKER


def worked_addition(first: int, second: int, *, carry: bool = True) -> str:
    """The worked answer, operands >= 0: ``worked_addition(47, 85) == "7+5=12;4+8+1=13;#132"``.

    Without ``carry`` every column is added on its own, and the answer is wrong where one should have been carried:
    ``"7+5=12;4+8=12;#122"``.
    """
    left, right = str(first)[::-1], str(second)[::-1]
    columns = max(len(left), len(right))
    clauses, digits, carried = [], "", 0
    for a, b in zip(left.ljust(columns, "0"), right.ljust(columns, "0"), strict=True):
        total = int(a) + int(b) + carried
        clauses.append(f"{a}+{b}+1={total}" if carried else f"{a}+{b}={total}")
        digits = f"{total % 10}{digits}"
        carried = total // 10 if carry else 0
    answer = f"{total // 10 or ''}{digits}"
    return ";".join(clauses) + f";{ANSWER_MARKER}{answer}"


def characters(prompts: Iterable[Prompt]) -> str:
    """The sorted distinct characters of prompts, answers and demonstrations, for a tokenizer."""
    found: set[str] = set()
    for prompt in prompts:
        found.update(prompt.text or "", prompt.answer or "", str(prompt.metadata.get("demonstration", "")))
        for turn in prompt.messages or ():
            found.update(turn["content"])
    return "".join(sorted(found))


def check_option_names(given: Iterable[str], allowed: Iterable[str], owner: str) -> None:
    """TaskError that names the nearest valid option for the first unknown one."""
    names = sorted(allowed)
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TaskError(f"{owner}: unknown option {name!r}; {hint}Valid options: {', '.join(names) or 'none'}")


def _addition_prompt(first: int, second: int, *, carry: bool) -> Prompt:
    text = f"{first}+{second}="
    metadata = {"demonstration": worked_addition(first, second, carry=carry)}
    return Prompt(id=f"{first}+{second}", text=text, answer=str(first + second), metadata=metadata)


def _addition_options(options: Mapping[str, Any]) -> tuple[int, int, float, float]:
    """(lowest operand, highest operand, held-out fraction, share of careless worked answers)."""
    check_option_names(options, ("digits", "min_digits", "careless", "held_out_fraction"), "addition")
    digits = options.get("digits", 2)
    shortest = options.get("min_digits", digits)
    fraction = options.get("held_out_fraction", 0.2)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in (digits, shortest)):
        raise TaskError(f"addition: digits = {digits!r} and min_digits = {shortest!r} must be whole numbers")
    if not 1 <= shortest <= digits <= 18:
        raise TaskError(
            f"addition: digits = {digits}, min_digits = {shortest}; 1 <= min_digits <= digits <= 18 is needed"
        )
    if not isinstance(fraction, float) or not 0.0 < fraction < 1.0:
        raise TaskError(f"addition: held_out_fraction = {fraction!r} must lie between 0 and 1")
    careless = options.get("careless", 0.0)
    if not isinstance(careless, (int, float)) or isinstance(careless, bool) or not 0 <= careless <= 1:
        raise TaskError(f"addition: careless = {careless!r} must be a share between 0 and 1")
    return (0 if shortest == 1 else 10 ** (shortest - 1)), 10**digits - 1, fraction, float(careless)


def _part(pairs: int, split: str | None, fraction: float) -> tuple[int, int]:
    """(first place, number of places) of a split in the fixed permutation of all pairs."""
    held_out = min(max(1, round(pairs * fraction)), pairs - 1)
    parts = {None: (0, pairs), "train": (0, pairs - held_out), "test": (pairs - held_out, held_out)}
    if split not in parts:
        raise TaskError(f'addition: split = {split!r} is unknown; valid: "train", "test", or none for all items')
    return parts[split]


def _permuted(index: int, size: int, key: int) -> int:
    """Place ``index`` of the permutation of 0 .. size-1 that ``key`` names.

    A balanced Feistel network on the next even number of bits (Luby and Rackoff 1988), repeated until the
    value falls below ``size`` (cycle walking, Black and Rogaway 2002): at most 4 rounds of it on average.
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_round(right, key, number) & mask)
        value = (left << half) | right
        if value < size:
            return value


def _round(value: int, key: int, number: int) -> int:
    digest = hashlib.blake2b(f"{key}|{number}|{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
