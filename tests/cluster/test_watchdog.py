"""A watched process ends whatever it hangs in, and with its watcher; a note says where it hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_jax.cluster import watchdog
from areal_jax.cluster.watchdog import PAUSED_S, Deadlines, _Watcher
from tests.hangs import HANG_S, wait_for
from tests.processes import assert_ends, has_ended

ROOT = Path(__file__).parents[2]

Start = Callable[[str], subprocess.Popen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(way)`: watcher and watched; what is left of them after the test is killed by its id."""
    begun: list[subprocess.Popen] = []

    def one(way: str) -> subprocess.Popen:
        command = ["env", "--default-signal=INT", sys.executable, "-m", "tests.cluster.watched"]
        begun.append(subprocess.Popen([*command, tmp_path, way], cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield one
    for process in begun:
        process.kill()
        process.wait()
    if (tmp_path / "pids").exists():
        for pid in pids(tmp_path):
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    """Watcher and watched, once the second runs."""
    wait_for(lambda: (folder / "pids").exists())
    return [int(word) for word in (folder / "pids").read_text().split()]


def ended(process: subprocess.Popen, folder: Path) -> tuple[int, str, str]:
    """Status, stderr and the file of stacks; no process is left."""
    _, error = process.communicate(timeout=HANG_S)
    assert all(has_ended(pid) for pid in pids(folder))
    stacks = folder / "logs" / "trainer-0.stacks"
    return process.returncode, error, stacks.read_text() if stacks.exists() else ""


def test_a_process_that_ends_leaves_nothing(start: Start, tmp_path: Path):
    assert ended(start("ends"), tmp_path) == (0, "", "")


def test_an_error_is_reported_with_its_activity(start: Start, tmp_path: Path):
    status, error, _ = ended(start("fails"), tmp_path)
    assert status == 1
    assert "error: trajectory 3 is missing\n" in error
    assert "ended with status 1; activity: pack\n" in error


def test_the_watcher_ends_with_the_watched(start: Start, tmp_path: Path):
    status, error, _ = ended(start("is_killed"), tmp_path)
    assert status == 128 + signal.SIGKILL
    assert f"trainer-0 (process {pids(tmp_path)[1]}) ended with status 137; activity: publish\n" in error


def test_a_process_stuck_in_a_known_activity_is_killed_and_its_stacks_are_written(
    start: Start, tmp_path: Path
):
    status, error, stacks = ended(start("is_stuck"), tmp_path)
    assert status == 128 + signal.SIGKILL
    assert "killed: no progress reported for 0.5 s; state: waiting; activity: update\n" in error
    assert "killed: no progress reported for 0.5 s; state: waiting; activity: update\n" in stacks
    assert "in wait_in_vain" in stacks


def test_the_watchers_own_pause_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine that stood still for an hour; then the watched process is stuck, and is killed after 10 s."""
    now_s, steps = [0.0], [1.0, 3600.0, *[1.0] * 30]
    process = SimpleNamespace(is_alive=lambda: bool(steps), sentinel=0, pid=1, exitcode=0)
    watcher = _Watcher(process, None, "trainer-0", tmp_path / "stacks", Deadlines(10.0, 10.0))  # type: ignore
    watcher._since, watcher._dump = 0.0, lambda: None
    wait = lambda *_: now_s.append(now_s[-1] + steps.pop(0))  # noqa: E731
    monkeypatch.setattr(watchdog, "connection", SimpleNamespace(wait=wait))
    times = SimpleNamespace(monotonic=lambda: now_s[-1], strftime=time.strftime)
    monkeypatch.setattr(watchdog, "time", times)
    watcher.watch()
    # Of the pause, PAUSED_S count: 1 s, 5 s, and the next whole second after 4 s more.
    assert PAUSED_S == 5.0 and now_s[-1] == 3601.0 + 5.0 and steps


def test_a_stopped_process_is_killed_and_the_note_says_stopped(start: Start, tmp_path: Path):
    status, error, stacks = ended(start("is_stopped"), tmp_path)
    assert status == 128 + signal.SIGKILL
    assert "killed: no progress reported for 0.5 s; state: stopped; activity: checkpoint\n" in error
    assert "File" not in stacks  # it cannot write any


def test_a_second_sigterm_does_not_shorten_the_grace_and_a_second_ctrl_c_ends_it(
    start: Start, tmp_path: Path
):
    """Slurm signals every process of a job, and then the agent its own. The grace is longer than the test."""
    process = start("ends_late")
    watcher, _ = pids(tmp_path)
    os.kill(watcher, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(watcher, signal.SIGTERM)
    status, error, _ = ended(process, tmp_path)
    assert (status, error) == (0, "")
    (tmp_path / "pids").unlink()
    process = start("ignores_signals")
    watcher, _ = pids(tmp_path)
    os.kill(watcher, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(watcher, signal.SIGINT)
    assert ended(process, tmp_path)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_process_that_ignores_signals_is_killed_after_the_grace(start: Start, tmp_path: Path, number: int):
    process = start("is_killed_after_its_grace")
    watcher, _ = pids(tmp_path)
    begun = time.monotonic()
    os.kill(watcher, number)
    status, error, _ = ended(process, tmp_path)
    assert status == 128 + signal.SIGKILL
    assert "killed: still running 1 s after SIGTERM; activity: update\n" in error
    assert time.monotonic() - begun >= 1.0


def test_a_signal_ends_a_process_that_does_not_ignore_it(start: Start, tmp_path: Path):
    process = start("waits")
    watcher, _ = pids(tmp_path)
    os.kill(watcher, signal.SIGTERM)
    status, error, _ = ended(process, tmp_path)
    assert status == 128 + signal.SIGTERM
    assert "ended with status 143; activity: wait: a batch\n" in error


def test_the_watched_dies_with_its_watcher(start: Start, tmp_path: Path):
    process = start("ignores_signals")
    watcher, child = pids(tmp_path)
    os.kill(watcher, signal.SIGKILL)
    process.wait(HANG_S)
    assert_ends(child)
