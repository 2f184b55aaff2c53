"""The plain synchronous rollout: the same host, driven to the end of its samples, and rewards in process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from areal_jax.control.events import Event, RewardFailed, RewardScored, SampleFailed
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host, Start
from areal_jax.tasks.scoring import score_group
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.task import Task, TaskError
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Completion, Group, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.memory import MemoryStore


def completion_of(trajectory: Trajectory, tokenizer: Tokenizer) -> Completion:
    """What the reward sees: the sampled tokens and their text."""
    tokens = trajectory.tokens[trajectory.loss_mask].tolist()
    return Completion(tokenizer.decode(tokens), tuple(tokens), trajectory.stop_reason)


def with_rewards(members: Sequence[Trajectory], scored: RewardScored) -> tuple[Trajectory, ...]:
    """The group's trajectories with their rewards and named parts."""
    parts, notes = scored.parts or ((),) * len(members), scored.notes or ("",) * len(members)
    return tuple(
        replace(member, reward=reward, reward_parts=dict(own), reward_note=note)
        for member, reward, own, note in zip(members, scored.rewards, parts, notes, strict=True)
    )


def rollout(
    engine: Engine,
    params: VersionedParams,
    task: Task | Mapping[str, WeightedTask],
    ordinals: Iterable[int],
    group_size: int,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> list[Group]:
    """Sample and score the groups at these ordinals, all under `params`; groups in ordinal order.

    Raises ArealError for a prompt that does not fit, TaskError where a reward fails: there is no second
    attempt here.
    """
    tasks = load_tasks({}, [task]) if isinstance(task, Task) else task
    prompts = PromptStream(tasks, seed)
    tokenizer = engine.get_tokenizer()
    done: dict[SampleId, Trajectory] = {}

    def collect(event: Event, trajectory: Trajectory | None) -> None:
        if isinstance(event, SampleFailed):
            raise ArealError(f"the prompt at ordinal {event.sample.ordinal} cannot be served: {event.reason}")
        if trajectory is not None:
            done[trajectory.sample] = trajectory

    store = MemoryStore(engine.canary)
    store.publish(params)
    host = Host(
        "rollout", engine, store, collect, seed=seed, sampling=sampling or Sampling(max_tokens=engine.length)
    )
    asked = {ordinal: prompts.prompt(ordinal) for ordinal in sorted(ordinals)}
    for ordinal, prompt in asked.items():
        samples = tuple(SampleId(ordinal, member) for member in range(group_size))
        host.inbox.put(Start(samples, tuple(tokenizer.render(prompt)), params.version))
    host.take_commands()
    while host.has_work:
        host.step()
    groups = []
    for ordinal, prompt in asked.items():
        members = [done[SampleId(ordinal, member)] for member in range(group_size)]
        completions = [completion_of(member, tokenizer) for member in members]
        scored = score_group(tasks[prompt.task].task, prompt, completions, ordinal)
        if isinstance(scored, RewardFailed):
            raise TaskError(f"the group at ordinal {ordinal} could not be scored: {scored.message}")
        groups.append(Group(ordinal, prompt, with_rewards(members, scored)))
    return groups
