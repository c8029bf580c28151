"""What a run says at its end."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from gspo.training.console import RunConsole, changed_first
from gspo.types import FinishReason, Grading, Prompt, Rollout, StepReport


def rollout(name: str, text: str, reward: float) -> Rollout:
    return Rollout(Prompt(name, text=name), 0, (), FinishReason.STOP, text, reward, {}, Grading.GRADED)


def test_samples_that_changed_are_shown_first() -> None:
    before = [rollout("a", "x", 1.0), rollout("b", "y", 0.0), rollout("c", "z", 0.0)]
    after = [rollout("a", "x", 1.0), rollout("b", "y", 0.0), rollout("c", "Z", 1.0)]
    assert [r.prompt.id for r in changed_first(before, after)[0]] == ["c", "a", "b"]


def test_the_end_says_where_everything_is(tmp_path: Path) -> None:
    out = StringIO()
    console = RunConsole(Console(file=out, width=80))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "policy_version": 1, "metrics": {"reward": 0.5}}\n')
    console.finished(tmp_path, ([rollout("a", "one", 0.0)], [rollout("a", "two", 1.0)]))
    said = out.getvalue().replace("\n", "")
    assert "one" in said and "two" in said and f"gspo show {tmp_path}" in said and "curves.png" in said


def test_a_stall_is_explained_once() -> None:
    out = StringIO()
    console = RunConsole(Console(file=out, width=200))
    nothing = {
        "reward": 0.0, "reward_std": 0.0, "grad_norm": 0.0, "frac_reward_zero_std": 1.0, "groups/all_wrong": 1.0,
        "groups/all_right": 0.0, "completions/clipped_ratio": 0.9, "grading/graded": 1.0, "completions/count": 8.0,
    }  # fmt: skip
    for step in range(12):
        console.report(StepReport(step, step + 1, nothing))
    assert out.getvalue().count("note:") == 1 and "90%" in out.getvalue()


def test_quiet_is_quiet(capsys) -> None:
    console = RunConsole(quiet=True)
    console.note("hello")
    console.settings([("a", "b", "c")], notes=["d"])
    assert capsys.readouterr().out == ""
