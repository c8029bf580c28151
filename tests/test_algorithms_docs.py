"""docs/algorithms.md names what the code has, with the code's defaults, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gspo.algorithms as alg

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
TEXT = PAGE.read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    """The table rows that start with a name in backquotes: name to its cells."""
    table = {}
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for name in re.findall(r"`([a-z0-9_]+)`", cells[0]):
                table.setdefault(name, cells)  # the catalogue comes first
    return table


def test_every_name_has_a_row() -> None:
    names = {*alg.CATALOG, *alg.ADVANTAGES, *alg.REDUCTIONS, *alg.KL_ESTIMATORS}
    assert names <= set(rows())


@pytest.mark.parametrize("name", sorted(alg.CATALOG))
def test_the_table_states_the_defaults(name: str) -> None:
    entry, cells = alg.CATALOG[name], rows()[name]
    stated = [float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?![\w.])", cells[5])]
    if name == "sapo":
        assert stated == [entry.tau_positive, entry.tau_negative]
    elif name == "cispo":
        assert stated[0] == entry.epsilon_high and stated[1] == 1 + entry.epsilon_high and entry.epsilon is None
    elif name != "rloo":
        assert stated[:2] == [entry.epsilon, entry.epsilon_high]
    for level in ("token", "sequence", "sequence_token"):
        assert (cells[2] == level) == (entry.importance_sampling_level == level and entry.rule != "reinforce")
    assert entry.beta == 0.0 and entry.kl_estimator == ("k3" if name == "grpo" else "k3_unbiased")


@pytest.mark.parametrize("name", sorted(alg.CATALOG))
def test_every_entry_is_a_public_function_with_its_defaults(name: str) -> None:
    function = vars(alg)[name]
    assert name in alg.__all__
    defaults = function.__kwdefaults__ or {}
    for knob in ("epsilon", "epsilon_high", "tau_positive", "tau_negative", "correction_max"):
        if knob in defaults:
            assert defaults[knob] == getattr(alg.CATALOG[name], knob)


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 2
    current = torch.full((4, 5), -1.0, requires_grad=True)
    names = {
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "current_logprobs": current,
        "current": current,
        "proximal_logprobs": current.detach() - 0.01,
        "proximal": current.detach() - 0.01,
        "engine_logprobs": current.detach() + 0.001,
        "mask": torch.ones(4, 5),
    }
    for block in blocks:
        exec(block, names)
    assert names["clipped"] == 5  # one positive sequence beyond the range, of two that learn
    assert torch.is_tensor(names["loss"])
