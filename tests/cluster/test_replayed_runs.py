"""Runs of 20 steps, of each strategy, by threads and by processes, replay without a bit of difference.

Hosts have few slots and decode one token a call, so that versions are committed while samples are under way:
samples change version half-way, or move to another host. All runs share the shapes of their programs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from areal_jax.control.events import Dispatch, RunResumed, SampleFinished, SamplesMoved, VersionCommitted
from areal_jax.observe.metrics import read_rows
from areal_jax.runtime.reading import audit_run, open_journal
from areal_jax.types import VersionSpan
from tests.cluster.agents import pids_of, wait_until
from tests.processes import assert_ends
from tests.programs import require
from tests.small_run import RECIPE, WORDS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS, SAMPLES = 20, 20 * 32
ROOT = Path(__file__).parents[2]
PROGRAM = ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main"]
DEADLINE_S = 300

SHARED = (
    *WORDS,
    f"run.steps={STEPS}",
    "algorithm.group_size=8",
    "generation.slots=2",
    "generation.decode_steps=1",
    "generation.length=64",
    "generation.max_tokens=58",
    "trainer.length=64",
    "trainer.checkpoint_every=4",
    "observe.live=false",
)
STRATEGIES = {
    "sync": (),
    "one_step": (),
    "interruptible": (),
    "keep": (),
    # Of three hosts, one adopts each version before the others, and samples that it has move to them.
    "pinned": ("control.max_staleness=2", "control.placement_every_s=0.05"),
}


class Way(NamedTuple):
    """How a run is started, and how it is resumed: words before those of the config or the folder."""

    start: tuple[str, ...]
    resume: tuple[str, ...]


WAYS = {
    "threads": Way(("run",), ("resume",)),
    "processes": Way(("launch", "local"), ("launch", "local")),
}
KILLED = {("keep", "threads"), ("interruptible", "processes")}
"""Runs of which every process is killed on the way, and which are resumed."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_steps_replay_without_a_bit_of_difference(tmp_path: Path, strategy: str, way: str):
    folder, is_killed = tmp_path / "run", (strategy, way) in KILLED
    words = [str(RECIPE), f"run.dir={folder}", *SHARED, f"control.strategy={strategy}", *STRATEGIES[strategy]]
    words += ["runtime.hosts=3" if strategy == "pinned" else "runtime.hosts=2"]
    if way == "processes":
        require("redis-server")
        words += ["launch.accelerator=cpu"]
    if is_killed:
        kill_at(folder, STEPS // 2, *WAYS[way].start, *words)
        finish(folder, *WAYS[way].resume, str(folder))
    else:
        finish(folder, *WAYS[way].start, *words)
    assert audit_run(folder).ok
    check_hard(folder, strategy, is_killed)
    check_replayed(folder)


def check_hard(folder: Path, strategy: str, is_killed: bool) -> None:
    """Whether the run had what makes its replay hard."""
    with open_journal(folder) as journal:
        finished = list(journal.events(SampleFinished.__name__))
        has_moved = any(journal.events(SamplesMoved.__name__))
        resumed = [event.header for event in journal.events(RunResumed.__name__)]
    assert bool(resumed) == is_killed and all(header["jaxlib"] for header in resumed)
    mixed = [event for event in finished if len(event.spans) > 1]
    assert bool(mixed) == (strategy in ("interruptible", "keep"))  # samples that changed version half-way
    assert any(event.rebuilds for event in finished) == (strategy == "interruptible")
    assert has_moved == (strategy == "pinned")
    assert bool(commits_with_samples_under_way(folder)) == (strategy != "sync")


def commits_with_samples_under_way(folder: Path) -> list[int]:
    """Versions at whose commit more samples were dispatched than had finished."""
    found, under_way = [], set()
    with open_journal(folder) as journal:
        for row in journal.rows():
            if isinstance(row.event, SampleFinished):
                under_way.discard(row.event.sample)
            if isinstance(row.event, VersionCommitted) and under_way:
                found.append(row.event.version)
            for action in row.actions:
                if isinstance(action, Dispatch):
                    under_way |= set(action.samples)
    return found


def check_replayed(folder: Path) -> None:
    """Replays the run in a process of its own, and compares its counts with those of the journal."""
    with open_journal(folder) as journal:
        spans = {event.sample: event.spans for event in journal.events(SampleFinished.__name__)}
        stored = sum(journal.trajectory(sample).completion_tokens for sample in spans)
    found = json.loads(finish(folder, "replay", str(folder), "--json"))
    assert found["difference"] == "" and found["header"] == {}
    assert (found["steps"], found["samples"], found["unfinished"]) == (STEPS, SAMPLES, 0)
    assert (found["uncompared"], found["reissued"]) == (0, 0)
    tokens = sum(map(length, spans.values()))
    assert len(spans) == SAMPLES and tokens == stored > 10 * SAMPLES
    assert found["tokens"] == found["by_value"] == found["by_digest"] == tokens


def length(spans: Sequence[VersionSpan]) -> int:
    return spans[-1].end - spans[0].start


# --- processes ----------------------------------------------------------------------------------------------


def begin(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Starts the command; what it prints goes to FOLDER.out, and what it reports to FOLDER.err."""
    # Bits on CPUs depend on a process's number of devices: here, what the command itself asks for.
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    with folder.with_suffix(".out").open("w") as out, folder.with_suffix(".err").open("a") as err:
        return subprocess.Popen([*PROGRAM, *words], cwd=ROOT, env=env, stdout=out, stderr=err)


def finish(folder: Path, *words: str) -> str:
    """Returns what the command printed; fails where the command does."""
    process = begin(folder, *words)
    try:
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    printed = folder.with_suffix(".out").read_text()
    assert status == 0, printed[-4000:] + folder.with_suffix(".err").read_text()[-4000:]
    return printed


def kill_at(folder: Path, step: int, *words: str) -> None:
    """Starts the command, and ends all of its processes by SIGKILL when so many steps have been trained."""
    process = begin(folder, *words)
    try:
        wait_until(lambda: len(read_rows(folder)) >= step, [process], folder, DEADLINE_S)
        assert process.poll() is None, "the run ended before it could be killed"
    finally:
        pids = [process.pid, *pids_of(folder).values()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    for pid in pids:
        assert_ends(pid, within_s=20)
    assert step <= len(read_rows(folder)) < STEPS
