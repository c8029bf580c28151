"""README.md, README.zh-CN.md, CHANGELOG.md and docs/index.md: equal in content, true of the code, and run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import gspo
from docs_helpers import ROOT, blocks, make_model
from gspo.algorithms import ADVANTAGES, CATALOG, KL_ESTIMATORS, REDUCTIONS
from gspo.cli.arguments import parse
from gspo.cli.doctor import TESTED
from gspo.cli.main import COMMANDS
from gspo.config import Recipe
from gspo.recipe_names import ALIASES, option_names

ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
BOTH = pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def without_comments(code: str) -> str:
    """Code with its trailing and whole-line comments dropped; no string in these pages holds a '#'."""
    return "\n".join(line.split("#", 1)[0].rstrip() for line in code.splitlines())


def prose(text: str) -> str:
    return FENCE.sub("", text)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, row by row, the dashes left out."""
    found = re.findall(r"(?:^\|.*\|\n)+", prose(text), flags=re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if "|---" not in row]
        for table in found
    ]


def exact(cell: str) -> tuple[list[str], list[str]]:
    """What a translation may not touch: code, and numbers outside it."""
    outside = re.sub(r"`[^`]*`", "", cell)
    return re.findall(r"`([^`]*)`", cell), re.findall(r"\d[\d.,e-]*\d|\d", outside)


def table(header: str) -> list[list[str]]:
    """The rows under the English table whose first cell is ``header``."""
    return next(rows[1:] for rows in tables(ENGLISH) if rows[0][0] == header)


def code_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


# --- the two languages -----------------------------------------------------------------------------------


def test_the_same_headings() -> None:
    levels = [[len(marks) for marks in re.findall(r"^(#+) ", prose(t), flags=re.MULTILINE)] for t in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1] and len(levels[0]) >= 10


def test_the_same_code() -> None:
    english, chinese = FENCE.findall(ENGLISH), FENCE.findall(CHINESE)
    assert [language for language, _ in english] == [language for language, _ in chinese]
    for (_, ours), (_, theirs) in zip(english, chinese, strict=True):
        assert without_comments(ours) == without_comments(theirs)
        assert [line.count("#") for line in ours.splitlines()] == [line.count("#") for line in theirs.splitlines()]


def test_the_same_tables() -> None:
    english, chinese = tables(ENGLISH), tables(CHINESE)
    assert len(english) == len(chinese) >= 8
    for ours, theirs in zip(english, chinese, strict=True):
        assert [len(row) for row in ours] == [len(row) for row in theirs]
        for left, right in zip(ours, theirs, strict=True):
            assert [exact(cell) for cell in left] == [exact(cell) for cell in right]


def test_the_same_links_names_and_limits() -> None:
    links = [re.findall(r"\]\(([^)]*)\)", prose(t)) for t in (ENGLISH, CHINESE)]
    assert links[0][0] == "README.zh-CN.md" and links[1][0] == "README.md"
    assert links[0][1:] == links[1][1:]
    names = [sorted(re.findall(r"`([^`]*)`", prose(t))) for t in (ENGLISH, CHINESE)]
    assert names[0] == names[1]
    limits = [len(re.findall(r"^> - \*\*", t, flags=re.MULTILINE)) for t in (ENGLISH, CHINESE)]
    assert limits[0] == limits[1] >= 10


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "CHANGELOG.md", "docs/index.md", "docs/extending.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)]*)\)", prose(path.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        if target.startswith("https://"):
            continue
        found = (path.parent / target) if target else path
        assert found.exists(), f"{page}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page}: {link}"


# --- the first screen and what the code blocks do --------------------------------------------------------


@BOTH
def test_the_first_screen_has_the_two_commands(text: str) -> None:
    first = text.splitlines()[:20]
    assert "make quickstart" in first and "make test" in first
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"quickstart", "test"} <= set(targets)


