"""``gspo show``: which rollouts are shown, and that what a model wrote cannot steer the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.cli.main import main
from gspo.cli.run_folder import read_jsonl, require_run_folder, rollout_files, safe_text
from gspo.cli.show import choose_rows, describe, summary
from gspo.errors import ConfigError


def row(reward, text="hi", **more):
    return {
        "step": 3,
        "version": 3,
        "prompt_id": "p",
        "index": 0,
        "prompt": "1+1=",
        "answer": "2",
        "text": text,
        "reward": reward,
        "parts": {"exact": reward},
        "grading": "graded" if reward is not None else "timeout",
        "finish_reason": "stop",
        "tokens": 5,
        "advantage": 0.5,
        **more,
    }


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    for step in (3, 12):
        rows = [row(float(i), text=f"step {step} reward {i}") for i in range(6)] + [row(None, text="ungraded one")]
        text = "".join(json.dumps(item) + "\n" for item in rows)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    (folder / "rollouts" / "eval_000012.jsonl").write_text(json.dumps(row(1.0, text="held out")) + "\n")
    (folder / "rollouts" / "step_000013.jsonl.partial").write_text("{")
    return folder


def test_the_newest_step_by_default_with_two_best_and_two_worst(run_folder, capsys):
    assert main(["show", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 12: 7 rollouts, mean reward 2.5, 0% truncated, mean length 5 tokens, 1 timeout")
    shown = [line for line in text.splitlines() if line.startswith("step 12 reward")]
    assert shown == [f"step 12 reward {i}" for i in (5, 4, 0, 1)]


def test_step_best_and_worst_are_chosen(run_folder, capsys):
    main(["show", str(run_folder), "--step", "3", "--worst", "1"])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3 reward")]
    assert shown == ["step 3 reward 0"]
    main(["show", str(run_folder), "--best", "3"])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 12 reward")]
    assert shown == [f"step 12 reward {i}" for i in (5, 4, 3)]


def test_the_held_out_evaluation_is_read_by_name(run_folder, capsys):
    assert main(["show", str(run_folder), "--eval"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("evaluation at step 12: 1 rollouts") and "held out" in text


def test_a_step_that_is_not_there_names_the_nearest(run_folder, capsys):
    assert main(["show", str(run_folder), "--step", "5"]) == 2
    assert "there are 2, from 3 to 12; nearest: 3, 12" in capsys.readouterr().err


def test_what_is_no_run_folder_names_the_runs_there_are(run_folder, capsys):
    assert main(["show", str(run_folder.parent / "rnu")]) == 2
    error = capsys.readouterr().err
    assert "does not exist" in error and "run" in error.split("runs in")[1]
    with pytest.raises(ConfigError, match="is not a run folder"):
        require_run_folder(run_folder.parent)


def test_a_run_without_rollouts_says_so(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    assert main(["show", str(tmp_path)]) == 2
    assert "no rollouts yet" in capsys.readouterr().err


def test_ungraded_rollouts_are_neither_best_nor_worst():
    rows = [row(1.0), row(None), row(0.0)]
    assert [[r["reward"] for r in part] for _, part in choose_rows(rows, 3, 3)] == [[1.0, 0.0], [0.0, 1.0]]
    assert [title for title, _ in choose_rows([row(None)], 1, None)] == ["ungraded"]


def test_ties_keep_the_order_of_the_file():
    rows = [row(1.0, text="a"), row(1.0, text="b"), row(0.0, text="c"), row(0.0, text="d")]
    (_, best), (_, worst) = choose_rows(rows, 1, 1)
    assert (best[0]["text"], worst[0]["text"]) == ("a", "c")


def test_summary_counts_truncated_and_ungraded():
    rows = [row(1.0, finish_reason="length"), row(0.0), row(None), row(None, grading="failed")]
    assert summary(rows, 7) == (
        "step 7: 4 rollouts, mean reward 0.5, 25% truncated, mean length 5 tokens, 1 failed, 1 timeout"
    )


ATTACKS = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "c1 control": "\x9b2J",
    "overwrite": "good\rbad",
    "backspace": "a\x08b",
    "right to left": "abc\u202edef",
    "isolate": "\u2066x",
    "line separator": "a\u2028b",
    "invisible tag": "\U000e0041",
    "lone surrogate": "\ud800",
    "null": "a\x00b",
    "delete": "\x7f",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_what_steers_a_terminal_is_shown_as_an_escape(text):
    shown = describe(row(1.0, text=text, prompt=text, answer=text, prompt_id=text, parts={text: 1.0}), None)
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert shown.count("\\") >= 5
    shown.encode("utf-8")


def test_markup_is_text(run_folder, capsys):
    path = run_folder / "rollouts" / "step_000012.jsonl"
    path.write_text(json.dumps(row(1.0, text="[bold red]x[/] [link=file:///etc]y[/link]")) + "\n")
    main(["show", str(run_folder)])
    assert "[bold red]x[/] [link=file:///etc]y[/link]" in capsys.readouterr().out


def test_readable_text_is_untouched():
    text = "línea 1\n\tπ ≈ 3.14 模型 👩\u200d🚀 می\u200cخواهم"
    assert safe_text(text) == text


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_no_control_character_survives(text):
    assert not any((ord(char) < 32 and char not in "\n\t") or 0x7F <= ord(char) < 0xA0 for char in safe_text(text))


def test_long_texts_are_cut_and_counted():
    shown = describe(row(1.0, text="x" * 2000), 1500)
    assert "x" * 1500 + "\n... 500 more characters (--full)" in shown
    assert "x" * 2000 in describe(row(1.0, text="x" * 2000), None)


def test_chat_prompts_are_shown_by_role():
    shown = describe(
        row(1.0, prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]), None
    )
    assert "system: Be brief.\nuser: Hi" in shown


def test_missing_fields_are_no_traceback():
    assert "no reward" in describe({}, 100)
    assert summary([{}], 0).startswith("step 0: 1 rollouts")


def test_a_torn_last_line_is_left_out_and_other_damage_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    assert read_jsonl(path) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not JSON"):
        read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="expected an object"):
        read_jsonl(path)


def test_files_are_found_by_step(run_folder):
    assert list(rollout_files(run_folder)) == [3, 12]
    assert list(rollout_files(run_folder, evaluation=True)) == [12]
