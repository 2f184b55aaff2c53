"""How a supervisor treats processes that end, fail or hang, and how it ends by a signal."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from areal_jax.cluster.rendezvous import AwayError, Situation
from areal_jax.cluster.supervisor import MOVED, ChildProcess, Supervisor, Unit
from tests.hangs import HANG_S
from tests.processes import assert_ends, is_gone


def unit(name: str, script: str, **flags: bool) -> Unit:
    return Unit((ChildProcess(name, ("bash", "-c", script), {"NAME": name}),), **flags)


class FakeMeeting:
    """The hash that agents share, in this process; `away` polls find no Redis."""

    token = "this head"

    def __init__(self, rank: int = 0, away: int = 0) -> None:
        self.rank, self._away = rank, away
        self.found = Situation(self.token, 0, None, frozenset())
        self.reported: list[int] = []
        self.ended: int | None = None
        self.has_left = False

    def situation(self) -> Situation:
        if self._away:
            self._away -= 1
            raise AwayError("no Redis answers")
        return self.found

    def join(self) -> None:
        self.found = replace(self.found, agents=self.found.agents | {self.rank})

    def leave(self) -> None:
        self.has_left = True

    def next_generation(self, seen: int) -> int:
        self.reported.append(seen)
        self.found = replace(self.found, generation=max(self.found.generation, seen + 1))
        return self.found.generation

    def end(self, status: int) -> None:
        self.ended = status


def supervise(tmp_path: Path, *units: Unit, restarts: int = 2, grace_s: float = 5) -> tuple[int, str]:
    """The status and everything printed, in a folder where scripts leave files."""
    out, before = io.StringIO(), Path.cwd()
    os.chdir(tmp_path)
    try:
        kept = Supervisor(
            units, tmp_path / "logs", out, restarts, FakeMeeting(), backoff_s=0.02, grace_s=grace_s
        )  # type: ignore[arg-type]
        return kept.run(), out.getvalue()
    finally:
        os.chdir(before)


def test_the_run_ends_with_its_controller_and_the_others_end_by_themselves(tmp_path):
    status, printed = supervise(
        tmp_path,
        unit("controller", "sleep 0.2; touch over; echo trained", ends_run=True),
        unit(
            "generate-0", "while [ ! -e over ]; do sleep 0.05; done; sleep 0.2; echo $NAME left; touch left"
        ),
    )
    assert status == 0 and (tmp_path / "left").exists()
    assert printed.splitlines() == ["controller | trained", "generate-0 | generate-0 left"]
    assert (tmp_path / "logs" / "generate-0.log").read_text() == "generate-0 left\n"


def test_a_failed_process_restarts_a_bounded_number_of_times_with_growing_waits(tmp_path):
    status, printed = supervise(
        tmp_path,
        unit(
            "controller",
            "while [ $(cat starts | wc -l) -lt 3 ]; do sleep 0.02; done; sleep 0.3",
            ends_run=True,
        ),
        unit("generate-0", "echo x >>starts; echo error: no disk; echo x; exit 3"),
    )
    assert status == 0  # a run goes on without a host
    assert (tmp_path / "starts").read_text() == "x\n" * 3
    notes = [line.split("| ")[1] for line in printed.splitlines() if line.startswith("launch")]
    assert notes == [
        "generate-0 ended with status 3; generate-0 starts again in 0.02 s (failure 1, launch.restarts=2)",
        "generate-0 ended with status 3; generate-0 starts again in 0.04 s (failure 2, launch.restarts=2)",
        "generate-0 ended with status 3; generate-0 is not restarted after failure 3 (launch.restarts=2), "
        "and the run continues without it. Error of generate-0: no disk",
    ]


def test_a_process_whose_log_is_on_a_full_disk_goes_on_and_its_output_is_printed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "controller.log").symlink_to("/dev/full")
    status, printed = supervise(
        tmp_path, unit("controller", "for n in $(seq 20000); do echo line $n; done", ends_run=True)
    )
    assert status == 0 and printed.splitlines()[-1] == "controller | line 20000"


def test_the_run_fails_with_a_unit_that_it_needs(tmp_path):
    status, printed = supervise(
        tmp_path,
        unit("controller", "echo $$ >own; mv own pid; sleep 60; touch late", ends_run=True),
        unit("trainer-0", "while [ ! -e pid ]; do sleep 0.02; done; kill -9 $$", is_group=True),
        restarts=1,
    )
    assert status == 1
    assert "trainer-0 was killed by SIGKILL; trainer-0 is not restarted after failure 2" in printed
    assert is_gone(int((tmp_path / "pid").read_text())) and not (tmp_path / "late").exists()


def test_commands_of_one_unit_end_and_start_together(tmp_path):
    once = "[ $(grep -c trainer-1 starts) -ge 2 ] || { sleep 0.1; exit 1; }"
    dies = f"echo $NAME >>starts; {once}; touch well; sleep 1000"
    trainers = Unit(
        (
            ChildProcess(
                "trainer-0",
                ("bash", "-c", "echo $NAME >>starts; echo $$ >>ids; exec sleep 1000"),
                {"NAME": "trainer-0"},
            ),
            ChildProcess("trainer-1", ("bash", "-c", dies), {"NAME": "trainer-1"}),
        ),
        is_group=True,
    )
    controller = unit("controller", "while [ ! -e well ]; do sleep 0.02; done", ends_run=True)
    status, printed = supervise(tmp_path, controller, trainers, grace_s=0.5)
    assert status == 0
    assert sorted((tmp_path / "starts").read_text().split()) == ["trainer-0"] * 2 + ["trainer-1"] * 2
    assert "trainer-1 ended with status 1; trainer-0 and trainer-1 starts again" in printed
    ids = (tmp_path / "ids").read_text().split()
    assert len(ids) == 2 and all(is_gone(int(each)) for each in ids)


def test_a_process_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path):
    stubborn = "trap '' TERM; sleep 60 & echo $! >grandchild; touch up; wait; wait; touch late"
    controller = unit("controller", "while [ ! -e up ]; do sleep 0.02; done", ends_run=True)
    status, _ = supervise(tmp_path, controller, unit("generate-0", stubborn), grace_s=0.3)
    assert status == 0 and not (tmp_path / "late").exists()
    assert_ends(int((tmp_path / "grandchild").read_text()))


SCRIPT = """
import sys
from pathlib import Path
from areal_jax.cluster.supervisor import ChildProcess, Supervisor, Unit
from tests.cluster.test_supervisor import FakeMeeting
wait = ("bash", "-c", "trap 'touch polite; exit 0' TERM; touch up; while true; do sleep 0.05; done")
unit = Unit((ChildProcess("controller", wait, {}),), ends_run=True)
raise SystemExit(Supervisor([unit], Path("logs"), sys.stdout, 3, FakeMeeting()).run())
"""


def started_agent(folder: Path) -> subprocess.Popen[str]:
    """An agent that runs SCRIPT in `folder`, once its process is up."""
    words = ["env", "--default-signal=INT", sys.executable, "-c", SCRIPT]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    await_file(folder / "up", process)
    return process


def await_file(path: Path, process: subprocess.Popen[str] | None = None) -> None:
    end_s = time.monotonic() + HANG_S
    while not path.exists():
        assert time.monotonic() < end_s and (process is None or process.poll() is None)
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_everything_and_the_status_says_so(tmp_path, number, status):
    process = started_agent(tmp_path)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == status and (tmp_path / "polite").exists()
    assert f"received {number.name} and ends all its processes" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_processes_of_a_killed_agent_get_sigterm(tmp_path):
    process = started_agent(tmp_path)
    process.kill()
    process.wait(HANG_S)
    await_file(tmp_path / "polite")


# --- with the agents of other machines -------------------------------------------------------------------


def member(script: str) -> Unit:
    command = ChildProcess("trainer-0", ("bash", "-c", script), {})
    return Unit((command,), is_group=True)


def supervise_with(tmp_path: Path, meeting: FakeMeeting, *units: Unit, away_s: float = 10) -> tuple[int, str]:
    out = io.StringIO()
    script_folder = ("env", "-C", str(tmp_path))
    placed = [
        replace(each, commands=tuple(replace(c, words=(*script_folder, *c.words)) for c in each.commands))
        for each in units
    ]
    kept = Supervisor(placed, tmp_path / "logs", out, 2, meeting, away_s=away_s, backoff_s=0.02, grace_s=5)  # type: ignore[arg-type]
    return kept.run(), out.getvalue()


WAITS_FOR_THE_SECOND = "for _ in {1..15000}; do [ $(cat starts | wc -l) -lt 2 ] || break; sleep 0.02; done"


def test_a_failed_member_raises_the_groups_generation_and_starts_again(tmp_path):
    meeting = FakeMeeting()
    controller = unit("controller", WAITS_FOR_THE_SECOND, ends_run=True)
    dies_once = "echo x >>starts; [ $(cat starts | wc -l) -ge 2 ] || exit 1; exec sleep 1000"
    status, printed = supervise_with(tmp_path, meeting, controller, member(dies_once))
    assert (status, meeting.ended, meeting.reported, meeting.has_left) == (0, 0, [0], True)
    assert "trainer-0 ended with status 1; trainer-0 starts again" in printed


def test_a_member_starts_again_when_one_on_another_machine_failed(tmp_path):
    meeting = FakeMeeting(rank=1)
    begun_at_two = replace(meeting.found, generation=2)
    meeting.found = begun_at_two
    raised = threading.Timer(1.5, lambda: setattr(meeting, "found", replace(begun_at_two, generation=3)))
    raised.start()
    ends = unit("ends", WAITS_FOR_THE_SECOND, ends_run=True)
    status, printed = supervise_with(tmp_path, meeting, ends, member("echo x >>starts; exec sleep 1000"))
    assert status == 0 and (tmp_path / "starts").read_text() == "x\n" * 2
    assert "a trainer process on another machine failed; trainer-0 starts again" in printed
    assert meeting.found.generation == 3  # which this agent did not raise further
    raised.join()


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [
        ({"status": 1}, 1, "another machine's agent ended the run with status 1"),
        ({"status": 0}, 0, ""),
        ({"token": "a later head"}, MOVED, "the agent of rank 0 was restarted"),
    ],
)
def test_an_agent_ends_with_the_run_and_with_its_head(tmp_path, found, status, says):
    meeting = FakeMeeting(rank=2)
    meeting.found = replace(meeting.found, **found)
    host = unit("generate-0", "trap 'exit 0' TERM; sleep 0.3")
    assert supervise_with(tmp_path, meeting, host)[0] == status
    assert meeting.ended is None  # it is the others that know
    assert says in supervise_with(tmp_path, meeting, host)[1]


def test_redis_may_be_away_for_a_while_and_not_for_longer(tmp_path):
    controller = unit("controller", "sleep 1.5", ends_run=True)
    assert supervise_with(tmp_path, FakeMeeting(away=2), controller)[0] == 0
    status, printed = supervise_with(tmp_path, FakeMeeting(away=99), controller, away_s=0.2)
    assert status == 1 and "Redis has been unreachable for 0.2 s" in printed
