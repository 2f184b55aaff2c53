"""A host that returns the tasks' reference answers instead of sampling: for supervised training.

To the control plane it is a generation host like any other, so a supervised run has the same journal,
checkpoints, resume and report as an RL run. The host holds no parameters and loads no weights version.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from areal_jax.control.events import SampleFailed, SampleFinished
from areal_jax.generation.commands import InboxCommand, Start, Statistics, Stop
from areal_jax.generation.host import Emit, next_command
from areal_jax.observe.waits import Clock
from areal_jax.tasks.errors import USERS, raised
from areal_jax.types import ArealError, SampleId, Trajectory


class ReferenceHost:
    """Reports the trajectory `answer(sample)`, the task's reference answer, for each sample of a Start.

    Emits SampleFailed instead if `answer` raises an error, or if the trajectory exceeds `length` tokens.
    """

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
        self.name, self.inbox = name, queue.Queue[InboxCommand]()
        self._answer, self._emit = answer, emit
        self._length, self._clock, self._deadline_s = length, clock, deadline_s
        self.has_work = False
        self.generated_tokens = 0
        self.tokens_per_s: float | None = None
        self.gaps_s: deque[float] = deque()

    def statistics(self) -> Statistics:
        """Returns statistics with only `generated_tokens` set, since this host has no versions or slots."""
        return Statistics(generated_tokens=self.generated_tokens)

    def run(self) -> None:
        """Report the reference answers of each command's samples until a Stop without samples arrives.

        Raises WaitTimeout if no command arrives within `deadline_s` seconds (see the constructor).
        """
        while True:
            command = next_command(self.inbox, self.name, self._deadline_s, self._clock)
            # Samples are answered at once, so a Stop with samples comes too late to have an effect.
            if isinstance(command, Start):
                for sample in command.samples:
                    self._finish(sample)
            elif isinstance(command, Stop) and not command.samples:
                return

    def _finish(self, sample: SampleId) -> None:
        try:
            trajectory = self._answer(sample)
            if len(trajectory.tokens) > self._length:
                raise ArealError(
                    f"prompt and reference answer together have {len(trajectory.tokens)} tokens, more than "
                    f"generation.length={self._length}; raise generation.length, or leave this row out of "
                    "the task's data"
                )
        except USERS as error:  # the task's own code
            self._emit(SampleFailed(sample, self.name, raised(error)), None)
            return
        self._emit(SampleFinished(sample, self.name, (), trajectory.stop_reason), trajectory)
