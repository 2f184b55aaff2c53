"""`kill -9` of each role in turn, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import read_rows
from areal_jax.weights.manifest import committed

pytestmark = pytest.mark.slow
SOAK = pytest.mark.soak

MAIN = (sys.executable, "-m", "areal_jax.cli.main")
ROLES = ("generate", "reward", "trainer", "controller", "evaluate")
ROUNDS = int(os.environ.get("AREAL_JAX_KILL_ROUNDS", "2"))
BACKENDS = os.environ.get("AREAL_JAX_KILL_BACKENDS", "transfer").split()
FIRST, BETWEEN, DEADLINE_S = 4, 5, 900


def rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def processes(run: Path, role: str) -> list[int]:
    """Ids of this run's processes of a role."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[3:5] == ["role", role] and any(str(run) in word for word in words):
            found.append(int(folder.name))
    return sorted(found)


def await_rows(run: Path, count: int, launched: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while rows(run) < count:
        assert launched.poll() is None, f"ended with {launched.returncode} at step {rows(run)}"
        assert time.monotonic() < end_s, f"only {rows(run)} steps"
        time.sleep(0.1)


@contextmanager
def launching(run: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The quickstart as processes; ended by Ctrl-C where the block does not end it.

    `variables`: set in the environment of all its processes.
    """
    # Longer answers than the quickstart's, so that a kill finds samples under way.
    own = ("generation.max_tokens=18", "observe.live=false", "observe.report=false")
    words = ("configs/quickstart.yaml", f"run.dir={run}", *own, *words)
    with run.with_suffix(".log").open("w") as log:
        launched = subprocess.Popen(
            [*MAIN, "launch", "local", *words],
            env=os.environ | variables, stdout=log, stderr=log, text=True,
        )  # fmt: skip
    try:
        yield launched
    finally:
        if launched.poll() is None:
            launched.send_signal(signal.SIGINT)
            launched.wait(DEADLINE_S)


def ended_well(run: Path, launched: subprocess.Popen[str]) -> dict:
    """What `audit` says, once the run has ended."""
    assert launched.wait(DEADLINE_S) == 0, run.with_suffix(".log").read_text()[-3000:]
    done = subprocess.run([*MAIN, "audit", str(run), "--json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("backend", "rounds"),
    [("orbax", 1), pytest.param("orbax", ROUNDS, marks=SOAK), pytest.param("transfer", 1, marks=SOAK)],
)
def test_kill_9_of_each_role_in_turn(tmp_path: Path, backend: str, rounds: int):
    """Every ordinal is trained once, every step has one row, no process is left behind."""
    run, steps = tmp_path / "run", FIRST + BETWEEN * len(ROLES) * rounds + 6
    words = [f"run.steps={steps}", "runtime.hosts=2", "trainer.checkpoint_every=6"]
    words += ["observe.evaluate=2", "observe.exports=1", f"launch.restarts={4 * rounds}"]
    with launching(run, f"weights.backend={backend}", *words) as launched:
        for number, role in enumerate(ROLES * rounds):
            await_rows(run, FIRST + BETWEEN * number, launched)
            os.kill(processes(run, role)[0], signal.SIGKILL)
        figures = ended_well(run, launched)
    assert figures["ok"] and figures["violations"] == []
    assert figures["trained"] == 16 * steps and figures["in_flight"] == 0
    assert [row["step"] for row in read_rows(run)] == list(range(steps))
    versions = [line["version"] for line in read_evals(run)]
    assert versions[-1] == steps and len(set(versions)) == len(versions)
    assert [path.name for path in (run / "exports").iterdir()] == [str(steps)]
    assert (committed(run / "weights")[-1:] == [steps]) == (backend == "orbax")
    assert all(processes(run, role) == [] for role in ROLES)


def moves(run: Path) -> int:
    """Number of times that a host took over another host's samples."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as journal:
        return journal.execute("SELECT count(*) FROM events WHERE kind = 'SamplesMoved'").fetchone()[0]


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_9_of_each_role_while_samples_move_between_hosts(tmp_path: Path, backend: str):
    """DORA: no sample is lost or too old, and each has one version; the audit checks all three."""
    run, roles = tmp_path / "run", ("generate", "reward", "trainer", "controller", "generate")
    between, last_kill = 4, FIRST + 12 * len(roles)
    steps = last_kill + 8
    words = [f"run.steps={steps}", f"weights.backend={backend}", "runtime.hosts=3", "generation.slots=1"]
    words += ["control.strategy=pinned", "control.max_staleness=2"]
    # Samples stay long, and decode slowly, one on each host: hosts are busy when a version is committed.
    words += ["trainer.learning_rate=1e-9", "trainer.supervised.steps=0", "generation.decode_steps=1"]
    words += ["trainer.batch_size=8", "trainer.rows=16"]
    before, at_a_move, earliest = 0, [], FIRST
    with launching(run, *words, "launch.restarts=6") as launched:
        for role in roles:
            await_rows(run, earliest, launched)
            # Whether a sample is under way at a commit is chance. Were there none for long, the roles that
            # are left would all end late and close to each other.
            while (now := moves(run)) == before and rows(run) < last_kill:
                assert launched.poll() is None
                time.sleep(0.01)
            at_a_move.append(now > before)
            before, earliest = now, min(rows(run) + between, last_kill)
            os.kill(processes(run, role)[-1], signal.SIGKILL)
        figures = ended_well(run, launched)
    assert sum(at_a_move) >= 3
    assert figures["ok"] and figures["violations"] == []
    assert (figures["trained"], figures["in_flight"], figures["dropped"]) == (8 * steps, 0, {})
    assert [row["step"] for row in read_rows(run)] == list(range(steps))
    assert max(row["token_age_max"] for row in read_rows(run)) <= 2
    until = 24  # with kills, and with moves before and after them
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [*MAIN, "replay", str(run), f"--until={until}", "--json"], capture_output=True, env=env, check=False
    )
    found = json.loads(done.stdout)
    assert (found["difference"], found["steps"], found["reissued"]) == ("", until, 0)
    assert found["samples"] >= 64 * until and found["by_digest"] == found["tokens"]


@contextmanager
def launching_held(run: Path, steps: int, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run whose trainer is about to write its last checkpoint, for which it waits for the file `go` in the
    folder that is returned. All batches are trained, and all rows written.
    """
    place = run.parent / "held"
    place.mkdir()
    folder = str(Path(__file__).parent / "held_checkpoint")
    words = (f"run.steps={steps}", "trainer.checkpoint_every=100", *words)
    with launching(run, *words, HELD_CHECKPOINT=str(place), PYTHONPATH=folder) as launched:
        await_rows(run, steps, launched)
        await_held(place, launched)
        yield launched, place


def await_held(place: Path, launched: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not (place / "held").exists():
        assert launched.poll() is None and time.monotonic() < end_s
        time.sleep(0.02)


def test_a_controller_killed_after_the_last_batch_waits_for_what_it_has_not_heard_of(tmp_path: Path):
    """The trainer's last checkpoint, and its evaluation by a process that is on its way back."""
    run, steps = tmp_path / "run", 12
    with launching_held(run, steps, "observe.evaluate=2", "observe.exports=1") as (launched, place):
        for role in ("evaluate", "controller"):
            os.kill(processes(run, role)[0], signal.SIGKILL)
        (place / "go").touch()
        assert ended_well(run, launched)["ok"]
    for folder in ("checkpoints", "exports"):
        assert [path.name for path in (run / folder).iterdir()] == [str(steps)]
    assert [line["version"] for line in read_evals(run)] == [steps]
    assert all(processes(run, role) == [] for role in ROLES)


@SOAK
@pytest.mark.parametrize("backend", ["orbax", "transfer"])
def test_a_trainer_killed_before_its_last_checkpoint_writes_it_when_it_is_back(tmp_path: Path, backend: str):
    """All batches are trained by then: it trains them again from the journal."""
    run, steps = tmp_path / "run", 12
    with launching_held(run, steps, f"weights.backend={backend}") as (launched, place):
        (victim,) = processes(run, "trainer")
        os.kill(victim, signal.SIGKILL)
        (place / "held").unlink()
        await_held(place, launched)
        assert victim not in processes(run, "trainer") and list((run / "checkpoints").iterdir()) == []
        (place / "go").touch()
        assert ended_well(run, launched)["ok"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [str(steps)]


@pytest.mark.soak
def test_one_step_goes_on_after_its_controller_was_killed(tmp_path: Path):
    """The trainer waits for hosts that hold the newest version, which the new controller has to hear of."""
    run, steps = tmp_path / "run", 14
    words = [f"run.steps={steps}", "control.strategy=one_step", "generation.slots=4"]
    with launching(run, *words, "runtime.deadline_s=600") as launched:
        for count in (4, 8):
            await_rows(run, count, launched)
            os.kill(processes(run, "controller")[0], signal.SIGKILL)
        figures = ended_well(run, launched)
    assert figures["ok"] and figures["trained"] == 16 * steps
