"""``gspo doctor``: what is installed, missing, and untested."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest

from gspo.cli import doctor
from gspo.cli.main import main


@pytest.fixture
def lacking(monkeypatch):
    """Pretend that packages are absent."""

    def arrange(*names: str) -> None:
        real = importlib.metadata.version

        def version(name: str) -> str:
            if name in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr("importlib.metadata.version", version)

    return arrange


def test_the_report_names_versions_device_and_memory(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in (platform.python_version(), importlib.metadata.version("torch"), "auto", "cores", "GiB"):
        assert words in text


def test_a_missing_extra_is_told_with_its_install_line(lacking):
    lacking("matplotlib")
    assert dict(doctor.extras())["plot"] == 'missing: pip install "gspo[plot]"'


def test_every_extra_for_users_is_listed():
    names = {name for name, _ in doctor.extras()}
    assert {"datasets", "gguf", "reasoning-gym", "plot", "tensorboard", "wandb"} <= names
    assert not names & {"dev", "all"}


def test_a_missing_requirement_is_an_error(lacking, capsys):
    lacking("tokenizers")
    assert main(["doctor"]) == 1
    assert "missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "installed, tested",
    [("2.13.0+cpu", "2.13"), ("2.13", "2.13"), ("2.11.1", "2.11"), ("2.130.0", None), ("2.12.1", None), ("3.0", None)],
)
def test_versions_other_than_the_tested_ones_are_told(monkeypatch, installed, tested):
    monkeypatch.setattr(doctor, "version_of", lambda name: installed if name == "torch" else None)
    told = any(line.startswith(f"torch {installed}:") for line in doctor.untested())
    assert told is (tested is None)


def test_a_gpu_is_told_to_be_untested(monkeypatch):
    monkeypatch.setattr(doctor, "device", lambda: [("auto", "cuda")])
    assert any("device cuda" in line for line in doctor.untested())


def test_a_control_groups_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text("1073741824\n")
    monkeypatch.setattr(doctor, "_CGROUP_LIMITS", (str(limit),))
    assert doctor.memory_bytes() == 2**30
    limit.write_text("max\n")
    assert doctor.memory_bytes() > 2**30
