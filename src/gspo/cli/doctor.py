"""``gspo doctor``: what this machine has, what it lacks, and what of it this version was not tested with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo import __version__

TESTED = {
    "python": ("3.11", "3.12", "3.13"),
    "torch": ("2.11", "2.13", "2.14"),
    "transformers": ("5.16", "5.24"),
    "peft": ("0.21",),
    "numpy": ("2.4",),
}
"""Version prefixes that this version's tests ran with, on CPU."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Arguments:
    """Report on this machine."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Print the report; 1 where a required package is missing."""
    missing = False
    for title, rows in (
        ("software", software()),
        ("device", device()),
        ("machine", machine()),
        ("extras", extras()),
    ):
        print(title)
        for name, value in rows:
            print(f"  {name:<16} {value}")
            missing = missing or (title == "software" and value == "missing")
    print("untested here")
    for line in untested() or ["nothing: these are the tested versions"]:
        print(f"  {line}")
    return 1 if missing else 0


def version_of(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> Iterator[tuple[str, str | None]]:
    """(package, extra or None) that gspo asks for."""
    for line in importlib.metadata.requires("gspo") or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if name and name[0] != "gspo":
            yield name[0], extra[1] if extra else None


def software() -> list[tuple[str, str]]:
    """Python, gspo and the required packages."""
    rows = [("gspo", __version__), ("python", f"{platform.python_version()} ({sys.executable})")]
    rows += [(name, version_of(name) or "missing") for name, extra in requirements() if extra is None]
    return rows


def extras() -> list[tuple[str, str]]:
    """Each extra with the version of its packages, or how to install it."""
    found: dict[str, list[str]] = {}
    for name, extra in requirements():
        if extra not in (None, "all", "dev"):
            found.setdefault(extra, []).append(name)
    rows = []
    for extra, names in found.items():
        lacking = [name for name in names if version_of(name) is None]
        value = ", ".join(f"{name} {version_of(name)}" for name in names if name not in lacking)
        rows.append((extra, f'missing: pip install "gspo[{extra}]"' if lacking else value))
    return rows


def device() -> list[tuple[str, str]]:
    """What torch computes on, and what ``device = "auto"`` takes."""
    if version_of("torch") is None:
        return [("torch", "missing")]
    import torch

    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"))
    mps = torch.backends.mps.is_available()
    if mps:
        rows.append(("mps", "available"))
    rows.append(("auto", "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"))
    rows.append(("torch threads", f"{torch.get_num_threads()}"))
    return rows


def machine() -> list[tuple[str, str]]:
    """Cores, memory and disk that this process may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    free = shutil.disk_usage(Path.cwd()).free
    rows = [("system", platform.platform()), ("cores", str(cores)), ("disk free", f"{free / 2**30:.1f} GiB")]
    memory = memory_bytes()
    if memory is not None:
        rows.insert(2, ("memory", f"{memory / 2**30:.1f} GiB"))
    return rows


def memory_bytes() -> int | None:
    """Memory this process may use: the machine's, or its control group's limit if lower; None where unknown."""
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CGROUP_LIMITS:
        path = Path(name)
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def _is_tested(name: str, version: str) -> bool:
    return any(f"{version}.".startswith(f"{prefix}.") for prefix in TESTED[name])


def untested() -> list[str]:
    """What of this machine is outside what was tested."""
    present = {"python": platform.python_version(), **{name: version_of(name) for name in TESTED if name != "python"}}
    lines = [
        f"{name} {found}: tests ran with {' and '.join(TESTED[name])}"
        for name, found in present.items()
        if found is not None and not _is_tested(name, found)
    ]
    chosen = dict(device()).get("auto")
    if chosen in ("cuda", "mps"):
        lines.append(f"device {chosen}: tests ran on cpu; set run.device to choose")
    if sys.platform != "linux":
        lines.append(f"{platform.system()}: tests ran on Linux")
    return lines
