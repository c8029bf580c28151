"""``gspo check reward``: verdicts and problems of a function on completions from the command line."""

from __future__ import annotations

import sys

import pytest

from gspo.cli.main import main

FUNCTIONS = """
def says_yes(rollout, word="yes"):
    return float(word in rollout.text)

def wrong(rollout):
    return "1"

def repeats(rollout):
    raise ValueError(rollout.text)

def lengths(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the user's module in it; the module's name is its own in every test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "cli_rewards.py").write_text(FUNCTIONS)
    yield
    sys.modules.pop("cli_rewards", None)


def check(*words: str) -> int:
    return main(["check", "reward", *words])


def test_a_builtin_is_tried_on_an_answer(capsys):
    assert check("exact", "it is #### 4", "#### 5", "", "--answer", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reward exact: 3 examples")
    assert [line.split()[:2] for line in lines[1:4]] == [["0:", "1.0"], ["1:", "0.0"], ["2:", "0.0"]]


def test_a_function_beside_the_user_with_an_option(capsys):
    assert check("cli_rewards:says_yes", "no", "yes", "--options", '{ word = "no" }') == 0
    out = capsys.readouterr().out
    assert "0: 1.0" in out and "1: 0.0" in out


def test_trls_signature_by_name(capsys):
    assert check("cli_rewards:lengths", "a", "bb", "--signature", "trl") == 0
    assert "1: 2.0" in capsys.readouterr().out


def test_a_problem_is_told_and_is_the_exit_status(capsys):
    assert check("cli_rewards:wrong", "a") == 1
    assert "returned a str" in capsys.readouterr().out
    assert check("cli_rewards:says_yes", "a", "b") == 1
    assert "constant" in capsys.readouterr().out


def test_what_cannot_be_tried_is_an_error(capsys):
    assert check("exact") == 2
    assert 'gspo check reward exact "..."' in capsys.readouterr().err
    assert check("cli_rewards:says_yess", "a") == 1
    assert 'did you mean "says_yes"' in capsys.readouterr().err
    assert check("cli_rewards:says_yes", "a", "--options", "word") == 2
    assert "TOML table" in capsys.readouterr().err


def test_escapes_in_completions_do_not_reach_the_terminal(capsys):
    assert check("cli_rewards:repeats", "\x1b[2J") == 1
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out and "\x1b" not in out
