"""One journal on a cluster: Redis may lose everything, a stuck controller writes nothing, a copy goes on."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.cluster.messages import EventReport, from_plain
from areal_jax.config.loading import load_config
from areal_jax.control.events import BatchTrained, SampleFinished, Train
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.report.reading import write_report
from areal_jax.trajectories.journal import unpack
from tests.cluster.test_kill import launching, processes
from tests.processes import stop
from tests.redis_servers import SECRET, Killable, require_redis, url_of

pytestmark = pytest.mark.slow

GROUPS, DEADLINE_S = 16, 900
ROOT = Path(__file__).parents[2]
MAIN = (sys.executable, "-m", "areal_jax.cli.main")


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[Killable]:
    require_redis()
    with Killable(tmp_path / "redis") as killable:
        yield killable


def await_that(holds: Callable[[], bool], log: Path, timeout_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, log.read_text()[-3000:]
        time.sleep(0.02)


def events_in_mailbox(killable: Killable, run: str) -> set[type]:
    """Kinds of the events that the controller has not journaled."""
    import redis

    with redis.Redis(port=killable.server.port, password=SECRET) as asked:
        found: Any = asked.xrange(f"areal:{{{run}}}:mailbox:control")
    messages = [from_plain(unpack(fields[b"body"])) for _, fields in found]
    return {type(message.event) for message in messages if isinstance(message, EventReport)}


def is_training(run: Path) -> bool:
    """Whether the controller has sent the trainer a batch and journaled no report of it."""
    with open_journal(run) as journal:
        rows = list(journal.rows())
    sent = sum(isinstance(action, Train) for row in rows for action in row.actions)
    return sent > sum(isinstance(row.event, BatchTrained) for row in rows)


def check(run: Path, steps: int) -> None:
    audit = audit_run(run)
    assert audit.ok and audit.trained == steps * GROUPS and audit.in_flight == 0, audit
    assert [row["step"] for row in read_rows(run)] == list(range(steps))


@pytest.mark.parametrize("how", ["FLUSHALL", pytest.param("kill -9", marks=pytest.mark.soak)])
def test_redis_may_lose_samples_and_a_trained_batch(killable: Killable, tmp_path: Path, how: str):
    """The run goes on in a new epoch, without a restart of any process, and is audited while it lives."""
    run, steps = tmp_path / "run", 50
    log = run.with_suffix(".log")
    words = [f"runtime.redis={url_of(killable.server)}", f"run.steps={steps}"]
    words += ["run.name=lost", "launch.restarts=0"]
    with launching(run, *words) as launched:
        await_that(lambda: len(read_rows(run)) >= 3 or launched.poll() is not None, log)
        (controller,) = processes(run, "controller")
        try:
            # Stopped while the trainer has a batch, the controller leaves it a report that no
            # process reads; stopped before it has sent a batch it does not, and goes on after a while.
            found = False
            for wait_s in cycle((0.0, 0.3, 0.5, 0.7, 1.1, 1.3, 1.7)):
                time.sleep(wait_s)
                stop(controller)
                end_s = time.monotonic() + 20 * is_training(run)
                while not found and time.monotonic() < end_s:
                    found = {BatchTrained, SampleFinished} <= events_in_mailbox(killable, "lost")
                    time.sleep(0.02)
                if found:
                    break
                os.kill(controller, signal.SIGCONT)
                assert launched.poll() is None, log.read_text()[-3000:]
            if how == "FLUSHALL":
                import redis

                with redis.Redis(port=killable.server.port, password=SECRET) as asked:
                    asked.flushall()
            else:
                killable.kill()
                killable.start()
        finally:
            os.kill(controller, signal.SIGCONT)
        assert audit_run(run).ok, "of a live run"
        assert launched.wait(DEADLINE_S) == 0, log.read_text()[-3000:]
    assert "Redis lost its data" in log.read_text()
    check(run, steps)


def stop_between_transactions(controller: subprocess.Popen[bytes], run: Path) -> None:
    """Sends SIGSTOP where the process holds no lock of SQLite, which its successor could not take over."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        stop(controller.pid)
        with closing(sqlite3.connect(run / "journal.sqlite", timeout=0.2, isolation_level=None)) as journal:
            try:
                journal.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                assert time.monotonic() < end_s, "the journal is always locked"
                controller.send_signal(signal.SIGCONT)
                time.sleep(0.01)
            else:
                journal.execute("ROLLBACK")
                return


def test_a_stopped_controller_that_was_replaced_writes_nothing(killable: Killable, tmp_path: Path):
    run, steps = tmp_path / "run", 60
    env = os.environ | {"AREAL_JAX_SECRET": SECRET, "JAX_PLATFORMS": "cpu"}
    config = ["--config", str(ROOT / "configs/quickstart.yaml"), "--run", str(run)]
    words = [f"runtime.redis={killable.server.url}", "run.name=stuck", f"run.steps={steps}"]
    words += ["observe.live=false", "observe.report=false"]
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "log"

    def start(role: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            one = subprocess.Popen([*MAIN, "role", role, *config, *words], env=env, stdout=out, stderr=out)
        started.append(one)
        return one

    try:
        stuck, *others = map(start, ("controller", "trainer", "generate", "reward"))
        await_that(lambda: len(read_rows(run)) >= 3, log)
        stop_between_transactions(stuck, run)
        successor = start("controller")
        before = len(read_rows(run))
        await_that(lambda: len(read_rows(run)) >= before + 5, log)
        stuck.send_signal(signal.SIGCONT)
        assert stuck.wait(DEADLINE_S) != 0
        assert successor.poll() is None, "the stuck one ended the run"
        assert "took over the run" in log.read_text() or "was taken over by another" in log.read_text()
        assert successor.wait(DEADLINE_S) == 0, log.read_text()[-3000:]
        assert [one.wait(DEADLINE_S) for one in others] == [0, 0, 0]
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
                one.wait()
    check(run, steps)


@pytest.mark.soak
def test_a_copied_folder_goes_on_with_two_trainer_processes(tmp_path: Path):
    """Batches beyond the checkpoint are trained again from the journal alone; it is audited without Redis."""
    first, copy = tmp_path / "first" / "run", tmp_path / "second" / "run"
    first.parent.mkdir()
    log = first.with_suffix(".log")
    two = ["trainer.mesh.fsdp=2", "runtime.trainer_processes=2"]
    with launching(first, *two, "run.steps=40", "trainer.checkpoint_every=4") as launched:
        await_that(lambda: len(read_rows(first)) >= 7 or launched.poll() is not None, log)
        assert launched.poll() is None, log.read_text()[-3000:]
        launched.kill()  # and with it its Redis
        launched.wait()
    for role in ("controller", "trainer", "generate", "reward"):
        for victim in processes(first, role):
            os.kill(victim, signal.SIGKILL)
    audit = audit_run(first)
    assert audit.ok and audit.trained >= 7 * GROUPS
    assert write_report(first, load_config(first / "config.yaml")).exists()
    shutil.copytree(first, copy)
    shutil.rmtree(first)
    steps = len(read_rows(copy)) + 2
    with copy.with_suffix(".log").open("w") as out:
        done = subprocess.run(
            [*MAIN, "launch", "local", str(copy), f"run.steps={steps}"],
            stdout=out, stderr=out, timeout=DEADLINE_S,
        )  # fmt: skip
    said = copy.with_suffix(".log").read_text()
    assert done.returncode == 0, said[-3000:]
    assert "training steps" in said and "again with digest" not in said
    check(copy, steps)
