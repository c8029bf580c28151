"""What a second look at whole runs found: seeds, resuming, full disks, options that nobody reads."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

import gspo
from gspo.config import Recipe
from gspo.errors import CheckpointError, ConfigError, ModelError
from gspo.observe.trackers import build_trackers
from gspo.policy.model import load_policy
from gspo.studies.calibrate import calibrate
from gspo.training import checkpoint
from gspo.training.build import build, load_options
from gspo.training.coldstart import coldstart
from gspo.training.console import RunConsole
from gspo.training.preflight import check_recipe, memory_estimate
from gspo.training.record import RunRecorder
from gspo.training.resolve import load_estimator, notes_on_learning, refuse_unread
from gspo.training.run import restore, resume, train
from gspo.types import Rollout

QUIET = RunConsole(quiet=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose cold start is done: 2 batches."""
    root = tmp_path_factory.mktemp("review")
    text = {
        "run": {"name": "tiny", "output_dir": str(root / "runs"), "steps": 2, "save_every": 1, "threads": 1},
        "model": {"path": str(root / "model")},
        "coldstart": {
            "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_length": 48, "steps": 2, "batch_size": 8,
            "task": {"size": 50},
        },
        "task": {"source": "addition", "split": "train", "size": 32},
        "rewards": [{"function": "exact", "options": {"marker": "#"}}],
        "grading": {"in_process": True},
        "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8},
        "optim": {"learning_rate": 1e-3, "updates_per_step": 2},
    }  # fmt: skip
    loaded = gspo.load_recipe(text)
    coldstart(loaded)
    return loaded


def changed(recipe: Recipe, **overrides: object) -> Recipe:
    return gspo.load_recipe(recipe, {name.replace("__", "."): value for name, value in overrides.items()})


def digits(rollout: Rollout) -> float:
    """A reward that untrained models earn now and then."""
    return float(sum(c.isdigit() for c in rollout.text) % 3)


def adapter(recipe: Recipe) -> torch.Tensor:
    policy = load_policy(load_options(recipe))
    return torch.cat([p.detach().flatten() for _, p in policy.trainable()])


def test_adapters_start_from_the_seed(recipe: Recipe) -> None:
    wanted = changed(recipe, lora__rank=2)
    torch.manual_seed(1)
    first, after = adapter(wanted), torch.rand(1)
    torch.manual_seed(2)
    assert torch.equal(first, adapter(wanted)) and first.any()
    torch.manual_seed(1)
    assert after == torch.rand(1), "the global generator moved"
    assert not torch.equal(first, adapter(changed(wanted, run__seed=1)))


def test_a_run_of_python_objects_says_that_it_cannot_be_resumed(recipe: Recipe, tmp_path: Path) -> None:
    """Else it would go on with the recipe's own task and rewards."""
    folder = train(changed(recipe, run__output_dir=str(tmp_path)), functions=[digits], console=QUIET)
    shutil.rmtree(folder / "model")
    with pytest.raises(CheckpointError, match=r"Python objects \(functions\)"):
        resume(folder, console=QUIET)


