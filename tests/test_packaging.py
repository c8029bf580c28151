"""What an install takes: every requirement has a pin, every pin is allowed, the tested versions are the pinned ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from docs_helpers import ROOT
from gspo.cli.doctor import TESTED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> Iterator[Requirement]:
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        yield from (Requirement(line) for line in group if not line.startswith("gspo["))


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in split}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_pinned_and_the_lowest_versions_are_among_the_tested() -> None:
    lowest = {
        canonicalize_name(one.name): spec.version
        for one in requirements()
        for spec in one.specifier
        if spec.operator == ">="
    }
    for name in ("torch", "transformers"):
        tested = {Version(version).release[:2] for version in TESTED[name]}
        assert pins()[name].release[:2] in tested and Version(lowest[name]).release[:2] in tested
    for name in ("peft", "numpy"):
        assert pins()[name].release[:2] in {Version(version).release[:2] for version in TESTED[name]}


def test_make_and_the_package_ask_for_the_same_pythons() -> None:
    asked = re.search(r"\((\d, \d+)\) <= sys\.version_info\[:2\] < \((\d, \d+)\)", (ROOT / "Makefile").read_text())
    assert asked is not None
    low, high = (bound.replace(", ", ".") for bound in asked.groups())
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert allowed == SpecifierSet(f">={low},<{high}")
    assert all(version in allowed for version in TESTED["python"])
