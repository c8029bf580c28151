"""Which column holds what, and how an answer stands in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import TaskError
from gspo.tasks import TaskOptions, load_task, recognise_columns
from gspo.tasks.answers import answer_form, extract_answer, last_boxed, plain_text

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is \\boxed{4}."}]


def first(row: dict, **options):
    return load_task(TaskOptions([row], **options)).prompts[0]


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "demonstration"),
    [
        ({"prompt": "p", "answer": "3"}, "p", "3", None),
        ({"question": "p", "answer": "2+1\n#### 3"}, "p", "3", "2+1\n#### 3"),
        ({"question": "p", "answer": "long\n#### 1,234,567"}, "p", "1234567", "long\n#### 1,234,567"),
        ({"problem": "p", "solution": "$\\boxed{\\frac{1}{2}}$"}, "p", "\\frac{1}{2}", "$\\boxed{\\frac{1}{2}}$"),
        ({"problem": "p", "solution": "because", "answer": 204}, "p", "204", "because"),
        ({"Problem": "p", "Answer": 27.0}, "p", "27", None),
        ({"query": "p", "target": "x"}, "p", "x", None),
        ({"instruction": "p", "input": "c", "output": "o", "label": 1}, "p\n\nc", "1", "o"),
        ({"instruction": "p", "input": "", "label": 0}, "p", "0", None),
        ({"input": "p", "ground_truth": True}, "p", "True", None),
        ({"prompt": "p", "solution": "$5$"}, "p", "$5$", "$5$"),
        ({"messages": TURNS}, "2+2?", "4", "It is \\boxed{4}."),
        ({"problem": "2+2?", "messages": TURNS, "answer": "4"}, "2+2?", "4", None),
        ({"prompt": "p", "final_answer": ["7"]}, "p", "7", None),
        (
            {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "w"}], "gold": "3"},
            "p", "3", "w",
        ),
    ],
)  # fmt: skip
def test_common_shapes(row, prompt, answer, demonstration):
    found = first(row)
    assert (found.text, found.answer) == (prompt, answer)
    assert found.metadata.get("demonstration") == demonstration


def test_nested_reward_model_columns():
    row = {
        "data_source": "d",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 0, "answer": "48+24\n#### 72"},
    }
    found = first(row)
    assert found.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "p"})
    assert found.answer == "72"
    assert found.metadata["demonstration"] == "48+24\n#### 72"
    assert found.metadata["extra_info"] == row["extra_info"]


def test_metadata_holds_every_column_but_the_prompt():
    found = first({"question": "p", "answer": "w #### 3", "level": 2, "tags": ["a"]})
    assert dict(found.metadata) == {
        "answer": "w #### 3",
        "level": 2,
        "tags": ["a"],
        "demonstration": "w #### 3",
    }


def test_two_prompt_columns_that_differ_are_an_error():
    with pytest.raises(TaskError, match=r"'prompt' and 'question'.*Columns: question, prompt, answer.*prompt_column"):
        first({"question": "a", "prompt": "b", "answer": "1"})
    assert first({"question": "a", "prompt": "b", "answer": "1"}, prompt_column="question").text == "a"
    assert first({"question": "a", "prompt": "a", "answer": "1"}).text == "a"


def test_two_answer_columns_that_differ_are_an_error():
    with pytest.raises(TaskError, match=r"'answer' and 'label'.*answer_column"):
        first({"prompt": "a", "answer": "yes", "label": 0})
    assert first({"prompt": "a", "answer": "yes", "label": 0}, answer_column="label").answer == "0"
    assert first({"prompt": "a", "answer": "so\n#### 1,000", "final_answer": "1000"}).answer == "1000"


def test_absent_columns_list_what_is_there():
    with pytest.raises(TaskError, match=r"no prompt column found. Columns: text, answer.*prompt_column"):
        first({"text": "a", "answer": "1"})
    with pytest.raises(TaskError, match=r"no answer column found. Columns: prompt, result.*answer_column"):
        first({"prompt": "a", "result": "1"})
    with pytest.raises(TaskError, match=r"answer_column = 'reslut' is not among the columns: prompt, result"):
        first({"prompt": "a", "result": "1"}, answer_column="reslut")


def test_no_answer_is_allowed_where_no_reward_needs_one():
    assert first({"prompt": "a"}, answer_required=False).answer is None
    assert first({"prompt": "a"}, options={"answer_required": False}).answer is None


def test_named_columns_may_be_nested():
    found = first({"a": {"q": "p", "r": 3}}, prompt_column="a.q", answer_column="a.r")
    assert (found.text, found.answer) == ("p", "3")


def test_recognise_columns_is_public():
    columns = recognise_columns([{"id": 4, "question": "p", "answer": "x #### 3"}])
    assert columns.roles() == {"prompt": "question", "answer": "answer (hashes)", "demonstration": "answer", "id": "id"}
    assert recognise_columns([{"prompt": "p"}]).answer is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27.0, "27"), (0.5, "0.5"), (1e300, "1e+300"), (-3, "-3"), (True, "True"), (" x ", "x"), (None, None),
        ("", None), (" \n", None), (math.nan, None), (["a"], "a"), (np.float32(2.0), "2"), (np.int64(5), "5"),
        (np.array(["b"]), "b"),
    ],
)  # fmt: skip
def test_plain_text(value, text):
    assert plain_text(value) == text


@pytest.mark.parametrize("value", [["a", "b"], [], {"a": 1}, [["a"]]])
def test_containers_are_no_answers(value):
    with pytest.raises(TaskError, match="one string or number is needed"):
        plain_text(value)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a \text{ if } \} b}", r"a \text{ if } \} b"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed 5$", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{}", None),
        (r"boxed{3}", None),
        ("", None),
    ],
)
def test_last_balanced_box(text, inside):
    assert last_boxed(text) == inside


@given(st.recursive(st.sampled_from(["", "x", r"\frac", "1 "]), lambda s: st.builds("{{{}}}{}".format, s, s)))
def test_any_balanced_content_comes_back(content):
    assert last_boxed(rf"so \boxed{{{content}}} is it") == (content.strip() or None)


def test_form_is_that_of_most_rows():
    assert answer_form(["a #### 1", "b #### 2", "3"]) == "hashes"
    assert answer_form([r"\boxed{1}", "b", "3"]) == "plain"
    assert answer_form([r"\boxed{1}", None, ""]) == "boxed"
    assert answer_form([]) == "plain"
    assert extract_answer("x #### 1 #### -2,500.5 ", "hashes") == "-2500.5"
    assert extract_answer("x #### 1,2", "hashes") == "1,2"
    assert extract_answer("x ####  ", "hashes") is None
