"""Counting stories: small word problems with worked answers, a task for a model that reads English.

"Mia has 12 shells. Mia finds 7 more. Then Mia gives away 5. How many shells now?" has the worked answer
"12+7=19;19-5=14;#14". A recipe names it ``source = "gspo.tasks.stories:stories"`` and takes as many as ``size`` says.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from gspo.errors import TaskError
from gspo.types import Prompt

NAMES = ("Mia", "Tom", "Anna", "Ben", "Lucy", "Sam", "Nora", "Max", "Ella", "Leo", "Ruth", "Paul")
THINGS = ("shells", "books", "stamps", "apples", "coins", "marbles", "pens", "cards", "eggs", "roses", "keys", "stones")
GAINS = ("finds {} more", "buys {} more", "wins {} more", "is given {} more", "picks up {} more", "borrows {} more")
LOSSES = ("gives away {}", "loses {}", "sells {}", "breaks {}", "throws away {}", "lends out {}")
HELD_OUT_OF = 5
PATIENCE = 20_000  # stories in a row that were told before or belong to the other split


def stories(*, seed: int = 0, split: str = "train", changes: int = 2, largest: int = 30) -> Iterator[Prompt]:
    """An endless stream of different stories, deterministic in ``seed``.

    ``changes``: gains and losses a story, 1 or more; ``largest``: the largest number told (at least 2). Every
    intermediate count lies in 0 .. ``largest`` x (``changes`` + 1). ``split``: "train" and "test" are disjoint
    whatever the seeds: a hash of the text puts every fifth story into "test". TaskError for other values, and where
    the stream runs dry: below ``largest`` 3 with one change there are a few thousand stories.
    """
    if split not in ("train", "test"):
        raise TaskError(f'stories: split = {split!r} is unknown; valid: "train", "test"')
    if changes < 1 or largest < 2:
        raise TaskError(f"stories: changes = {changes}, largest = {largest}; at least 1 and 2 are needed")
    chooser = random.Random(seed)
    seen: set[str] = set()
    misses = 0
    while True:
        text, working, answer = _story(chooser, changes, largest)
        if text in seen or held_out(text) != (split == "test"):
            misses += 1
            if misses == PATIENCE:
                raise TaskError(f"stories: only {len(seen)} different ones found; take fewer, or raise largest")
            continue
        misses = 0
        seen.add(text)
        metadata = {"demonstration": f"{working};#{answer}"}
        yield Prompt(id=f"{split}-{len(seen)}", text=text, answer=str(answer), metadata=metadata)


def held_out(text: str) -> bool:
    """Whether a story belongs to the split "test"."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % HELD_OUT_OF == 0


def _story(chooser: random.Random, changes: int, largest: int) -> tuple[str, str, int]:
    """(text, working, answer) of one story."""
    name, things = chooser.choice(NAMES), chooser.choice(THINGS)
    count = chooser.randint(2, largest)
    sentences, clauses = [f"{name} has {count} {things}."], []
    for change in range(changes):
        loses = count > 1 and chooser.random() < 0.5
        number = chooser.randint(1, min(count, largest)) if loses else chooser.randint(1, largest)
        verb = chooser.choice(LOSSES if loses else GAINS).format(number)
        sentences.append(f"{'Then ' if change else ''}{name} {verb}.")
        after = count - number if loses else count + number
        clauses.append(f"{count}{'-' if loses else '+'}{number}={after}")
        count = after
    return f"{' '.join(sentences)} How many {things} now?\n", ";".join(clauses), count
