"""Our own generators: right sums, no item twice, train and test apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import TaskError
from gspo.tasks import (
    TaskOptions,
    addition,
    addition_alphabet,
    characters,
    load_task,
    shared_prompts,
    worked_addition,
)


@pytest.mark.parametrize(
    ("first", "second", "worked"),
    [
        (47, 85, "7+5=12;4+8+1=13;#132"),
        (12, 34, "2+4=6;1+3=4;#46"),
        (99, 1, "9+1=10;9+0+1=10;#100"),
        (5, 5, "5+5=10;#10"),
        (0, 0, "0+0=0;#0"),
        (109, 99, "9+9=18;0+9+1=10;1+0+1=2;#208"),
    ],
)
def test_worked_addition_by_hand(first, second, worked):
    assert worked_addition(first, second) == worked


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_working_is_consistent(first, second):
    *clauses, final = worked_addition(first, second).split(";")
    digits = ""
    for clause in clauses:
        left, _, total = clause.partition("=")
        assert sum(map(int, left.split("+"))) == int(total)
        digits = total[-1] + digits
    assert final == f"#{first + second}"
    assert str(first + second).endswith(digits)


def test_items_are_short_and_within_the_alphabet():
    prompts = addition(8100)
    assert max(len(p.metadata["demonstration"]) for p in prompts) <= 32
    assert set(characters(prompts)) == set(addition_alphabet())
    assert len(set(addition_alphabet())) == len(addition_alphabet()) == 14


def test_all_pairs_occur_exactly_once():
    prompts = addition(8100, seed=4)
    assert {p.text for p in prompts} == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert all(int(p.answer) == sum(map(int, p.text[:-1].split("+"))) for p in prompts)


def test_an_item_follows_from_seed_and_index():
    assert addition(50, seed=7) == addition(500, seed=7)[:50]
    assert addition(50, seed=7) != addition(50, seed=8)
    # recorded: other items for the same seed would break every resume
    assert [p.text for p in addition(3, seed=0, split="train")] == ["18+68=", "63+14=", "74+96="]


@pytest.mark.parametrize("options", [{}, {"digits": 1}, {"digits": 3, "min_digits": 2}, {"held_out_fraction": 0.5}])
@pytest.mark.parametrize(("train_seed", "test_seed"), [(0, 0), (0, 1), (12345, 7)])
def test_train_and_test_are_disjoint_whatever_the_seeds(options, train_seed, test_seed):
    train = load_task(TaskOptions("addition", split="train", seed=train_seed, options=options))
    test = load_task(TaskOptions("addition", split="test", seed=test_seed, options=options))
    assert not shared_prompts(train, test)


def test_parts_hold_the_declared_share():
    assert len(load_task(TaskOptions("addition", split="train", size=6480))) == 6480
    assert len(load_task(TaskOptions("addition", split="test"))) == 1620
    with pytest.raises(TaskError, match="1620 different items"):
        load_task(TaskOptions("addition", split="test", size=1621))


def test_large_operands_need_no_table():
    prompts = addition(20, options={"digits": 18})
    assert len({p.text for p in prompts}) == 20
    assert all(len(p.text) == 38 for p in prompts)


def test_default_seed_is_the_runs_seed():
    assert (
        load_task(TaskOptions("addition", size=5), default_seed=3).prompts
        == load_task(TaskOptions("addition", size=5, seed=3)).prompts
    )


@pytest.mark.parametrize(
    ("options", "split", "message"),
    [
        ({"digit": 2}, None, "unknown option 'digit'; did you mean 'digits'"),
        ({"digits": 0}, None, "1 <= min_digits <= digits"),
        ({"digits": 2.5}, None, "whole numbers"),
        ({"min_digits": 3}, None, "1 <= min_digits <= digits"),
        ({"held_out_fraction": 1.0}, None, "between 0 and 1"),
        ({}, "dev", "split = 'dev'"),
    ],
)
def test_wrong_options_are_named(options, split, message):
    with pytest.raises(TaskError, match=message):
        load_task(TaskOptions("addition", split=split, options=options))


def test_a_careless_teacher_forgets_every_carry_but_the_answer_stays_right() -> None:
    assert worked_addition(47, 85, carry=False) == "7+5=12;4+8=12;#122"
    assert worked_addition(23, 45, carry=False) == worked_addition(23, 45) == "3+5=8;2+4=6;#68"
    assert worked_addition(999, 1, carry=False) == "9+1=10;9+0=9;9+0=9;#990"
    careful = addition(400, split="train")
    careless = addition(400, split="train", options={"careless": 0.75})
    assert [(p.id, p.answer) for p in careful] == [(p.id, p.answer) for p in careless]
    carries = [p for p in careless if sum(int(n) % 10 for n in p.id.split("+")) >= 10]
    forgot = sum(not p.metadata["demonstration"].endswith("#" + str(p.answer)) for p in carries)
    assert 0.65 < forgot / len(carries) < 0.85
    assert all(p.metadata["demonstration"].endswith(f"#{p.answer}") for p in careful)


@pytest.mark.parametrize("careless", [-0.1, 1.5, True, "often"])
def test_a_share_of_careless_answers_is_a_share(careless: object) -> None:
    with pytest.raises(TaskError, match="careless"):
        addition(10, options={"careless": careless})
