"""Keeps the processes of one machine running: starts them, shows their output, restarts those that failed.

A unit is a set of processes that restart together. The run is complete when the unit with `ends_run` (the
controller) has ended with status 0; it fails when a unit with `is_needed` has failed more than
launch.restarts times. The trainer's processes on all machines compute together, so they are one group. The
agents share the group's generation, a number, through Redis (`Meeting`). If a process of the group fails, the
agent on its machine increases the generation, and every agent ends and restarts its trainer processes that
were started in an earlier generation.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

from areal_jax.cluster.rendezvous import POLL_S as MEETING_POLL_S
from areal_jax.cluster.rendezvous import AwayError, Meeting
from areal_jax.cluster.tied import tied
from areal_jax.file_errors import unless_full

HEALTHY_S = 600.0
"""If a unit ran for this many seconds before it failed, its earlier failures no longer count."""
LONGEST_BACKOFF_S = 60.0
GRACE_S = 25.0
"""Seconds that processes may take to end by themselves: after the run is complete, and again after SIGTERM.

It is less than Slurm's KillWait (30 s), and more than the 20 s after which the watchdog kills a trainer.
"""
GROUP_GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL when the trainer's group restarts. Short, because its processes hang in a
collective and cannot end by themselves.
"""
POLL_S = 0.05
ERROR = "error: "
"""Beginning of the line with which a process that ends with an error names it."""
MOVED = -1
"""Returned by `run` if another agent of rank 0 has started, so that the addresses have changed."""


@dataclass(frozen=True)
class ChildProcess:
    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    """Environment variables in addition to the node agent's own."""


@dataclass(frozen=True)
class Unit:
    commands: tuple[ChildProcess, ...]
    ends_run: bool = False
    """Whether the run is complete once all processes of this unit have ended with status 0."""
    is_group: bool = False
    """Whether the processes belong to the trainer, which may have processes on other machines."""

    @property
    def is_needed(self) -> bool:
        """Whether the run fails if the unit's processes fail more often than launch.restarts."""
        return self.ends_run or self.is_group

    @property
    def name(self) -> str:
        return " and ".join(command.name for command in self.commands)


@dataclass
class _Kept:
    """The current processes of a unit (processes that restart together), and its number of failures."""

    unit: Unit
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    failures: int = 0
    began_s: float = 0.0
    starts_at_s: float = 0.0
    has_ended: bool = False
    generation: int = 0
    """The generation (number of restarts) of the trainer's group when the processes were started."""


