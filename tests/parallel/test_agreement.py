"""What processes do together none does alone: all hear of a failure, and of one that does not come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.parallel.agreement import leads, together

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
"""Ends a hang."""


def test_a_process_that_is_alone_agrees_with_itself():
    assert leads()
    with together("write", 0.0):
        pass
    with pytest.raises(OSError, match="full"), together("write", 0.0):
        raise OSError("the disk is full")


@pytest.mark.slow
def test_two_processes_agree_or_hear_why_not(port: int):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.parallel.agreeing"]
    both = [
        subprocess.Popen([*command, index, str(port)], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for index in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    first, second = (
        [line.removeprefix("said: ") for line in text.splitlines() if line.startswith("said: ")]
        for text in said
    )
    assert first[:4] == [
        "True",
        "well",
        "DisagreementError: the step 'write' failed in process 1: the disk is full",
        "well",
    ]
    assert second == ["False", "well", "OSError: the disk is full", "well", "well"]
    assert first[4].startswith(
        "ArealError: process 0 of 2 ends, because it waited 1 s for the others at the step 'read'. "
    )
    assert "1/2" in first[4]
    assert first[5:] == ["well"]
