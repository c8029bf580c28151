"""Sources of rows, and rows that cannot be used."""

from __future__ import annotations

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from gspo.errors import MissingExtra, TaskError
from gspo.tasks import TaskOptions, check_task, first_rows, load_task
from gspo.types import Prompt

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(6)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def bad_integer(answer: str) -> str | None:
    return None if answer.lstrip("-").isdigit() else "not an integer"


def test_jsonl(tmp_path):
    task = load_task(TaskOptions(write_lines(tmp_path / "sums.jsonl", ROWS)))
    assert task.name == "sums"
    assert [(p.text, p.answer, p.task) for p in task.prompts[:2]] == [("0+1?", "1", "sums"), ("1+1?", "2", "sums")]
    assert (task.report.rows_read, task.report.problems, task.report.notes) == (6, (), ())
    assert dict(task.report.columns) == {"prompt": "question", "answer": "answer"}


def test_jsonl_with_bom_crlf_blank_lines_and_line_separators(tmp_path):
    path = tmp_path / "odd.jsonl"
    text = '\ufeff{"prompt": "a\u2028b", "answer": "1"}\r\n\r\n   \n{"prompt": "c", "answer": "2"}'
    path.write_bytes(text.encode("utf-8"))
    assert [p.text for p in load_task(TaskOptions(str(path))).prompts] == ["a\u2028b", "c"]


def test_bad_rows_are_listed_with_their_lines(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"prompt": "a", "answer": "1"}',
        b'{"prompt": "a", "answer": ',
        b"",
        b"[1, 2]",
        b'{"prompt": "", "answer": "1"}',
        b'{"prompt": "d"}',
        b'{"prompt": "e", "answer": "see figure"}',
        b'{"prompt": "f\xff", "answer": "1"}',
        b'{"prompt": "g", "answer": ["1", "2"]}',
        b'{"prompt": "h", "answer": ""}',
    ]
    path.write_bytes(b"\n".join(lines))
    options = TaskOptions(str(path), check_answer=bad_integer)
    with pytest.raises(TaskError) as caught:
        load_task(options)
    message = str(caught.value)
    assert "8 of 9 rows cannot be used" in message
    for expected in (
        "line 2: not JSON: Expecting value",
        "line 4: a JSON list, not an object",
        "line 5: no prompt in column 'prompt'",
        "line 6: no answer",
        "line 7: answer 'see figure' cannot be graded: not an integer",
        "line 8: not UTF-8 at byte 14",
        "line 9: the answer is a list of 2",
        "line 10: no answer",
        'bad_rows = "drop"',
    ):
        assert expected in message
    task = load_task(TaskOptions(str(path), check_answer=bad_integer, options={"bad_rows": "drop"}))
    assert [p.text for p in task.prompts] == ["a"]
    assert [problem.line for problem in task.report.problems] == [2, 4, 5, 6, 7, 8, 9, 10]
    assert task.report.notes == ("8 of 9 rows were dropped",)


def test_many_bad_rows_are_counted(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}] + [{"prompt": "b", "answer": None}] * 30
    with pytest.raises(TaskError) as caught:
        load_task(TaskOptions(write_lines(tmp_path / "x.jsonl", rows)))
    assert "30 of 31" in str(caught.value)
    assert "... and 20 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 13


def test_rows_without_the_declared_mark_are_bad_rows(tmp_path):
    rows = [
        {"question": "a", "answer": "x #### 1"},
        {"question": "b", "answer": "y #### 2"},
        {"question": "c", "answer": "z"},
    ]
    with pytest.raises(TaskError, match="line 3: no \"####\" with an answer in column 'answer'"):
        load_task(TaskOptions(write_lines(tmp_path / "x.jsonl", rows)))


def test_a_gold_is_checked_once_for_each_distinct_answer():
    asked = []
    rows = [{"prompt": str(i), "answer": i % 3} for i in range(30)]
    load_task(TaskOptions(rows, check_answer=lambda answer: asked.append(answer)))
    assert sorted(asked) == ["0", "1", "2"]


