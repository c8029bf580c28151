"""Small cases of rewards, resuming, checkpoints and configuration that other trainers got wrong; and bad input.

Everything goes through a whole run or the command line. Named by number where the case has one.
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

import gspo
from case_helpers import Recorded, components, count_digits, tiny_recipe
from docs_helpers import make_model
from gspo.cli.main import main
from gspo.errors import CheckpointError, ConfigError, ModelError, RewardError, TaskError
from gspo.evaluation import Evaluation
from gspo.observe.trackers import build_trackers
from gspo.recipe import dump_recipe
from gspo.training import checkpoint
from gspo.training.console import RunConsole
from gspo.training.loop import loop
from gspo.training.record import RunRecorder
from gspo.training.run import evaluate_recipe, make_run, resume, train
from gspo.types import Rollout

QUIET = RunConsole(quiet=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_model(folder / "model")
    return folder


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def few_digits(rollout: Rollout) -> float:
    """The opposite of ``count_digits``."""
    return -count_digits(rollout)


# --- rewards ---------------------------------------------------------------------------------------------


def four(values: Any) -> Any:
    """A function of TRL's signature that returns this whatever it is asked."""

    def trl_reward(prompts: list, completions: list, **columns: Any) -> Any:
        return values(len(completions))

    return trl_reward


WRONG_SHAPES = {
    "three_short": (lambda n: [0.0] * (n - 3), "5 values for 8 completions: they part at index 5"),
    "a_tuple": (lambda n: (0.0,) * n, "a tuple"),
    "a_dict": (lambda n: {"reward": 1.0}, "a dict"),
    "text": (lambda n: ["1"] * n, "at index 0"),
    "a_list_inside": (lambda n: [0.0, [1.0]] + [0.0] * (n - 2), "at index 1"),
}
three_short, a_tuple, a_dict, text, a_list_inside = (four(make) for make, _ in WRONG_SHAPES.values())


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_r02_a_wrong_shape_is_an_error_before_any_update(root: Path, tmp_path: Path, name: str) -> None:
    reward = {"function": f"{__name__}:{name}", "signature": "trl"}
    recipe = tiny_recipe(root, rewards=[reward], run__output_dir=str(tmp_path))
    with pytest.raises(RewardError, match=rf"(?s)(trl_reward|{name}).*{WRONG_SHAPES[name][1]}"):
        train(recipe, console=QUIET)
    assert not (tmp_path / "tiny" / "metrics.jsonl").exists()


def of_every_kind(rollout: Rollout) -> Any:
    return (1, 0.5, True, np.float32(2.0), Fraction(1, 4))[len(rollout.text) % 5]


def test_r01_every_kind_of_number_becomes_a_float(root: Path, tmp_path: Path) -> None:
    folder = train(tiny_recipe(root, run__output_dir=str(tmp_path)), functions=[of_every_kind], console=QUIET)
    lines = [json.loads(line) for line in (folder / "rollouts" / "step_000000.jsonl").read_text().splitlines()]
    assert {type(line["reward"]) for line in lines} == {float}


def test_r04_one_function_that_raises_costs_one_rollout(root: Path) -> None:
    def raises_once(rollout: Rollout) -> float:
        if rollout.prompt.id == victim and rollout.index == 1:
            raise KeyError("column")
        return count_digits(rollout)

    made = components(tiny_recipe(root), functions=[raises_once])
    victim = made.task.batch(0, 4, 0)[2].id
    try:
        recorder = Recorded()
        next(iter(loop(make_run(made, recorder=recorder))))
        batch = recorder.steps[0].batch
        assert batch.valid.tolist() == [True] * 5 + [False] + [True] * 2
        failed = recorder.steps[0].groups[2].rollouts[1]
        assert failed.reward is None and "KeyError" in (failed.grading_error or "")
    finally:
        made.close()


