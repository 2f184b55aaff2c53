"""A watched process without jax, for test_watchdog: `python -m tests.cluster.watched FOLDER WAY`.

FOLDER/pids names the two processes; WAY is a function below.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from areal_jax.cluster.watchdog import Beat, Deadlines, watched
from areal_jax.types import ArealError

PATIENT = Deadlines(first_s=300.0, later_s=300.0, grace_s=300.0)
"""No limit that a process on a slow and busy machine exceeds."""
DEADLINES = {
    "is_stuck": PATIENT._replace(later_s=0.5),
    "is_stopped": PATIENT._replace(later_s=0.5),
    "is_killed_after_its_grace": PATIENT._replace(grace_s=1.0),
}


def ends(beat: Beat) -> None:
    beat("wait: a batch")


def fails(beat: Beat) -> None:
    beat("pack")
    raise ArealError("trajectory 3 is missing")


def is_killed(beat: Beat) -> None:
    beat("publish")
    os.kill(os.getpid(), signal.SIGKILL)


def is_stuck(beat: Beat) -> None:
    """In an activity that was there before; a new one may take longer."""
    beat("update")
    time.sleep(1)
    beat("publish")
    beat("update")
    wait_in_vain()


def waits(beat: Beat) -> None:
    beat("wait: a batch")
    wait_in_vain()


def ends_late(beat: Beat) -> None:
    """As a trainer does that writes a checkpoint; a second signal would end it with an error."""

    def begin_to_end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        is_ending.append(True)

    is_ending: list[bool] = []
    signal.signal(signal.SIGTERM, begin_to_end)
    while not is_ending:
        beat("update")
        time.sleep(0.02)
    time.sleep(0.5)


def is_stopped(beat: Beat) -> None:
    beat("checkpoint")
    beat("checkpoint")
    os.kill(os.getpid(), signal.SIGSTOP)


def ignores_signals(beat: Beat) -> None:
    """As a process with a stuck interpreter does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    beat("update")
    while True:
        beat("update")
        time.sleep(0.1)


def is_killed_after_its_grace(beat: Beat) -> None:
    ignores_signals(beat)


def wait_in_vain() -> None:
    time.sleep(1000)


def run(folder: Path, way: str, watcher: int, beat: Beat) -> None:
    globals()[way](told(folder, watcher, beat))


def told(folder: Path, watcher: int, beat: Beat) -> Beat:
    """Writes the file of ids at the first activity: handlers of signals are set by then."""

    def first(activity: str) -> None:
        if not (folder / "pids").exists():
            (folder / "pids.new").write_text(f"{watcher} {os.getpid()}")
            (folder / "pids.new").rename(folder / "pids")
        beat(activity)

    return first


if __name__ == "__main__":
    folder_, way_ = Path(sys.argv[1]), sys.argv[2]
    deadlines = DEADLINES.get(way_, PATIENT)
    sys.exit(watched(partial(run, folder_, way_, os.getpid()), "trainer-0", folder_ / "logs", deadlines))