def test_nothing_usable_is_an_error_even_when_dropping(tmp_path):
    with pytest.raises(TaskError, match="holds no rows"):
        load_task(TaskOptions(write_lines(tmp_path / "empty.jsonl", [])))
    path = tmp_path / "prose.jsonl"
    path.write_text("once upon\na time\n")
    with pytest.raises(TaskError, match="2 of 2 rows cannot be used"):
        load_task(TaskOptions(str(path), bad_rows="drop"))


def test_size_takes_the_first_rows_and_reads_no_further(tmp_path):
    path = tmp_path / "x.jsonl"
    write_lines(path, ROWS)
    path.write_text(path.read_text() + "not json\n")
    assert len(load_task(TaskOptions(str(path), size=6))) == 6
    small = load_task(TaskOptions(ROWS, size=100))
    assert small.report.notes == ("the source has 6 rows, fewer than size = 100",)


def test_missing_file_names_the_nearest(tmp_path):
    write_lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(TaskError, match=r"no such file: .*trian.jsonl'; did you mean .*train.jsonl"):
        load_task(TaskOptions(str(tmp_path / "trian.jsonl")))


def test_utf16_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}', encoding="utf-16")
    with pytest.raises(TaskError, match="UTF-16"):
        load_task(TaskOptions(str(path)))


def test_json_arrays_and_json_lines_under_json(tmp_path):
    array, lines, broken = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    array.write_text(json.dumps(ROWS, indent=1))
    write_lines(lines, ROWS)
    broken.write_text("[{]")
    assert [p.text for p in load_task(TaskOptions(str(array))).prompts] == [r["question"] for r in ROWS]
    assert [p.text for p in load_task(TaskOptions(str(lines))).prompts] == [r["question"] for r in ROWS]
    with pytest.raises(TaskError, match="is not JSON"):
        load_task(TaskOptions(str(broken)))


def test_parquet_with_nested_columns(tmp_path):
    path = tmp_path / "x.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i)}} for i in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = load_task(TaskOptions(str(path)))
    assert [(p.text, p.answer) for p in task.prompts] == [("q0", "0"), ("q1", "1"), ("q2", "2")]
    (tmp_path / "y.parquet").write_text("no parquet")
    with pytest.raises(TaskError, match="cannot be read as Parquet"):
        load_task(TaskOptions(str(tmp_path / "y.parquet")))


def test_parquet_problems_name_the_row(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None, "c"], "answer": ["1", "2", None]}), path)
    with pytest.raises(TaskError) as caught:
        load_task(TaskOptions(str(path)))
    assert "row 2: no prompt" in str(caught.value)
    assert "row 3: no answer" in str(caught.value)


def test_saved_data_set_folders(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select(range(2))}).save_to_disk(str(tmp_path / "two"))
    assert len(load_task(TaskOptions(str(tmp_path / "one"), size=4))) == 4
    assert len(load_task(TaskOptions(str(tmp_path / "two")))) == 6
    assert load_task(TaskOptions(str(tmp_path / "two"), split="test")).name == "two"
    assert len(load_task(TaskOptions(str(tmp_path / "two"), split="test"))) == 2
    with pytest.raises(TaskError, match="no split 'dev'; it has: train, test"):
        load_task(TaskOptions(str(tmp_path / "two"), split="dev"))


def test_hub_names_pass_subset_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, subset, *, split):
        calls.append((name, subset, split))
        if name == "org/none":
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_task(TaskOptions("org/sums", subset="main", split="test")).name == "org-sums"
    assert calls == [("org/sums", "main", "test")]
    with pytest.raises(TaskError, match=r"'org/none'.*'train'.*ConnectionError: no network.*save_to_disk"):
        load_task(TaskOptions("org/none"))


