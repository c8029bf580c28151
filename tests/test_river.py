"""The river from end to end, on a model small enough for seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gspo
from gspo.config import Recipe
from gspo.errors import CheckpointError, ConfigError, GspoError, ModelError, NumericsError, RewardError, TaskError
from gspo.policy.model import Policy
from gspo.training.build import Components, build
from gspo.training.coldstart import coldstart
from gspo.training.console import RunConsole
from gspo.training.loop import loop, train_step, with_advantages
from gspo.training.record import RunRecorder
from gspo.training.run import make_run, resume, train
from gspo.types import Rollout

torch.set_num_threads(1)


def right(rollout: Rollout) -> float:
    """1 where the answer after the marker is right."""
    return float(rollout.text.rsplit("#", 1)[-1].strip() == rollout.prompt.answer)


def first_digit(rollout: Rollout) -> float:
    """A reward that a model of a few batches earns now and then."""
    return float(sum(c.isdigit() for c in rollout.text) % 3)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose cold start is done: 12 batches, enough to write digits."""
    root = tmp_path_factory.mktemp("river")
    text = {
        "run": {"name": "tiny", "output_dir": str(root / "runs"), "steps": 4, "save_every": 2, "threads": 1},
        "model": {"path": str(root / "model")},
        "coldstart": {
            "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_length": 48, "steps": 12, "batch_size": 16,
            "learning_rate": 3e-3, "task": {"size": 200},
        },
        "task": {"source": "addition", "split": "train", "size": 64},
        "rewards": [{"function": "exact", "options": {"marker": "#"}}],
        "grading": {"in_process": True},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12},
        "algorithm": {"epsilon": 3e-3, "epsilon_high": 4e-3},
        "optim": {"learning_rate": 1e-3, "updates_per_step": 4},
        "eval": {"every": 2, "task": {"split": "test", "size": 10}},
    }  # fmt: skip
    loaded = gspo.load_recipe(text)
    coldstart(loaded)
    return loaded


@pytest.fixture
def parts(recipe: Recipe) -> Iterator[Components]:
    made = build(recipe, functions=[first_digit])
    yield made
    made.close()


def changed(recipe: Recipe, **overrides: object) -> Recipe:
    return gspo.load_recipe(recipe, {name.replace("__", "."): value for name, value in overrides.items()})


class Silent:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list = []

    def step(self, step):
        self.steps.append(step)
        return step

    def evaluation(self, step, result) -> None: ...
    def save(self, step, version, *, last) -> None: ...


def step_batch(parts: Components):
    run = make_run(parts, recorder=None)
    groups = run.collector.collect(run.task.batch(0, 4, 0), run.plan, step=0)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return rollouts, with_advantages(parts.learner.score(rollouts), rollouts, "group")


def gradients(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in policy.trainable() if p.grad is not None]).double()


def test_a_run_leaves_what_it_promises(recipe: Recipe) -> None:
    folder = train(recipe, functions=[first_digit], console=RunConsole(quiet=True))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert "eval/accuracy" in lines[0]["metrics"] and "eval/accuracy" in lines[4]["metrics"]
    assert all(np.isfinite(v) for line in lines for v in line["metrics"].values())
    assert gspo.load_recipe(folder / "config.toml") == recipe
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16 and all(r["version"] == 3 for r in rollouts)
    assert (folder / "model" / "model.safetensors").is_file()
    assert json.loads((folder / "timings.jsonl").read_text().splitlines()[0])["timings"]["rollout"] > 0


def test_engine_and_learner_agree_and_the_first_update_is_on_policy(parts: Components) -> None:
    _, batch = step_batch(parts)
    assert batch.proximal_logprobs is not None
    assert np.abs(batch.proximal_logprobs - batch.sampled_logprobs).max() < 1e-5
    run = make_run(parts, recorder=None)
    result = train_step(run, 0)
    first, later = result.updates[0].sequences, result.updates[-1].sequences
    assert np.abs(first["log_ratio_sum"]).max() == 0.0
    assert first["clipped_low"].sum() == first["clipped_high"].sum() == 0
    assert np.abs(later["log_ratio_sum"]).max() > 0.0


def test_every_split_into_microbatches_gives_the_same_gradient(parts: Components) -> None:
    _, batch = step_batch(parts)
    indices = np.flatnonzero(batch.valid)
    found = []
    for budget in (10_000, 60, 25):
        parts.learner.max_tokens = budget
        parts.learner._accumulate(batch, indices)
        found.append(gradients(parts.policy))
    assert found[0].norm() > 0
    for other in found[1:]:
        assert (other - found[0]).norm() / found[0].norm() < 1e-5


