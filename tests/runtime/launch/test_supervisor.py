"""What becomes of processes that end, fail, hang, and of those that a signal ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_jax.runtime.launch.supervisor import Command, Supervisor, Unit


def unit(name: str, script: str, **flags: bool) -> Unit:
    return Unit((Command(name, ("bash", "-c", script), {"NAME": name}),), **flags)


def supervise(tmp_path: Path, *units: Unit, restarts: int = 2, grace_s: float = 5) -> tuple[int, str]:
    """The status and everything printed, in a folder where scripts leave files."""
    out, before = io.StringIO(), Path.cwd()
    os.chdir(tmp_path)
    try:
        kept = Supervisor(units, tmp_path / "logs", out, restarts, backoff_s=0.02, grace_s=grace_s)
        return kept.run(), out.getvalue()
    finally:
        os.chdir(before)


def test_the_run_ends_with_the_unit_that_ends_it_and_the_others_end_by_themselves(tmp_path):
    status, printed = supervise(
        tmp_path,
        unit("controller", "sleep 0.2; touch over; echo trained", ends_run=True, is_needed=True),
        unit(
            "generate-0", "while [ ! -e over ]; do sleep 0.05; done; sleep 0.2; echo $NAME left; touch left"
        ),
    )
    assert status == 0 and (tmp_path / "left").exists()
    assert printed.splitlines() == ["controller | trained", "generate-0 | generate-0 left"]
    assert (tmp_path / "logs" / "generate-0.log").read_text() == "generate-0 left\n"


def test_what_fails_starts_again_a_bounded_number_of_times_with_growing_waits(tmp_path):
    status, printed = supervise(
        tmp_path,
        unit(
            "controller",
            "while [ $(cat starts | wc -l) -lt 3 ]; do sleep 0.02; done; sleep 0.3",
            ends_run=True,
        ),
        unit("generate-0", "echo x >>starts; exit 3"),
    )
    assert status == 0  # a host may stay away
    assert (tmp_path / "starts").read_text() == "x\n" * 3
    notes = [line.split("| ")[1] for line in printed.splitlines() if line.startswith("launch")]
    assert notes == [
        "generate-0 ended with 3; generate-0 starts again in 0.02 s (failure 1)",
        "generate-0 ended with 3; generate-0 starts again in 0.04 s (failure 2)",
        "generate-0 ended with 3; that was failure 3, and it stays down (launch.restarts)",
    ]


def test_the_run_fails_with_a_unit_that_it_needs(tmp_path):
    began_s = time.monotonic()
    status, printed = supervise(
        tmp_path,
        unit("controller", "echo $$ >pid; exec sleep 60", ends_run=True, is_needed=True),
        unit("trainer-0", "kill -9 $$", is_needed=True),
        restarts=1,
    )
    assert status == 1 and time.monotonic() - began_s < 10
    assert "trainer-0 was killed by SIGKILL; that was failure 2" in printed
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_commands_of_one_unit_end_and_start_together(tmp_path):
    once = "[ $(grep -c trainer-1 starts) -ge 2 ] || { sleep 0.1; exit 1; }"
    dies = f"echo $NAME >>starts; {once}; touch well; sleep 60"
    trainers = Unit(
        (
            Command(
                "trainer-0",
                ("bash", "-c", "echo $NAME >>starts; echo $$ >>ids; exec sleep 60"),
                {"NAME": "trainer-0"},
            ),
            Command("trainer-1", ("bash", "-c", dies), {"NAME": "trainer-1"}),
        ),
        is_needed=True,
    )
    controller = unit("controller", "while [ ! -e well ]; do sleep 0.02; done", ends_run=True)
    status, printed = supervise(tmp_path, controller, trainers, grace_s=0.5)
    assert status == 0
    assert sorted((tmp_path / "starts").read_text().split()) == ["trainer-0"] * 2 + ["trainer-1"] * 2
    assert "trainer-1 ended with 1; trainer-0 and trainer-1 starts again" in printed
    ids = (tmp_path / "ids").read_text().split()
    assert len(ids) == 2 and not any(Path(f"/proc/{each}").exists() for each in ids)


def test_a_process_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path):
    stubborn = "trap '' TERM; sleep 60 & echo $! >grandchild; touch up; wait; wait"
    controller = unit("controller", "while [ ! -e up ]; do sleep 0.02; done", ends_run=True)
    began_s = time.monotonic()
    status, _ = supervise(tmp_path, controller, unit("generate-0", stubborn), grace_s=0.3)
    assert status == 0 and time.monotonic() - began_s < 10
    grandchild = Path(f"/proc/{(tmp_path / 'grandchild').read_text().strip()}/stat")
    assert not grandchild.exists() or grandchild.read_text().split()[2] == "Z"


SCRIPT = """
import sys
from pathlib import Path
from areal_jax.runtime.launch.supervisor import Command, Supervisor, Unit
wait = ("bash", "-c", "trap 'touch polite; exit 0' TERM; touch up; while true; do sleep 0.05; done")
unit = Unit((Command("controller", wait, {}),), is_needed=True, ends_run=True)
raise SystemExit(Supervisor([unit], Path("logs"), sys.stdout, 3).run())
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_everything_and_the_status_says_so(tmp_path, number, status):
    words = ["env", "--default-signal=INT", sys.executable, "-c", SCRIPT]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    end_s = time.monotonic() + 30
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == status and (tmp_path / "polite").exists()
    assert f"ending everything: {number.name}" in printed
