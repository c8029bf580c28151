"""The thin commands hand the right things to the functions behind them, under those functions' own signatures."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.main import main
from gspo.evaluation import Evaluation
from gspo.recipe import dump_recipe, load_recipe
from gspo.studies.calibrate import Calibration
from gspo.training.preflight import RecipeCheck
from gspo.types import FinishReason, Grading, Group, Prompt, Rollout

RECIPE = "[rollout]\nnum_generations = 4\n"


@pytest.fixture
def called(monkeypatch):
    """Replace a function by one that records its arguments, if the real one would have taken them."""

    def arrange(name: str, result: Any) -> list[dict[str, Any]]:
        module, _, function = name.partition(":")
        signature = inspect.signature(getattr(importlib.import_module(module), function))
        calls: list[dict[str, Any]] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(dict(signature.bind(*args, **kwargs).arguments))
            return result

        monkeypatch.setattr(f"{module}.{function}", record)
        return calls

    return arrange


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "my.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(dump_recipe(load_recipe({"run": {"seed": 5}})))
    return folder


def test_train_gets_the_recipe_with_its_overrides(called, recipe):
    calls = called("gspo.training.run:train", Path("runs/x"))
    assert main(["train", recipe, "--optim.learning-rate", "1e-5", "--run.seed=3"]) == 0
    expected = load_recipe(recipe, {"optim.learning_rate": 1e-5, "run.seed": 3})
    assert calls == [{"recipe": expected}]


def test_resume_gets_the_folder(called, run_folder, capsys):
    calls = called("gspo.training.run:resume", run_folder)
    assert main(["resume", str(run_folder)]) == 0
    assert calls == [{"folder": run_folder}]
    with pytest.raises(SystemExit) as end:  # a resume keeps its own recipe
        main(["resume", str(run_folder), "--run.seed", "3"])
    assert end.value.code == 2 and len(calls) == 1


def test_eval_of_a_recipe_and_of_a_run(called, recipe, run_folder, capsys):
    calls = called("gspo.training.run:evaluate_recipe", Evaluation({"eval/accuracy": 0.25}, []))
    assert main(["eval", recipe, "--eval.num_samples", "4"]) == 0
    assert calls[0] == {"recipe": load_recipe(recipe, {"eval.num_samples": 4}), "checkpoint_of": None}
    assert main(["eval", str(run_folder)]) == 0
    assert calls[1]["recipe"].run.seed == 5 and calls[1]["checkpoint_of"] == run_folder
    assert "eval/accuracy        0.25" in capsys.readouterr().out
    assert main(["eval", str(run_folder.parent)]) == 2  # a folder, but of no run
    assert "runs in" in capsys.readouterr().err


def test_coldstart_says_where_the_model_is(called, recipe, capsys):
    calls = called("gspo.training.coldstart:coldstart", Path("models/x"))
    assert main(["coldstart", recipe]) == 0
    assert main(["coldstart", recipe, "--force", "--coldstart.steps", "7"]) == 0
    assert [call["force"] for call in calls] == [False, True]
    assert calls[1]["recipe"].coldstart.steps == 7
    assert "model: models/x" in capsys.readouterr().out


def test_plot_says_where_the_picture_is(called, run_folder, capsys):
    calls = called("gspo.observe.plot:plot_run", run_folder / "curves.png")
    assert main(["plot", str(run_folder)]) == 0
    assert list(calls[0].values()) == [run_folder]
    assert f"plot: {run_folder / 'curves.png'}" in capsys.readouterr().out


def test_calibrate_prints_lines_for_the_recipe(called, recipe, capsys):
    result = Calibration(3e-3, 4e-3, 0.149, 1e-7, (1e-7, 2e-3), (5e-3, 2e-3), 25.0, ("watch out",))
    calls = called("gspo.studies.calibrate:calibrate", result)
    assert main(["calibrate", recipe, "--clip-fraction", "0.1", "--run.seed", "1"]) == 0
    assert calls[0]["clip_fraction"] == 0.1 and calls[0]["recipe"].run.seed == 1
    out = capsys.readouterr().out
    assert "\n[algorithm]\nepsilon = 0.003\nepsilon_high = 0.004\n" in out
    assert "clip fraction 0.149" in out and "note: watch out" in out


def test_check_recipe_shows_the_group_harmlessly(called, recipe, capsys):
    prompt = Prompt(id="p\x1b", text="1+1=")
    rollouts = tuple(
        Rollout(prompt, i, (), FinishReason.STOP, text=f"two\n\x1b[2J{i}", reward=reward, grading=Grading.GRADED)
        for i, reward in enumerate((1.0, None))
    )
    result = RecipeCheck([("one step", "2", "rollouts")], Group("g", rollouts), 0.5, 1.5, 1e-6, ("a note",))
    calls = called("gspo.training.preflight:check_recipe", result)
    assert main(["check", "recipe", recipe]) == 0
    assert calls == [{"recipe": load_recipe(recipe)}]
    out = capsys.readouterr().out
    assert "\x1b" not in out and "two\\n\\x1b[2J0" in out
    for words in ("one step", "reward 1 ", "reward none", "gradient norm 1.5", "1e-06", "note: a note"):
        assert words in out, words
    assert out.endswith("ok\n")