@BOTH
def test_ten_lines_of_python(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = blocks(text, "python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10 + 1  # the closing bracket
    make_model(tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct")  # a folder wins over the hub's name
    monkeypatch.chdir(tmp_path)
    whole, folders = gspo.train, []
    smaller = {"run.steps": 1, "rollout.prompts_per_step": 4, "rollout.num_generations": 2, "grading.in_process": True}

    def train(*, overrides: Mapping[str, Any], **arguments: Any) -> Path:
        folders.append(whole(**arguments, overrides={**overrides, **smaller}, quiet=True))
        return folders[-1]

    monkeypatch.setattr(gspo, "train", train)
    exec(compile(code, "README", "exec"), {})
    lines = (folders[0] / "rollouts" / "step_000000.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8 and set(json.loads(lines[0])["parts"]) == {"right"}
    resolved = gspo.load_recipe(folders[0])
    assert (resolved.algorithm.epsilon, resolved.algorithm.epsilon_high) == (3e-3, 4e-3)
    assert (folders[0] / "metrics.jsonl").is_file() and (folders[0] / "model" / "config.json").is_file()


@BOTH
def test_one_function_in_another_trainer(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks(text, "python")[1], "README", "exec"), names)
    assert capsys.readouterr().out == "tensor(0.5000)\n"
    root = 0.5**0.5
    assert names["advantages"].tolist() == pytest.approx([root, -root, -root, root])
    ratio = math.exp(0.002)  # two clipped at 1 + 4e-4, two that lost and are not
    assert names["out"].loss.item() == pytest.approx((ratio - 1.0004) * root / 2, rel=1e-3)
    gradient = names["current_logprobs"].grad
    assert (gradient[[0, 3]] == 0).all()
    assert torch.allclose(gradient[[1, 2]], torch.tensor(ratio * root / 24), rtol=1e-4)


@BOTH
def test_every_recipe_loads(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks(text, "toml")
    (tmp_path / "my.toml").write_text(recipe, encoding="utf-8")
    loaded = gspo.load_recipe("my.toml")
    assert loaded.rewards[0].function == "math" and loaded.rollout.max_completion_length == 1024
    assert loaded.eval.task is not None and loaded.eval.task.source == "test.jsonl"


def test_every_command_line_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my", "my-test"):
        rows = "".join(json.dumps({"question": f"{n}+{n}?", "answer": str(2 * n)}) + "\n" for n in range(8))
        (tmp_path / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    lines = [line for text in blocks(ENGLISH, "bash") for line in text.splitlines()]
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("gspo ")]
    ours.sort(key=lambda words: words[0] != "init")  # it writes the recipe that the others read
    assert len(ours) >= 7 and ours[0][0] == "init"
    for words in ours:
        name = next(name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS)
        module = importlib.import_module(f"gspo.cli.{COMMANDS[name].module}")
        arguments, overrides = parse(module.Arguments, words[len(name.split()) :], name=name, command=COMMANDS[name])
        if name == "init":
            assert module.run(arguments, overrides) == 0
        elif COMMANDS[name].overrides:
            gspo.load_recipe(arguments.recipe, overrides)
    assert gspo.load_recipe("my.toml").run.name == "my"  # what `gspo show runs/my` reads


def test_install_lines_name_what_is_there() -> None:
    lines = [line for text in blocks(ENGLISH, "bash") for line in text.splitlines()]
    installs = [shlex.split(line)[4:] for line in lines if line.startswith("python -m pip install")]
    assert installs[0] == ["torch==2.13.0"] and all(words != ["gspo"] for words in installs)
    constraints = ROOT / "constraints-cpu.txt"
    pins = constraints.read_text(encoding="utf-8").split() if constraints.is_file() else ["torch==2.13.0"]
    assert installs[0][0] in pins
    assert f"dist/gspo-{gspo.__version__}-py3-none-any.whl[plot]" in {word for words in installs for word in words}
    assert {word for row in table("extra") for word in code_names(row[0])} == set(PROJECT["optional-dependencies"])
    requires = " ".join(PROJECT["dependencies"])
    assert "torch>=2.11" in requires and "torch 2.11 or newer" in ENGLISH
    assert "transformers>=5.16" in requires and "transformers 5.16 or newer" in ENGLISH
    assert PROJECT["requires-python"] == ">=3.11,<3.14" and "Python 3.11 to 3.13" in " ".join(ENGLISH.split())


# --- the tables, held to the code ------------------------------------------------------------------------


def test_the_catalogue() -> None:
    rows = {code_names(row[0])[0]: row for row in table("name")}
    assert list(rows) == list(CATALOG)
    for name, entry in CATALOG.items():
        level, stated = rows[name][1], [float(x) for x in exact(rows[name][3])[1]]
        if entry.rule in ("soft_gate", "reinforce"):
            assert stated == []
        else:
            assert stated == [x for x in (entry.epsilon, entry.epsilon_high) if x is not None]
        kind = "none" if entry.rule == "reinforce" else entry.importance_sampling_level.split("_")[0]
        assert level.split(",")[0] == kind
    stated = " ".join(prose(ENGLISH).split())
    words = {6: "six", 7: "seven"}
    counts = len(ADVANTAGES), len(REDUCTIONS), len(KL_ESTIMATORS)
    assert f"{counts[0]} advantage estimators, {words[counts[1]]} reductions" in stated
    assert f"{words[counts[2]]} KL estimators" in stated
    assert re.findall(r"(\d+) 种", CHINESE) == [str(count) for count in counts]


def test_the_defaults() -> None:
    recipe, gspo_entry = Recipe(), CATALOG["gspo"]
    for setting, default, _ in table("setting"):
        if not (names := code_names(setting)):
            continue
        section, option = names[0].split(".")
        value = getattr(getattr(recipe, section), option)
        assert float(default) == (getattr(gspo_entry, option) if value is None else value), setting
    assert gspo_entry.reduction == "sequence_mean_token_mean" and gspo_entry.advantage == "group"


def test_the_share_that_the_papers_range_clips() -> None:
    """log s is normal with spread 0.02 / sqrt(L), and half of the advantages are positive."""
    header, row = next(rows for rows in tables(ENGLISH) if rows[0][0].startswith("tokens in"))

    def beyond(x: float) -> float:
        return 0.5 * math.erfc(x / math.sqrt(2))

    for length, stated in zip(header[1:], row[1:], strict=True):
        spread = 0.02 / math.sqrt(float(length.replace(",", "")))
        share = 0.5 * beyond(math.log1p(4e-4) / spread) + 0.5 * beyond(-math.log1p(-3e-4) / spread)
        assert f"{share:.2f}" == stated


def test_the_quickstarts_range() -> None:
    algorithm = gspo.load_recipe("quickstart").algorithm
    stated = f"{algorithm.epsilon:.1e}, {algorithm.epsilon_high:.1e}".replace("e-0", "e-")
    assert f"use {stated}." in ENGLISH and f"用的是 {stated}。" in CHINESE


def test_the_commands() -> None:
    assert {code_names(row[0])[0].removeprefix("gspo ") for row in table("command")} == set(COMMANDS)


def test_trls_names() -> None:
    ours = {*option_names(), "rewards"}
    options = {name.split(".", 1)[-1]: name for name in reversed(list(option_names()))}  # the first of a name
    for theirs, here, _ in table("TRL"):
        wanted = [name.split(" = ")[0] for name in code_names(here)]
        assert set(wanted) <= ours
        for position, name in enumerate(code_names(theirs)):
            alias = ALIASES.get(name)
            if "=" in name:
                continue
            target = wanted[min(position, len(wanted) - 1)] if wanted else ""
            assert target == (alias.ours if alias else options[name]), name


# --- what is not there, and the other pages --------------------------------------------------------------


def test_what_is_said_to_be_missing_is_missing() -> None:
    """When one of these arrives, both READMEs lose a line."""
    for module in ("gspo.cluster", "gspo.environments", "gspo.sandbox", "gspo.engines.vllm", "gspo.engines.sglang"):
        assert importlib.util.find_spec(module) is None, module
    assert importlib.util.find_spec("gspo.policy.routing") is None
    engines = {path.stem for path in (ROOT / "src" / "gspo" / "engines").glob("*.py")}
    assert "local" in engines and not engines & {"vllm", "sglang", "server"}


@BOTH
def test_the_tested_versions(text: str) -> None:
    (limit,) = re.findall(r"^> - \*\*(?:Tested with|测试环境)\*\*(.*?)(?=^> - )", text, flags=re.DOTALL | re.MULTILINE)
    versions = [version for name in ("python", "torch", "transformers", "peft") for version in TESTED[name]]
    assert re.findall(r"(\d+\.\d+)(?:\.\d+)?", limit) == versions


def test_the_index_knows_every_page_and_room() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([^)#]*)\)", index))
    rooms = {path.parent.name for path in (ROOT / "src" / "gspo").glob("*/__init__.py")}
    assert {name.rstrip("/") for name in re.findall(r"^\| `(\w+/)` \|", index, flags=re.MULTILINE)} == rooms


def test_the_changelog_has_this_version_first() -> None:
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", log, flags=re.MULTILINE)[0] == gspo.__version__ == PROJECT["version"]
    named = set(re.findall(r"`([a-z_ ]+)`", log))
    assert set(COMMANDS) <= named and set(CATALOG) <= named