def test_out_of_memory_halves_the_budget_and_changes_nothing(
    parts: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batch = step_batch(parts)
    indices = np.flatnonzero(batch.valid)
    loss, _, notes = parts.learner._accumulate(batch, indices)
    plain = gradients(parts.policy)
    assert notes == ()
    whole = parts.learner._backward

    def small_memory(batch, sequences, totals):
        if len(sequences) > 4:
            raise torch.OutOfMemoryError("no memory for this many rows")
        return whole(batch, sequences, totals)

    monkeypatch.setattr(parts.learner, "_backward", small_memory)
    again, _, notes = parts.learner._accumulate(batch, indices)
    assert again == pytest.approx(loss, abs=1e-6)
    assert (gradients(parts.policy) - plain).norm() / plain.norm() < 1e-5
    assert notes and "out of memory" in notes[0] and parts.learner.max_tokens < 16384


def test_a_non_finite_gradient_stops_before_the_weights_change(parts: Components, tmp_path: Path) -> None:
    _, batch = step_batch(parts)
    parts.learner.dump_with(lambda arrays: str(tmp_path / f"{len(arrays)}"))
    before = {name: p.detach().clone() for name, p in parts.policy.trainable()}
    batch.advantages[3] = np.nan
    with pytest.raises(NumericsError, match=r"weights were not changed.*" + str(tmp_path)):
        parts.learner.update(batch, np.arange(batch.num_sequences))
    assert all(torch.equal(p, before[name]) for name, p in parts.policy.trainable())


def test_an_update_without_a_usable_sequence_is_skipped_and_counted(parts: Components) -> None:
    _, batch = step_batch(parts)
    nothing = replace(batch, valid=np.zeros_like(batch.valid))
    before = {name: p.detach().clone() for name, p in parts.policy.trainable()}
    result = parts.learner.update(nothing, np.arange(batch.num_sequences))
    assert result.skipped and parts.learner.updates_done == 1
    assert all(torch.equal(p, before[name]) for name, p in parts.policy.trainable())


def test_zero_advantages_still_take_an_optimizer_step(parts: Components) -> None:
    _, batch = step_batch(parts)
    parts.learner.update(batch, np.arange(batch.num_sequences))
    before = {name: p.detach().clone() for name, p in parts.policy.trainable()}
    batch.advantages[:] = 0.0
    result = parts.learner.update(batch, np.arange(batch.num_sequences))
    assert result.grad_norm == 0.0 and not result.skipped
    moved = [not torch.equal(p, before[name]) for name, p in parts.policy.trainable()]
    assert any(moved)  # AdamW's momentum goes on, as where nothing is skipped


def test_masked_truncation_leaves_the_update_but_stays_in_the_mean(recipe: Recipe) -> None:
    masked = changed(recipe, rollout__mask_truncated_completions=True, rollout__max_completion_length=6)
    made = build(masked, functions=[first_digit])
    try:
        rollouts, batch = step_batch(made)
        cut = np.array([r.truncated for r in rollouts])
        assert cut.any() and not (batch.valid & cut).any()
    finally:
        made.close()


def test_resume_goes_on_to_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    whole = train(changed(recipe, run__output_dir=str(tmp_path / "a")), console=RunConsole(quiet=True))
    half = train(changed(recipe, run__output_dir=str(tmp_path / "b")), console=RunConsole(quiet=True))
    for gone in ("step_000004", "step_000003"):
        for path in sorted((half / "checkpoints" / gone).glob("*")):
            path.unlink()
    for path in (half / "model").glob("*"):
        path.unlink()
    (half / "model").rmdir()
    resume(half, console=RunConsole(quiet=True))
    assert (
        load_file(whole / "model" / "model.safetensors").keys()
        == load_file(half / "model" / "model.safetensors").keys()
    )
    for name in (
        "metrics.jsonl",
        "model/model.safetensors",
        "rollouts/step_000003.jsonl",
        "rollouts/eval_000004.jsonl",
    ):
        assert (whole / name).read_bytes() == (half / name).read_bytes(), name


def test_a_finished_run_has_nothing_to_resume(recipe: Recipe, tmp_path: Path) -> None:
    folder = train(changed(recipe, run__output_dir=str(tmp_path), run__steps=2), console=RunConsole(quiet=True))
    before = (folder / "metrics.jsonl").read_bytes()
    resume(folder, console=RunConsole(quiet=True))
    assert (folder / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="no run folder"):
        resume(tmp_path, console=RunConsole(quiet=True))


def test_the_reference_model_is_the_initial_policy(recipe: Recipe) -> None:
    made = build(changed(recipe, algorithm__beta=0.1), functions=[first_digit])
    try:
        run = make_run(made, recorder=Silent())
        first = train_step(run, 0)
        assert np.abs(first.updates[0].sequences["kl_reference_sum"]).max() < 1e-6
        second = train_step(run, 1)
        assert second.batch.reference_logprobs is not None
        assert np.abs(second.updates[0].sequences["kl_reference_sum"]).max() > 1e-6
    finally:
        made.close()


def test_lora_trains_the_adapter_alone(recipe: Recipe) -> None:
    made = build(changed(recipe, lora__rank=2, algorithm__beta=0.1), functions=[first_digit])
    try:
        assert all("lora_" in name for name, _ in made.policy.trainable())
        frozen = {n: p.detach().clone() for n, p in made.policy.model.named_parameters() if not p.requires_grad}
        run = make_run(made, recorder=Silent())
        train_step(run, 0)
        result = train_step(run, 1)
        assert all(torch.equal(p, frozen[n]) for n, p in made.policy.model.named_parameters() if n in frozen)
        assert result.batch.reference_logprobs is not None and made.learner.reference is None
        mismatch = result.batch.sampled_logprobs - result.batch.reference_logprobs
        assert np.abs(mismatch).max() > 1e-6  # the base under a disabled adapter is not the policy any more
    finally:
        made.close()


@pytest.mark.parametrize("mode", ["engine", "detach"])
def test_the_other_denominators(recipe: Recipe, mode: str) -> None:
    updates = {"optim__updates_per_step": 1} if mode == "detach" else {}
    made = build(changed(recipe, algorithm__proximal_logprobs=mode, **updates), functions=[first_digit])
    try:
        result = train_step(make_run(made, recorder=Silent()), 0)
        ratio = np.abs(result.updates[0].sequences["log_ratio_sum"]).max()
        assert ratio == 0.0 if mode == "detach" else 0.0 < ratio < 1e-4
    finally:
        made.close()


@pytest.mark.parametrize(
    "name",
    ["gspo_token", "grpo", "dapo", "dr_grpo", "cispo", "gmpo", "sapo", "luspo", "reinforce_pp_baseline", "minirl"],
)
def test_every_algorithm_takes_a_step(recipe: Recipe, name: str) -> None:
    extra = {"algorithm__loss_constant": 12.0} if name == "dr_grpo" else {}
    data = recipe.model_dump(mode="json")
    data["algorithm"] = {"name": name}
    made = build(changed(gspo.load_recipe(data), **extra), functions=[first_digit])
    try:
        before = {n: p.detach().clone() for n, p in made.policy.trainable()}
        result = train_step(make_run(made, recorder=Silent()), 0)
        assert all(np.isfinite(u.loss) and np.isfinite(u.grad_norm) for u in result.updates)
        assert any(not torch.equal(p, before[n]) for n, p in made.policy.trainable())
    finally:
        made.close()


def test_a_bfloat16_engine_holds_its_own_copy(recipe: Recipe) -> None:
    made = build(changed(recipe, rollout__engine_dtype="bfloat16"), functions=[first_digit])
    try:
        run = make_run(made, recorder=Silent())
        first = train_step(run, 0)
        second = train_step(run, 1)
        assert first.batch.proximal_logprobs is not None
        gap = np.nanmax(np.abs(first.batch.proximal_logprobs - first.batch.sampled_logprobs))
        assert 1e-5 < gap < 0.5
        assert {int(v) for rows in second.batch.rows for row in rows for v in row.versions} == {-1, 1}
    finally:
        made.close()


def test_the_loop_is_an_iterator_of_reports(parts: Components, tmp_path: Path) -> None:
    recorder = Silent()
    run = replace(make_run(parts, recorder=recorder), steps=2)
    assert [report.step for report in loop(run)] == [0, 1]
    assert recorder.steps[1].version == 2


def test_a_grader_that_always_fails_stops_the_run(recipe: Recipe) -> None:
    def broken(rollout: Rollout) -> float:
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"(?s)16 of 16 rollouts.*KeyError"):
        train(changed(recipe, eval__every=0), functions=[broken], console=RunConsole(quiet=True))


