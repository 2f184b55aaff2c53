"""Runs of a config under a cost model: simulated, or in real time with executors that sleep.

Both give what a real run gives to an ablation: metrics rows, intervals by component and activity, and the
ages of the trained tokens. So one table compares a simulation with a run.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.jobs.local import run_parts
from areal_jax.lab.ablations.ablation import RunRecord, recorded
from areal_jax.lab.ablations.strategy_ablation import FOR_BATCH, FOR_SAMPLES, FOR_VERSION
from areal_jax.lab.published.sleeping import sleeping_parts
from areal_jax.lab.simulation.decoders import StepResult
from areal_jax.lab.simulation.machines import DrawnMachines
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.lab.simulation.world import SimulationError, World
from areal_jax.observe.waits import HELD, NS, Clock, Interval, idle_share
from areal_jax.runtime.core import Offer
from areal_jax.trajectories.age_mask import oldest_trained, trained_tokens
from areal_jax.trajectories.paths import spans_of
from areal_jax.types import Group, Trajectory


def simulated(config: Config, costs: Schedule) -> RunRecord:
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
    return RunRecord(world.steps, intervals=world.intervals(), token_ages=result.token_ages)


def slept(config: Config, costs: Schedule) -> RunRecord:
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
        super().__init__(config, schedule, DrawnMachines(config, schedule, self._stepped))
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

    def _join(self, name: str) -> None:
        self._clock(name, FOR_SAMPLES)
        super()._join(name)

    def _stepped(self, name: str, result: StepResult, is_waiting: bool) -> None:
        """Record on the host's clock what its step does."""
        clock, costs = self._clock(name, FOR_SAMPLES), self.schedule
        if result.adopted is not None:
            clock.switch("swap")
            if result.live:
                swap_s = costs.swap_s + result.recomputed * costs.recompute_token_s
                self.clock.later(swap_s, clock.switch, "decode")
        elif result.live:
            clock.switch("decode")
        else:
            clock.switch(FOR_VERSION if is_waiting else FOR_SAMPLES)
