"""Episodes on a cluster: `kill -9` of each role with tool calls under way, and no call happens twice."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.control import events as e
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.replay import replay
from tests.cluster.agents import pids_of, said, wait_until
from tests.cluster.test_launch_local import QUIET, launch
from tests.programs import require
from tests.small_run import RECIPE, WORDS

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("AREAL_JAX_EPISODE_KILLS", "4"))
ROLES = ("reward-0", "generate-0", "controller", "trainer-0")
BETWEEN_S = 4.0


@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.soak)])
def test_kill_9_of_each_role_with_episodes_in_flight_calls_no_tool_twice(tmp_path: Path, kills: int):
    """Fewer slots than samples. A call of a killed process may have happened or not: it is in doubt."""
    require("redis-server")
    folder, calls, steps = tmp_path / "run", tmp_path / "calls", 4 + 8 * kills
    task = "tasks=tests.runtime.test_episode_run:Clerk"
    shape = ("generation.slots=2", "generation.decode_steps=1", "runtime.hosts=2")
    own = (task, *shape, f"run.steps={steps}", f"launch.restarts={kills + 1}", *QUIET)
    words = (str(RECIPE), f"run.dir={folder}", *WORDS, *own)
    slowly = {"CALLS": str(calls), "CALL_S": "0.02", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = launch(folder, *words, **slowly)
    try:
        for number, role in enumerate(itertools.islice(itertools.cycle(ROLES), kills)):
            wait_until(lambda after=3 + 2 * number: len(read_rows(folder)) >= after, [run], folder)
            wait_until(lambda name=role: name in pids_of(folder), [run], folder)
            made = calls.read_text()
            wait_until(lambda before=made: calls.read_text() != before, [run], folder)  # a call begins
            os.kill(pids_of(folder)[role], signal.SIGKILL)
            time.sleep(BETWEEN_S)
        assert run.wait(900) == 0, said(folder)[-4000:]
    finally:
        run.kill()
        run.wait()
    result = audit_run(folder)
    assert (result.violations, result.in_flight, len(read_rows(folder))) == ([], 0, steps)
    named = calls.read_text().split()
    assert len(named) == len(set(named)) >= steps * 4 * 4 * 2
    with open_journal(folder) as journal:
        failed = [event.reason for event in journal.events("EpisodeFailed")]
        begun = {(event.sample, event.call) for event in journal.events("ToolStarted")}
        ended = {(event.sample, event.call) for event in journal.events("ToolReturned")}
        mixed = [one for one in journal.events("SampleFinished") if len({s.version for s in one.spans}) > 1]
    assert set(failed) <= {"tool_in_doubt"} and len(begun - ended) >= len(failed) and mixed
    assert sum(isinstance(one, e.Rerun) for one in actions_of(folder)) >= kills // 4
    print(f"{kills} kills, {len(named)} calls, {len(failed)} of them in doubt")  # noqa: T201
    found = replay(folder)
    assert (found.difference, found.steps, calls.read_text().split()) == ("", steps, named)


def actions_of(folder: Path) -> list[e.Action]:
    with open_journal(folder) as journal:
        return [action for row in journal.rows() for action in row.actions]
