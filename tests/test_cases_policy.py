"""Small cases of log-probs, dropout, tokens, masks and truncation that other trainers got wrong, end to end.

Named by number; those of the engine alone are in ``test_engines_*``, of encoding in ``test_tasks_encoding``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gspo
from case_helpers import components, groups_of, rollout, scripted, tiny_recipe
from docs_helpers import make_model
from engine_helpers import build as build_model
from gspo.engines.scripted import Reply
from gspo.errors import ConfigError, ModelError, NumericsError
from gspo.observe.metrics import rollout_metrics
from gspo.policy.learner import Learner, LearnerOptions, make_batch
from gspo.policy.model import LoadOptions, Policy, load_policy, silence_noise
from gspo.policy.packing import collate
from gspo.rollouts.collector import token_row
from gspo.training.build import Components
from gspo.training.loop import train_step
from gspo.types import Completion, FinishReason, Group, Request, Rollout, Sampling, TokenRow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_model(folder / "model")
    return folder


@pytest.fixture
def parts(root: Path) -> Iterator[Components]:
    made = components(tiny_recipe(root))
    yield made
    made.close()


def options() -> LearnerOptions:
    return LearnerOptions(algorithm=gspo.algorithms.CATALOG["gspo"], total_updates=4)


def completed(prompt: list[int], sampled: list[int], reason: FinishReason = FinishReason.STOP) -> TokenRow:
    request = Request("r", np.array(prompt), Sampling(), seed=0)
    count = len(sampled)
    ids, versions = np.array(sampled, dtype=np.int64), np.zeros(count, dtype=np.int64)
    return token_row(request, Completion("r", ids, np.full(count, -1.0, np.float32), versions, reason))


def test_p03_nothing_truncates_the_distribution(root: Path) -> None:
    for name in ("rollout.top_p", "rollout.top_k", "rollout.min_p"):
        with pytest.raises(ConfigError, match=rf"{name}.*whole"):
            gspo.load_recipe(tiny_recipe(root), {name: 0.9})


def test_p04_dropout_of_a_model_given_in_train_mode_is_off() -> None:
    """The same weights twice are the same numbers: ratio 1, KL 0."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
    ).train()
    policy = Policy(model, None)
    batch = collate([completed([2, 3], [4, 5, 6])], CPU)
    noisy = policy(batch)[0] - policy(batch)[0]
    assert noisy.abs().max() > 0  # GPT-2's dropout of 0.1 is there
    Learner(policy, options())
    assert torch.equal(policy(batch)[0], policy(batch)[0])


def checkpointed_gpt2(*, silent: bool) -> Policy:
    config = GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
    if silent:
        silence_noise(config)
    model = GPT2LMHeadModel(config).train()
    new = "activation_checkpointing_enable" in dir(model)
    (model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable)()
    return Policy(model, None)


def test_p04_activation_checkpointing_with_dropout_is_refused() -> None:
    Learner(checkpointed_gpt2(silent=True), options())
    with pytest.raises(ModelError, match="pdrop"):
        Learner(checkpointed_gpt2(silent=False), options())


def test_activation_checkpointing_changes_no_gradient(root: Path) -> None:
    found = []
    for on in (False, True):
        made = components(tiny_recipe(root, model__gradient_checkpointing=on))
        try:
            run = scripted(made, lambda request, version: Reply([5, 6, 7, 8][: 1 + request.seed % 4]))
            rollouts = [r for group in groups_of(run) for r in group.rollouts]
            batch = made.learner.score(rollouts)
            batch.advantages[:] = np.linspace(-1, 1, len(batch.advantages))
            made.learner.options = replace(made.learner.options, algorithm=gspo.algorithms.CATALOG["gspo_token"])
            made.learner._accumulate(batch, np.flatnonzero(batch.valid))
            assert made.policy.training is on
            found.append(torch.cat([p.grad.flatten() for _, p in made.policy.trainable() if p.grad is not None]))
        finally:
            made.close()
    assert found[0].norm() > 0 and torch.allclose(found[0], found[1], atol=1e-7)


