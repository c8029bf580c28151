"""Checkpoints are complete or absent, and verified before use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gspo.errors import CheckpointError
from gspo.training import checkpoint

TENSORS = {"model.w": torch.arange(6.0).reshape(2, 3), "exp_avg.w": torch.ones(2, 3)}


def save(root: Path, step: int) -> Path:
    return checkpoint.save(root, step, TENSORS, {"policy_version": step, "best": None})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 7)
    found, problems = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 7 and found.state["policy_version"] == 7 and problems == []
    assert all(torch.equal(found.tensors()[name], value) for name, value in TENSORS.items())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007"]


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "extra"])
def test_damage_is_detected_and_the_previous_one_used(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 1)
    victim = save(tmp_path, 2) / name
    content = victim.read_bytes()
    if harm == "flip":
        victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif harm == "truncate":
        victim.write_bytes(content[:-1])
    elif harm == "remove":
        victim.unlink()
    else:
        (victim.parent / "stranger").write_text("x")
    with pytest.raises(CheckpointError):
        checkpoint.load(victim.parent)
    found, problems = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 1
    assert len(problems) == 1 and "step_000002" in problems[0]


def test_an_unfinished_save_is_not_seen(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step_000002.99.partial").mkdir()
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 1


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert checkpoint.prune(tmp_path, 2, best=1) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000003", "step_000004"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="step_000001"):
        save(tmp_path / "file" / "checkpoints", 1)
