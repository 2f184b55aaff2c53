"""Node agents of one run on this one machine, each as if it had a machine of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.processes import require_proc

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
"""Ends a hang."""
QUIET = ["launch.accelerator=cpu", "observe.tensorboard=false", "observe.report=false", "observe.live=false"]
AGENT = ["env", "--default-signal=INT", sys.executable, "-m", "areal_jax.cli.main", "role", "node"]


def start_agent(folder: Path, *words: str, prefix: Sequence[str] = ()) -> subprocess.Popen:
    """An agent of the run in `folder`; what it prints goes to FOLDER.out."""
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    with folder.with_suffix(".out").open("a") as out:
        return subprocess.Popen(
            [*prefix, *AGENT, f"--run={folder}", *words], cwd=ROOT, env=env, stdout=out, stderr=out
        )


@contextmanager
def agents(folder: Path, count: int, *words: str) -> Iterator[list[subprocess.Popen]]:
    """`count` agents of ranks 0, 1, ...; those that still run at the end of the block are ended."""
    place = [f"--machines={count}", "--address=127.0.0.1"]
    running = [start_agent(folder, f"--rank={rank}", *place, *words) for rank in range(count)]
    try:
        yield running
    finally:
        for agent in running:
            agent.terminate()
        for agent in running:
            agent.wait(DEADLINE_S)


def said(folder: Path) -> str:
    return folder.with_suffix(".out").read_text()


def pids_of(folder: Path) -> dict[str, int]:
    """Name -> process id of the run's processes."""
    require_proc()
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue  # it has just ended
        if (
            f"--run={folder}" in words
            and "role" in words
            and "node" not in words
            and "-c" not in words  # `tied` before its exec
        ):
            name = next(word for word in words if word.startswith("--name="))
            found[name.removeprefix("--name=")] = int(path.parent.name)
    return found


def wait_until(
    holds: Callable[[], bool],
    running: Sequence[subprocess.Popen],
    folder: Path,
    timeout_s: float = DEADLINE_S,
) -> None:
    """Until it holds; fails where an agent ends with an error, or at the deadline."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        ended = [agent.returncode for agent in running if agent.poll()]
        assert not ended and time.monotonic() < end_s, f"{ended}\n{said(folder)[-4000:]}"
        time.sleep(0.1)
