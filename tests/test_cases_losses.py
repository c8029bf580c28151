"""Small cases of losses and advantages that other trainers got wrong, through rollouts instead of bare tensors.

Named by number; those on bare tensors alone are in ``test_algorithms_*``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from case_helpers import Recorded, components, count_digits, groups_of, rollout, scripted, tiny_recipe
from docs_helpers import make_model
from gspo.algorithms import CATALOG, LossInputs, policy_loss
from gspo.engines.scripted import Reply
from gspo.evaluation import evaluate
from gspo.observe.metrics import rollout_metrics, update_metrics
from gspo.observe.update_table import update_table
from gspo.policy.learner import make_batch
from gspo.rewards import Grader, RewardSpec
from gspo.training.build import Components
from gspo.training.loop import loop, train_step, with_advantages
from gspo.training.run import make_run
from gspo.types import FinishReason, Group, Rollout, TrainBatch


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    make_model(folder / "model")
    return folder


@pytest.fixture
def parts(root: Path) -> Iterator[Components]:
    made = components(tiny_recipe(root))
    yield made
    made.close()


def advantages(rollouts: list[Rollout]) -> tuple[TrainBatch, list[float]]:
    """The batch, and one advantage a rollout with tokens (NaN without)."""
    batch = with_advantages(make_batch(rollouts), rollouts, "group")
    per_sequence = [batch.advantages[batch.sequence_ids == s] for s in range(len(rollouts))]
    assert all(len(set(values.tolist())) <= 1 for values in per_sequence)
    return batch, [float(values[0]) if len(values) else float("nan") for values in per_sequence]


def token_losses(batch: TrainBatch, name: str) -> tuple[float, torch.Tensor]:
    """The loss of the valid sequences where every ratio is 1, and its gradient over all tokens."""
    current = torch.tensor(batch.sampled_logprobs, dtype=torch.float64, requires_grad=True)
    chosen = torch.from_numpy(batch.valid[batch.sequence_ids])
    dense = torch.from_numpy(np.cumsum(batch.valid) - 1)[torch.from_numpy(batch.sequence_ids)]
    inputs = LossInputs(
        current_logprobs=current[chosen],
        proximal_logprobs=current.detach()[chosen],
        sampled_logprobs=current.detach()[chosen],
        advantages=torch.from_numpy(batch.advantages).double()[chosen],
        sequence_ids=dense[chosen],
        num_sequences=int(batch.valid.sum()),
        total_sequences=float(batch.valid.sum()),
        total_tokens=float(chosen.sum()),
    )
    loss = policy_loss(inputs, CATALOG[name]).loss
    loss.backward()
    assert current.grad is not None
    return float(loss.detach()), current.grad


def test_l16_a_masked_truncation_leaves_the_token_mean() -> None:
    cut = replace(rollout(1.0, tokens=4, index=1), finish_reason=FinishReason.LENGTH)
    batch = make_batch([rollout(0.0, tokens=4), cut], mask_truncated=True)
    batch.advantages[:] = -1.0  # every token's loss is 1
    loss, gradient = token_losses(batch, "dapo")
    assert loss == pytest.approx(1.0)
    assert gradient[:4].tolist() == pytest.approx([0.25] * 4) and gradient[4:].eq(0).all()
    both = replace(batch, valid=np.array([True, True]))
    assert token_losses(both, "dapo")[1].tolist() == pytest.approx([0.125] * 8)  # unmasked, both would count


def test_l16_a_masked_truncation_stays_in_its_groups_mean() -> None:
    cut = replace(rollout(1.0, index=1), finish_reason=FinishReason.LENGTH)
    _, values = advantages([rollout(0.0), cut])
    assert values == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("tokens", [0, 2])
def test_l17_a_step_without_a_usable_rollout_changes_nothing_and_reports(parts: Components, tokens: int) -> None:
    """No rollout has a token; or none could be graded."""
    run = scripted(parts, lambda request, version: Reply([1, 2][:tokens]))
    if tokens:
        run.collector._grader = Refusing()
    before = {name: p.detach().clone() for name, p in parts.policy.trainable()}
    result = train_step(run, 0)
    assert all(update.skipped for update in result.updates)
    assert all(torch.equal(p, before[name]) for name, p in parts.policy.trainable())
    metrics = {**rollout_metrics(result.groups), **update_metrics(update_table(result.updates))}
    assert metrics and all(np.isfinite(value) for value in metrics.values())
    assert "reward" not in metrics and metrics["groups/unusable"] == 1.0


class Refusing:
    """A grader that could grade nothing."""

    def grade(self, rollouts):  # type: ignore[no-untyped-def]
        return [rollout_verdict() for _ in rollouts]


def rollout_verdict():  # type: ignore[no-untyped-def]
    from gspo.rewards.contract import Verdict
    from gspo.types import Grading

    return Verdict(None, {}, Grading.TIMEOUT, "too slow")


def test_l18_an_evaluation_may_take_one_completion_of_each_item(parts: Components) -> None:
    run = make_run(parts, recorder=None)
    single = replace(run.plan, num_generations=1)
    result = evaluate(run.collector, run.task.prompts[:3], single)
    assert [len(group.rollouts) for group in result.groups] == [1, 1, 1]
    assert all(np.isfinite(value) for value in result.metrics.values())
    alone = [group.rollouts[0] for group in result.groups]
    assert advantages(alone)[0].advantages.tolist() == [0.0] * sum(r.num_scored for r in alone)


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.1 + 0.2, 0.3]])
def test_l19_l20_equal_rewards_give_no_gradient(rewards: list[float]) -> None:
    batch, values = advantages([rollout(r, index=i) for i, r in enumerate(rewards)])
    assert values == [0.0] * len(rewards)
    loss, gradient = token_losses(batch, "gspo")
    assert loss == 0.0 and gradient.eq(0).all()


def test_l19_the_kl_of_a_group_without_signal_is_kept(root: Path) -> None:
    """With beta > 0 the KL to the reference acts on every sequence; only the policy term is 0."""
    made = components(tiny_recipe(root, algorithm__beta=0.5), functions=[always_one])
    try:
        run = make_run(made, recorder=Recorded())
        with torch.no_grad():
            for _, parameter in made.policy.trainable():
                parameter.add_(0.05 * torch.randn_like(parameter))
        update = train_step(run, 0).updates[0]
        assert update.sequences["advantage"].tolist() == [0.0] * 8
        assert update.grad_norm > 0.0
    finally:
        made.close()


def always_one(rollout: Rollout) -> float:
    return 1.0


def test_l23_groups_go_by_prompt_whatever_the_order() -> None:
    rewards = [("a", 1.0), ("b", 0.0), ("a", 1.0), ("b", 0.0)]
    _, values = advantages([rollout(r, prompt=p, index=i // 2) for i, (p, r) in enumerate(rewards)])
    assert values == [0.0] * 4


def test_l24_every_completion_has_its_own_request_and_its_prompts_group(parts: Components) -> None:
    run = scripted(parts, lambda request, version: Reply([1, 2]))
    groups = groups_of(run)
    assert [len(group.rollouts) for group in groups] == [2, 2, 2, 2]
    requests = run.engine.requests  # type: ignore[attr-defined]
    assert len({r.id for r in requests}) == 8 and len({r.seed for r in requests}) == 8
    assert len({r.group_id for r in requests}) == 4
    batch = make_batch([r for group in groups for r in group.rollouts])
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_l25_a_sibling_without_tokens_leaves_the_group() -> None:
    batch, values = advantages([rollout(100.0, tokens=0), rollout(1.0, tokens=2, index=1)])
    assert values[1] == 0.0
    assert batch.valid.tolist() == [False, True]


def first_score(rollout: Rollout) -> float | None:
    return {0: 1.0, 1: 0.0}.get(rollout.index)


def second_score(rollout: Rollout) -> float | None:
    return 0.0 if rollout.index == 1 else None


def test_l26_what_no_function_scores_enters_no_statistic() -> None:
    raw = [replace(rollout(None, index=i), reward=None) for i in range(3)]
    grader = Grader([RewardSpec(first_score), RewardSpec(second_score)], in_process=True)
    verdicts = grader.grade(raw)
    assert [v.reward for v in verdicts] == [1.0, 0.0, None]
    graded = [replace(r, reward=v.reward, grading=v.grading) for r, v in zip(raw, verdicts, strict=True)]
    batch, values = advantages(graded)
    assert values == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0])
    assert batch.valid.tolist() == [True, True, False]
    metrics = rollout_metrics([Group("p", tuple(graded))])
    assert metrics["reward"] == 0.5 and all(np.isfinite(value) for value in metrics.values())


def test_l28_one_low_member_among_equals_is_kept_with_its_group() -> None:
    _, values = advantages([rollout(0.0)] + [rollout(0.95, index=i) for i in range(1, 8)])
    assert len(values) == 8 and values[0] < 0 and all(v > 0 for v in values[1:])


def test_l35_the_first_thing_a_run_does_is_to_evaluate(root: Path) -> None:
    made = components(tiny_recipe(root, eval__every=1, eval__task={"split": "test", "size": 3}), functions=[])
    try:
        recorder = Recorded()
        steps = [step.step for step in loop(make_run(made, recorder=recorder))]
        assert steps == [0, 1] and [step for step, _ in recorder.evaluations] == [0, 1, 2]
        assert all(np.isfinite(v) for _, e in recorder.evaluations for v in e.metrics.values())
    finally:
        made.close()


def test_an_engine_error_costs_its_rollout_alone(parts: Components) -> None:
    """One request of eight is refused: its group goes on with the other member, and no error becomes a zero reward."""
    digit = parts.policy.tokenizer("7", add_special_tokens=False)["input_ids"][0]
    run = scripted(parts, lambda request, version: Reply([digit] * (1 + request.seed % 3)))
    refuse_first(run.engine)
    result = train_step(run, 0)
    first = result.groups[0].rollouts[0]
    assert first.finish_reason is FinishReason.ERROR and first.reward is None and first.rows[0].num_scored == 0
    assert "engine: no" in (first.grading_error or "")
    assert result.batch.valid.tolist() == [False] + [True] * 7
    assert result.batch.advantages[result.batch.sequence_ids == 1].tolist() == [0.0] * (
        result.groups[0].rollouts[1].num_scored
    )
    metrics = {**rollout_metrics(result.groups), **update_metrics(update_table(result.updates))}
    assert metrics["completions/failed_ratio"] == pytest.approx(1 / 8) and all(map(np.isfinite, metrics.values()))
    assert metrics["reward"] == pytest.approx(np.mean([count_digits(r) for g in result.groups for r in g.rollouts][1:]))


def refuse_first(engine) -> None:  # type: ignore[no-untyped-def]
    answer = engine._answer

    def refusing(request):  # type: ignore[no-untyped-def]
        done = answer(request)
        if not request.id.endswith("/0/0/0"):
            return done
        nothing, floats = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        return replace(
            done, token_ids=nothing, logprobs=floats, versions=nothing, finish_reason=FinishReason.ERROR, error="no"
        )

    engine._answer = refusing
