"""Measures the journal of a long run: writing it, opening it for a resume, and the commands that read it.

The run is simulated (`lab.kept_run`): its driver, journal and metrics are real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_jax.assembly.devices import machine
from areal_jax.assembly.run_folder import JOURNAL, open_journal
from areal_jax.lab.kept_run import keep_run, long_config, opened
from areal_jax.lab.simulation.schedule import Schedule
from areal_jax.types import ArealError

LIMIT_S = 3600.0
"""Seconds that a command over the run's folder may take."""

LONG = Schedule(token_s=0.05, max_virtual_s=1e9, max_rows=10**9)
"""The schedule of a simulated long run: a batch takes a second, and its samples about three."""


def journal(*, steps: int = 200, samples: int = 512, folder: str | None = None) -> dict[str, Any]:
    """Measures the journal of a run of `steps` batches of `samples` samples on 8 hosts.

    `folder`: where the run is made, and stays; a run that was begun there goes on. None: a temporary folder.
    In the result, `write_us` is CPU time an event of driver, control plane and simulation together, None if
    the run was there already; `resume_s` the time in which a resume opens the folder; `audit_cpu_s` and the
    like the CPU time of the command with its start, and `audit_mb` its largest memory.
    """
    with _folder(folder) as path:
        started_s = time.process_time()
        is_new = not (path / JOURNAL).exists()
        keep_run(long_config(path, steps, samples), LONG)
        spent_s = time.process_time() - started_s
        with open_journal(path) as written:
            events = written.last_seq
        resumes = []
        for _ in range(3):
            start_s = time.monotonic()
            with opened(long_config(path, steps, samples)):
                resumes.append(time.monotonic() - start_s)
        figures = {
            "events": events,
            "journal_mb": (path / JOURNAL).stat().st_size / 1e6,
            "write_us": 1e6 * spent_s / events if is_new else None,
            "resume_s": min(resumes),
        }
        newest = (steps - 1) * (samples // 16)
        for words in (("audit",), ("report",), ("inspect", f"{newest}/0")):
            figures |= _command(words[0], str(path), *words[1:])
        return (
            machine(f"{steps} x {samples} samples", "none", resumes)
            | figures
            | {"audit_us": 1e6 * figures["audit_cpu_s"] / events}
        )


_PROGRAM = """
import sys
from pathlib import Path

status = Path(sys.argv.pop(1))
from areal_jax.cli.main import app

try:
    app()
finally:
    status.write_bytes(Path("/proc/self/status").read_bytes())
"""
"""Runs the command line, then writes what Linux says of the process: its parent would see a memory that
includes the parent's own at the fork."""


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made) / "run"


def _command(name: str, *words: str) -> dict[str, float]:
    """Runs `areal-jax NAME WORDS` in a process of its own; returns its seconds and memory.

    Raises ArealError if it fails.
    """
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    with tempfile.TemporaryDirectory() as made:
        status = Path(made) / "status"
        start_s, before = time.monotonic(), os.times()
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(status), name, *words],
            capture_output=True, text=True, check=False, env=environment, timeout=LIMIT_S,
        )  # fmt: skip
        seconds, after = time.monotonic() - start_s, os.times()
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise ArealError(f"areal-jax {name} {' '.join(words)} failed: {said}")
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {f"{name}_s": seconds, f"{name}_cpu_s": spent, f"{name}_mb": int(peak.split()[1]) / 1e3}
