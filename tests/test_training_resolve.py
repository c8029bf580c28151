"""A recipe's words become an algorithm, or an error that names the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gspo.algorithms import CATALOG, Algorithm
from gspo.config import AlgorithmConfig, CorrectionConfig
from gspo.errors import ConfigError
from gspo.training.resolve import load_estimator, require_sequence_advantages, resolve_algorithm


def resolve(
    correction: dict[str, Any] | None = None, *, updates: int = 4, **algorithm: Any
) -> tuple[Algorithm, tuple[str, ...]]:
    return resolve_algorithm(
        AlgorithmConfig(**algorithm),
        CorrectionConfig(**(correction or {})),
        updates_per_step=updates,
        max_completion_length=300,
    )


def test_the_default_is_the_paper() -> None:
    algorithm, notes = resolve()
    assert algorithm == CATALOG["gspo"]
    assert (algorithm.epsilon, algorithm.epsilon_high, algorithm.beta) == (3e-4, 4e-4, 0.0)
    assert (algorithm.importance_sampling_level, algorithm.reduction) == ("sequence", "sequence_mean_token_mean")
    assert notes == ()


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_entry_resolves_with_its_own_defaults(name: str) -> None:
    extra = {"loss_constant": 128.0} if name == "dr_grpo" else {}
    algorithm, _ = resolve(name=name, updates=1 if name == "rloo" else 4, **extra)
    entry = CATALOG[name]
    for field in ("advantage", "rule", "reduction", "epsilon", "epsilon_high", "correction", "kl_estimator"):
        assert getattr(algorithm, field) == getattr(entry, field)


def test_overrides_arrive() -> None:
    algorithm, _ = resolve(
        {"kind": "token_mask", "max": 3.0, "off_policy_mask_delta": 0.5},
        name="grpo",
        epsilon=0.1,
        epsilon_high=0.3,
        delta=4.0,
        beta=0.04,
        kl_estimator="k2",
        advantage="rloo",
        reduction="token_mean",
    )
    assert (algorithm.epsilon, algorithm.epsilon_high, algorithm.delta) == (0.1, 0.3, 4.0)
    assert (algorithm.beta, algorithm.kl_estimator) == (0.04, "k2")
    assert (algorithm.advantage, algorithm.reduction) == ("rloo", "token_mean")
    assert (algorithm.correction, algorithm.correction_max, algorithm.correction_min) == ("token_mask", 3.0, 0.5)
    assert algorithm.off_policy_mask_delta == 0.5


REFUSED: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({"name": "gspp"}, {}, 4, 'did you mean "gspo"'),
    ({"name": "grpo", "advantage": "groups"}, {}, 4, 'did you mean "group"'),
    ({"reduction": "seq-mean"}, {}, 4, "algorithm.reduction"),
    ({"beta": 0.1, "kl_estimator": "k4"}, {}, 4, "algorithm.kl_estimator"),
    ({}, {"kind": "tis"}, 4, "correction.kind"),
    # a sequence ratio with a token reduction
    ({"reduction": "token_mean"}, {}, 4, 'name = "luspo".*name = "dapo"'),
    ({"reduction": "sequence_mean_token_sum"}, {}, 4, 'name = "luspo".*name = "dapo"'),
    ({"reduction": "length_weighted"}, {}, 4, 'name = "luspo"'),
    ({"name": "gspo_token", "reduction": "token_mean"}, {}, 4, 'name = "luspo"'),
    ({"name": "dapo", "importance_sampling_level": "sequence"}, {}, 4, 'name = "luspo"'),
    ({"name": "grpo", "reduction": "length_weighted"}, {}, 4, "LUSPO"),
    ({"name": "luspo", "reduction": "sequence_mean_token_mean"}, {}, 4, 'name = "gspo"'),
    ({"name": "gmpo", "reduction": "token_mean"}, {}, 4, "GMPO"),
    # a unit that contradicts the name
    ({"importance_sampling_level": "token"}, {}, 4, 'name = "grpo"'),
    ({"importance_sampling_level": "sequence_token"}, {}, 4, 'name = "gspo_token"'),
    ({"advantage": "reinforce_pp"}, {}, 4, 'name = "gspo_token"'),
    # options that nobody reads
    ({"name": "rloo", "epsilon": 0.2}, {}, 1, "not read by"),
    ({"tau_positive": 1.0}, {}, 4, "sapo"),
    ({"name": "sapo", "epsilon": 0.2}, {}, 4, "not read by"),
    ({"name": "cispo", "delta": 4.0}, {}, 4, "not read by"),
    ({"name": "gmpo", "importance_sampling_level": "token"}, {}, 4, "not read by"),
    ({"loss_constant": 8.0}, {}, 4, "loss_constant is not read"),
    ({"name": "dr_grpo"}, {}, 4, "loss_constant, for example 300"),
    ({"kl_estimator": "k3"}, {}, 4, "algorithm.beta"),
    ({}, {"max": 2.0}, 4, "correction.max is not read"),
    ({}, {"min": 0.5}, 4, "correction.min is not read"),
    ({}, {"kind": "token_truncate", "min": 0.5}, 4, "token_mask"),
    # what makes no sense
    ({"name": "grpo", "delta": 1.1}, {}, 4, "inside the clip range"),
    ({"name": "grpo", "epsilon": 1.5}, {}, 4, "at most 1"),
    ({"name": "cispo", "epsilon_high": 0.28}, {}, 4, "added to 1"),
    ({"beta": 0.1, "kl_estimator": "k1"}, {}, 4, "no gradient in expectation"),
    ({}, {"kind": "token_mask", "max": 0.4}, 4, "not below"),
    ({}, {"kind": "token_truncate_joint"}, 4, 'name = "minirl"'),
    ({"proximal_logprobs": "engine"}, {"kind": "token_mask"}, 4, "corrects nothing"),
    ({"proximal_logprobs": "detach"}, {}, 4, "recompute"),
    ({"name": "rloo"}, {}, 4, "optim.updates_per_step = 1"),
    ({"name": "rloo", "proximal_logprobs": "engine"}, {}, 1, "has no ratio"),
]


@pytest.mark.parametrize(("algorithm", "correction", "updates", "match"), REFUSED)
def test_refused_with_the_fix(algorithm: dict[str, Any], correction: dict[str, Any], updates: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(correction, updates=updates, **algorithm)


@pytest.mark.parametrize(
    ("algorithm", "correction", "updates"),
    [
        ({"proximal_logprobs": "engine"}, {"off_policy_mask_delta": 0.1}, 4),
        ({"proximal_logprobs": "detach"}, {}, 1),
        ({"name": "minirl", "proximal_logprobs": "engine"}, {}, 4),
        ({"name": "minirl"}, {"kind": "token_truncate", "max": 3.0}, 4),
        ({"name": "minirl"}, {"kind": "none"}, 4),
        ({"name": "cispo", "importance_sampling_level": "sequence"}, {}, 4),
        ({"name": "dr_grpo", "loss_constant": 64.0}, {}, 4),
        ({"advantage": "my_module:my_advantage"}, {}, 4),
        ({"name": "gspo_token", "advantage": "reinforce_pp"}, {}, 4),
        ({"name": "rloo"}, {"kind": "sequence_geometric_mask"}, 1),
    ],
)
def test_allowed(algorithm: dict[str, Any], correction: dict[str, Any], updates: int) -> None:
    resolved, _ = resolve(correction, updates=updates, **algorithm)
    assert all(getattr(resolved, name) == value for name, value in algorithm.items())
    assert resolved.correction == correction.get("kind", resolved.correction)


@pytest.mark.parametrize(
    ("algorithm", "updates", "match"),
    [
        ({"epsilon": 0.2, "epsilon_high": 0.28}, 4, "clips nothing"),
        ({"name": "grpo", "importance_sampling_level": "sequence"}, 4, "clips nothing"),
        ({"name": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4}, 4, "clips nearly every token"),
        ({}, 1, "the clip is inactive"),
        ({"proximal_logprobs": "engine"}, 4, "sees the mismatch"),
    ],
)
def test_notes(algorithm: dict[str, Any], updates: int, match: str) -> None:
    _, notes = resolve(updates=updates, **algorithm)
    assert len([note for note in notes if match in note]) == 1


def test_a_token_correction_under_gspo_is_noted() -> None:
    _, notes = resolve({"kind": "token_truncate"})
    assert "GSPO-token's form" in notes[0]


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("token_truncate", (2.0, None)),
        ("token_mask", (5.0, 0.5)),
        ("sequence_geometric_mask", (1.01, 0.99)),
        ("sequence_product_mask", (3.0, None)),
    ],
)
def test_each_kind_has_its_own_bounds(kind: str, bounds: tuple[float, float | None]) -> None:
    algorithm, _ = resolve({"kind": kind})
    assert (algorithm.correction_max, algorithm.correction_min) == bounds


def test_gspo_refuses_advantages_that_vary_inside_a_sequence() -> None:
    ids = torch.tensor([0, 0, 1, 1, 1])
    constant, varying = torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0]), torch.tensor([1.0, 1.0, -2.0, -2.0, 0.0])
    require_sequence_advantages(constant, ids, CATALOG["gspo"])
    require_sequence_advantages(varying, ids, CATALOG["gspo_token"])
    require_sequence_advantages(constant[:0], ids[:0], CATALOG["gspo"])
    with pytest.raises(ConfigError, match='name = "gspo_token"'):
        require_sequence_advantages(varying, ids, CATALOG["gspo"])


def test_an_estimator_by_dotted_path() -> None:
    assert load_estimator("rloo") == "rloo"
    assert callable(load_estimator("gspo.algorithms:reinforce_pp_advantages"))
    for path, match in (
        ("no_such_module_here:f", "cannot be imported"),
        ("gspo.algorithms:no_such", "has no"),
        ("gspo.algorithms:CATALOG", "not a function"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_estimator(path)
