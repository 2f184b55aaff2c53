"""What tests say of processes is true, also where there is no /proc."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.cluster.agents import pids_of
from tests.processes import assert_ends, has_ended, is_gone, stop


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_there_then_a_zombie_and_then_gone(child: subprocess.Popen[bytes]):
    assert not has_ended(child.pid)
    with pytest.raises(AssertionError, match=f"process {child.pid} did not end within 0 s"):
        assert_ends(child.pid, within_s=0)
    stop(child.pid)
    assert not has_ended(child.pid) and processes.state(Path(f"/proc/{child.pid}/stat")) == "T"
    child.kill()
    assert_ends(child.pid)
    assert not is_gone(child.pid)
    child.wait()
    assert is_gone(child.pid) and has_ended(child.pid)
    assert not has_ended(os.getpid())


def test_without_proc_no_process_counts_as_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(processes, "PROC", tmp_path / "stat")
    with pytest.raises(AssertionError, match="does not exist"):
        processes.state(tmp_path / "stat")
    with pytest.raises(AssertionError, match="does not exist"):
        pids_of(tmp_path)
