"""`.ci/run`: budgets in CPU seconds, and missing programs that fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUSY = f"{sys.executable} -S -c 'import time\nwhile time.process_time() < 1.5: pass'"
WAITING = "sleep 1.5"


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the functions of `.ci/run`, in an environment without CI."""
    return subprocess.run(
        ["env", "--unset=CI", "bash", "-c", f"source .ci/run\n{script}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_tier_fails_beyond_one_and_a_quarter_times_its_cpu_seconds():
    done = shell(f"tier calm 2 {BUSY}; tier busy 1 {BUSY}; tier later 1 true; finish")
    assert done.returncode == 1
    assert done.stderr == "=== over 1.25 times their budgets: busy\n"
    assert "=== later: 0.0 CPU seconds, within" in done.stdout  # the tiers after it ran


def test_on_slower_cores_a_tier_may_take_longer_by_the_time_of_a_fixed_loop():
    done = shell(f"loops() {{ printf '0.22\\n0.33\\n9\\n'; }}; tier busy 1 {BUSY}; finish")
    assert done.returncode == 0, done.stderr
    assert "within 1.25 times its budget of 1, on cores 3.00 times as slow;" in done.stdout
    done = shell(f"loops() {{ echo 0.01; }}; tier busy 1 {BUSY}; finish")  # faster ones change nothing
    assert (done.returncode, done.stderr) == (1, "=== over 1.25 times their budgets: busy\n")


def test_the_fixed_loop_is_timed_in_cpu_seconds():
    """Two loops; each takes hundredths of a second to seconds on whatever machine."""
    done = shell("sleep() { :; }; loops | head -n 2")
    first, second = map(float, done.stdout.split())
    assert 0.01 < first < 5 and 0.01 < second < 5


def test_waiting_costs_no_cpu_seconds_and_wall_time_is_printed():
    done = shell(f"tier waits 1 {WAITING}; finish")
    assert done.returncode == 0, done.stderr
    assert re.search(r"=== waits: 0\.0 CPU seconds, within .*; wall [12] s\n", done.stdout)


def test_a_tier_whose_command_fails_ends_the_run():
    done = shell("tier broken 9 false; tier later 1 true; finish")
    assert done.returncode == 1
    assert "=== broken FAILED" in done.stderr and "later" not in done.stdout


def test_only_the_named_tiers_run():
    done = shell("wanted=(second); tier first 9 false; tier second 9 true; finish")
    assert done.returncode == 0, done.stderr
    assert "first" not in done.stdout and "=== second: " in done.stdout


def test_a_missing_program_fails_rather_than_skips():
    assert shell("echo $CI").stdout == "true\n"