def test_r11_no_reward_is_a_clear_error(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no reward.*\[\[rewards\]\]"):
        train(tiny_recipe(root, rewards=[]), console=QUIET)


def test_r12_each_completion_is_graded_once(root: Path) -> None:
    calls: Counter[tuple[str, int]] = Counter()

    def counting(rollout: Rollout) -> float:
        calls[rollout.prompt.id, rollout.index] += 1
        return float(len(calls) % 2)

    made = components(tiny_recipe(root), functions=[counting])
    try:
        list(loop(make_run(made, recorder=Recorded())))  # two steps of four prompts: the task of eight once
        assert len(calls) == 16 and set(calls.values()) == {1}
    finally:
        made.close()


# --- data order, resuming, checkpoints -------------------------------------------------------------------


def test_s08_each_prompt_is_sampled_num_generations_times_an_epoch(root: Path) -> None:
    recipe = tiny_recipe(
        root, task__size=9, run__steps=3, rollout__prompts_per_step=3, optim__updates_per_step=3
    )  # fmt: skip
    made = components(recipe)
    try:
        recorder = Recorded()
        list(loop(make_run(made, recorder=recorder)))
        sampled = Counter(r.prompt.id for s in recorder.steps for g in s.groups for r in g.rollouts)
        assert len(sampled) == 9 and set(sampled.values()) == {2}
        trained = [np.sort(np.concatenate([u.sequences["sequence"] for u in s.updates])) for s in recorder.steps]
        assert all(t.tolist() == [0, 1, 2, 3, 4, 5] for t in trained)
    finally:
        made.close()
    with pytest.raises(ConfigError, match=r"updates_per_step 1 or 3, or prompts_per_step 4"):
        tiny_recipe(root, rollout__prompts_per_step=3, optim__updates_per_step=4)


def test_s01_a_run_resumed_at_the_end_of_an_epoch_takes_the_next(root: Path, tmp_path: Path) -> None:
    """Two steps an epoch, two epochs; what came after the first epoch's checkpoint is lost."""
    recipe = tiny_recipe(root, run__output_dir=str(tmp_path), run__steps=4, run__keep_checkpoints=4)
    folder = train(recipe, console=QUIET)
    whole = (folder / "metrics.jsonl").read_bytes()
    lose(folder / "model", *(folder / "checkpoints" / f"step_{step:06d}" for step in (3, 4)))
    assert not (folder / "checkpoints" / "step_000004").exists()
    resume(folder, console=QUIET)
    assert (folder / "checkpoints" / "step_000004").is_dir() and (folder / "metrics.jsonl").read_bytes() == whole


def lose(*folders: Path) -> None:
    for folder in folders:
        for path in folder.glob("*"):
            path.unlink()
        if folder.exists():
            folder.rmdir()


def test_s05_a_save_that_was_killed_costs_one_checkpoint(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(
        tiny_recipe(root, run__output_dir=str(tmp_path), run__steps=3, run__keep_checkpoints=3), console=QUIET
    )
    whole = (folder / "model" / "model.safetensors").read_bytes()
    lose(folder / "model")
    damaged = folder / "checkpoints" / "step_000003" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    resume(folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "skipped a damaged checkpoint" in said and "at step 2 of 3" in said
    assert (folder / "model" / "model.safetensors").read_bytes() == whole


def test_s06_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model.w": np_tensor()}
    checkpoint.save(tmp_path, 1, tensors, {"best": None})

    def full(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    for step in (1, 2):  # a new one, and one that would replace it
        with pytest.raises(CheckpointError, match=r"No space left.*MB free.*intact"):
            checkpoint.save(tmp_path, step, tensors, {"best": None})
    found, problems = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 1 and problems == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def np_tensor() -> Any:
    import torch

    return torch.arange(4.0)


def test_s07_a_checkpoint_holds_no_code(root: Path, tmp_path: Path) -> None:
    folder = train(tiny_recipe(root, run__output_dir=str(tmp_path), run__steps=1), console=QUIET)
    files = {p.suffix for p in (folder / "checkpoints").rglob("*") if p.is_file()}
    assert files == {".safetensors", ".json"}
    assert not [p for p in folder.rglob("*") if p.suffix in (".pt", ".bin", ".pkl", ".pth")]


def run_recorder(root: Path, folder: Path) -> tuple[RunRecorder, Any]:
    made = components(tiny_recipe(root))
    return RunRecorder(folder, made.learner, build_trackers((), folder, {}), save_every=1, keep=1), made


@pytest.mark.parametrize(("accuracies", "best"), [([0.1, 0.5, 0.9], 2), ([0.1, 0.5, 0.5], 1), ([0.3, 0.1, 0.2], 0)])
def test_the_newest_checkpoint_names_the_best(root: Path, tmp_path: Path, accuracies: list[float], best: int) -> None:
    """Also where the step was saved before it was evaluated, as at the end of a run."""
    recorder, made = run_recorder(root, tmp_path)
    try:
        for step, accuracy in enumerate(accuracies):
            if step:
                recorder.save(step, step, last=step == 2)
            recorder.evaluation(step, Evaluation({"eval/accuracy": accuracy}, []))
        found, _ = checkpoint.newest(tmp_path / "checkpoints")
        assert found is not None and found.step == 2 and found.state["best"][0] == best
        assert best in (0, 2) or (tmp_path / "checkpoints" / f"step_{best:06d}").is_dir()
    finally:
        recorder.trackers.close()
        made.close()


@pytest.mark.parametrize(("reward", "best_is_last"), [("count_digits", True), ("few_digits", False)])
def test_gspo_eval_of_a_run_takes_its_best_checkpoint(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: str, best_is_last: bool
) -> None:
    """Trained for digits: by digits the last step is the best, by their opposite the initial weights are."""
    rewards = [{"function": "case_helpers:count_digits"}, {"function": f"{__name__}:few_digits", "weight": 0.0}]
    recipe = tiny_recipe(
        root, rewards=rewards, run__output_dir=str(tmp_path), run__steps=3, optim__learning_rate=0.02,
        rollout__prompts_per_step=8, rollout__num_generations=8, eval__every=1, eval__reward=reward,
        eval__task={"split": "test", "size": 8}, eval__num_samples=4, eval__temperature=1.0,
    )  # fmt: skip
    folder = train(recipe, console=QUIET)
    accuracies = [metrics["eval/accuracy"] for metrics in metrics_of(folder) if "eval/accuracy" in metrics]
    assert len(accuracies) == 4 and accuracies.index(max(accuracies)) == (3 if best_is_last else 0)
    assert main(["eval", str(folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("eval/accuracy "))
    assert float(line.split()[1]) == pytest.approx(max(accuracies), rel=1e-5)
    assert evaluate_recipe(recipe, checkpoint_of=folder).metrics["eval/accuracy"] == max(accuracies)


def test_gspo_eval_before_the_cold_start_says_what_makes_it(root: Path, tmp_path: Path) -> None:
    recipe = gspo.load_recipe(tiny_recipe(root, coldstart={"steps": 1}), {"model.path": str(tmp_path / "model")})
    with pytest.raises(ConfigError, match="gspo coldstart"):
        evaluate_recipe(recipe)


# --- what is refused before step 0, as the command line says it ------------------------------------------


def told(recipe: gspo.Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What ``gspo train`` answers to a recipe that it refuses; nothing of a run may be left."""
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(recipe))
    assert main(["train", str(file), "--run.output_dir", str(tmp_path / "out"), *words]) in (1, 2)
    assert not (tmp_path / "out").exists()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_rows_with_unusable_answers_are_listed_with_their_lines(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["4", "", "see figure", "5", None, "6"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": a}) + "\n" for n, a in enumerate(answers)))
    said = told(
        tiny_recipe(root, rewards=[{"function": "math"}], task__source=str(data), task__split=None, task__size=None),
        tmp_path,
        capsys,
    )
    assert "3 of 6 rows cannot be used" in said and 'bad_rows = "drop"' in said
    assert "line 2: no answer" in said and "line 5: no answer" in said
    assert "line 3: answer 'see figure' cannot be graded" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rollout.num_generations", "1"], ["num_generations = 1", "at least 2"]),  # S10
        (["--optim.updates_per_step", "3"], ["does not divide", "updates_per_step 2 or 4", "prompts_per_step 3 or 6"]),
        (["--algorithm.betta", "0.1"], ["betta", "beta"]),  # S13
        (["--algorithm.tau_positive", "1.0"], ["tau_positive is not read", "sapo"]),
        (["--lora.alpha", "8"], ["lora.alpha", "lora.rank"]),
        (["--eval.num_samples", "4", "--eval.task.split", "test"], ["eval.num_samples = 4", "eval.temperature"]),
        (["--rollout.prompts_per_step", "9"], ["prompts_per_step = 9", "1 to 8"]),
        (["--task.max_prompt_length", "1"], ["max_prompt_length", "longest has"]),
        (["--per_device_train_batch_size", "8"], ["per_device_train_batch_size", "prompts_per_step"]),
        (["--task.system_prompt", "Add."], ["chat template", "model.chat_template"]),
        (["--model.path", "no/such/folder"], ["no/such/folder", "does not exist"]),
        (["--rollout.max_completion_length", "600"], ["600", "at most 511"]),
    ],
)
def test_what_the_command_line_says(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: list[str]
) -> None:
    said = told(tiny_recipe(root), tmp_path, capsys, *words)
    assert all(part in said for part in says), said


def test_too_few_prompts_after_the_long_ones_are_dropped(root: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * n, "answer": "1"} for n in (2, 3, 4, 50)]
    recipe = tiny_recipe(root, run__output_dir=str(tmp_path / "out"), task__max_prompt_length=10)
    with pytest.raises(TaskError, match=r"prompts_per_step = 4.*1 to 3"):
        train(recipe, rows=rows, functions=[count_digits], console=QUIET)
    assert not (tmp_path / "out").exists()


def test_a_held_out_part_that_no_reward_has(root: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(root, run__output_dir=str(tmp_path), eval__every=1, eval__task={"split": "test", "size": 2},
                         eval__reward="accuracy")  # fmt: skip
    with pytest.raises(ConfigError, match=r'eval.reward = "accuracy".*there are: .*exact'):
        train(recipe, console=QUIET)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"base": "some/model", "hidden_size": 64}, "hidden_size = 64 is not read.*base"),
        ({"num_experts": 4}, 'num_experts = 4 is not read.*"qwen3_moe"'),
    ],
)
def test_options_of_a_cold_start_that_nobody_reads(root: Path, section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(tiny_recipe(root, coldstart=section), console=QUIET)


@pytest.mark.parametrize("option", ["run.output_dir", "model.path"])
def test_a_folder_that_cannot_be_made_is_named_before_a_cold_start(root: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("x")
    cold = {"model.path": str(tmp_path / "model"), option: str(tmp_path / "file" / "below")}
    recipe = gspo.load_recipe(tiny_recipe(root, coldstart={"steps": 1}), cold)
    with pytest.raises(ConfigError, match=rf"{option} = .*cannot be written.*file"):
        train(recipe, console=QUIET)
    assert not (tmp_path / "model").exists()


def test_messages_without_a_chat_template(root: Path, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    rows = [{"messages": turns, "answer": str(n)} for n in range(4)]
    with pytest.raises(ModelError, match="needs a chat template and the tokenizer has none"):
        train(tiny_recipe(root, run__output_dir=str(tmp_path / "out")), rows=rows, console=QUIET)
    assert not (tmp_path / "out").exists()


def test_s12_notes_reach_the_terminal(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(root, run__output_dir=str(tmp_path), run__steps=1, algorithm__epsilon=0.2)
    train(recipe)
    said = " ".join(capsys.readouterr().out.split())
    assert "clips nothing" in said and "the clip is inactive" in said


@pytest.mark.parametrize(
    "overrides",
    [
        {"optim.schedule": "cosine", "optim.warmup_updates": 3, "optim.minibatches": "rollouts"},
        {"lora.rank": 2, "algorithm.beta": 0.1, "rollout.engine_dtype": "bfloat16"},
        {"algorithm.beta": 0.1, "rollout.mask_truncated_completions": True, "eval.every": 1},
    ],
)
def test_s02_six_steps_are_three_and_three(root: Path, tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Weights, optimizer, learning rate, data order, rollouts and metrics are the same bytes."""
    held_out = {"eval.task": {"split": "test", "size": 3}, "rewards": [{"function": "case_helpers:count_digits"}]}
    plain = tiny_recipe(root, run__steps=6, run__save_every=3, optim__updates_per_step=2, run__keep_checkpoints=9)
    found = []
    for name in ("whole", "halves"):
        out = {"run.output_dir": str(tmp_path / name)}
        found.append(train(gspo.load_recipe(plain, {**held_out, **overrides, **out}), console=QUIET))
    whole, halves = found
    lose(halves / "model", halves / "checkpoints" / "step_000006")
    for step in (3, 4, 5):
        (halves / "rollouts" / f"step_{step:06d}.jsonl").unlink()
    resume(halves, console=QUIET)
    names = sorted(
        str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file() and p.parent.name != "tensorboard"
    )
    compared = [n for n in names if n.startswith(("metrics", "rollouts", "model", "checkpoints"))]
    assert len(compared) > 10
    different = [n for n in compared if (whole / n).read_bytes() != (halves / n).read_bytes()]
    assert different == []