def test_scoring_that_runs_out_of_memory_is_repeated_in_smaller_parts(
    parts: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scripted(parts, lambda request, version: Reply([5, 6, 7, 8][: 1 + request.seed % 4]))
    rollouts = [r for group in groups_of(run) for r in group.rollouts]
    plain = parts.learner.score(rollouts)
    forward = Policy.forward

    def small_memory(self, batch, **options):  # type: ignore[no-untyped-def]
        if len(batch.token_ids) > 3:
            raise torch.OutOfMemoryError("no memory for this many rows")
        return forward(self, batch, **options)

    monkeypatch.setattr(Policy, "forward", small_memory)
    again = parts.learner.score(rollouts)
    assert again.proximal_logprobs is not None and plain.proximal_logprobs is not None
    assert np.allclose(again.proximal_logprobs, plain.proximal_logprobs, atol=1e-6)
    result = parts.learner.update(again, np.arange(8))
    assert any("out of memory" in note for note in result.notes)
    assert parts.learner.update(again, np.arange(8)).notes == ()


def test_p05_padding_moves_no_completion(parts: Components) -> None:
    """Absolute positions: a row alone, and beside a longer one that has it padded."""
    policy = Policy(build_model("gpt2"), None)
    short, long = completed([2, 3], [4, 5]), completed([7] * 9, [8, 9])
    alone, _ = policy(collate([short], CPU))
    beside, _ = policy(collate([long, short], CPU))
    assert torch.allclose(alone, beside[2:], atol=1e-5)


def test_p09_nothing_trainable(root: Path) -> None:
    frozen = load_policy(LoadOptions(path=str(root / "model"), device="cpu"))
    frozen.requires_grad_(False)
    with pytest.raises(ModelError, match=r"0 trainable parameters.*lora\.rank"):
        gspo.train(tiny_recipe(root), model=frozen, quiet=True)
    assert not (root / "runs").exists()


def test_p14_a_nan_in_one_gradient_stops_before_weights_and_engine(parts: Components, tmp_path: Path) -> None:
    run = scripted(parts, lambda request, version: Reply([5 + request.seed % 10]))
    parts.learner.dump_with(lambda arrays: str(tmp_path / "dump"))
    before = {name: p.detach().clone() for name, p in parts.policy.trainable()}
    poisoned = parts.policy.trainable()[0][1]
    hook = poisoned.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NumericsError, match=r"gradient norm nan.*not changed.*dump"):
        train_step(run, 0)
    hook.remove()
    assert all(torch.equal(p, before[name]) for name, p in parts.policy.trainable())
    assert run.engine.loads == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("eos", [(7, 9), (9,)])
def test_t01_t02_the_first_end_of_sequence_is_trained_and_no_more(parts: Components, eos: tuple[int, ...]) -> None:
    run = scripted(parts, lambda request, version: Reply([5, 6, 9, 9, 9]))
    plan = replace(run.plan, sampling=replace(run.plan.sampling, eos_token_ids=eos))
    rollouts = run.collector.collect(run.task.prompts[:1], plan, step=0)[0].rollouts
    assert [r.num_scored for r in rollouts] == [3, 3]
    assert not rollouts[0].truncated and rollouts[0].finish_reason is FinishReason.STOP
    micro = collate([rollouts[0].rows[0], completed([4] * 20, [5])], CPU)
    assert int(micro.scored[0].sum()) == 3
    assert micro.token_ids[0, micro.scored[0]].tolist() == [5, 6, 9]


def test_t03_what_is_attended_to_follows_from_lengths_not_from_ids() -> None:
    """The id 0, which pads, occurs in the prompt and ends the completion."""
    micro = collate([completed([0, 8, 0], [9, 0]), completed([4], [5])], CPU)
    assert micro.attention_mask.tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert micro.scored.tolist() == [[False] * 3 + [True] * 2, [False, True, False, False, False]]


def test_t04_a_cut_completion_gets_no_end_of_sequence(parts: Components) -> None:
    run = scripted(parts, lambda request, version: Reply([5, 6, 7, 8]))
    plan = replace(run.plan, sampling=replace(run.plan.sampling, eos_token_ids=(9,), max_new_tokens=3))
    cut = run.collector.collect(run.task.prompts[:1], plan, step=0)[0].rollouts[0]
    assert cut.truncated and cut.finish_reason is FinishReason.LENGTH
    assert cut.rows[0].token_ids[cut.rows[0].sampled_mask].tolist() == [5, 6, 7]


