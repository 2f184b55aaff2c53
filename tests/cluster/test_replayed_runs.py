"""Runs of 20 steps, of each strategy, by threads and by processes, replay without a bit of difference.

Hosts have few slots and decode one token a call, so that versions are committed while samples are under way:
samples change version half-way, or move to another host. All runs share the shapes of their programs. A run
by threads that is not killed runs in this process; all replays of runs by processes share another process.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.loading import load_config
from areal_jax.control.events import Dispatch, RunResumed, SampleFinished, SamplesMoved, VersionCommitted
from areal_jax.jobs.local import run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.replay import Replayed, replay
from tests.cluster.agents import pids_of, wait_until
from tests.processes import assert_ends
from tests.programs import require
from tests.promises import check as check_promise
from tests.small_run import RECIPE, WORDS

pytestmark = pytest.mark.slow

STEPS = 20
ROOT = Path(__file__).parents[2]
PROGRAM = ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main"]
DEADLINE_S = 900

SHARED = (
    *WORDS,
    f"run.steps={STEPS}",
    "runtime.hosts=2",
    "generation.slots=2",
    "generation.decode_steps=1",
    "trainer.checkpoint_every=4",
    "observe.live=false",
)
STRATEGIES = {
    "sync": (),
    "one_step": (),
    # A batch of more samples than slots, so that a version finds samples under way.
    "interruptible": ("trainer.batch_size=8",),
    "keep": ("trainer.batch_size=8",),
    # Of three busy hosts, one adopts each version first, and samples that it has move to the others.
    "pinned": (
        "control.max_staleness=4",
        "runtime.hosts=3",
        "trainer.batch_size=8",
    ),
}


class Way(NamedTuple):
    """How a run is started and resumed (words before those of the config or the folder), on how many devices.

    Bits on CPUs depend on a process's number of devices, so a replay needs as many as the run.
    """

    start: tuple[str, ...]
    resume: tuple[str, ...]
    devices: int


WAYS = {
    "threads": Way(("run",), ("resume",), 4),
    "processes": Way(("launch", "local"), ("launch", "local"), 1),
}
CHANGING = {"interruptible", "keep", "pinned"}
"""Strategies whose samples change version or host where a batch takes hosts longer than the trainer."""
KILLED = {("keep", "threads"), ("interruptible", "processes")}
"""Runs of which every process is killed on the way, and which are resumed."""


@pytest.mark.parametrize("way", [pytest.param("threads", marks=pytest.mark.soak), "processes"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_steps_replay_without_a_bit_of_difference(
    tmp_path: Path, on_one_device: ProcessPoolExecutor, strategy: str, way: str
):
    folder, (start, resume, devices), is_killed = tmp_path / "run", WAYS[way], (strategy, way) in KILLED
    words = [str(RECIPE), f"run.dir={folder}", *SHARED, f"control.strategy={strategy}", *STRATEGIES[strategy]]
    if way == "processes":
        require("redis-server")
        words += ["launch.accelerator=cpu"]
    if is_killed:
        kill_at(STEPS // 2, folder, devices, *start, *words)
        start, words = resume, [str(folder)]
    if way == "threads" and not is_killed and devices == jax.device_count():
        run(load_config(*words), stream=io.StringIO())
    else:
        finish(folder, devices, *start, *words, is_changing=way == "processes" and strategy in CHANGING)
    assert audit_run(folder).ok
    check_hard(folder, strategy, is_killed)
    with open_journal(folder) as journal:
        check_promise(load_config(folder / "config.yaml"), (row.event for row in journal.rows()))
    if devices == jax.device_count():
        check_replayed(folder, replay(folder))
    else:
        check_replayed(folder, on_one_device.submit(replay, folder).result(DEADLINE_S))


MIXTURE = (
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32, experts: 8, "
    "experts_per_token: 2, expert_width: 16, has_unit_weights: true}"
)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", sorted(CHANGING))
def test_routes_replay_without_a_bit_of_difference(
    tmp_path: Path, on_one_device: ProcessPoolExecutor, strategy: str
):
    """Kept where a version finds samples under way: with their KV rebuilt, kept, or moved to another host."""
    require("redis-server")
    folder = tmp_path / "run"
    words = [str(RECIPE), f"run.dir={folder}", *SHARED, f"control.strategy={strategy}", *STRATEGIES[strategy]]
    words += ["launch.accelerator=cpu", "algorithm.routes=replay", MIXTURE]
    finish(folder, 1, "launch", "local", *words, is_changing=True)
    assert audit_run(folder).ok
    check_hard(folder, strategy, is_killed=False)
    assert any(row["routes_differ"] > 0 for row in read_rows(folder))
    check_replayed(folder, on_one_device.submit(replay, folder).result(DEADLINE_S))


@pytest.mark.soak
def test_a_mixture_on_several_devices_is_killed_and_resumed(tmp_path: Path):
    """The trainer's four devices split its experts and its other parameters; a host's two its experts."""
    require("redis-server")
    folder = tmp_path / "run"
    words = [str(RECIPE), f"run.dir={folder}", *SHARED, "launch.accelerator=cpu", "trainer.batch_size=8"]
    words += [MIXTURE, "trainer.mesh={expert: 2, fsdp: 2}", "algorithm.routes=replay"]
    kill_at(STEPS // 2, folder, 1, "launch", "local", *words, "runtime.host_tensor=2")
    finish(folder, 1, "launch", "local", str(folder), is_changing=True)
    assert audit_run(folder).ok and any(changed(folder))
    rows = read_rows(folder)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(1 <= row["router_load_max"] <= 8 for row in rows)
    assert max(row["logp_gap_max/age_0"] for row in rows if "logp_gap_max/age_0" in row) < 1e-4


@pytest.fixture(scope="module")
def on_one_device() -> Iterator[ProcessPoolExecutor]:
    """Calls functions in a process of one device, which starts with the first call."""
    assert WAYS["processes"].devices == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield pool


def changed(folder: Path) -> tuple[bool, bool]:
    """Whether a sample has changed version half-way, and whether samples have moved to another host."""
    with open_journal(folder) as journal:
        is_mixed = any(len(event.spans) > 1 for event in journal.events(SampleFinished.__name__))
        return is_mixed, any(journal.events(SamplesMoved.__name__))


def check_hard(folder: Path, strategy: str, is_killed: bool) -> None:
    """Whether the run had what makes its replay hard."""
    is_mixed, has_moved = changed(folder)
    with open_journal(folder) as journal:
        finished = list(journal.events(SampleFinished.__name__))
        resumed = [event.header for event in journal.events(RunResumed.__name__)]
    assert bool(resumed) == is_killed and all(header["jaxlib"] for header in resumed)
    assert is_mixed == (strategy in ("interruptible", "keep"))
    assert has_moved == (strategy == "pinned")
    # A sample that moved may have its KV rebuilt, or may bring it along.
    assert any(event.rebuilds for event in finished) == (strategy == "interruptible") or has_moved
    is_under_way = bool(commits_with_samples_under_way(folder))
    assert is_under_way <= (strategy != "sync") and (is_under_way or strategy in ("sync", "one_step"))
    if strategy == "one_step":  # its samples are those of the version before, whether they have ended or not
        versions = {event.sample.ordinal // 4: event.spans[0].version for event in finished}
        assert all(version == max(0, batch - 1) for batch, version in versions.items())


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


def check_replayed(folder: Path, found: Replayed) -> None:
    """Compares the counts of the run's replay with those of the journal."""
    config = load_config(folder / "config.yaml")
    samples = STEPS * config.trainer.batch_size * config.algorithm.group_size
    with open_journal(folder) as journal:
        spans = {event.sample: event.spans for event in journal.events(SampleFinished.__name__)}
        stored = sum(journal.trajectory(sample).completion_tokens for sample in spans)
    assert (found.difference, found.header) == ("", {})
    assert (found.steps, found.samples, found.unfinished) == (STEPS, samples, 0)
    assert (found.uncompared, found.reissued) == (0, 0)
    tokens = sum(each[-1].end - each[0].start for each in spans.values())
    assert len(spans) == samples and tokens == stored > 10 * samples
    assert found.tokens == found.by_value == found.by_digest == tokens


