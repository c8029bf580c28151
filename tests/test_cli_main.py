"""The command line's edge: help without torch, one clear line for an error, exit statuses, overrides."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo import __version__
from gspo.cli.arguments import flags_of, split_overrides
from gspo.cli.main import COMMANDS, format_error, main
from gspo.errors import ConfigError, EngineError, ModelError


def python(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd)


@pytest.fixture
def fails(monkeypatch):
    """Make ``gspo recipes`` fail in a chosen way: the one command whose work needs no model."""

    def arrange(error: BaseException) -> None:
        def broken():
            raise error

        monkeypatch.setattr("gspo.cli.recipes.packaged_recipes", broken)

    return arrange


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text and command.summary in text


def test_every_command_is_documented():
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `gspo {name} " not in page and f"| `gspo {name}`" not in page] == []


def test_no_word_is_help_and_a_usage_error(capsys):
    assert main([]) == 2
    assert "usage: gspo COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_and_version_load_nothing_heavy(words):
    code = (
        "import sys; from gspo.cli.main import main; main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'tyro', 'rich', 'peft'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = python("-c", code, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_loads_no_torch(name):
    code = (
        "import sys; from gspo.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        "sys.exit(status or ('torch' in sys.modules))"
    )
    done = python("-c", code, *name.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: gspo {name}" in done.stdout


def test_python_m_gspo_is_the_same_command():
    done = python("-m", "gspo", "--version")
    assert (done.returncode, done.stdout) == (0, f"gspo {__version__}\n")


def test_help_of_train_shows_the_options_with_the_recipes_values(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("[rollout]\nnum_generations = 12\n")
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "a.toml"), "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--rollout.num-generations INT" in text
    assert "Completions of each prompt: the group. (default: 12)" in text
    assert "--eval.task.size" in text and "--coldstart.steps" in text


@pytest.mark.parametrize(
    "words, hint",
    [
        (["trian"], 'did you mean "gspo train"?'),
        (["check", "rewards"], 'did you mean "gspo check reward"?'),
        (["check"], "check engine"),
        (["zzzz"], 'see "gspo --help"'),
    ],
)
def test_a_wrong_command_names_the_right_one(words, hint, capsys):
    assert main(words) == 2
    assert hint in capsys.readouterr().err


def test_an_error_is_one_line_without_traceback(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("[rollout]\nnum_generation = 12\n")
    assert main(["train", str(tmp_path / "a.toml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ") and lines[0].endswith("did you mean rollout.num_generations?")
    assert "\x1b" not in lines[0], "no colour where the output is no terminal"


def test_the_first_line_is_red_in_a_terminal():
    assert format_error(ModelError("a\nb"), colour=True) == "\x1b[31merror: a\x1b[0m\nb"
    assert format_error(ModelError("a\nb"), colour=False) == "error: a\nb"
    assert format_error(OSError(), colour=False) == "error: OSError"
    assert format_error(ModelError("wrote \x1b[2J"), colour=False) == "error: wrote \\x1b[2J"


@pytest.mark.parametrize(
    "error, status",
    [
        (ConfigError("x"), 2),
        (EngineError("x"), 1),
        (PermissionError(13, "Permission denied", "x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_statuses(fails, error, status, capsys):
    fails(error)
    assert main(["recipes"]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_gspo_traceback_shows_where_an_error_comes_from(fails, monkeypatch):
    fails(EngineError("x"))
    monkeypatch.setenv("GSPO_TRACEBACK", "1")
    with pytest.raises(EngineError):
        main(["recipes"])


def test_an_error_that_is_a_bug_is_not_hidden(fails):
    fails(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["recipes"])


def test_a_closed_pipe_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m gspo train --help | head -1", shell=True, capture_output=True, text=True
    )
    assert "usage: gspo train" in done.stdout
    assert done.stderr == ""


def test_a_terminal_without_unicode_is_no_traceback(tmp_path):
    (tmp_path / "rollouts").mkdir()
    row = '{"step": 0, "prompt": "模型", "text": "é", "reward": 1.0, "tokens": 1}\n'
    (tmp_path / "rollouts" / "step_000000.jsonl").write_text(row, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "show", str(tmp_path)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u6a21\\u578b" in done.stdout


@dataclass
class Own:
    recipe: str
    force: bool = False
    limit: int = 3


@pytest.mark.parametrize(
    "words, own, overrides",
    [
        ("a.toml --rollout.n 4", "a.toml", "--rollout.n 4"),
        ("--rollout.num_generations 4 a.toml", "a.toml", "--rollout.num_generations 4"),
        ("--rollout.num_generations=4 a.toml", "a.toml", "--rollout.num_generations=4"),
        ("--force --limit 2 a.toml --run.seed 1", "--force --limit 2 a.toml", "--run.seed 1"),
        ("--model.gradient_checkpointing a.toml", "a.toml", "--model.gradient_checkpointing"),
        ("--model.gradient-checkpointing false a.toml", "a.toml", "--model.gradient-checkpointing false"),
        ("a.toml --rewards.0.weight -1", "a.toml", "--rewards.0.weight -1"),
        ("a.toml --epochs 3 --limit=4", "a.toml --limit=4", "--epochs 3"),
        ("a.toml --no-force", "a.toml --no-force", ""),
    ],
)
def test_words_are_split_into_the_commands_own_and_overrides(words, own, overrides):
    assert split_overrides(words.split(), flags_of(Own)) == (own.split(), overrides.split())


def test_functions_beside_the_user_can_be_imported(tmp_path):
    (tmp_path / "my_rewards_here.py").write_text("x = 1\n")
    code = "from gspo.cli.main import main; main(['recipes']); import my_rewards_here"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_recipes_lists_and_prints(capsys):
    assert main(["recipes"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"quickstart", "smollm2"} <= set(listed)
    assert main(["recipes", "quickstart"]) == 0
    assert "[rollout]" in capsys.readouterr().out
    assert main(["recipes", "nope"]) == 2
    assert "quickstart" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, wanted",
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["default", "count", "policy"],
)
def test_waiting_threads_sleep_unless_told_otherwise(given, wanted):
    code = "import os; from gspo.cli.main import main; main(['recipes']); print(os.environ.get('GOMP_SPINCOUNT'))"
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**kept, **given})
    assert done.stdout.splitlines()[-1] == str(wanted)
