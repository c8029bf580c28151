"""Whole public data sets, where GSPO_TEST_DATA names a folder that holds them; skipped elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gspo.tasks import TaskOptions, load_task


def data_file(name: str) -> str:
    path = Path(os.environ.get("GSPO_TEST_DATA", "/nonexistent")) / name
    if not path.is_file():
        pytest.skip(f"GSPO_TEST_DATA holds no {name}")
    return str(path)


def is_number(answer: str) -> str | None:
    try:
        float(answer)
    except ValueError:
        return "not a number"
    return None


@pytest.mark.parametrize(
    ("name", "rows", "first_answer"),
    [("gsm8k_train.jsonl", 7473, "72"), ("gsm8k_test.jsonl", 1319, "18"), ("aime24.jsonl", 30, "204"),
     ("amc23.jsonl", 40, "27")],
)  # fmt: skip
def test_whole_file_with_numeric_answers(name, rows, first_answer):
    task = load_task(TaskOptions(data_file(name), check_answer=is_number))
    assert len(task) == rows
    assert task.prompts[0].answer == first_answer
    assert not task.report.problems
    assert len({prompt.id for prompt in task.prompts}) == rows
    assert not any("," in prompt.answer for prompt in task.prompts)
