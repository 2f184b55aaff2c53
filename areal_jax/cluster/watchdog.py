"""Watched processes: a child process reports its activities, and is killed if it reports none for too long.

If a process waits in a collective for a dead or stopped process, Python cannot interrupt the wait: neither by
a deadline, nor by a signal handler, which runs only between two steps of the interpreter. Therefore the
process that a node agent starts (the watcher) only watches a child process, which does the work:

- the watcher has no jax and no thread, so nothing in it hangs, and SIGTERM, Ctrl-C and scancel always reach
  it; a child that is still running after a grace period is killed;
- a child that is stuck in a collective, a driver or a lock, or is stopped, is killed by SIGKILL, which
  nothing in it can delay; a note names its activity, and the stacks of its threads are written to a file;
- when the child dies, the watcher ends with the child's exit status; when the watcher dies, the kernel kills
  the child (PR_SET_PDEATHSIG).

The watcher must be the parent, because SIGTERM is sent to the parent only, and a parent that did the work and
was stuck could not pass the signal on.
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
from typing import Any, NamedTuple

from areal_jax.file_errors import explained, unless_full
from areal_jax.types import ArealError

Beat = Callable[[str], None]
"""`beat(activity)` reports that the watched process begins this activity. Never blocks, never raises."""

INTERRUPTED = 130

MARGIN_S = 30.0
COMPILING_S = 1800.0
"""Additional seconds for the first run of each activity, because a first run compiles programs."""
POLL_S = 0.1
PAUSED_S = 5.0
"""Longest time, in seconds, between two checks of a watcher that is not paused."""
DUMP_S = 3.0
"""Maximum time, in seconds, to write the stacks of a stuck process."""
GONE_S = 30.0
"""Seconds that the operating system may take to end a process after SIGKILL."""

_PR_SET_PDEATHSIG = 1
_STATES = {"T": "stopped", "R": "running", "S": "waiting", "D": "waiting for a disk or a device"}


class Deadlines(NamedTuple):
    """Limits of a watched process, in seconds."""

    first_s: float
    """Longest time without a report while an activity runs for the first time, and so compiles programs."""
    later_s: float
    """Longest time without a report in later runs of an activity; must exceed all timeouts within it."""
    grace_s: float = 20.0
    """Seconds from SIGTERM or Ctrl-C to SIGKILL."""

    @classmethod
    def beside(cls, deadline_s: float) -> Deadlines:
        """Returns limits longer than the process's own `deadline_s`.

        So the process can first raise an error that names the cause, and is killed only if it does not.
        """
        return cls(first_s=deadline_s + MARGIN_S + COMPILING_S, later_s=deadline_s + MARGIN_S)


def watched(body: Callable[[Beat], Any], name: str, logs: Path, deadlines: Deadlines) -> int:
    """Runs `body(beat)` in a child process, watches this process to its end and returns its exit status.

    `body` calls `beat(activity)` at the start of each activity. If the next call comes later than `deadlines`
    allow, the child is killed, and the stacks of its threads are written to `logs/<name>.stacks`. Must be
    called in the main thread; `body` is pickled. The status is 0 if `body` returned, 1 if `body` raised, 128
    + n if signal n ended the child.
    """
    logs.mkdir(parents=True, exist_ok=True)
    stacks = logs / f"{name}.stacks"
    context = multiprocessing.get_context("spawn")
    reports, reporter = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(body, os.getpid(), reporter, stacks), name=name)
    watcher = _Watcher(process, reports, name, stacks, deadlines)
    former = {number: signal.signal(number, watcher.signalled) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process.start()
        reporter.close()
        watcher.watch()
    finally:
        watcher.kill()
        for number, handler in former.items():
            signal.signal(number, handler)
    if stacks.exists() and not stacks.stat().st_size:
        stacks.unlink()
    return watcher.status()


class _Watcher:
    def __init__(
        self, process: Any, reports: Connection, name: str, stacks: Path, deadlines: Deadlines
    ) -> None:
        self._process, self._name, self._stacks, self._deadlines = process, name, stacks, deadlines
        self._reports: Connection | None = reports
        self._activity, self._since = "start", time.monotonic()
        self._known: set[str] = set()
        self._limit_s = deadlines.first_s
        self._kill_at: float | None = None

    def signalled(self, number: int, frame: Any) -> None:
        """Handles SIGTERM and SIGINT: passes the first signal on to the watched process.

        If that process still runs `grace_s` seconds later, or at a second Ctrl-C, it is killed. A second
        SIGTERM has no effect, because Slurm and the node agent both send SIGTERM.
        """
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + self._deadlines.grace_s
            if self._process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)
        elif number == signal.SIGINT:
            self._kill_at = now

    def watch(self) -> None:
        """Waits until the watched process has ended, or has exceeded a limit and the caller must kill it.

        A pause of the watcher itself does not count, because it may be one of the whole machine.
        """
        checked = time.monotonic()
        while self._process.is_alive():
            connection.wait([self._process.sentinel, *([self._reports] if self._reports else [])], POLL_S)
            now = time.monotonic()
            self._since += max(0.0, now - checked - PAUSED_S)
            checked = now
            self._listen()
            if self._kill_at is not None and now >= self._kill_at:
                self._note(f"killed: still running {self._deadlines.grace_s:g} s after SIGTERM")
                return
            if now - self._since > self._limit_s and self._process.is_alive():
                self._note(f"killed: no progress reported for {self._limit_s:g} s; state: {self._state()}")
                self._dump()
                return
        self._listen()
        if self.status():
            self._note(f"ended with status {self.status()}")

    def kill(self) -> None:
        """Kills the watched process; raises ArealError if it has not ended after GONE_S seconds."""
        if self._process.pid is None:
            return
        self._process.kill()
        self._process.join(GONE_S)
        if self._process.is_alive():
            raise ArealError(
                f"{self._name} (process {self._process.pid}, {self._state()}) did not end within "
                f"{GONE_S:g} s of SIGKILL: its device or disk does not answer; see the kernel's log (dmesg)"
            )

    def status(self) -> int:
        code = self._process.exitcode
        return 1 if code is None else code if code >= 0 else 128 - code

    def _listen(self) -> None:
        while self._reports is not None and self._reports.poll():
            try:
                activity = self._reports.recv_bytes().decode()
            except (EOFError, OSError):
                self._reports = None
                return
            # The first of its kind compiles programs, so it may take longer.
            is_known = activity in self._known
            self._limit_s = self._deadlines.later_s if is_known else self._deadlines.first_s
            self._known.add(activity)
            self._activity, self._since = activity, time.monotonic()

    def _note(self, what: str) -> None:
        """Writes one line to stderr and to the file of stacks: what happened, and during which activity."""
        line = f"{self._name} (process {self._process.pid}) {what}; activity: {self._activity}\n"
        sys.stderr.write(line)
        sys.stderr.flush()
        with unless_full(), self._stacks.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    def _state(self) -> str:
        """Returns the process's state according to /proc, such as running or stopped."""
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return _STATES.get(fields[0], fields[0])
        return "alive"

    def _dump(self) -> None:
        """Makes the process write its threads' stacks to the stacks file, unless the process is stopped."""
        if self._state() == "stopped":
            return
        # faulthandler's handler is C code and runs while the interpreter hangs. The dump is complete once the
        # file stops growing.
        size = before = self._stacks.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        end = time.monotonic() + DUMP_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            former, size = size, self._stacks.stat().st_size
            if size > before and size == former:
                return