# --- processes ----------------------------------------------------------------------------------------------


def begin(folder: Path, devices: int, *words: str) -> subprocess.Popen[bytes]:
    """Starts the command; what it prints goes to FOLDER.out, and what it reports to FOLDER.err."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    with folder.with_suffix(".out").open("w") as out, folder.with_suffix(".err").open("a") as err:
        return subprocess.Popen([*PROGRAM, *words], cwd=ROOT, env=env, stdout=out, stderr=err)


def finish(folder: Path, devices: int, *words: str, is_changing: bool) -> None:
    """Waits for the command's end; fails where the command does.

    `is_changing`: hosts are slow until a sample has changed version or host, on whichever cores this is.
    """
    process = begin(folder, devices, *words)
    try:
        if is_changing:
            slow_hosts_until_changed(process, folder)
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    printed = folder.with_suffix(".out").read_text()
    assert status == 0, printed[-4000:] + folder.with_suffix(".err").read_text()[-4000:]


def slow_hosts_until_changed(process: subprocess.Popen[bytes], folder: Path) -> None:
    """From the next version on, by when all have compiled, hosts stand still most of the time."""
    trained = len(read_rows(folder))
    wait_until(lambda: len(read_rows(folder)) > trained, [process], folder, DEADLINE_S)
    hosts = [pid for name, pid in pids_of(folder).items() if name.startswith("generate")]
    end_s = time.monotonic() + DEADLINE_S
    while process.poll() is None and not any(changed(folder)):
        assert time.monotonic() < end_s
        for sign, pause_s in ((signal.SIGSTOP, 0.05), (signal.SIGCONT, 0.01)) * 5:
            for pid in hosts:
                with suppress(ProcessLookupError):  # the run has ended
                    os.kill(pid, sign)
            time.sleep(pause_s)


def kill_at(step: int, folder: Path, devices: int, *words: str) -> None:
    """Starts the command, and ends all of its processes by SIGKILL when so many steps have been trained."""
    process = begin(folder, devices, *words)
    try:
        wait_until(lambda: len(read_rows(folder)) >= step, [process], folder, DEADLINE_S)
        assert process.poll() is None, "the run ended before it could be killed"
    finally:
        pids = [process.pid, *pids_of(folder).values()]
        for pid in pids:
            with suppress(ProcessLookupError):  # with its parent
                os.kill(pid, signal.SIGKILL)
        process.wait()
    for pid in pids:
        assert_ends(pid)
    assert step <= len(read_rows(folder)) < STEPS
