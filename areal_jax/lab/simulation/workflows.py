"""Workflows of simulated episodes; their turns and tool calls are drawn from the schedule's seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.types import Prompt, SampleId

BRANCHES = 0.25
"""Fraction of turns, without first ones, that begin a branch."""


class Script(NamedTuple):
    """What the workflow of one sample does."""

    calls: tuple[bool, ...]
    """For each turn: whether a tool is called before it."""
    after: tuple[int | None, ...]
    """For each turn: the earlier one that it continues, as a branch; None: the one before it."""
    added: int
    """Number of tokens added before each turn but the first."""
    reward: float | None
    fails: bool
    """Whether the workflow raises an error instead of returning `reward`."""


class DrawnWorkflows:
    """Conducts the episodes of a simulated run; a crash of the driver ends them all."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        later: Callable[..., None],
        deliver: Callable[[e.Event], None],
    ) -> None:
        """`later(seconds, call, *arguments)` schedules a call; `deliver(event)` records an event."""
        self._config, self._schedule, self._later, self._deliver = config, schedule, later, deliver
        self._live: dict[SampleId, Conversation] = {}
        self._scripts: dict[SampleId, Script] = {}
        self._noise = np.random.default_rng([schedule.seed, 6])
        self.calls: Counter[tuple[SampleId, int]] = Counter()
        """(sample, number of its tool call) -> how often the tool was called."""

    def crash(self) -> set[SampleId]:
        """Ends all workflows; returns their samples."""
        ended = set(self._live)
        self._live.clear()
        return ended

    def begin(self, sample: SampleId, prompt: Prompt, conversation: Conversation) -> None:
        if sample in self._live:
            return
        self._live[sample] = conversation
        open_calls = [begun for begun, returned in conversation.calls.values() if returned is None]
        if open_calls:
            self._think(self._fail, sample, "tool_in_doubt")
        elif not conversation.turns or conversation.turns[-1][1] is not None:
            self._think(self._go_on, sample)

    def answer(self, sample: SampleId, turn: int, conversation: Conversation) -> None:
        if sample in self._live:
            self._think(self._go_on, sample)

    def call(self, sample: SampleId, call: int) -> None:
        if sample in self._live:
            self.calls[sample, call] += 1
            self._think(self._returned, sample, call)

    def end(self, ordinal: int) -> None:
        self._live = {sample: one for sample, one in self._live.items() if sample.ordinal != ordinal}

    def script(self, sample: SampleId) -> Script:
        if sample not in self._scripts:
            self._scripts[sample] = self._drawn(sample)
        return self._scripts[sample]

    def _drawn(self, sample: SampleId) -> Script:
        schedule = self._schedule
        rng = np.random.default_rng([schedule.seed, 5, *sample])
        turns = 1 + int(rng.poisson(schedule.turns - 1))
        calls = tuple(bool(each) for each in rng.random(turns) < schedule.tool_calls)
        is_rejected, fails = rng.random(2) < (schedule.rejected, schedule.failed_samples)
        reward = None if is_rejected else round(float(rng.random()), 3)
        added = int(rng.integers(1, 6))
        after = [
            int(rng.integers(turn)) if turn and rng.random() < BRANCHES else None for turn in range(turns)
        ]
        return Script(calls, tuple(after), added, reward, bool(fails))

    # --- inside ---------------------------------------------------------------------------------------------

    def _think(self, then: Callable[..., None], sample: SampleId, *arguments: Any) -> None:
        seconds = self._schedule.workflow_s * float(self._noise.exponential())
        self._later(seconds, self._if_live, self._live[sample], then, sample, *arguments)

    def _if_live(
        self, one: Conversation, then: Callable[..., None], sample: SampleId, *arguments: Any
    ) -> None:
        if self._live.get(sample) is one:
            then(sample, *arguments)

    def _go_on(self, sample: SampleId) -> None:
        """Calls the tool of the next turn, or asks for that turn, or ends the episode."""
        one, script = self._live[sample], self.script(sample)
        turn, call = len(one.turns), len(one.calls)
        if turn == len(script.calls):
            self._end(sample, script)
        elif script.calls[turn] and call < sum(script.calls[: turn + 1]):
            self._deliver(e.ToolStarted(sample, call, "tool", ""))
        else:
            tokens = (1,) * script.added if turn else ()
            segment = sum(each is not None for each in script.after[: turn + 1])
            own = sample, segment, turn, tokens, self._config.generation.max_tokens, (), script.after[turn]
            self._deliver(e.TurnAdded(*own))

    def _returned(self, sample: SampleId, call: int) -> None:
        self._deliver(e.ToolReturned(sample, call, "1"))
        if sample in self._live:  # a fault may strike as the event is delivered
            self._go_on(sample)

    def _end(self, sample: SampleId, script: Script) -> None:
        if script.fails:
            self._fail(sample, "failed_episode")
        else:
            del self._live[sample]
            self._deliver(e.EpisodeEnded(sample, script.reward))

    def _fail(self, sample: SampleId, reason: str) -> None:
        del self._live[sample]
        self._deliver(e.EpisodeFailed(sample, reason, "simulated"))