# --- in the watched process ---------------------------------------------------------------------------------


def _run(body: Callable[[Beat], Any], parent: int, reporter: Connection, stacks: Path) -> None:
    """Runs `body` in the child process, and reports the activities of `body` through `reporter`.

    If `body` raises, ends the process at once: a normal exit would let jax wait for the other processes of
    the group. `parent`: the watcher's process id. `stacks`: the file for the threads' stacks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the watcher died before the line above
    os.setsid()  # a terminal's Ctrl-C is for the watcher, which passes it on
    # A stopped watcher does not read: its full pipe must not stop the training.
    os.set_blocking(reporter.fileno(), False)

    def beat(activity: str) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # the watcher is stopped or dead
            reporter.send_bytes(activity.encode()[:1000])

    file = stacks.open("a")  # faulthandler keeps a reference, and so the file open
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    try:
        body(beat)
    except KeyboardInterrupt:
        _end("", INTERRUPTED)
    except BaseException as error:  # noqa: BLE001 - this process writes the error and ends
        shown = explained(error)
        _end(traceback.format_exc() if shown is None else f"error: {shown}\n")


def _end(why: str, status: int = 1) -> None:
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(why)
        sys.stderr.flush()
    # Not sys.exit: jax would wait at exit for the other processes, one of which may be dead.
    os._exit(status)
