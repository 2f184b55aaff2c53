"""Processes of a launched run that are paused for longer than the run waits for a heartbeat."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from areal_jax.observe.metrics import read_rows
from tests.cluster.test_kill import BETWEEN, FIRST, await_rows, ended_well, launching, processes
from tests.hangs import wait_for
from tests.programs import require
from tests.small_run import WORDS

pytestmark = pytest.mark.slow

PAUSE_S = 20.0


def tree(pid: int) -> list[int]:
    """A process and all below it, as a machine pauses them: a trainer's work is done by a child."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(each for child in children.split() for each in tree(int(child)))]


def pause(pid: int, is_noticed) -> None:
    """Stops the process for PAUSE_S seconds, and for as long as nothing has noticed it."""
    stopped, end_s = tree(pid), time.monotonic() + PAUSE_S
    for each in stopped:
        os.kill(each, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    wait_for(is_noticed)
    assert time.monotonic() >= end_s
    for each in reversed(stopped):
        os.kill(each, signal.SIGCONT)


@pytest.mark.parametrize(
    "roles",
    [
        ("generate", "controller"),
        pytest.param(("reward", "trainer", "controller", "generate", "evaluate"), marks=pytest.mark.soak),
    ],
    ids=len,
)
def test_a_process_that_was_paused_comes_back(tmp_path: Path, roles: tuple[str, ...]):
    """Each one goes on in its own process, though it was lost, and the run ends as if nothing had been.

    An evaluation process comes last, because the run trains on to its end while that one is paused.
    """
    require("redis-server")
    run, steps = tmp_path / "run", FIRST + BETWEEN * len(roles) + 2
    words = [*WORDS, f"run.steps={steps}", "launch.accelerator=cpu", "launch.restarts=0"]
    words += ["observe.evaluate=2"] if "evaluate" in roles else []
    said = run.with_suffix(".log")
    with launching(run, *words) as launched:
        for number, role in enumerate(roles):
            await_rows(run, FIRST + BETWEEN * number, launched)
            (pid,) = processes(run, role)
            is_noticed = lambda role=role: role == "controller" or f"{role}-0 is lost" in said.read_text()  # noqa: E731
            pause(pid, is_noticed)
        figures = ended_well(run, launched)
    assert figures["ok"] and figures["violations"] == []
    assert figures["trained"] == 4 * steps and figures["in_flight"] == 0
    assert [row["step"] for row in read_rows(run)] == list(range(steps))
    text = said.read_text()
    assert "ended with" not in text and "starts again" not in text
    for role in set(roles) - {"controller"}:
        assert text.count(f"{role}-0 joined the run") == 2
