"""``gspo check engine``: the embedded engine passes with a model of nothing, and a lying learner is caught."""

from __future__ import annotations

import pytest

from gspo.cli import check_engine
from gspo.cli.main import main
from gspo.engines.check import Check
from gspo.recipe import load_recipe

TINY = {
    "run": {"threads": 1},
    "task": {"source": "addition", "size": 64},
    "rewards": [{"function": "exact"}],
    "coldstart": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_length": 48, "steps": 2, "batch_size": 4},
    "rollout": {"max_completion_length": 16},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return load_recipe(TINY, {"model.path": str(folder / "tiny")})


def test_the_embedded_engine_keeps_its_promises(tiny):
    checks = check_engine.check_recipe_engine(tiny)
    assert [f"{check.name}: {check.detail}" for check in checks if not check.passed] == []
    agreement = next(check for check in checks if "another implementation" in check.name)
    assert not agreement.skipped


def test_a_bfloat16_engine_is_compared_with_more_room(tiny):
    checks = check_engine.check_recipe_engine(load_recipe(tiny, {"rollout.engine_dtype": "bfloat16"}))
    assert [f"{check.name}: {check.detail}" for check in checks if not check.passed] == []


def test_a_learner_that_disagrees_is_caught(tiny, monkeypatch):
    true_score = check_engine.score_by

    def shifted(policy):
        score = true_score(policy)
        return lambda *words: [value - 1e-3 for value in score(*words)]

    monkeypatch.setattr(check_engine, "score_by", shifted)
    failed = [check for check in check_engine.check_recipe_engine(tiny) if not check.passed]
    assert len(failed) == 1 and "log-probs off by 0.001" in failed[0].detail


@pytest.mark.parametrize("passed, status, word", [(True, 0, "ok"), (False, 1, "failed")])
def test_each_check_is_a_line_and_a_failure_the_exit_status(tmp_path, monkeypatch, capsys, passed, status, word):
    checks = (Check("first", True, "no seeds", skipped=True), Check("second", passed, "why \x1b"))
    given = []

    def fake(recipe, tolerance):
        given.append((recipe.run.seed, tolerance))
        return checks

    monkeypatch.setattr(check_engine, "check_recipe_engine", fake)
    (tmp_path / "a.toml").write_text("")
    assert main(["check", "engine", str(tmp_path / "a.toml"), "--tolerance", "0.5", "--run.seed", "2"]) == status
    assert given == [(2, 0.5)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped  first: no seeds"
    assert lines[1].split() == [word, "second:", "why", "\\x1b"]