def test_python_rows_and_functions(recipe: Recipe, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 18)]
    folder = gspo.train(
        model=recipe.model.path,
        task=rows,
        rewards=[right, first_digit],
        overrides={
            "run.output_dir": str(tmp_path),
            "run.steps": 1,
            "rollout.prompts_per_step": 4,
            "rollout.num_generations": 2,
            "rollout.max_completion_length": 8,
            "grading.in_process": True,
        },
        quiet=True,
    )
    line = json.loads((folder / "rollouts" / "step_000000.jsonl").read_text().splitlines()[0])
    assert set(line["parts"]) == {"right", "first_digit"}


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        ({"model.path": "no/where/at/all", "coldstart": None}, ModelError, "does not exist"),
        ({"model.path": "", "coldstart": None}, ModelError, "model.path is empty"),
        ({"task.source": "", "coldstart": None}, ConfigError, "task.source is empty"),
        ({"rewards": []}, ConfigError, "no reward"),
        ({"rollout.max_completion_length": 48}, ConfigError, "at most 47"),
        ({"rollout.engine": "vllm"}, ConfigError, "local"),
        ({"task.max_prompt_length": 2, "task.overlong_prompts": "error"}, TaskError, "prompt"),
        ({"rollout.num_generations": 1}, ConfigError, "num_generations"),
        ({"rollout.prompts_per_step": 6}, ConfigError, "4 or 8"),
        ({"run.device": "cuda"}, ModelError, "available"),
    ],
)
def test_what_is_wrong_is_said_before_step_0(
    recipe: Recipe, overrides: dict[str, object], error: type[GspoError], says: str
) -> None:
    if overrides.get("run.device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(error, match=says):
        data = gspo.load_recipe(recipe, {k: v for k, v in overrides.items() if k != "coldstart"})
        if "coldstart" in overrides:
            data = data.model_copy(update={"coldstart": None})
        train(data, console=RunConsole(quiet=True))


def test_a_cold_start_is_not_mistaken_for_another(recipe: Recipe) -> None:
    assert coldstart(recipe) == Path(recipe.model.path)
    with pytest.raises(ConfigError, match="other settings"):
        coldstart(changed(recipe, coldstart__steps=13))


def test_an_unwritable_folder_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        train(changed(recipe, run__output_dir=str(tmp_path / "file" / "runs")), console=RunConsole(quiet=True))


def test_a_new_best_is_kept_and_the_earliest_wins_a_tie(parts: Components, tmp_path: Path) -> None:
    from gspo.evaluation import Evaluation
    from gspo.observe.trackers import build_trackers

    recorder = RunRecorder(tmp_path, parts.learner, build_trackers((), tmp_path, {}), save_every=0, keep=1)
    for step, accuracy in ((2, 0.5), (4, 0.7), (6, 0.7), (8, 0.2)):
        recorder.evaluation(step, Evaluation({"eval/accuracy": accuracy}, []))
    recorder.save(9, 9, last=True)
    assert recorder.best == (4, 0.7)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000004", "step_000009"]


def test_a_damaged_checkpoint_is_not_resumed(recipe: Recipe, tmp_path: Path) -> None:
    folder = train(changed(recipe, run__output_dir=str(tmp_path), run__steps=2), console=RunConsole(quiet=True))
    for path in (folder / "checkpoints").glob("*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        resume(folder, console=RunConsole(quiet=True))


def uneven(rewards, group_ids, valid, lengths, token_rewards):
    """An advantage that varies inside a sequence."""
    return torch.linspace(-1.0, 1.0, int(lengths.sum()), dtype=torch.float64)


def test_gspo_refuses_advantages_that_vary_inside_a_sequence(recipe: Recipe) -> None:
    varying = changed(recipe, algorithm__advantage=f"{__name__}:uneven")
    made = build(varying, functions=[first_digit])
    try:
        with pytest.raises(ConfigError, match="gspo_token"):
            train_step(make_run(made, recorder=Silent()), 0)
    finally:
        made.close()
    data = varying.model_dump(mode="json")
    data["algorithm"]["name"] = "gspo_token"
    made = build(gspo.load_recipe(data), functions=[first_digit])
    try:
        result = train_step(make_run(made, recorder=Silent()), 0)
        assert np.unique(result.batch.advantages).size > 16
    finally:
        made.close()


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_counts_as_out_of_memory(kind: str) -> None:
    from gspo.policy.learner import out_of_memory

    if kind == "cuda":
        assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    else:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(2**55, dtype=torch.float32)
        assert out_of_memory(raised.value)
    assert not out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm.tau_positive": 2.0},
        {"rewards": []},
        {"rollout.prompts_per_step": 65},
        {"task.size": 10**6},
        {"run.output_dir": __file__ + "/runs"},
    ],
)
def test_nothing_is_trained_before_what_can_be_checked(
    recipe: Recipe, tmp_path: Path, overrides: dict[str, object]
) -> None:
    fresh = tmp_path / "model"
    with pytest.raises(GspoError):
        train(gspo.load_recipe(recipe, {**overrides, "model.path": str(fresh)}), console=RunConsole(quiet=True))
    assert not fresh.exists()
