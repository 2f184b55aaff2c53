"""Episodes outside a run: one host and the workflows of this process, one step after the other."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from contextlib import closing

from areal_jax.control import events as e
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.episodes.workflow_runner import Gateway, WorkflowRunner
from areal_jax.generation.commands import Stop, command_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Workflow
from areal_jax.types import Prompt, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.memory import MemoryStore

Reported = tuple[e.Event, Trajectory | None]

WAIT_S = 10.0
"""Seconds beyond its deadline within which an episode ends."""


def _raise(sample: SampleId, reason: str) -> None:
    raise TaskError(f"the episode of {sample} failed: {reason}")


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
    on_failure: Callable[[SampleId, str], object] = _raise,
    make_gateway: Callable[[], Gateway] | None = None,
) -> dict[int, list[Trajectory]]:
    """Conducts `group_size` episodes of each prompt; returns ordinal -> trajectories, without rewards.

    `talks` records them, and then has their rewards. `on_failure(sample, reason)` is called if a workflow
    fails or rejects its sample, or if the engine cannot decode a turn; by default it raises TaskError. If it
    returns, the sample's prompt is left out of the result. `make_gateway`: as in `WorkflowRunner`.
    """
    events: queue.SimpleQueue[Reported | BaseException] = queue.SimpleQueue()
    deliver = lambda event, trajectory=None: events.put((event, trajectory))  # noqa: E731
    store = MemoryStore(engine.canary, engine.model.config.params_dtype)
    store.publish(params)
    host = Host("rollout", engine, store, deliver, seed=seed, sampling=sampling)
    asked = {SampleId(n, member): prompt for n, prompt in prompts.items() for member in range(group_size)}
    done: dict[SampleId, Trajectory | None] = {}
    conducting = WorkflowRunner(
        workflows, engine.tokenizer, limits, deliver, seed, make_gateway=make_gateway, fail=events.put
    )
    with closing(conducting) as runner:
        for sample, prompt in asked.items():
            runner.begin(sample, prompt, talks.of(sample))
        while len(done) < len(asked):
            while not events.empty() or not (host.has_work or len(done) == len(asked)):
                event, payload = _next(events, limits)
                if isinstance(event, e.TurnAdded) and event.turn < len(talks.of(event.sample).turns):
                    continue  # asked for again by a workflow that runs again (`WorkflowRunner`)
                event, _ = talks.record(event, payload)
                match event:
                    case e.TurnAdded(sample, segment, turn):
                        go_on = e.Continue(sample, segment, turn, host.name, params.version)
                        host.inbox.put(command_of(go_on, talks.request(sample, turn), deliver))
                        host.take_commands()
                    case e.TurnFinished(sample, _, turn):
                        runner.answer(sample, turn, talks.of(sample))
                    case e.ToolStarted(sample, call):
                        runner.call(sample, call)
                    case e.EpisodeEnded(sample, reward) if reward is not None:
                        done[sample] = talks.finished(event)[1]
                        host.inbox.put(Stop((sample,)))
                    case e.EpisodeEnded(sample) | e.EpisodeFailed(sample) | e.SampleFailed(sample):
                        done[sample] = None
                        host.inbox.put(Stop((sample,)))
                        on_failure(sample, _reason(event))
            if host.has_work:
                host.step()
    found = {n: [done[SampleId(n, member)] for member in range(group_size)] for n in prompts}
    return {n: [t for t in own if t is not None] for n, own in found.items() if None not in own}


def _reason(event: e.Event) -> str:
    match event:
        case e.EpisodeFailed(_, _, message):
            return message
        case e.SampleFailed(_, _, reason):
            return f"a turn is refused: {reason}"
    return "its workflow rejected it"


def _next(events: queue.SimpleQueue[Reported | BaseException], limits: Limits) -> Reported:
    # A workflow that takes longer fails by itself, even if it blocks the thread of the workflows.
    wait_s = 2 * limits.timeout_s + WAIT_S
    try:
        event = events.get(timeout=wait_s)
    except queue.Empty:
        raise TaskError(
            f"no workflow did anything for {wait_s:g} s; raise episode.timeout_s, or make the workflow faster"
        ) from None
    if isinstance(event, BaseException):
        raise event
    return event
