"""A host that answers with the tasks' reference answers: supervised training through the same loop.

To the control plane it is a generation host like any other, so a supervised run has the same journal, gate,
checkpoints, resume and report. It holds no parameters and adopts no version.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from areal_jax.control.events import SampleFailed, SampleFinished
from areal_jax.generation.commands import Start, Statistics, Stop
from areal_jax.generation.host import Emit
from areal_jax.observe.waits import Clock, get
from areal_jax.types import ArealError, SampleId, Trajectory


class ReferenceHost:
    """`answer(sample)` makes the trajectory; `length`: the longest that may be trained, in tokens."""

    def __init__(
        self,
        name: str,
        answer: Callable[[SampleId], Trajectory],
        emit: Emit,
        *,
        length: int,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        self.name, self.inbox = name, queue.Queue[Start | Stop]()
        self._answer, self._emit = answer, emit
        self._length, self._clock, self._deadline_s = length, clock, deadline_s
        self.has_work = False
        self.generated_tokens = 0
        self.tokens_per_s: float | None = None
        self.gaps_s: deque[float] = deque()

    def statistics(self) -> Statistics:
        """It swaps, rebuilds and evicts nothing."""
        return Statistics(generated_tokens=self.generated_tokens)

    def run(self) -> None:
        """Until told to stop. Raises WaitTimeout when no command comes for the deadline."""
        while True:
            command = get(
                self.inbox,
                who=self.name,
                what="samples from the control plane",
                deadline_s=self._deadline_s,
                clock=self._clock,
            )
            if isinstance(command, Start):
                for sample in command.samples:
                    self._finish(sample)
            elif not command.samples:
                return

    def _finish(self, sample: SampleId) -> None:
        try:
            trajectory = self._answer(sample)
            self._require_room(trajectory)
        except ArealError as error:
            self._emit(SampleFailed(sample, self.name, str(error)), None)
            return
        self._emit(SampleFinished(sample, self.name, (), trajectory.stop_reason), trajectory)

    def _require_room(self, trajectory: Trajectory) -> None:
        if len(trajectory.tokens) > self._length:
            raise ArealError(
                f"prompt and reference answer have {len(trajectory.tokens)} tokens; generation.length="
                f"{self._length}: raise it"
            )
