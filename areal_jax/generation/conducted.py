"""Episodes outside a run: one host and the workflows of this process, one step after the other."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from contextlib import closing

from areal_jax.control import events as e
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.episodes.workflow_runner import WorkflowRunner
from areal_jax.generation.commands import command_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Workflow
from areal_jax.types import ArealError, Prompt, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.memory import MemoryStore


def conducted(
    engine: Engine,
    params: VersionedParams,
    prompts: Mapping[int, Prompt],
    group_size: int,
    *,
    talks: Conversations,
    workflows: Mapping[str, Workflow],
    limits: Limits,
    sampling: Sampling,
    seed: int,
) -> dict[int, list[Trajectory]]:
    """Conducts `group_size` episodes of each prompt; returns ordinal -> trajectories, without rewards.

    `talks` records them, and then has their rewards. Raises TaskError if a workflow fails or rejects its
    sample, ArealError if the engine cannot decode a turn.
    """
    events: queue.SimpleQueue[tuple[e.Event, Trajectory | None]] = queue.SimpleQueue()
    deliver = lambda event, trajectory=None: events.put((event, trajectory))  # noqa: E731
    store = MemoryStore(engine.canary, engine.model.config.params_dtype)
    store.publish(params)
    host = Host("rollout", engine, store, deliver, seed=seed, sampling=sampling)
    samples = {
        SampleId(ordinal, member): prompts[ordinal] for ordinal in prompts for member in range(group_size)
    }
    done: dict[SampleId, Trajectory] = {}
    with closing(WorkflowRunner(workflows, engine.tokenizer, limits, deliver, seed)) as runner:
        for sample, prompt in samples.items():
            runner.begin(sample, prompt, talks.of(sample))
        while len(done) < len(samples):
            while not (host.has_work and events.empty()):
                event, payload = _next(events, limits)
                event, _ = talks.record(event, payload)
                match event:
                    case e.TurnAdded(sample, segment, turn):
                        go_on = e.Continue(sample, segment, turn, host.name, params.version)
                        host.inbox.put(command_of(go_on, talks.request(sample, turn), deliver))
                    case e.TurnFinished(sample, _, turn):
                        runner.answer(sample, turn, talks.of(sample))
                    case e.ToolStarted(sample, call):
                        runner.call(sample, call)
                    case e.EpisodeEnded(sample, reward):
                        if reward is None:
                            raise TaskError(f"the workflow rejected {sample}; leave such prompts out")
                        done[sample] = talks.finished(event)[1]
                    case e.EpisodeFailed(sample, _, message):
                        raise TaskError(f"the episode of {sample} failed: {message}")
                    case e.SampleFailed(sample, _, reason):
                        raise ArealError(f"a turn of {sample} is refused: {reason}")
                if len(done) == len(samples):
                    break
                host.take_commands()
            else:
                host.step()
    return {n: [done[SampleId(n, member)] for member in range(group_size)] for n in prompts}


def _next(
    events: queue.SimpleQueue[tuple[e.Event, Trajectory | None]], limits: Limits
) -> tuple[e.Event, Trajectory | None]:
    # A workflow that takes longer fails by itself, unless it blocks the thread of the workflows.
    wait_s = 2 * limits.timeout_s
    try:
        return events.get(timeout=wait_s)
    except queue.Empty:
        raise TaskError(
            f"no workflow did anything for {wait_s:g} s: one of them blocks the thread of all; call what "
            "takes long by episode.tool"
        ) from None
