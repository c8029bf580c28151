"""``gspo init`` and ``gspo check task``: recipes for people's own data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.cli.init import path_for
from gspo.cli.main import main
from gspo.recipe import load_recipe


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, rows: list[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(count: int, start: int = 0) -> list[dict]:
    return [{"question": f"{i} + 1?", "answer": f"One more. #### {i + 1}"} for i in range(start, start + count)]


def test_columns_are_recognised_and_the_recipe_loads(capsys):
    write("sums.jsonl", sums(100))
    assert main(["init", "sums.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "100 prompts; prompt = question" in out and "answer = answer (hashes)" in out
    assert "next: gspo check recipe sums.toml" in out
    recipe = load_recipe("sums.toml")
    assert (recipe.task.source, recipe.task.prompt_column, recipe.task.answer_column) == (
        "sums.jsonl",
        "question",
        "answer",
    )
    assert [reward.function for reward in recipe.rewards] == ["math"]
    assert "\\boxed{}" in recipe.task.system_prompt
    assert recipe.eval.every == 0 and recipe.run.name == "sums"
    assert recipe.rollout.prompts_per_step == 16


def test_the_recipe_explains_itself():
    write("sums.jsonl", sums(100))
    main(["init", "sums.jsonl"])
    text = Path("sums.toml").read_text()
    assert "gspo calibrate sums.toml" in text
    assert text.count("#") >= 8


def test_the_written_task_can_be_loaded_as_the_recipe_says(capsys):
    write("sums.jsonl", sums(8))
    main(["init", "sums.jsonl"])
    assert main(["check", "task", "sums.toml"]) == 0
    assert "8 prompts of 8 rows" in capsys.readouterr().out


def test_answers_in_words_are_compared_as_text():
    write("words.jsonl", [{"prompt": f"Capital of {i}?", "answer": "a city in words"} for i in range(8)])
    main(["init", "words.jsonl"])
    recipe = load_recipe("words.toml")
    assert recipe.rewards[0].function == "exact"
    assert recipe.rewards[0].options == {"marker": "####"}
    assert "####" in recipe.task.system_prompt


def test_without_answers_the_reward_is_the_users_function(capsys):
    write("free.jsonl", [{"prompt": f"Write about {i}."} for i in range(8)])
    main(["init", "free.jsonl"])
    recipe = load_recipe("free.toml")
    assert recipe.rewards[0].function == "my_rewards:score"
    assert recipe.task.options == {"answer_required": False}
    assert recipe.task.system_prompt is None
    assert main(["check", "task", "free.toml"]) == 0


def test_held_out_rows_are_asked_the_same_way(capsys):
    write("sums.jsonl", sums(20))
    write("held.jsonl", sums(5, start=18))
    assert main(["init", "sums.jsonl", "--eval", "held.jsonl"]) == 0
    assert "warning: 2 held-out prompts are training prompts too" in capsys.readouterr().out
    recipe = load_recipe("sums.toml")
    assert recipe.eval.every == 10
    assert recipe.eval.task.source == "held.jsonl"
    assert recipe.eval.task.system_prompt == recipe.task.system_prompt
    assert recipe.eval.task.prompt_column == "question"


def test_rows_that_cannot_be_used_are_named_and_dropped_by_the_recipe(capsys):
    write("sums.jsonl", [*sums(8), {"question": "", "answer": "3"}])
    main(["init", "sums.jsonl"])
    assert "line 9" in capsys.readouterr().out
    assert load_recipe("sums.toml").task.options == {"bad_rows": "drop"}
    assert main(["check", "task", "sums.toml"]) == 1  # shown, and the exit status says so
    assert "line 9" in capsys.readouterr().out


def test_few_rows_make_small_steps():
    write("sums.jsonl", sums(10))
    main(["init", "sums.jsonl"])
    assert load_recipe("sums.toml").rollout.prompts_per_step == 8


def test_what_cannot_be_done_is_said(capsys):
    write("sums.jsonl", sums(3))
    assert main(["init", "sums.jsonl"]) == 1
    assert "at least 4" in capsys.readouterr().err
    assert main(["init", "smus.jsonl"]) == 1
    assert "sums.jsonl" in capsys.readouterr().err
    write("odd.jsonl", [{"foo": "a", "bar": "b"}] * 8)
    assert main(["init", "odd.jsonl"]) == 1
    assert "foo, bar" in capsys.readouterr().err
    assert not list(Path.cwd().glob("*.toml"))


def test_columns_can_be_named():
    write("odd.jsonl", [{"foo": f"a {i}", "bar": "1"} for i in range(8)])
    assert main(["init", "odd.jsonl", "--prompt-column", "foo", "--answer-column", "bar"]) == 0
    assert load_recipe("odd.toml").task.answer_column == "bar"


def test_a_recipe_is_not_written_over(capsys):
    write("sums.jsonl", sums(8))
    Path("sums.toml").write_text("# mine\n")
    assert main(["init", "sums.jsonl"]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("sums.toml").read_text() == "# mine\n"
    assert main(["init", "sums.jsonl", "--force"]) == 0


def test_names_and_paths_that_toml_must_quote():
    write('my "data" ü.jsonl', sums(8))
    assert main(["init", 'my "data" ü.jsonl']) == 0
    recipe = load_recipe('my "data" ü.toml')
    assert recipe.task.source == 'my "data" ü.jsonl'
    assert recipe.run.name == "my-data"


def test_the_data_is_found_from_wherever_the_recipe_is(here, monkeypatch):
    write("sub/sums.jsonl", sums(8))
    main(["init", "sub/sums.jsonl"])
    assert Path(load_recipe("sub/sums.toml").task.source).resolve() == here / "sub" / "sums.jsonl"
    monkeypatch.chdir(here / "sub")
    assert Path(load_recipe("sums.toml").task.source).resolve() == here / "sub" / "sums.jsonl"


def test_paths_in_the_recipe(here):
    assert path_for(Path("a/x.jsonl"), Path("a/x.toml")) == "x.jsonl"
    assert path_for(Path("a/x.jsonl"), Path("x.toml")) == "a/x.jsonl"
    assert path_for(Path("a/x.jsonl"), Path("b/x.toml")) == (here / "a" / "x.jsonl").as_posix()


def test_check_task_takes_a_source_or_a_recipe_with_overrides(capsys):
    write("sums.jsonl", sums(8))
    assert main(["check", "task", "sums.jsonl"]) == 0
    assert "8 prompts of 8 rows" in capsys.readouterr().out
    assert main(["check", "task", "addition", "--task.size", "30"]) == 0
    assert "task addition: 30 prompts" in capsys.readouterr().out
    assert main(["check", "task", "nowhere.jsonl"]) == 1
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_what_a_row_says_cannot_steer_the_terminal(capsys):
    write("evil.jsonl", [{"prompt": f"{i} \x1b[2J", "answer": "\x1b]0;x\x07"} for i in range(8)])
    main(["check", "task", "evil.jsonl"])
    main(["init", "evil.jsonl"])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\x1b" not in Path("evil.toml").read_text()
