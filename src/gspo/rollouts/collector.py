"""The collector: prompts in, graded groups out.

Synchronous: everything is submitted, then polled until nothing is in flight. A prompt's rollouts are bound to it by
explicit request ids, never by position; each has its own counter-based seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from gspo.engines.base import Engine
from gspo.errors import EngineError
from gspo.seeding import seed
from gspo.types import (
    Completion,
    FinishReason,
    Grading,
    Group,
    IntArray,
    Prompt,
    Request,
    Rollout,
    Sampling,
    TokenRow,
)


class Grades(Protocol):
    """What the collector asks of a grader: one verdict a rollout, in order."""

    def grade(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Verdicts with ``reward``, ``parts``, ``grading`` and ``error``; only a wrong shape is raised."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How a set of prompts is sampled. ``stream`` names the seeds: the same stream and step give the same rollouts."""

    num_generations: int
    sampling: Sampling
    run_seed: int
    stream: str = "rollout"
    purpose: str = "train"


class Collector:
    """Samples and grades groups with one engine and one grader."""

    def __init__(
        self,
        engine: Engine,
        grader: Grades,
        *,
        encode: Callable[[Prompt], IntArray],
        decode: Callable[[IntArray], str],
    ) -> None:
        self.engine = engine
        self._grader = grader
        self._encode = encode
        self._decode = decode

    def collect(self, prompts: Sequence[Prompt], plan: SamplingPlan, *, step: int) -> list[Group]:
        """Groups of ``num_generations`` graded rollouts, one for each prompt, in the order of the prompts.

        A refused request is an ungraded rollout without tokens. Raises EngineError where the engine refused every
        request or went idle with some unanswered; RewardError as ``Grader.grade``.
        """
        requests: dict[str, Request] = {}
        owners: dict[str, tuple[int, int]] = {}
        for p, prompt in enumerate(prompts):
            ids = self._encode(prompt)
            for g in range(plan.num_generations):
                request = self._request(ids, plan, step, p, g)
                requests[request.id] = request
                owners[request.id] = (p, g)
        rollouts: dict[tuple[int, int], Rollout] = {}
        for completion in self._sample(list(requests.values())):
            p, g = owners[completion.request_id]
            rollouts[p, g] = self._rollout(prompts[p], g, requests[completion.request_id], completion)
        ordered = [rollouts[p, g] for p in range(len(prompts)) for g in range(plan.num_generations)]
        graded = self._grade(ordered)
        size = plan.num_generations
        return [
            Group(id=prompt.id, rollouts=tuple(graded[i * size : (i + 1) * size])) for i, prompt in enumerate(prompts)
        ]

    def _request(self, ids: IntArray, plan: SamplingPlan, step: int, prompt: int, member: int) -> Request:
        index = prompt * plan.num_generations + member
        return Request(
            id=f"{plan.stream}/{step}/{prompt}/{member}",
            token_ids=ids,
            sampling=plan.sampling,
            seed=seed(plan.run_seed, plan.stream, step, index),
            group_id=f"{plan.stream}/{step}/{prompt}",
            purpose=plan.purpose,
        )

    def _sample(self, requests: Sequence[Request]) -> list[Completion]:
        self.engine.submit(requests)
        completions: list[Completion] = []
        while len(completions) < len(requests):
            arrived = self.engine.poll(None)
            if not arrived:
                missing = len(requests) - len(completions)
                raise EngineError(f"the engine went idle with {missing} of {len(requests)} requests unanswered")
            completions.extend(arrived)
        errors = [c for c in completions if c.finish_reason is FinishReason.ERROR]
        if errors and len(errors) == len(completions):
            raise EngineError(f"the engine refused all {len(errors)} requests; the first: {errors[0].error}")
        return completions

    def _rollout(self, prompt: Prompt, index: int, request: Request, completion: Completion) -> Rollout:
        row = token_row(request, completion)
        failed = completion.finish_reason is FinishReason.ERROR
        return Rollout(
            prompt=prompt,
            index=index,
            rows=(row,),
            finish_reason=completion.finish_reason,
            text=self._decode(completion.token_ids),
            grading=Grading.FAILED if failed else Grading.PENDING,
            grading_error=f"engine: {completion.error}" if failed else None,
        )

    def _grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        pending = [r for r in rollouts if r.grading is Grading.PENDING]
        verdicts = iter(self._grader.grade(pending))
        graded = []
        for rollout in rollouts:
            if rollout.grading is Grading.PENDING:
                verdict = next(verdicts)
                rollout = replace(
                    rollout,
                    reward=verdict.reward,
                    reward_parts=verdict.parts,
                    grading=verdict.grading,
                    grading_error=verdict.error,
                )
            graded.append(rollout)
        return graded


def token_row(request: Request, completion: Completion) -> TokenRow:
    """One row: the request's ids, then the sampled ones with their log-probs and versions."""
    prompt_length = len(request.token_ids)
    length = prompt_length + len(completion.token_ids)
    mask = np.zeros(length, dtype=np.bool_)
    mask[prompt_length:] = True
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[prompt_length:] = completion.logprobs
    versions = np.full(length, -1, dtype=np.int64)
    versions[prompt_length:] = completion.versions
    return TokenRow(
        token_ids=np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64),
        sampled_mask=mask,
        sampled_logprobs=logprobs,
        versions=versions,
        routes=completion.routes,
    )
