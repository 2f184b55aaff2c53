"""Evaluates a task with a workflow: conducts the episodes of its prompts, then takes their rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from areal_jax.config.tree import Config
from areal_jax.control.events import RewardFailed
from areal_jax.episodes.limits import limits_of
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.episodes.workflow_runner import Gateway
from areal_jax.evaluation.result import Failure, PassResult, ScoredPrompt
from areal_jax.generation.conducted import conducted
from areal_jax.generation.engine import Engine
from areal_jax.generation.rollout import completion_of
from areal_jax.tasks.scoring import score_group
from areal_jax.tasks.task import Task, Workflow
from areal_jax.trajectories.paths import turns_of
from areal_jax.types import Prompt, Sampling, VersionedParams

TURNS = "turns"
"""The part that an evaluation adds to the rewards of episodes: the number of turns."""


def episode_pass(
    engine: Engine,
    params: VersionedParams,
    task: Task,
    prompts: Mapping[int, tuple[Prompt, tuple[int, ...]]],
    *,
    samples: int,
    sampling: Sampling,
    config: Config,
    workflow: Workflow,
    make_gateway: Callable[[], Gateway] | None = None,
) -> PassResult:
    """Conducts `samples` episodes of each prompt (index -> the prompt and its token ids), and scores them.

    `workflow` conducts them; `make_gateway` as in `WorkflowRunner`. A workflow that fails, or rejects its
    sample, is a failure of its prompt.
    """
    began_s = time.perf_counter()
    failed: dict[int, str] = {}
    talks = Conversations(None, lambda index: prompts[index][1], sampling)
    found = conducted(
        engine,
        params,
        {index: prompt for index, (prompt, _) in prompts.items()},
        samples,
        talks=talks,
        workflows={prompt.task: workflow for prompt, _ in prompts.values()},
        make_gateway=make_gateway,
        limits=limits_of(config.episode, config.generation.length, config.generation.max_tokens),
        sampling=sampling,
        seed=config.run.seed,
        on_failure=lambda sample, reason: failed.setdefault(sample.ordinal, reason),
    )
    scored, failures = [], []
    for index, (prompt, _) in prompts.items():
        of = f"{prompt.task}/{index}"
        if index in failed:
            failures.append(Failure(of, "failed", failed[index]))
            continue
        members = found[index]
        completions = [talks.rewarded(t.sample, completion_of(t, engine.tokenizer, task)) for t in members]
        outcome = score_group(task, prompt, completions, index)
        if isinstance(outcome, RewardFailed):
            failures.append(Failure(of, outcome.outcome, outcome.message))
            continue
        parts = outcome.parts or ((),) * samples
        pairs = zip(parts, members, strict=True)
        scored.append(
            ScoredPrompt(
                outcome.rewards,
                tuple(t.completion_tokens for t in members),
                tuple(t.truncated for t in members),
                tuple({**dict(own), TURNS: float(turns_of(t))} for own, t in pairs),
            )
        )
    tokens = sum(t.completion_tokens for members in found.values() for t in members)
    took_s = time.perf_counter() - began_s
    return PassResult(samples, sampling.temperature, tuple(scored), tuple(failures), tokens, took_s)
