"""Real machines under the virtual clock: a run's engines, reward functions and learner, without threads.

A schedule of virtual times determines the order of events. So the same seed reproduces a run bit for bit, and
the staleness of trained samples is chosen, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_jax.assembly.parts import Parts
from areal_jax.control import events as e
from areal_jax.episodes.conversation import TurnRequest
from areal_jax.generation.commands import HandOver, HostSample, Stop, TakeOver, command_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.lab.simulation.decoders import StepResult
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.batch_figures import batch_figures
from areal_jax.runtime.compute_choice import plan_new
from areal_jax.runtime.core import Incoming, Offer
from areal_jax.runtime.trainer_loop import held_batch, train_batch
from areal_jax.tasks.scoring import score_group
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.age_mask import oldest_trained
from areal_jax.types import (
    ArealError,
    Completion,
    Group,
    PolicyVersion,
    Prompt,
    SampleId,
    VersionedParams,
)
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import wire_copy

ENDS = (e.SampleFinished, e.TurnFinished, e.SampleFailed)
"""The events with which a sample gives up its slot."""


class EngineDecoder:
    """A decoder that runs a real generation host; the simulation, not a thread, calls its steps."""

    def __init__(self, name: str, parts: Parts, engine: Engine, store: MemoryStore) -> None:
        c = parts.config
        self._host = Host(
            name,
            engine,
            store,
            lambda event, trajectory: self._incoming.append((event, trajectory)),
            seed=c.run.seed,
            sampling=c.generation.sampling,
            on_update=c.on_update,
            versions=c.parameter_sets,
            adopts_on_command=c.places_versions,
            calls_ahead=c.generation.calls_ahead,
            on_tokens=lambda sample, tokens: self._decoded_under.add(tokens.version),
        )
        self._incoming: list[Incoming] = []
        self._decoded_under: set[PolicyVersion] = set()

    def take(self, dispatch: e.Dispatch, prompt: tuple[int, ...] | None) -> None:
        self._host.inbox.put(command_of(dispatch, prompt, lambda *_: None))

    def go_on(self, action: e.Continue, request: TurnRequest) -> None:
        self._host.inbox.put(command_of(action, request, lambda *_: None))

    def cancel(self, samples: Iterable[SampleId]) -> None:
        if gone := tuple(samples):
            self._host.inbox.put(Stop(gone))

    def serve(self, version: PolicyVersion) -> None:
        self._host.inbox.put(e.Serve(self._host.name, version))

    def hand_over(self, samples: Sequence[SampleId]) -> tuple[tuple[SampleId, ...], Offer]:
        found: list[HostSample] = []
        self._host.inbox.put(HandOver(tuple(samples), found.extend))
        self._host.take_commands()
        return tuple(work.sample for work in found), found

    def take_over(self, offer: Offer) -> str:
        said: list[str] = []
        self._host.inbox.put(TakeOver(offer, said.append))
        self._host.take_commands()
        return said[0]

    def take_back(self, samples: Sequence[SampleId]) -> None:
        self._host.inbox.put(e.TakeBack(tuple(samples), self._host.name))

    def step(self) -> StepResult:
        host = self._host
        host.take_commands()
        before = host.statistics()
        self._decoded_under.clear()
        host.step()
        now = host.statistics()
        incoming, self._incoming = self._incoming, []
        ended = tuple(one for one in incoming if isinstance(one[0], ENDS))
        adopted = next((event for event, _ in incoming if isinstance(event, e.HostAdopted)), None)
        live = now.live + len(ended)
        return StepResult(
            adopted,
            prefills=live - before.live,
            live=live,
            tokens=now.generated_tokens - before.generated_tokens,
            ended=ended,
            recomputed=now.recomputed_tokens - before.recomputed_tokens,
            passes=len(self._decoded_under),
            held=len(now.held_versions),
        )


class RealMachines:
    """The machines of one run: `engines`, one for each host, and the learner in `parts`.

    Training starts from `state`; each update overwrites (donates) the buffers of the state before it, so a
    batch cannot be trained twice, and the schedule must not contain faults. Raises ArealError unless
    algorithm.samples is policy.
    """

    def __init__(self, parts: Parts, state: TrainState, engines: Sequence[Engine]) -> None:
        if parts.config.algorithm.samples != "policy":
            raise ArealError(
                f"algorithm.samples={parts.config.algorithm.samples}: the virtual clock counts "
                "decode calls, and reference answers need none; use algorithm.samples=policy"
            )
        self.state, self.prompts = state, parts
        self._parts, self._engines = parts, list(engines)
        self._store = MemoryStore(engines[0].canary, parts.config.wire_dtype)
        self._clock = Timeline(None).clock("trainer")
        self._trained: dict[PolicyVersion, VersionedParams] = {0: parts.learner.publish(state)}

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> EngineDecoder:
        """Return the decoder of the host `name`, on the next unused engine.

        The decoder reads the newest version from the weight store; it does not call `latest`.
        """
        return EngineDecoder(name, self._parts, self._engines.pop(0), self._store)

    def score(
        self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]
    ) -> e.RewardScored | e.RewardFailed:
        """Score the completions with the prompt's task, in the calling thread."""
        task = self._parts.tasks[prompt.task].task
        return score_group(task, prompt, completions, action.ordinal, action.attempt)

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> tuple[str, dict[str, Any]]:
        """Do one update on the groups; return the new version's digest and the metrics.

        Decoders get the new version only after `publish`.
        """
        plan = plan_new(self._parts.config, groups, self._parts.learner.takes_shared_prompts)
        batch = held_batch(action.step, groups, plan)
        self.state, value, metrics = train_batch(
            self._parts.config, self._parts.learner, self.state, batch, self._clock
        )
        self._trained[value.version] = wire_copy(value, self._parts.config.wire_dtype)
        oldest = oldest_trained(self._parts.config.control, action.step)
        return value.digest, batch_figures(action.step, groups, action.gates, oldest) | metrics

    def publish(self, version: PolicyVersion) -> str:
        return self._store.publish(self._trained.pop(version)).digest
