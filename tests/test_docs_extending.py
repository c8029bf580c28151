"""docs/extending.md: every example is run, in order, as a reader would: modules as files, recipes loaded, commands."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gspo
from docs_helpers import ROOT, blocks, make_model
from gspo.algorithms import CATALOG
from gspo.cli.main import main
from gspo.training.resolve import load_estimator, resolve_algorithm

TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = blocks(TEXT, "python")
MODULES = {match[1]: code for code in EXAMPLES if (match := re.match(r"# (my_\w+)\.py\n", code))}
RECIPES = blocks(TEXT, "toml")
RUN = """
[run]
steps = 1
[model]
path = "model"
[task]
source = "my_tasks:squares"
[[rewards]]
function = "my_rewards:number"
[grading]
in_process = true
[rollout]
prompts_per_step = 4
num_generations = 2
max_completion_length = 6
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the modules of the page, which is the current one and is searched for modules."""
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def names() -> dict[str, object]:
    """The tensors that the page takes for granted."""
    torch.manual_seed(1)
    current = (-torch.rand(3, 5) - 0.5).requires_grad_()
    return {
        "current_logprobs": current,
        "proximal_logprobs": current.detach() + 0.01 * torch.randn(3, 5),
        "advantages": torch.tensor([1.0, -0.5, 0.25]),
        "mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]),
    }


def test_the_examples_are_short_and_cover_every_extension_point() -> None:
    assert all(len(code.splitlines()) < 40 for code in EXAMPLES)
    headings = re.findall(r"^## (\w+)$", TEXT, flags=re.MULTILINE)
    assert headings == ["Algorithm", "Advantage", "Reward", "Task", "Engine", "Tracker"]
    assert re.findall(r"^\| (\w+) \|", TEXT.split("\n\n## ", 1)[0], flags=re.MULTILINE)[1:] == [
        name.lower() for name in headings
    ]


@pytest.mark.parametrize("code", [code for code in EXAMPLES if not code.startswith("# my_")])
def test_example(code: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = names()
    if "my.toml" in code:
        make_model(place / "model")
        (place / "my.toml").write_text(RUN, encoding="utf-8")
    exec(compile(code, "extending.md", "exec"), scope)
    if "gspo.loop" in code:
        assert capsys.readouterr().out.startswith("0 ")
        assert (place / "runs" / "run" / "metrics.jsonl").is_file()
    if "soft_gspo" in code:
        gradient = scope["current_logprobs"].grad
        assert gradient[0].abs().min() > 0 and (gradient[1, 2:] == 0).all()


@pytest.mark.parametrize("text", RECIPES)
def test_recipe(text: str, place: Path) -> None:
    import tomllib

    recipe = gspo.load_recipe(tomllib.loads(text))
    algorithm, _ = resolve_algorithm(recipe.algorithm, recipe.correction, updates_per_step=4, max_completion_length=256)
    assert callable(load_estimator(algorithm.advantage)) == (":" in algorithm.advantage)
    if "[algorithm]" not in text:
        assert algorithm == CATALOG["gspo"]


@pytest.mark.parametrize("line", [line for text in blocks(TEXT, "console") for line in text.splitlines()])
def test_command(line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line.startswith("$ gspo ")
    assert main(shlex.split(line)[2:]) == 0, capsys.readouterr()


def test_a_run_uses_the_named_functions(place: Path) -> None:
    make_model(place / "model")
    (place / "my.toml").write_text(RUN, encoding="utf-8")
    changes = {"algorithm.advantage": "my_advantages:from_median", "run.trackers": ["my_trackers:Csv"]}
    folder = gspo.train("my.toml", overrides=changes, quiet=True)
    assert (folder / "reward.csv").read_text(encoding="utf-8").startswith("0,")
