"""Keeps the processes of one machine running: starts them, shows what they print, starts again what failed.

Commands of a unit only work together: when one fails, the others are ended and all start again. The run is
over when the unit that `ends_run` has ended well, and has failed when a unit that it needs cannot be kept.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, TextIO

HEALTHY_S = 600.0
"""A unit that lived for so long begins its count of restarts anew."""
LONGEST_BACKOFF_S = 60.0
GRACE_S = 30.0
"""What a process has to end by itself: after the run's end, and again after SIGTERM."""
POLL_S = 0.05


@dataclass(frozen=True)
class Command:
    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    """Beside that of this process."""


@dataclass(frozen=True)
class Unit:
    commands: tuple[Command, ...]
    is_needed: bool = False
    """The run fails where it cannot be kept."""
    ends_run: bool = False

    @property
    def name(self) -> str:
        return " and ".join(command.name for command in self.commands)


@dataclass
class _Kept:
    """A unit's processes now, and how often they failed."""

    unit: Unit
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    failures: int = 0
    began_s: float = 0.0
    starts_at_s: float = 0.0
    has_ended: bool = False

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes.values())


class Supervisor:
    """`run()` returns the status of the whole: 0, 1 where the run failed, 128 + the signal that ended it."""

    def __init__(
        self,
        units: Sequence[Unit],
        logs: Path,
        out: TextIO,
        restarts: int,
        *,
        backoff_s: float = 1.0,
        grace_s: float = GRACE_S,
    ) -> None:
        """`backoff_s`: wait before the first restart; it doubles."""
        self._kept = [_Kept(unit) for unit in units]
        self._logs, self._out, self._restarts = logs, out, restarts
        self._backoff_s, self._grace_s = backoff_s, grace_s
        self._width = max(len(command.name) for unit in units for command in unit.commands)
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._signal = 0

    def run(self) -> int:
        """From the main thread: until the run is complete, has failed, or Ctrl-C or SIGTERM ends it."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._signals():
            try:
                for kept in self._kept:
                    self._start(kept)
                status = self._watch()
                if status == 0:
                    self._await_all()
                return status
            finally:
                self._end(self._kept)
                for reader in self._readers:
                    reader.join(timeout=1)  # a grandchild may hold the pipe open

    def _watch(self) -> int:
        while not self._signal:
            for kept in self._kept:
                status = self._look(kept)
                if status is not None:
                    return status
            time.sleep(POLL_S)
        self.note(f"ending everything: {signal.Signals(self._signal).name}")
        return 128 + self._signal

    def _look(self, kept: _Kept) -> int | None:
        """Act on what became of a unit; the run's status where that decides it."""
        if kept.has_ended:
            return None
        if not kept.processes:
            if time.monotonic() >= kept.starts_at_s:
                self._start(kept)
            return None
        statuses = {name: process.poll() for name, process in kept.processes.items()}
        if failed := {name: status for name, status in statuses.items() if status}:
            return self._failed(kept, failed)
        if all(status == 0 for status in statuses.values()):
            kept.has_ended = True
            return 0 if kept.unit.ends_run else None
        return None

    def _failed(self, kept: _Kept, failed: Mapping[str, int]) -> int | None:
        why = ", ".join(f"{name} {_ended_by(status)}" for name, status in failed.items())
        self._end([kept])
        kept.processes = {}
        if time.monotonic() - kept.began_s >= HEALTHY_S:
            kept.failures = 0
        kept.failures += 1
        if kept.failures > self._restarts:
            kept.has_ended = True
            self.note(f"{why}; that was failure {kept.failures}, and it stays down (launch.restarts)")
            return 1 if kept.unit.is_needed else None
        wait_s = min(self._backoff_s * 2 ** (kept.failures - 1), LONGEST_BACKOFF_S)
        kept.starts_at_s = time.monotonic() + wait_s
        self.note(f"{why}; {kept.unit.name} starts again in {wait_s:g} s (failure {kept.failures})")
        return None

    # --- processes --------------------------------------------------------------------------------------

    def _start(self, kept: _Kept) -> None:
        kept.began_s = time.monotonic()
        for command in kept.unit.commands:
            process = subprocess.Popen(
                [*_dies_with_us(), *command.words],
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to hand on
            )
            kept.processes[command.name] = process
            assert process.stdout is not None
            reader = threading.Thread(target=self._copy, args=(command.name, process.stdout), daemon=True)
            reader.start()
            self._readers = [*(each for each in self._readers if each.is_alive()), reader]

    def _copy(self, name: str, pipe: IO[bytes]) -> None:
        """Every line of a process, to its log as it is and to our output behind its name."""
        with pipe, (self._logs / f"{name}.log").open("ab") as log:
            for line in pipe:
                _write(log, line)
                self._print(name, line.decode("utf-8", "replace").rstrip("\n"))

    def _print(self, name: str, line: str) -> None:
        with self._lock, suppress(BrokenPipeError):  # whoever reads us may leave; the logs stay
            self._out.write(f"{name:<{self._width}} | {line}\n")
            self._out.flush()

    def note(self, line: str) -> None:
        self._print("launch", line)

    def _await_all(self) -> None:
        """The run is complete, and its processes know: let them end by themselves."""
        end_s = time.monotonic() + self._grace_s
        while any(kept.is_running for kept in self._kept) and not self._signal:
            if time.monotonic() >= end_s:
                return
            time.sleep(POLL_S)

    def _end(self, kept: Sequence[_Kept]) -> None:
        """Ask each process to end, and kill what is left of it and of what it started after the grace."""
        processes = [process for each in kept for process in each.processes.values()]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        began_s = time.monotonic()
        while any(process.poll() is None for process in processes):
            if time.monotonic() - began_s >= self._grace_s:
                break
            time.sleep(POLL_S)
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, _frame: object) -> None:
            if self._signal:
                self._grace_s = 0.0  # asked twice
            self._signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _write(log: BinaryIO, line: bytes) -> None:
    log.write(line)
    log.flush()


def _ended_by(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with {status}"


def _dies_with_us() -> list[str]:
    """So that no process outlives its supervisor, however that ends."""
    if sys.platform != "linux" or shutil.which("setpriv") is None:
        return []
    return ["setpriv", "--pdeathsig=TERM", "--"]