@pytest.mark.parametrize(
    "source", ["../../etc/passwd", "org/../x", "/nowhere/at/all", "a/b/c", "org/name\n", "adition!", "data.csv"]
)
def test_sources_of_no_known_kind(source):
    with pytest.raises(TaskError, match=r"is no file|is not read"):
        load_task(TaskOptions(source))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b", "x\n"])
def test_names_with_path_parts_are_refused(name):
    with pytest.raises(TaskError, match="task name"):
        load_task(TaskOptions(ROWS, name=name))


@pytest.mark.parametrize(
    ("package", "source"), [("datasets", "org/name"), ("reasoning_gym", "reasoning_gym:chain_sum")]
)
def test_missing_packages_name_the_extra(monkeypatch, package, source):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r'pip install "gspo\['):
        load_task(TaskOptions(source))


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    options = TaskOptions("reasoning_gym:chain_sum", size=20, options={"min_terms": 2, "max_terms": 2})
    task = load_task(options, default_seed=5)
    again = load_task(options, default_seed=5)
    assert task.fingerprint == again.fingerprint
    entry = task.prompts[3].metadata["entry"]
    assert (entry["question"], entry["answer"]) == (task.prompts[3].text, task.prompts[3].answer)
    assert task.prompts[3].metadata["source_dataset"] == "chain_sum"
    # reasoning-gym itself would give item i + 1 of seed 5 as item i of seed 6
    following = load_task(options, default_seed=6)
    assert not {p.text for p in task.prompts[1:]} & {p.text for p in following.prompts[:-1]}


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("reasoning_gym:chain_sun", {}, "nearest: chain_sum"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "refuses its options"),
    ],
)
def test_wrong_reasoning_gym_names(source, options, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(TaskError, match=message):
        load_task(TaskOptions(source, options=options))


def test_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "my_items.py").write_text(
        "import itertools\n"
        "from gspo.types import Prompt\n"
        "def items(start=0):\n"
        "    return [Prompt(id=str(i), text=f'q{i}', answer=str(i)) for i in range(start, start + 3)]\n"
        "def rows():\n"
        "    yield {'prompt': 'a', 'answer': 1}\n"
        "counter = itertools.count()\n"
        "def restless():\n"
        "    return [{'prompt': str(next(counter)), 'answer': 1}]\n"
        "def text():\n"
        "    return 'abc'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task(TaskOptions("my_items:items", options={"start": 4}))
    assert [p.id for p in task.prompts] == ["4", "5", "6"]
    assert load_task(TaskOptions("my_items:rows")).prompts[0].answer == "1"
    for source, options, message in (
        ("my_items:itms", {}, "no function 'itms' there; nearest: items"),
        ("my_items:items", {"strat": 1}, "does not take options"),
        ("my_items:text", {}, "returned str"),
        ("no_such_items:items", {}, "cannot be imported"),
    ):
        with pytest.raises(TaskError, match=message):
            load_task(TaskOptions(source, options=options))
    report = check_task(TaskOptions("my_items:restless"))
    assert "other prompts at its second call" in report.warnings[0]
    assert check_task(TaskOptions("my_items:items")).ok


def test_prompts_in_memory():
    prompts = (Prompt(id=f"p{i}", text="q", answer="1") for i in range(3))
    task = load_task(TaskOptions(prompts, name="mine"))
    assert [(p.id, p.task) for p in task.prompts] == [("p0", "mine"), ("p1", "mine"), ("p2", "mine")]
    with pytest.raises(TaskError, match="row 2: no answer"):
        load_task(TaskOptions([Prompt(id="a", text="q", answer="1"), Prompt(id="b", text="q")]))
    with pytest.raises(TaskError, match="row 1: exactly one of text and messages"):
        load_task(TaskOptions([Prompt(id="a", answer="1")]))
    with pytest.raises(TaskError, match="row 2 is dict among Prompts"):
        load_task(TaskOptions([Prompt(id="a", text="q", answer="1"), ROWS[0]]))


@pytest.mark.parametrize("source", [{"prompt": "a"}, 7, ["a"], [3]])
def test_sources_of_a_wrong_type(source):
    with pytest.raises(TaskError, match=r"needed|must be a dict or a Prompt"):
        load_task(TaskOptions(source))


def test_ids_are_stable_and_unique():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1}, {"prompt": "a", "answer": 1}]
    task = load_task(TaskOptions(rows))
    first, second, third = (p.id for p in task.prompts)
    assert third == f"{first}#2"
    assert load_task(TaskOptions(rows[1:])).prompts[0].id == second
    assert task.report.notes == ("1 rows had the id of an earlier row; they were numbered",)
    own = [{"id": name, "prompt": "a", "answer": 1} for name in (7, 7, "7#2", 8)]
    assert len({p.id for p in load_task(TaskOptions(own)).prompts}) == 4
    named = [{"key": "k1", "prompt": "a", "answer": 1}]
    assert load_task(TaskOptions(named, options={"id_column": "key"})).prompts[0].id == "k1"


