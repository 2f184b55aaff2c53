"""Reward workers: really killed, never a reward of 0, and gone when their run is."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pebble.common.types import CONSTS

from areal_jax.control.events import RewardFailed, RewardScored
from areal_jax.tasks import pool as pooling
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.scoring import GROUP
from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt
from tests.hangs import HANG_S, ends, wait_for
from tests.processes import assert_ends

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1.0


def _start_a_child_and_hang(note: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(note).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1e9)


def _hang() -> None:
    while True:
        pass


def _compute_and_sleep() -> float:
    end_s = time.process_time() + 0.6
    while time.process_time() < end_s:
        pass
    time.sleep(0.6)
    return 1.0


DEEDS: dict[str, Callable[..., object]] = {
    "pid": lambda: float(os.getpid()),
    "has_jax": lambda: float("jax" in sys.modules),
    "raise": lambda: 1 / 0,
    "loop": _hang,
    "busy": _compute_and_sleep,
    "sleep": lambda: time.sleep(1e9),
    "exit": lambda: os._exit(3),
    "exit_0": lambda: os._exit(0),
    "crash": lambda: ctypes.string_at(0),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or 1.0,
    "child": _start_a_child_and_hang,
}


class Deeds(Task):
    """Does what the prompt's text says and returns that; any other text scores 1."""

    def score(self, prompt: Prompt, completion: Completion):
        deed = DEEDS.get(prompt.text)
        return deed(*prompt.info.get("args", ())) if deed else 1.0


@pytest.fixture(scope="module")
def pool():
    with RewardPool({"deeds": Deeds()}, workers=1, timeout_s=HANG_S) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty():
    """A pool in which a score soon times out; on a busy machine now and then one that does nothing."""
    with RewardPool({"deeds": Deeds()}, workers=1, timeout_s=TIMEOUT_S) as pool:
        yield pool


