"""Runs of a config under a cost model: simulated, or in real time with executors that sleep.

Both give what a real run gives to an ablation: metrics rows, intervals by component and activity, and the
ages of the trained tokens. So one table compares a simulation with a run.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.episodes.conversation import TurnRequest
from areal_jax.jobs.local import run_parts
from areal_jax.lab.ablations.ablation import Measured, recorded
from areal_jax.lab.ablations.strategy_ablation import FOR_BATCH, FOR_SAMPLES, FOR_VERSION
from areal_jax.lab.published.sleeping import sleeping_parts
from areal_jax.lab.simulation.decoders import Call, Decoder
from areal_jax.lab.simulation.machines import DrawnMachines, Machines
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.world import SimulationError, World
from areal_jax.observe.waits import HELD, NS, Clock, Interval, idle_share
from areal_jax.runtime.core import Offer
from areal_jax.trajectories.age_mask import oldest_trained, trained_tokens
from areal_jax.trajectories.paths import spans_of
from areal_jax.types import Completion, Group, PolicyVersion, Prompt, SampleId, Trajectory


def simulated(config: Config, costs: Schedule) -> Measured:
    """Simulate a run of the config under the virtual clock; run.seed draws the lengths.

    Raises SimulationError if the run hangs or breaks an invariant of the control plane.
    """
    costs = replace(costs, seed=config.run.seed)
    world = TimedWorld(config, costs)
    result = world.run()
    if not result.audit.ok:
        raise SimulationError(
            f"the simulated run with seed {costs.seed} broke an invariant of the control plane: "
            f"{result.audit.violations[0]}; please report this as a bug"
        )
    return Measured(world.steps, intervals=world.intervals(), token_ages=result.token_ages)


def slept(config: Config, costs: Schedule) -> Measured:
    """Run the config in real time with executors that sleep as long as `costs` says (`sleeping_parts`)."""
    costs = replace(costs, seed=config.run.seed)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
        where = config.run.model_copy(update={"dir": f"{folder}/run"})
        parts = sleeping_parts(config.model_copy(update={"run": where}), costs)
        return recorded(run_parts(parts, parts.config, silent))


class TimedWorld(World):
    """A simulated run that also records metrics rows, and what trainer and hosts do at which time."""

    def __init__(self, config: Config, schedule: Schedule) -> None:
        self._clocks: dict[str, Clock] = {}
        super().__init__(config, schedule, _Watching(DrawnMachines(config, schedule), self._watched))
        self.steps: list[dict[str, Any]] = []
        """A metrics row for each trained batch, with the fields that need no model."""
        self._batch: dict[str, Any] = {}
        self._generated = 0

    def intervals(self) -> list[Interval]:
        return [
            Interval(name, activity, start / NS, end / NS)
            for name, clock in self._clocks.items()
            for activity, start, end in clock.take_intervals(is_final=True)
        ]

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        oldest = oldest_trained(self.config.control, action.step)
        tokens = trained_tokens(trajectories, oldest)
        spans = [
            span for t in trajectories for span in spans_of(t) if oldest is None or span.version >= oldest
        ]
        aged = sum((action.step - span.version) * (span.end - span.start) for span in spans)
        self._batch = {
            "trained_tokens": tokens,
            "completion_tokens_mean": sum(t.completion_tokens for t in trajectories) / len(trajectories),
            "token_age_mean": aged / max(tokens, 1),
            "token_age_max": max((action.step - span.version for span in spans), default=0),
        }
        self._clock("trainer", FOR_BATCH).switch("update")
        super().train(action, groups)

    def hold(self, action: e.Hold) -> None:
        self._clock("trainer", FOR_BATCH).switch(f"wait: {HELD}")
        super().hold(action)

    def deliver(self, event: e.Event, payload: Trajectory | Offer | None = None) -> None:
        if isinstance(event, e.BatchTrained):
            self._clock("trainer", FOR_BATCH).switch(FOR_BATCH)
            # Before the event is handled: the control plane may answer it with the next batch.
            self.steps.append(self._row(event.step))
        super().deliver(event, payload)

    def _row(self, step: int) -> dict[str, Any]:
        new, self._generated = self.meters.tokens - self._generated, self.meters.tokens
        totals = {name: clock.take_totals() for name, clock in self._clocks.items()}
        idle = [idle_share(spent) for name, spent in totals.items() if name != "trainer"]
        return {
            "step": step,
            "version": step + 1,
            "wall_s": self.clock.now_s,
            "generated_tokens": new,
            "trainer_wait_share": idle_share(totals["trainer"]),
            "generator_idle_share": sum(idle) / len(idle),
            "params_digest": "",
            **self._batch,
        }

    def _clock(self, name: str, activity: str) -> Clock:
        if name not in self._clocks:
            self._clocks[name] = Clock(activity, lambda: round(self.clock.now_s * NS), has_record=True)
        return self._clocks[name]

    def _watched(self, name: str, decoder: Decoder) -> Decoder:
        return _WatchedDecoder(decoder, self._clock(name, FOR_SAMPLES), self)


class _Watching:
    """Machines with decoders that `watched(name, decoder)` replaces."""

    def __init__(self, machines: Machines, watched: Callable[[str, Decoder], Decoder]) -> None:
        self.prompts, self._machines, self._watched = machines.prompts, machines, watched

    def decoder(self, name: str, latest: Callable[[], PolicyVersion]) -> Decoder:
        return self._watched(name, self._machines.decoder(name, latest))

    def score(
        self, action: e.Score, prompt: Prompt, completions: Iterable[Completion]
    ) -> e.RewardScored | e.RewardFailed:
        return self._machines.score(action, prompt, tuple(completions))

    def train(self, action: e.Train, groups: tuple[Group, ...]) -> tuple[str, dict[str, Any]]:
        return self._machines.train(action, groups)

    def publish(self, version: PolicyVersion) -> str:
        return self._machines.publish(version)


class _WatchedDecoder:
    """A decoder that records on `clock` what its host does; samples start in the order of their arrival."""

    def __init__(self, decoder: Decoder, clock: Clock, world: World) -> None:
        self._decoder, self._clock, self._world = decoder, clock, world
        self._waiting: deque[SampleId] = deque()

    def take(self, dispatch: e.Dispatch, prompt: tuple[int, ...] | None) -> None:
        if prompt is not None:
            self._waiting.extend(dispatch.samples)
        self._decoder.take(dispatch, prompt)

    def go_on(self, action: e.Continue, request: TurnRequest) -> None:
        self._waiting.append(action.sample)
        self._decoder.go_on(action, request)

    def cancel(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        self._waiting = deque(sample for sample in self._waiting if sample not in gone)
        self._decoder.cancel(gone)

    def serve(self, version: PolicyVersion) -> None:
        self._decoder.serve(version)

    def hand_over(self, samples: Sequence[SampleId]) -> tuple[tuple[SampleId, ...], Offer]:
        return self._decoder.hand_over(samples)

    def take_over(self, offer: Offer) -> str:
        return self._decoder.take_over(offer)

    def take_back(self, samples: Sequence[SampleId]) -> None:
        self._decoder.take_back(samples)

    def step(self) -> Call:
        call, costs = self._decoder.step(), self._world.schedule
        for _ in range(min(call.prefills, len(self._waiting))):
            self._waiting.popleft()
        if call.adopted is not None:
            self._clock.switch("swap")
            if call.live:
                swap_s = costs.swap_s + call.recomputed * costs.recompute_token_s
                self._world.clock.later(swap_s, self._decode)
        elif call.live:
            self._clock.switch("decode")
        else:
            self._clock.switch(FOR_VERSION if self._waiting else FOR_SAMPLES)
        return call

    def _decode(self) -> None:
        self._clock.switch("decode")
