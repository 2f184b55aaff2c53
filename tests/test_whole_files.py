"""A crashed worker process of pytest-xdist costs its test, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = 6
DEADLINE_S = 300
"""Ends a run that hangs; one takes 2 s of an idle machine."""

PASSES = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_passes(number):
    with Path(__file__).with_suffix(".ran").open("a") as ran:
        ran.write("passes\\n")
"""
CRASHES = """
import os, time
from pathlib import Path

def test_crashes():
    with Path(__file__).with_suffix(".ran").open("a") as ran:
        ran.write("crashes\\n")
    others = [Path(other) for other in {others}]
    end_s = time.monotonic() + 120
    while sum(other.read_text().count("\\n") for other in others if other.exists()) < {waits}:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


def distributed(folder: Path) -> subprocess.CompletedProcess[str]:
    """The tests in `folder`, on two workers, one of which may be replaced."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ["-p", "xdist", "-p", "tests.whole_files", "-p", "no:cacheprovider", "-c", os.devnull]
    words += ["--rootdir", str(folder), "-n", "2", "--dist", "loadfile", "--max-worker-restart", "1"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("place", "count"), [(0, 3), (FILES - 1, 3), (FILES - 1, 1)])
def test_a_crashed_worker_costs_one_test(tmp_path: Path, place: int, count: int):
    """In a test that waits for all other files, the other worker has no work left, and the crashed one has
    finished files behind it.
    """
    files = [tmp_path / f"test_{number}.py" for number in range(FILES)]
    others = [str(file.with_suffix(".ran")) for file in files if file != files[place]]
    for file in files:
        file.write_text(PASSES.format(count=count))
    waits = len(others) * count if place else 0
    crashes = CRASHES.format(others=others, waits=waits)
    files[place].write_text(crashes + PASSES.format(count=count - 1) * (count > 1))
    done = distributed(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"crashed while running 'test_{place}.py::test_crashes'" in done.stdout
    assert f"1 failed, {FILES * count - 1} passed" in done.stdout
    ran = [file.with_suffix(".ran").read_text().split() for file in files]
    wanted = [["passes"] * count for _ in files]
    wanted[place][0] = "crashes"
    assert ran == wanted


def test_a_worker_that_crashes_after_its_last_test_fails_the_session(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(
        "import os\n"
        "def pytest_sessionfinish(session):\n"
        "    if os.environ.get('PYTEST_XDIST_WORKER') == 'gw0':\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    for number in range(FILES):
        (tmp_path / f"test_{number}.py").write_text(PASSES.format(count=1))
    done = distributed(tmp_path)
    assert f"{FILES} passed" in done.stdout
    assert done.returncode == 1, done.stdout + done.stderr