def ask(pool: RewardPool, *deeds: str, members: int = 1, **info: object) -> list[RewardScored | RewardFailed]:
    """The outcomes of groups submitted at once, in that order."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    completions = [Completion("a", (1, 2), "stop")] * members
    for ordinal, deed in enumerate(deeds):
        pool.submit(ordinal, 5, Prompt(deed, info=info, task="deeds"), completions, answers.put)
    got = [answers.get(timeout=HANG_S) for _ in deeds]
    return sorted(got, key=lambda outcome: outcome.ordinal)


def scored(pool: RewardPool, deed: str) -> float:
    """The reward of a deed that takes no time, at the first try that does not time out."""
    for _ in range(20):
        (outcome,) = ask(pool, deed)
        if isinstance(outcome, RewardScored):
            return outcome.rewards[0]
        assert outcome.outcome == "timed_out", outcome
    raise AssertionError(f"{deed} timed out 20 times")


def test_groups_are_scored_in_another_process_without_jax(pool: RewardPool):
    one, pid, jax = ask(pool, "one", "pid", "has_jax", members=3)
    assert one == RewardScored(0, 5, (1.0, 1.0, 1.0))
    assert pid.rewards[0] != os.getpid()
    assert jax.rewards == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("deed", ["loop", "sleep"])
def test_a_group_past_its_deadline_is_timed_out_and_its_worker_is_dead(
    hasty: RewardPool, deed: str, monkeypatch: pytest.MonkeyPatch
):
    """The first signal kills the worker: pebble's second one would come long after the test's deadline."""
    monkeypatch.setattr(CONSTS, "term_timeout", 10 * HANG_S)
    before = int(scored(hasty, "pid"))
    start_s = time.monotonic()
    (late,) = ask(hasty, deed)
    assert time.monotonic() - start_s >= TIMEOUT_S
    assert (late.outcome, late.member) == ("timed_out", GROUP)
    assert "reward_timeout_s" in late.message
    if deed == "sleep":
        assert "longer than 4 s;" in late.message
    assert_ends(before, "worker")
    assert scored(hasty, "one") == 1.0


def test_each_group_has_the_whole_limit_on_cpu_time(hasty: RewardPool):
    """A score that sleeps for longer than the limit is no reason to kill; nor are the groups before it."""
    for _ in range(3):
        (outcome,) = ask(hasty, "busy")
        # Of three groups of 0.6 s each, a limit that counts them together would end the second.
        assert isinstance(outcome, RewardScored) or "4 s; raise" in outcome.message, outcome


def test_what_a_killed_score_had_started_dies_with_it(hasty: RewardPool, tmp_path: Path):
    note = tmp_path / "pids"
    for _ in range(20):  # until its child has started before the time is over
        (late,) = ask(hasty, "child", args=(str(note),))
        assert late.outcome == "timed_out"
        if note.exists():
            break
    for pid in map(int, note.read_text().split()):
        assert_ends(pid)


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("raise", "Deeds raised ZeroDivisionError: division by zero"),
        ("exit", "exited with status 3"),
        ("exit_0", "exited with status 0"),
        ("crash", "killed by SIGSEGV"),
    ],
)
def test_a_score_that_raises_or_kills_its_worker_fails_its_group_only(
    pool: RewardPool, deed: str, reason: str
):
    one, bad, other = ask(pool, "one", deed, "one", members=2)
    assert one == RewardScored(0, 5, (1.0, 1.0))
    assert other == RewardScored(2, 5, (1.0, 1.0))
    assert (bad.ordinal, bad.attempt, bad.outcome) == (1, 5, "failed")
    assert bad.member == (0 if deed == "raise" else GROUP)
    assert reason in bad.message


def test_a_keyboard_interrupt_does_not_reach_a_worker(pool: RewardPool):
    assert ask(pool, "interrupt") == [RewardScored(0, 5, (1.0,))]


def test_an_idle_worker_that_is_killed_costs_nothing(pool: RewardPool):
    (before,) = ask(pool, "pid")
    os.kill(int(before.rewards[0]), signal.SIGKILL)
    assert_ends(int(before.rewards[0]))
    assert ask(pool, "one", "one") == [RewardScored(n, 5, (1.0,)) for n in range(2)]


def test_a_prompt_that_cannot_travel_and_an_unknown_task_fail_their_groups(pool: RewardPool):
    (stuck,) = ask(pool, "one", lock=threading.Lock())
    assert (stuck.outcome, stuck.member) == ("failed", GROUP)
    assert "cannot be pickled for a reward worker" in stuck.message
    answers: queue.SimpleQueue = queue.SimpleQueue()
    pool.submit(0, 0, Prompt("one", task="other"), [], answers.put)
    unknown = answers.get(timeout=HANG_S)
    assert (unknown.outcome, unknown.member) == ("failed", GROUP)
    assert "KeyError('other')" in unknown.message


def test_a_task_that_cannot_travel_is_named_at_once():
    class Locked(Deeds):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(TaskError, match=r"tasks\.mine cannot be pickled for a reward worker"):
        RewardPool({"mine": Locked()}, 1, 1.0)


def test_a_task_that_cannot_be_loaded_fails_its_groups_with_the_reason():
    class Elsewhere(Deeds):
        def __reduce__(self):
            return __import__, ("no_such_module_anywhere",)

    with RewardPool({"deeds": Elsewhere()}, 1, HANG_S) as pool:
        (bad,) = ask(pool, "one")
    assert bad.outcome == "failed"
    assert "cannot load the tasks: ModuleNotFoundError" in bad.message


def test_a_task_whose_loading_kills_the_worker_fails_its_groups():
    class Deadly(Deeds):
        def __reduce__(self):
            return os._exit, (9,)

    with RewardPool({"deeds": Deadly()}, 1, HANG_S) as pool:
        (bad,) = ask(pool, "one")
    assert bad.outcome == "failed"
    assert "end before they score a group" in bad.message


def test_after_closing_nothing_is_reported_and_nothing_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CONSTS, "term_timeout", 10 * HANG_S)
    monkeypatch.setattr(pooling, "_JOIN_S", 10 * HANG_S)
    pool = RewardPool({"deeds": Deeds()}, 1, 10 * HANG_S)
    ask(pool, "one")
    told: list[object] = []
    pool.submit(0, 0, Prompt("sleep", task="deeds"), [Completion("", (), "stop")], told.append)
    for _ in range(2):
        ends(pool.close)  # it waits neither for the score nor for its time limit
    assert told == []
    with pytest.raises(TaskError, match="closed reward pool"):
        pool.submit(1, 0, Prompt("one", task="deeds"), [], told.append)


# --- whole programs -----------------------------------------------------------------------------------

SCRIPT = """
    import os, pathlib, queue, sys, time
    from areal_jax.tasks.pool import RewardPool
    from areal_jax.tasks.task import Task
    from areal_jax.types import Completion, Prompt, Reward

    print("started", flush=True)

    class Bonus:
        def __init__(self, value): self.value = value

    class Mine(Task):
        def score(self, prompt, completion):
            print("a score speaks")
            if prompt.text == "sleep":
                pathlib.Path(prompt.info["folder"], f"{os.getpid()}.asleep").touch()
                time.sleep(1e9)
            return Reward(prompt.info["bonus"].value, {"pid": os.getpid()})

    pool = RewardPool({"mine": Mine()}, workers=2, timeout_s=1000.0)
    answers = queue.SimpleQueue()
    def ask(text):
        info = {"bonus": Bonus(0.5), "folder": os.path.dirname(__file__)}
        pool.submit(0, 0, Prompt(text, info=info, task="mine"), [Completion("", (), "stop")], answers.put)
    ask("now")
    while answers.empty():
        os.path.dirname(__file__)  # the pool's thread starts the workers meanwhile
    scored = answers.get(timeout=300)
    if not hasattr(scored, "rewards"):
        sys.exit(str(scored))
    print(scored.rewards, dict(scored.parts[0])["pid"], flush=True)
    ask("sleep")
    ask("sleep")
    time.sleep(0.3 if "end" in sys.argv else 1000)
"""


def start_script(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [sys.executable, str(script), *words],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_script_needs_no_main_guard_its_classes_travel_and_its_stdout_stays_its_own(tmp_path: Path):
    script = start_script(tmp_path, "end")
    lines = script.communicate(timeout=HANG_S)[0].splitlines()
    assert script.returncode == 0, (tmp_path / "stderr").read_text()
    assert [line.split()[0] for line in lines] == ["started", "(0.5,)"]


def test_killing_the_parent_leaves_no_worker_behind(tmp_path: Path):
    script = start_script(tmp_path)
    try:
        assert script.stdout.readline() == "started\n"
        scored = script.stdout.readline().split()
        assert scored[:1] == ["(0.5,)"], (tmp_path / "stderr").read_text()
        worker = int(float(scored[1]))
        wait_for(lambda: len(list(tmp_path.glob("*.asleep"))) == 2)
        busy = [int(path.stem) for path in tmp_path.glob("*.asleep")]
        assert worker in busy
    finally:
        script.kill()
        script.communicate(timeout=HANG_S)
    for pid in busy:
        assert_ends(pid, "worker of a killed parent")


def test_a_worker_imports_few_modules_and_no_jax():
    """A new one starts after each score that timed out; pydantic or jax would add hundreds."""
    code = "import areal_jax.tasks.pool, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S, check=True
    )
    imported = set(done.stdout.split())
    assert "areal_jax.tasks.worker" in imported and not imported & {"jax", "pydantic"}
    assert len(imported) < 400
