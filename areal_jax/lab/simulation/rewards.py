"""The reward process of a simulated run: its scores and workflows, its crashes and its pauses."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.control import events as e
from areal_jax.control.events import Action
from areal_jax.episodes.conversation import Conversation
from areal_jax.lab.simulation.surroundings import Surroundings
from areal_jax.lab.simulation.virtual_clock import DRIVER, REWARD
from areal_jax.lab.simulation.workflows import DrawnWorkflows
from areal_jax.types import Completion, Prompt, SampleId


class Rewards:
    def __init__(self, world: Surroundings, workflows: DrawnWorkflows) -> None:
        self._world, self._clock, self._workflows = world, world.clock, workflows
        self._is_up = True
        self._orphans: set[SampleId] = set()
        """The samples of which the workflows run again when the process comes back."""

    def score(self, action: e.Score, prompt: Prompt, completions: Sequence[Completion]) -> None:
        if self._is_up:  # otherwise the process gets the group when it comes back
            seconds = self._world.latency(self._world.schedule.reward_s)
            scored = self._world.machines.score(action, prompt, completions)
            self._clock.later(seconds, self._world.send, scored, of=REWARD)

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        if self._is_up:
            self._workflows.begin(sample, prompt, conversation)
        else:
            self._orphans.add(sample)

    def restart(self) -> None:
        """A process takes the place of one that ended: it has no workflow, and gets what is open again."""
        self._workflows.crash()
        self._is_up = True
        self._orphans.clear()

    # --- pauses ---------------------------------------------------------------------------------------------

    def pause(self, down_s: float) -> None:
        """Pause the process; the driver finds it lost after Schedule.lost_s."""
        self._clock.pause(REWARD, down_s)
        if down_s > (lost_s := self._world.schedule.lost_s):
            self._clock.later(lost_s, self._lose, of=DRIVER)
        self._clock.later(down_s, self._go_on)

    def _lose(self) -> None:
        if self._clock.is_paused(REWARD):
            self._is_up = False
            self._orphans |= self._workflows.crash()

    def _go_on(self) -> None:
        if not self._is_up and not self._clock.is_paused(REWARD):
            self._clock.later(self._world.until_heard(), self._clock.with_driver, REWARD, self._come_back)

    def _come_back(self) -> None:
        """Get the groups again, and run the workflows again."""
        self._is_up = True
        state, (orphans, self._orphans) = self._world.control.state, (self._orphans, set())
        scoring = [group for group in state.groups.values() if group.stage == "scoring"]
        again: list[Action] = [e.Score(group.ordinal, group.attempt) for group in scoring]
        again += [e.Rerun(sample) for sample in sorted(orphans) if state.is_open(sample)]
        self._world.act(again)
