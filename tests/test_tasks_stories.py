"""Counting stories: what they tell, what they answer, and that nothing held out is trained on."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import TaskError
from gspo.rewards.text import exact_reward
from gspo.tasks import TaskOptions, load_task
from gspo.tasks.stories import GAINS, LOSSES, stories
from gspo.types import FinishReason, Prompt, Rollout

SIGNS = {verb.split()[0]: 1 for verb in GAINS} | {verb.split()[0]: -1 for verb in LOSSES}


def first(count: int, **options: object) -> list[Prompt]:
    return list(itertools.islice(stories(**options), count))  # type: ignore[arg-type]


def told(text: str) -> list[int]:
    """The counts after each sentence, read from the words alone."""
    sentences = text.split(". ")
    counts = [int(re.findall(r"\d+", sentences[0])[0])]
    for sentence in sentences[1:-1]:
        words = sentence.removeprefix("Then ").split()
        counts.append(counts[-1] + SIGNS[words[1]] * int(re.findall(r"\d+", sentence)[0]))
    return counts


@given(seed=st.integers(0, 2**31), changes=st.integers(1, 4), largest=st.integers(2, 40))
def test_the_answer_is_what_the_words_say(seed: int, changes: int, largest: int) -> None:
    for prompt in first(3, seed=seed, changes=changes, largest=largest):
        assert prompt.text is not None
        counts = told(prompt.text)
        assert len(counts) == changes + 1
        assert prompt.answer == str(counts[-1])
        assert all(0 <= count <= largest * (changes + 1) for count in counts)
        clauses = [re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", c) for c in prompt.metadata["demonstration"].split(";")[:-1]]
        assert [int(c[3]) for c in clauses if c] == counts[1:]
        assert [int(c[1]) for c in clauses if c] == counts[:-1]
        assert prompt.metadata["demonstration"].endswith(f"#{prompt.answer}")


def test_a_story_by_hand() -> None:
    prompt = first(1, seed=0, split="test", largest=30)[0]
    assert prompt.text == "Max has 20 marbles. Max picks up 7 more. Then Max gives away 5. How many marbles now?\n"
    assert (prompt.answer, prompt.metadata["demonstration"]) == ("22", "20+7=27;27-5=22;#22")


def test_a_stream_that_runs_dry_says_so() -> None:
    with pytest.raises(TaskError, match="different ones found"):
        first(3_000, changes=1, largest=2)


def test_splits_share_nothing_whatever_the_seeds() -> None:
    small: dict[str, object] = {"changes": 1, "largest": 2}  # few stories, so that a leak would show
    train = {p.text for p in first(1500, seed=1, split="train", **small)}
    test = {p.text for p in first(400, seed=2, split="test", **small)}
    assert len(train) == 1500 and len(test) == 400
    assert not train & test


def test_a_seed_is_a_fixed_stream() -> None:
    assert first(20, seed=3) == first(20, seed=3)
    assert first(20, seed=3) != first(20, seed=4)


def test_a_recipe_takes_as_many_as_it_asks_for() -> None:
    source = "gspo.tasks.stories:stories"
    task = load_task(TaskOptions(source, size=50, options={"largest": 9, "split": "test"}))
    assert len(task) == 50 and task.prompts[0].answer is not None


def test_the_worked_answer_earns_the_reward_and_another_number_does_not() -> None:
    prompt = first(1, seed=5)[0]
    demonstration = prompt.metadata["demonstration"]

    def reward(text: str) -> float:
        rollout = Rollout(prompt=prompt, index=0, rows=(), text=text, finish_reason=FinishReason.STOP)
        return exact_reward(rollout, marker="#")["reward"]

    assert reward(demonstration) == 1.0
    assert reward(demonstration.rpartition("#")[0] + f"#{int(prompt.answer or 0) + 1}") == 0.0


@pytest.mark.parametrize("options", [{"split": "dev"}, {"changes": 0}, {"largest": 1}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TaskError, match=str(next(iter(options)))):
        first(1, **options)
