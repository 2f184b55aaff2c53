"""A rollout outside a run: one host decodes all samples to their end, then this process scores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from areal_jax.config.sections import EpisodeConfig
from areal_jax.control.events import Event, RewardFailed, SampleFailed
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.limits import Limits, limits_of
from areal_jax.episodes.open_episodes import Conversations
from areal_jax.generation.commands import Start
from areal_jax.generation.conducted import conducted
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.scoring import score_group
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.tasks.text import token_pieces
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.trajectories.journal import with_rewards
from areal_jax.types import ArealError, Completion, Group, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.memory import MemoryStore


def completion_of(trajectory: Trajectory, tokenizer: Tokenizer, task: Task) -> Completion:
    """Returns the completion that `task` scores: the sampled tokens, their text and the stop reason.

    If the task wants the text of each token (`Task.wants_pieces`), the completion has that, too.
    """
    tokens = trajectory.tokens[trajectory.loss_mask].tolist()
    pieces = tuple(token_pieces(tokens, tokenizer)) if task.wants_pieces else ()
    return Completion(tokenizer.decode(tokens), tuple(tokens), trajectory.stop_reason, pieces)


def rollout(
    engine: Engine,
    params: VersionedParams,
    task: Task | Mapping[str, WeightedTask],
    ordinals: Iterable[int],
    group_size: int,
    seed: int = 0,
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
) -> list[Group]:
    """Sample and score `group_size` completions of each prompt, under `params`; returns a group per prompt.

    `ordinals`: places of the prompts in the order that `seed` determines; groups are returned by ascending
    ordinal. `task`: one task, or several by name. `sampling`: None means the default settings and at most
    `engine.length` tokens. `limits`: of the episodes of tasks with a workflow; None: those of a run's config
    by default. Raises ArealError if the engine cannot decode a prompt, TaskError if a reward or a workflow
    fails; neither is tried again.
    """
    tasks = load_tasks({}, [task]) if isinstance(task, Task) else task
    prompts = PromptStream(tasks, seed)
    tokenizer = engine.tokenizer
    asked = {ordinal: prompts.prompt(ordinal) for ordinal in sorted(ordinals)}
    rendered = {ordinal: tokenizer.render(prompt) for ordinal, prompt in asked.items()}
    sampling = sampling or Sampling(max_tokens=engine.length)
    groups = []
    plain = {n: rendered[n] for n, prompt in asked.items() if tasks[prompt.task].task.workflow is None}
    done = sampled(engine, params, plain, group_size, sampling, seed)
    talks = Conversations(None, lambda ordinal: tuple(rendered[ordinal]), sampling)
    episodes = {n: asked[n] for n in asked.keys() - plain.keys()}
    if episodes:
        limits = limits or limits_of(EpisodeConfig(), engine.length, sampling.max_tokens)
        done |= conducted(
            engine,
            params,
            episodes,
            group_size,
            talks=talks,
            workflows=workflows_of(None, tasks),
            limits=limits,
            sampling=sampling,
            seed=seed,
        )
    for ordinal in asked:
        members, prompt, own = done[ordinal], asked[ordinal], tasks[asked[ordinal].task].task
        completions = [talks.rewarded(m.sample, completion_of(m, tokenizer, own)) for m in members]
        scored = score_group(own, prompt, completions, ordinal)
        if isinstance(scored, RewardFailed):
            raise TaskError(f"the group at ordinal {ordinal} could not be scored: {scored.message}")
        groups.append(Group(ordinal, prompt, with_rewards(members, scored)))
    return groups


def sampled(
    engine: Engine,
    params: VersionedParams,
    prompts: Mapping[int, Sequence[int]],
    group_size: int,
    sampling: Sampling,
    seed: int,
) -> dict[int, list[Trajectory]]:
    """Samples `group_size` completions of each prompt; returns ordinal -> trajectories, without rewards.

    `prompts`: ordinal -> token ids. `seed` and the ordinal determine the random draws. Raises ArealError if
    the engine cannot decode a prompt.
    """
    done: dict[SampleId, Trajectory] = {}

    def collect(event: Event, trajectory: Trajectory | None) -> None:
        if isinstance(event, SampleFailed):
            raise ArealError(f"the prompt at ordinal {event.sample.ordinal} is refused: {event.reason}")
        if trajectory is not None:
            done[trajectory.sample] = trajectory

    store = MemoryStore(engine.canary, engine.model.config.params_dtype)
    store.publish(params)
    host = Host("rollout", engine, store, collect, seed=seed, sampling=sampling)
    for ordinal, tokens in prompts.items():
        samples = tuple(SampleId(ordinal, member) for member in range(group_size))
        host.inbox.put(Start(samples, tuple(tokens), params.version))
    host.take_commands()
    while host.has_work:
        host.step()
    return {ordinal: [done[SampleId(ordinal, member)] for member in range(group_size)] for ordinal in prompts}
