"""Checkpoints: a folder of safetensors and JSON that is complete or absent.

Written to a temporary folder, every file and folder fsynced, a manifest with sha256 sums last, then renamed. Found by
scanning and verifying; there is no pointer file. Seeds are counter-based and data order follows from the step, so the
step number restores both.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    step: int
    state: Mapping[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name."""
        from safetensors.torch import load_file

        return load_file(self.folder / "state.safetensors")


def save(root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write checkpoint ``step`` under ``root``. Raises CheckpointError when the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = root / f"step_{step:06d}"
    partial = root / f".{target.name}.{os.getpid()}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(
            {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()},
            partial / "state.safetensors",
        )
        _write_json(partial / "state.json", {"format": FORMAT, "step": step, **state})
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        _fsync(partial / "state.safetensors")
        _write_json(partial / "manifest.json", {"sha256": sums})
        _fsync(partial)
        replaced = root / f".{target.name}.{os.getpid()}.replaced"
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        _fsync(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors wraps what the system says
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(root).free if root.exists() else 0
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"cannot write checkpoint {target}: {why} ({free / 1e6:.0f} MB free). Earlier checkpoints are intact"
        ) from error
    return target


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and what was wrong with newer ones."""
    problems: list[str] = []
    for folder in sorted(root.glob("step_*"), reverse=True):
        try:
            return load(folder), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def load(folder: Path) -> Checkpoint:
    """Verify a checkpoint against its manifest.

    Raises CheckpointError for missing, extra, truncated or flipped files, or another format.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: no readable manifest ({type(error).__name__})") from error
    present = {path.name for path in folder.iterdir()} - {"manifest.json"}
    if present != set(manifest):
        raise CheckpointError(f"{folder}: holds {sorted(present)}, the manifest lists {sorted(manifest)}")
    for name, expected in manifest.items():
        if _sha256(folder / name) != expected:
            raise CheckpointError(f"{folder / name}: sha256 differs from the manifest; the file is damaged")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: format {state.get('format')}, this version reads {FORMAT}")
    return Checkpoint(folder, state["step"], state)


def prune(root: Path, keep: int, *, best: int | None) -> list[str]:
    """Remove all but the newest ``keep`` and the best; what could not be removed is returned as warnings."""
    folders = sorted(root.glob("step_*"), reverse=True)
    warnings = []
    for folder in folders[keep:]:
        if best is not None and folder.name == f"step_{best:06d}":
            continue
        try:
            shutil.rmtree(folder)
        except OSError as error:
            warnings.append(f"could not remove old checkpoint {folder}: {error.strerror}")
    return warnings


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
