"""A process that is watched: it says what it does, and is killed where it falls silent.

Who waits in a collective for a process that is dead or stopped cannot be interrupted from Python: neither by
a deadline, nor by a signal's handler, which runs only between two steps of the interpreter. So the process
that a launcher starts does nothing but watch, and what it watches is its child:

- it has no jax and no thread, so nothing in it hangs, and SIGTERM, Ctrl-C and scancel always reach it; what
  does not end within a grace is killed;
- a child that is stuck, in a collective, a driver or a lock, or stopped, is killed by SIGKILL, by its id,
  which nothing in it can hold up; a note says in which activity, and the stacks of its threads are written;
- where the child dies, the watching process ends with its status; where that one dies, the kernel kills the
  child (PR_SET_PDEATHSIG).

A watchdog that were the child of what it watches would not hear a SIGTERM sent to its parent, and the parent,
being stuck, could not pass it on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

from areal_jax.types import ArealError

Beat = Callable[[str], None]
"""`beat(activity)`: what the watched process does from now on. Never blocks, never raises."""

INTERRUPTED = 130

MARGIN_S = 30.0
COMPILING_S = 1800.0
"""How much longer than a later one the first of its kind may take: programs of large models."""
POLL_S = 0.1
DUMP_S = 3.0
"""How long the stacks of a silent process may take to be written."""
GONE_S = 30.0
"""How long the system may take to end a process after SIGKILL."""

_PR_SET_PDEATHSIG = 1
_STATES = {"T": "stopped", "R": "running", "S": "waiting", "D": "waiting for a disk or a device"}


class Deadlines(NamedTuple):
    """Seconds."""

    first_s: float
    """Longest silence in an activity that is new: whatever it runs has to be compiled."""
    later_s: float
    """Longest silence in one that was there before. Longer than any wait that has a deadline of its own."""
    grace_s: float = 20.0
    """From SIGTERM or Ctrl-C to SIGKILL."""

    @classmethod
    def beside(cls, deadline_s: float) -> Deadlines:
        """Of a process whose own waits end after `deadline_s`: those name their culprit, and come first."""
        return cls(first_s=deadline_s + MARGIN_S + COMPILING_S, later_s=deadline_s + MARGIN_S)


def watched(body: Callable[[Beat], Any], who: str, logs: Path, deadlines: Deadlines) -> int:
    """Run `body(beat)` in a new process and watch it until it has ended; from the main thread.

    `body` is pickled to get there. Answers its exit status: 0, 1 where it raised, 128 + n where signal n
    ended it. Of what was silent `logs/<who>.stacks` tells.
    """
    logs.mkdir(parents=True, exist_ok=True)
    stacks = logs / f"{who}.stacks"
    context = multiprocessing.get_context("spawn")
    hear, say = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(body, os.getpid(), say, stacks), name=who)
    watcher = _Watcher(process, hear, who, stacks, deadlines)
    former = {number: signal.signal(number, watcher.told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process.start()
        say.close()
        watcher.watch()
    finally:
        watcher.kill()
        for number, handler in former.items():
            signal.signal(number, handler)
    if stacks.exists() and not stacks.stat().st_size:
        stacks.unlink()
    return watcher.status()


class _Watcher:
    def __init__(self, process: Any, hear: Connection, who: str, stacks: Path, deadlines: Deadlines) -> None:
        self._process, self._who, self._stacks, self._deadlines = process, who, stacks, deadlines
        self._hear: Connection | None = hear
        self._activity, self._since = "start", time.monotonic()
        self._known: set[str] = set()
        self._limit_s = deadlines.first_s
        self._kill_at: float | None = None

    def told(self, number: int, frame: Any) -> None:
        """The handler of SIGTERM and SIGINT: pass it on, once; the second time, or after the grace, kill."""
        now = time.monotonic()
        is_first = self._kill_at is None
        self._kill_at = now + self._deadlines.grace_s if is_first else now
        if is_first and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def watch(self) -> None:
        """Until the process has ended, by itself or killed."""
        while self._process.is_alive():
            connection.wait([self._process.sentinel, *([self._hear] if self._hear else [])], POLL_S)
            self._listen()
            now = time.monotonic()
            if self._kill_at is not None and now >= self._kill_at:
                self._note(f"did not end within {self._deadlines.grace_s:g} s of being told to, in")
                return
            if now - self._since > self._limit_s and self._process.is_alive():
                self._note(f"{self._state()} was silent for {self._limit_s:g} s in")
                self._dump()
                return
        self._listen()
        if self.status():
            self._note(f"ended with status {self.status()} in")

    def kill(self) -> None:
        """Whatever it does. Raises ArealError where the system does not end it."""
        if self._process.pid is None:
            return
        self._process.kill()
        self._process.join(GONE_S)
        if self._process.is_alive():
            raise ArealError(
                f"{self._who} (process {self._process.pid}, {self._state()}) did not end within {GONE_S:g} s "
                "of SIGKILL: its device or disk does not answer; see the system's log"
            )

    def status(self) -> int:
        code = self._process.exitcode
        return 1 if code is None else code if code >= 0 else 128 - code

    def _listen(self) -> None:
        while self._hear is not None and self._hear.poll():
            try:
                activity = self._hear.recv_bytes().decode()
            except (EOFError, OSError):
                self._hear = None
                return
            is_known = activity in self._known
            self._limit_s = self._deadlines.later_s if is_known else self._deadlines.first_s
            self._known.add(activity)
            self._activity, self._since = activity, time.monotonic()

    def _note(self, what: str) -> None:
        """To stderr, and over the stacks."""
        line = f"{self._who} (process {self._process.pid}) {what}: {self._activity}\n"
        sys.stderr.write(line)
        sys.stderr.flush()
        with self._stacks.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    def _state(self) -> str:
        """Of the process, in a word, by the system's account."""
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return _STATES.get(fields[0], fields[0])
        return "alive"

    def _dump(self) -> None:
        """Have it write the stacks of its threads; one that is stopped cannot."""
        if self._state() == "stopped":
            return
        size = before = self._stacks.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        end = time.monotonic() + DUMP_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            former, size = size, self._stacks.stat().st_size
            if size > before and size == former:
                return


# --- in the watched process ---------------------------------------------------------------------------------


def _run(body: Callable[[Beat], Any], parent: int, say: Connection, stacks: Path) -> None:
    """End with status 1 where the body raises, at once: what others wait for must not wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above
    os.setsid()  # Ctrl-C in a terminal is for the parent, which passes it on
    os.set_blocking(say.fileno(), False)
    file = stacks.open("a")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    try:
        body(_Voice(say, file))
    except ArealError as error:
        _end(f"error: {error}\n")
    except KeyboardInterrupt:
        _end("", INTERRUPTED)
    except BaseException:  # noqa: BLE001 - this process ends of it, and says so
        _end(traceback.format_exc())


class _Voice:
    def __init__(self, say: Connection, stacks: IO[str]) -> None:
        self._say = say
        self._stacks = stacks  # faulthandler writes to its descriptor, and does not keep it open

    def __call__(self, activity: str) -> None:
        """A watcher that does not listen, being stopped or dead, holds nobody up."""
        with suppress(BlockingIOError, BrokenPipeError):
            self._say.send_bytes(activity.encode()[:1000])


def _end(why: str, status: int = 1) -> None:
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(why)
        sys.stderr.flush()
    os._exit(status)
