"""The real thing under the virtual clock: engines, rewards and learner of a run, without threads.

What happens is what a schedule of virtual times makes of it, so a seed gives the same run again, bit for bit,
and the staleness of what is trained is chosen and not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_jax.control import events as e
from areal_jax.control.events import Event
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host, Start, Stop
from areal_jax.generation.rollout import completion_of, with_rewards
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.assembly import Parts
from areal_jax.runtime.rows import batch_figures
from areal_jax.runtime.simulated_host import Call
from areal_jax.runtime.trainer import held_batch, train_batch
from areal_jax.tasks.scoring import score_group
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, Group, PolicyVersion, SampleId, Trajectory, VersionedParams
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import wire_copy


class EngineDecoder:
    """A generation host that is stepped; `keep(trajectory)` gets what it finished."""

    def __init__(
        self, name: str, parts: Parts, engine: Engine, store: MemoryStore, keep: Callable[[Trajectory], None]
    ) -> None:
        c = parts.config
        self._parts, self._keep = parts, keep
        self._host = Host(
            name,
            engine,
            store,
            self._hear,
            seed=c.run.seed,
            sampling=c.generation.sampling,
            on_update=c.on_update,
            versions=c.parameter_sets,
            on_tokens=lambda sample, tokens: self._decoded_under.add(tokens.version),
        )
        self._heard: list[Event] = []
        self._decoded_under: set[PolicyVersion] = set()

    def take(self, dispatch: e.Dispatch) -> None:
        prompt = self._parts.prompt_tokens(dispatch.samples[0].ordinal)
        self._host.inbox.put(Start(dispatch.samples, prompt, dispatch.min_version))

    def cancel(self, samples: Iterable[SampleId]) -> None:
        if gone := tuple(samples):
            self._host.inbox.put(Stop(gone))

    def step(self) -> Call:
        host = self._host
        host.take_commands()
        held, before = host.live, host.statistics()
        self._decoded_under.clear()
        host.step()
        now = host.statistics()
        heard, self._heard = self._heard, []
        ended = tuple(event for event in heard if isinstance(event, e.SampleFinished))
        adopted = next((event for event in heard if isinstance(event, e.HostAdopted)), None)
        live = host.live + len(ended)
        return Call(
            adopted,
            prefills=live - held,
            live=live,
            tokens=now.generated_tokens - before.generated_tokens,
            ended=ended,
            recomputed=now.recomputed_tokens - before.recomputed_tokens,
            passes=len(self._decoded_under),
            held=len(now.held_versions),
        )

    def _hear(self, event: Event, trajectory: Trajectory | None) -> None:
        self._heard.append(event)
        if trajectory is not None:
            self._keep(trajectory)


class RealMachines:
    """Of one run, from the given state on, which they take. What they trained they cannot train again, so
    none of them may die. Raises ArealError for a run that samples nothing.
    """

    def __init__(self, parts: Parts, state: TrainState, engines: Sequence[Engine]) -> None:
        if parts.config.algorithm.samples != "policy":
            raise ArealError(
                f"algorithm.samples={parts.config.algorithm.samples}: reference answers are decoded by "
                "nobody, so no virtual clock can run; use algorithm.samples=policy"
            )
        self.state = state
        self._parts, self._engines = parts, list(engines)
        self._store = MemoryStore(engines[0].canary, parts.config.weights.wire_dtype)
        self._clock = Timeline(None).actor("trainer")
        self._trained: dict[PolicyVersion, VersionedParams] = {0: parts.learner.publish(state)}
        self._members: dict[SampleId, Trajectory] = {}
        self._groups: dict[int, Group] = {}

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> EngineDecoder:
        """The next engine's; what is committed is what the store holds."""
        return EngineDecoder(name, self._parts, self._engines.pop(0), self._store, self._keep)

    def _keep(self, trajectory: Trajectory) -> None:
        self._members[trajectory.sample] = trajectory

    def score(self, action: e.Score) -> e.RewardScored | e.RewardFailed:
        """Scored here and now, by the task itself."""
        parts, size = self._parts, self._parts.config.algorithm.group_size
        ids = [SampleId(action.ordinal, member, action.attempt) for member in range(size)]
        members = [self._members.pop(sample) for sample in ids]
        prompt = parts.prompts.prompt(action.ordinal)
        completions = [completion_of(member, parts.model.tokenizer) for member in members]
        task = parts.tasks[prompt.task].task
        scored = score_group(task, prompt, completions, action.ordinal, action.attempt)
        if isinstance(scored, e.RewardScored):
            self._groups[action.ordinal] = Group(action.ordinal, prompt, with_rewards(members, scored))
        return scored

    def train(self, action: e.Train) -> tuple[str, dict[str, Any]]:
        """One update; the version waits, as a copy, until it is published."""
        groups = tuple(self._groups.pop(ordinal) for ordinal in action.ordinals)
        batch = held_batch(self._parts, action.step, groups)
        self.state, value, metrics = train_batch(self._parts, self.state, batch, self._clock)
        self._trained[value.version] = wire_copy(value, self._parts.config.weights.wire_dtype)
        return value.digest, batch_figures(action.step, groups) | metrics

    def publish(self, version: PolicyVersion) -> str:
        return self._store.publish(self._trained.pop(version)).digest

    def forget(self, ordinal: int) -> None:
        self._groups.pop(ordinal, None)
        for sample in [sample for sample in self._members if sample.ordinal == ordinal]:
            del self._members[sample]