def test_t06_nothing_truncated_is_a_rate_of_zero() -> None:
    group = Group("p", (rollout(0.0, tokens=3), rollout(1.0, tokens=5, index=1)))
    metrics = rollout_metrics([group])
    assert metrics["completions/clipped_ratio"] == 0.0 and metrics["completions/mean_terminated_length"] == 4.0


def test_t08_empty_completions_are_graded_and_only_those_with_a_token_are_trained(root: Path) -> None:
    """Nothing at all, and an end of sequence alone, beside an ordinary completion; through an update."""
    seen: list[str] = []

    def length(rollout: Rollout) -> float:
        seen.append(rollout.text)
        return float(len(rollout.text))

    made = components(tiny_recipe(root, rollout__num_generations=3), functions=[length])
    try:
        end = made.policy.eos_token_ids()[0]
        word = made.policy.tokenizer("ab", add_special_tokens=False)["input_ids"]
        script = {0: [], 1: [end], 2: [*word, end]}
        run = scripted(made, lambda request, version: Reply(script[members[request.seed]]))
        members = {run.collector._request(np.ones(1), run.plan, 0, p, g).seed: g for p in range(4) for g in range(3)}
        result = train_step(run, 0)
        assert seen.count("") == 8 and seen.count("ab") == 4
        assert [r.num_scored for r in result.groups[0].rollouts] == [0, 1, 3]
        assert result.batch.valid.tolist() == [False, True, True] * 4
        # the empty one enters no statistic: -1/sqrt(2) and 1/sqrt(2) for the two that are left
        of_first = result.batch.advantages[result.batch.sequence_ids < 3]
        assert of_first.tolist() == pytest.approx([-(0.5**0.5)] + [0.5**0.5] * 3)
        assert result.updates[0].sequences["tokens"].tolist() in ([3.0] * 4 + [1.0] * 4, [1.0] * 4 + [3.0] * 4)
        assert np.isfinite(result.updates[0].loss) and result.updates[0].grad_norm > 0
    finally:
        made.close()


def test_t09_a_tokenizer_without_a_pad_token_needs_none(root: Path, tmp_path: Path) -> None:
    policy = load_policy(LoadOptions(path=str(root / "model"), device="cpu"))
    policy.tokenizer.pad_token = None
    rows_before = policy.hf.get_input_embeddings().weight.shape[0]
    made = components(tiny_recipe(root), policy=policy)
    try:
        assert made.policy.tokenizer.pad_token_id is None
        run = replace(scripted(made, lambda request, version: Reply([5] * (1 + request.seed % 4))))
        result = train_step(run, 0)
        assert not result.updates[0].skipped
        assert made.policy.hf.get_input_embeddings().weight.shape[0] == rows_before
        assert made.policy.tokenizer.pad_token_id is None
    finally:
        made.close()


def test_t11_every_token_bears_the_version_that_sampled_it(parts: Components) -> None:
    run = scripted(parts, lambda request, version: Reply([5 + request.seed % 10]))
    for step in range(2):
        rows = [row for group in train_step(run, step).groups for r in group.rollouts for row in r.rows]
        assert {int(v) for row in rows for v in row.versions[row.sampled_mask]} == {step}


def test_t20_a_prompt_beyond_the_limit_is_dropped_counted_and_said(root: Path) -> None:
    rows = [{"prompt": "1" * n, "answer": "1"} for n in (4, 5, 6, 7, 8, 10)]
    made = components(tiny_recipe(root, task__max_prompt_length=8), rows=rows)
    try:
        assert sorted(len(ids) for ids in made.task.ids.values()) == [4, 5, 6, 7, 8]
        assert any("1 of 6 prompts have more than 8 tokens: dropped" in note for note in made.notes)
    finally:
        made.close()


def test_t22_a_prompt_that_fills_the_window_is_never_sampled(root: Path) -> None:
    """The room for the completion is taken off the window before step 0."""
    short = root / "short"
    make_model(short, context=16)
    rows = [{"prompt": "1" * n, "answer": "1"} for n in (7, 8, 9, 10, 11, 16, 17, 40)]
    made = components(tiny_recipe(root, model__path=str(short)), rows=rows)
    try:
        assert sorted(len(ids) for ids in made.task.ids.values()) == [7, 8, 9, 10]  # 16 - 6
    finally:
        made.close()


def test_the_batch_of_nothing() -> None:
    batch = make_batch([])
    assert batch.num_sequences == 0 and len(batch.sampled_logprobs) == 0