def test_template_and_system_prompt():
    row = {"prompt": "x^{2}?", "answer": 1}
    task = load_task(TaskOptions([row], prompt_template="Q: {prompt}\nBox {{it}}."))
    assert task.prompts[0].text == "Q: x^{2}?\nBox {{it}}."
    task = load_task(TaskOptions([row], prompt_template="Q: {prompt}", system_prompt="Be brief."))
    assert task.prompts[0].text is None
    assert task.prompts[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: x^{2}?"},
    )
    chat = {"messages": [{"role": "system", "content": "old"}, {"role": "user", "content": "q"}], "answer": 1}
    task = load_task(TaskOptions([chat], system_prompt="new"))
    assert [turn["content"] for turn in task.prompts[0].messages] == ["new", "q"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_template": "no place"}, r"has no \{prompt\} in it"),
        ({"size": 0}, "at least 1"),
        ({"options": {"bad_row": "drop"}}, "did you mean 'bad_rows'"),
        ({"options": {"bad_rows": "skip"}}, 'valid: "error", "drop"'),
        ({"options": {"answer_required": "no"}}, "valid: true, false"),
        ({"options": {"demonstration_column": "work"}}, "not among the columns: question, answer"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(TaskError, match=message):
        load_task(TaskOptions(ROWS, **options))


def test_no_source():
    with pytest.raises(TaskError, match="no source"):
        load_task(TaskOptions(""))


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"role": "assistant", "content": "x"}], "assistant turn only"),
        ([{"role": "wizard", "content": "x"}], "unknown chat role 'wizard'"),
        ([{"role": "user", "content": None}], "is NoneType, not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "kind 'image'"),
        ([{"role": "user", "content": " "}], "the prompt is empty"),
    ],
)
def test_bad_conversations(turns, message):
    with pytest.raises(TaskError, match=f"row 1: .*{message}"):
        load_task(TaskOptions([{"messages": turns, "answer": 1}]))


def test_text_parts_are_joined():
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert load_task(TaskOptions([{"messages": turns, "answer": 1}])).prompts[0].text == "ab"


def test_check_task_reports_instead_of_raising(tmp_path):
    rows = [*ROWS, {"question": "x", "answer": "soon"}]
    report = check_task(TaskOptions(write_lines(tmp_path / "x.jsonl", rows), check_answer=bad_integer))
    assert (report.ok, report.prompts, report.answers, report.distinct_answers) == (False, 6, 6, 6)
    assert report.prompt_characters == (4, 4, 4)
    assert "line 7: answer 'soon' cannot be graded" in str(report)
    assert check_task(load_task(TaskOptions(ROWS))).ok


def test_check_task_warns_of_one_answer_for_most():
    rows = [{"prompt": str(i), "answer": "yes" if i < 15 else str(i)} for i in range(20)]
    report = check_task(TaskOptions(rows))
    assert "15 of 20 answers are 'yes'" in report.warnings[0]


def test_first_rows(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ROWS)
    assert first_rows(path, 2) == ROWS[:2]