class Supervisor:
    """Runs the units of one machine until the run ends, and restarts failed ones.

    A unit is a set of processes that restart together.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        logs: Path,
        out: TextIO,
        restarts: int,
        meeting: Meeting,
        *,
        tend: Callable[[], None] = lambda: None,
        away_s: float = 120.0,
        backoff_s: float = 1.0,
        grace_s: float = GRACE_S,
    ) -> None:
        """`units`: sets of processes that restart together. `logs`: the folder of the processes' logs.

        `out`: where the processes' output is printed. `meeting`: access to the state that the agents of all
        machines share. The run fails if Redis is unreachable for `away_s` seconds. `restarts`: how many
        failures of a unit are followed by a restart. `tend`: called again and again, also while processes
        end; restarts Redis if it has ended. `backoff_s`: seconds before the first restart, doubled for each
        further restart. `grace_s`: seconds from SIGTERM to SIGKILL.
        """
        self._kept = [_Kept(unit) for unit in units]
        self._logs, self._out, self._restarts = logs, out, restarts
        self._backoff_s, self._grace_s = backoff_s, grace_s
        self._meeting, self._tend, self._away_s = meeting, tend, away_s
        self._generation, self._polled_s = 0, 0.0
        self._away_since_s: float | None = None
        """When Redis was found unreachable; None if it was reached since."""
        self._width = max(len(command.name) for unit in units for command in unit.commands)
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._errors: dict[str, str] = {}
        """Process -> the error that it printed last."""
        self._signal, self._is_hurried = 0, False

    def run(self) -> int:
        """Keeps the processes running until the run is complete, fails, or Ctrl-C or SIGTERM ends it.

        Returns 0 if the run is complete, 1 if it failed, 128 + N if signal N ended it, MOVED if a new agent
        of rank 0 has started. Must be called in the main thread, because only that thread receives signals.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._signals():
            try:
                self._consult()  # a group that was restarted before is not at generation 0
                for kept in self._kept:
                    self._start(kept)
                status = self._watch()
                if status == 0:
                    self._await_all()
                return status
            finally:
                self._end(self._kept, self._grace_s)
                with suppress(AwayError):  # then the head waits for its grace
                    self._meeting.leave()
                for reader in self._readers:
                    reader.join(timeout=1)  # a grandchild may hold the pipe open

    def _watch(self) -> int:
        while not self._signal:
            for kept in self._kept:
                status = self._look(kept)
                if status is not None:
                    return self._announced(status)
            if (status := self._consult()) is not None:
                return status
            self._pause()
        self.note(f"this node agent received {signal.Signals(self._signal).name} and ends all its processes")
        return self._announced(128 + self._signal)

    def _pause(self) -> None:
        self._tend()
        time.sleep(POLL_S)

    def _look(self, kept: _Kept) -> int | None:
        """Checks a unit (processes that restart together), and starts or restarts it if that is due.

        Returns the run's exit status if the unit has ended the run, else None.
        """
        is_behind = kept.unit.is_group and kept.generation < self._generation
        # A member that ended with 0 starts again too: the one that failed could not train alone, and the
        # controller sends End to both at once.
        if kept.has_ended and not is_behind:
            return None
        if not kept.processes:
            if time.monotonic() >= kept.starts_at_s:
                self._start(kept)
            return None
        statuses = {name: process.poll() for name, process in kept.processes.items()}
        if failed := {name: status for name, status in statuses.items() if status}:
            return self._failed(kept, ", ".join(f"{name} {_ended_by(code)}" for name, code in failed.items()))
        if is_behind:
            return self._failed(kept, "a trainer process on another machine failed")
        if all(status == 0 for status in statuses.values()):
            kept.has_ended = True
            return 0 if kept.unit.ends_run else None
        return None

    def _failed(self, kept: _Kept, why: str) -> int | None:
        """Ends the unit's other processes and schedules the unit's restart. `why`: the failure, for the user.

        Returns 1 if the unit has no restart left and the run fails with it, else None.
        """
        if kept.unit.is_group:
            try:
                self._generation = self._meeting.next_generation(kept.generation)
            except AwayError:
                return None  # the next look finds the failure again
        self._end([kept], GROUP_GRACE_S if kept.unit.is_group else self._grace_s)
        kept.processes = {}
        if time.monotonic() - kept.began_s >= HEALTHY_S:
            kept.failures = 0
        kept.failures += 1
        if kept.failures > self._restarts:
            kept.has_ended = True
            self.note(
                f"{why}; {kept.unit.name} is not restarted after failure {kept.failures} "
                f"(launch.restarts={self._restarts}), and the run "
                f"{'ends' if kept.unit.is_needed else 'continues without it'}{self._error_of(kept.unit)}"
            )
            return 1 if kept.unit.is_needed else None
        wait_s = min(self._backoff_s * 2 ** (kept.failures - 1), LONGEST_BACKOFF_S)
        kept.starts_at_s = time.monotonic() + wait_s
        kept.has_ended = False
        self.note(
            f"{why}; {kept.unit.name} starts again in {wait_s:g} s (failure {kept.failures}, "
            f"launch.restarts={self._restarts})"
        )
        return None

    def _error_of(self, unit: Unit) -> str:
        names = [command.name for command in unit.commands]
        for reader in self._readers:
            if reader.name in names:
                reader.join(timeout=1)  # the process has ended, and its last line may be under way
        return "".join(f". Error of {name}: {self._errors[name]}" for name in names if name in self._errors)

    # --- the other agents -------------------------------------------------------------------------------

    def _consult(self) -> int | None:
        """Reads the state that the agents share in Redis; adds this agent's rank if it is missing there.

        Returns the run's exit status if the run has ended, MOVED if a new agent of rank 0 has started, 1 if
        Redis was unreachable for `away_s` seconds; else None.
        """
        now = time.monotonic()
        if now - self._polled_s < MEETING_POLL_S:
            return None
        self._polled_s = now
        try:
            found = self._meeting.situation()
            if self._meeting.rank not in found.agents:  # at the start, and after Redis was emptied
                self._meeting.join()
        except AwayError as error:
            # Not the time since it was reached last: in a pause of this process that grows, too.
            self._away_since_s = self._away_since_s or now
            if now - self._away_since_s < self._away_s:
                return None
            self.note(
                "this node agent ends all its processes, because Redis has been unreachable for "
                f"{self._away_s:g} s (runtime.deadline_s); restore Redis and resume the run: {error}"
            )
            return 1
        self._away_since_s = None
        # Never lower: an emptied Redis holds 0 until the next failure.
        self._generation = max(self._generation, found.generation)
        if found.token not in (None, self._meeting.token):
            self.note(
                "the agent of rank 0 was restarted; all processes of this machine start again, with the new "
                "addresses"
            )
            return MOVED
        if found.status:
            self.note(
                "this node agent ends all its processes, because another machine's agent ended the run with "
                f"status {found.status}; see the ends of the logs in {self._logs}"
            )
        return found.status

    def _announced(self, status: int) -> int:
        """Publishes the run's status to the other agents, and returns the status.

        A machine that runs only hosts publishes nothing, because the run continues without it.
        """
        if any(kept.unit.is_needed for kept in self._kept):
            try:
                self._meeting.end(status)
            except AwayError as error:
                how = (
                    "the scheduler that sent the signal ends them too, or they end without Redis after "
                    f"{self._away_s:g} s"
                    if self._signal
                    else f"stop them with Ctrl-C or the scheduler: {error}"
                )
                self.note(f"the node agents of the other machines do not know that the run has ended; {how}")
        return status

    # --- processes --------------------------------------------------------------------------------------

    def _start(self, kept: _Kept) -> None:
        # Before the processes exist: a generation raised while they start is then seen as newer than theirs.
        kept.began_s, kept.generation, kept.has_ended = time.monotonic(), self._generation, False
        for command in kept.unit.commands:
            process = subprocess.Popen(
                tied(command.words),
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on
            )
            kept.processes[command.name] = process
            assert process.stdout is not None
            self._errors.pop(command.name, None)
            own = command.name, process.stdout
            reader = threading.Thread(target=self._copy, args=own, name=command.name, daemon=True)
            reader.start()
            self._readers = [*(each for each in self._readers if each.is_alive()), reader]

    def _copy(self, name: str, pipe: IO[bytes]) -> None:
        """Copies each output line of process `name` to its log and, after the name, to the agent's output."""
        # Unbuffered, so that a line which a full disk refuses is not tried again. The process's pipe must be
        # read in any case: a full pipe would stop the process.
        with pipe, (self._logs / f"{name}.log").open("ab", buffering=0) as log:
            for line in pipe:
                with unless_full():
                    log.write(line)
                text = line.decode("utf-8", "replace").rstrip("\n")
                if text.startswith(ERROR):
                    self._errors[name] = text.removeprefix(ERROR)
                self._print(name, text)

    def _print(self, name: str, line: str) -> None:
        # The output was closed, or is a file on a full disk; the logs remain.
        with self._lock, suppress(BrokenPipeError), unless_full():
            self._out.write(f"{name:<{self._width}} | {line}\n")
            self._out.flush()

    def note(self, line: str) -> None:
        self._print("launch", line)

    def _await_all(self) -> None:
        """Waits until all processes have ended by the controller's order, at most the grace period."""
        end_s = time.monotonic() + self._grace_s
        while _running(self._kept) and not self._signal:
            if time.monotonic() >= end_s:
                return
            self._pause()

    def _end(self, kept: Sequence[_Kept], grace_s: float) -> None:
        """Sends SIGTERM to the units' processes, waits up to `grace_s` seconds, then sends SIGKILL.

        SIGKILL also goes to child processes that these have left running. A second Ctrl-C ends the wait.
        """
        for process in _running(kept):
            process.terminate()
        began_s = time.monotonic()
        while _running(kept):
            if time.monotonic() - began_s >= (grace_s if not self._is_hurried else 0.0):
                break
            self._pause()
        for process in (process for each in kept for process in each.processes.values()):
            # Each leads a process group of its own, so children that it left behind end too.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, _frame: object) -> None:
            # Slurm may send SIGTERM several times; only a second Ctrl-C asks for an end without grace.
            self._is_hurried |= number == signal.SIGINT and bool(self._signal)
            self._signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _running(kept: Sequence[_Kept]) -> list[subprocess.Popen]:
    return [process for each in kept for process in each.processes.values() if process.poll() is None]


def _ended_by(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