def test_a_run_is_not_resumed_on_other_data(recipe: Recipe, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"source": str(data)}
    folder = train(
        changed(recipe, run__output_dir=str(tmp_path), task=task, coldstart=None), functions=(), console=QUIET
    )
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:-1], {"prompt": "9+1=", "answer": "10"}]))
    with pytest.raises(CheckpointError, match="no longer those"):
        resume(folder, console=QUIET)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (resume(folder, console=QUIET) / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_of_another_policy_is_refused_in_words(recipe: Recipe, tmp_path: Path, rank: int) -> None:
    folder = train(changed(recipe, run__output_dir=str(tmp_path), lora__rank=2), console=QUIET)
    shutil.rmtree(folder / "model")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rank = 2", f"rank = {rank}"))
    with pytest.raises(CheckpointError, match="does not fit the policy"):
        resume(folder, console=QUIET)


def test_fewer_adapters_than_in_the_checkpoint_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    folder = train(changed(recipe, run__output_dir=str(tmp_path), lora__rank=2), console=QUIET)
    start, _ = checkpoint.newest(folder / "checkpoints")
    assert start is not None
    made = build(changed(recipe, lora__rank=2, lora__target_modules=["q_proj"]))
    try:
        with pytest.raises(CheckpointError, match="is not trained here"):
            restore(made, start)
    finally:
        made.close()


def test_a_halved_token_budget_survives_a_resume(recipe: Recipe, tmp_path: Path) -> None:
    made = build(recipe)
    try:
        made.learner.max_tokens = 64
        recorder = RunRecorder(tmp_path, made.learner, build_trackers((), tmp_path, {}), save_every=1, keep=1)
        recorder.save(1, 1, last=False)
        recorder.trackers.close()
        made.learner.max_tokens = 512
        restore(made, checkpoint.load(tmp_path / "checkpoints" / "step_000001"))
        assert made.learner.max_tokens == 64 and made.engine.version == 1
    finally:
        made.close()


def test_a_disk_that_fills_while_tensors_are_written(tmp_path: Path) -> None:
    """safetensors has an error of its own, which is no OSError."""
    checkpoint.save(tmp_path, 1, {"model.w": torch.zeros(4)}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*intact"):
            checkpoint.save(tmp_path, 2, {"model.w": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_direct_mode_reports_no_mismatch_of_its_own_making(recipe: Recipe, tmp_path: Path) -> None:
    """The ratio starts from the engine's log-probs: their distance from themselves says nothing."""
    direct = changed(recipe, run__output_dir=str(tmp_path), run__steps=1, algorithm__proximal_logprobs="engine")
    direct = changed(direct, rollout__engine_dtype="bfloat16")
    folder = train(direct, console=QUIET)
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert not [name for name in metrics if name.startswith(("sampling/sampling_logp_difference", "sampling/offset"))]
    assert metrics["ratio/noise_floor"] > 1e-5, "a bfloat16 engine disagrees"
    assert metrics["sampling/missing_ratio"] == 0.0


@pytest.mark.parametrize("mode", ["recompute", "engine"])
def test_the_check_of_a_recipe_measures_the_mismatch_in_every_mode(recipe: Recipe, mode: str) -> None:
    wanted = changed(recipe, algorithm__proximal_logprobs=mode, rollout__engine_dtype="bfloat16")
    assert 1e-5 < check_recipe(wanted).mismatch_max < 0.5


def test_calibrating_a_range_that_is_not_of_log_s_is_refused_before_a_cold_start(recipe: Recipe) -> None:
    nowhere = changed(recipe, model__path="/proc/nowhere")  # a cold start would fail there
    with pytest.raises(ConfigError, match="gmpo does not clip the sequence ratio"):
        calibrate(changed(nowhere, algorithm__name="gmpo"))
    with pytest.raises(ConfigError, match="clips single tokens"):
        calibrate(changed(nowhere, algorithm__name="grpo"))


def test_calibrating_without_a_graded_rollout_says_why(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"no rollout of batch 1 can be learned from.*failed: .*"):
        calibrate(changed(recipe, rewards=[{"function": "operator:index"}]))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"eval.temperature": 0.6}, r"eval\.temperature = 0\.6 is not read: there is no held-out task"),
        ({"eval.reward": "exact"}, r"eval\.reward = 'exact' is not read"),
        ({"grading.timeout_s": 3.0}, r"grading\.timeout_s = 3\.0 is not read: in_process"),
    ],
)
def test_options_that_nobody_reads(recipe: Recipe, overrides: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_unread(gspo.load_recipe(recipe, overrides))
    refuse_unread(gspo.load_recipe(recipe, {**overrides, "eval.task": {"size": 4}, "grading.in_process": False}))


def test_what_keeps_the_weights_from_moving_is_noted(recipe: Recipe) -> None:
    assert notes_on_learning(changed(recipe, optim__warmup_updates=4)) == ()  # 2 steps of 2 updates
    (note,) = notes_on_learning(changed(recipe, optim__warmup_updates=16))
    assert "the run's 4 updates" in note and "ends at 0.00025" in note
    (note,) = notes_on_learning(changed(recipe, model__dtype="bfloat16"))
    assert "lost in the rounding" in note
    assert notes_on_learning(changed(recipe, model__dtype="bfloat16", lora__rank=2)) == ()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"optim.betas": [0.9, 1.5]}, "below 1"),
        ({"optim.betas": [-0.1, 0.9]}, "at least 0"),
        ({"rollout.stop": ["\n", ""]}, "empty string"),
    ],
)
def test_numbers_and_texts_that_cannot_be_meant(recipe: Recipe, overrides: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gspo.load_recipe(recipe, overrides)


def test_an_estimator_that_takes_other_arguments_is_refused_before_a_cold_start(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"f\(rewards, group_ids, valid, lengths, token_rewards\)"):
        train(changed(recipe, model__path="/proc/nowhere", algorithm__advantage="os:getcwd"), console=QUIET)
    assert callable(load_estimator("gspo.algorithms.advantages:reinforce_pp_advantages"))


def test_attention_kernels_that_are_not_installed(recipe: Recipe) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("they are installed")
    with pytest.raises(ModelError, match=r"model\.attn_implementation"):
        load_policy(load_options(changed(recipe, model__attn_implementation="flash_attention_2")))


def test_adapters_are_not_forgotten_where_the_policy_is_an_object(recipe: Recipe, tmp_path: Path) -> None:
    wanted = changed(recipe, lora__rank=2, run__output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"lora\.rank = 2 is not read"):
        train(wanted, policy=load_policy(load_options(recipe)), console=QUIET)
    assert not list(tmp_path.iterdir())
    folder = train(changed(wanted, run__steps=1), policy=load_policy(load_options(wanted)), console=QUIET)
    assert (folder / "model" / "adapter_config.json").is_file()


def test_the_memory_estimate_counts_the_engines_copy(recipe: Recipe) -> None:
    for dtype, share in (("auto", 0.0), ("bfloat16", 0.5)):
        made = build(changed(recipe, rollout__engine_dtype=dtype))
        try:
            estimate = memory_estimate(made)
            assert estimate.get("engine's copy", 0.0) == pytest.approx(share * estimate["weights"])
        finally:
            made.close()


def test_a_model_that_cannot_end_is_noted(recipe: Recipe) -> None:
    made = build(recipe)
    try:
        made.policy.hf.generation_config.eos_token_id = None
        made.policy.tokenizer.eos_token = None
        again = build(recipe, policy=made.policy)
        assert any("end-of-sequence" in note for note in again.notes)
        again.close()
        stopped = build(gspo.load_recipe(recipe, {"rollout.stop": [";"]}), policy=made.policy)
        assert not any("end-of-sequence" in note for note in stopped.notes)
        stopped.close()
    finally:
        made.close()


def test_more_threads_than_any_machine_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.threads"):
        gspo.load_recipe({"run": {"threads": 100_000}})


def test_prompts_without_an_answer_are_noted(recipe: Recipe) -> None:
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 14)] + [{"prompt": "1+1="}]
    made = build(recipe, rows=rows, functions=[digits_or_zero])
    try:
        assert any("1 of 5 prompts have no reference answer" in note for note in made.notes)
    finally:
        made.close()


def digits_or_zero(rollout: Rollout) -> float:
    """A reward that reads no answer."""
    return float(any(c.isdigit() for c in rollout.text))


def test_one_reward_need_not_be_a_list(recipe: Recipe, tmp_path: Path) -> None:
    overrides = {"run.output_dir": str(tmp_path), "run.steps": 1}
    folder = gspo.train(recipe, rewards=digits_or_zero, overrides=overrides, quiet=True)
    line = json.loads((folder / "rollouts" / "step_000000.jsonl").read_text().splitlines()[0])
    assert set(line["parts"]) == {"digits_or_zero"}
