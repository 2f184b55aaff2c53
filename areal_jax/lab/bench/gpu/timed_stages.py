"""`bench gpu`: measures what a GPU does with this system's programs, within minutes, whatever fails.

Each stage runs in a process of its own with a hard limit. Every measurement (cell) is written to the file as
soon as it ends, so a killed command loses only the measurement that was running. A process that crashes costs
one cell: a new process measures the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from areal_jax.lab.bench.gpu.stages import Cell, Stage, stages
from areal_jax.models.config import SHAPES
from areal_jax.plugin import did_you_mean
from areal_jax.types import ArealError

FILE, LOG = "gpu.jsonl", "gpu.log"
SHORTEST_S = 2.0
"""With less time than this left, no process is started: it could not measure anything."""


def gpu(
    *, shape: str = "qwen2.5-1.5b", budget: float = 560.0, only: Sequence[str] = (), out: str = ""
) -> dict[str, Any]:
    """Measures this GPU in at most `budget` seconds, the most important figures first.

    `shape`: the model's built-in size; tiny also makes every measurement small, to try the command on a CPU.
    `only`: names of the stages to run; empty: all. `out`: the folder of the results gpu.jsonl (a line a
    measurement) and gpu.log (what the processes printed); empty: $OUT, or the current folder. In the result,
    `cells` are the lines, and `failed` names the measurements without figures. Raises ArealError for an
    unknown shape or stage.
    """
    chosen = _chosen(shape, only)
    folder = Path(out or os.environ.get("OUT") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    already = len(read_lines(file))
    ends_s = time.monotonic() + budget
    for stage in chosen:
        _run_stage(stage, file, min(time.monotonic() + stage.limit_s, ends_s))
    lines = read_lines(file)[already:]
    failed = [f"{line['stage']}: {line['cell']}: {line['failed']}" for line in lines if "failed" in line]
    return {"file": str(file), "shape": shape, "budget": budget, "failed": failed, "cells": lines}


def _chosen(shape: str, only: Sequence[str]) -> list[Stage]:
    if shape not in SHAPES:
        raise ArealError(f"shape={shape} is unknown; {did_you_mean(shape, SHAPES, ', '.join(SHAPES))}")
    every = {stage.name: stage for stage in stages(shape)}
    names = [only] if isinstance(only, str) else only or list(every)
    for name in names:
        if name not in every:
            hint = did_you_mean(str(name), every, f"choose from: {', '.join(every)}")
            raise ArealError(f"only={name}: bench gpu has no such stage; {hint}")
    return [stage for name, stage in every.items() if name in names]


def _run_stage(stage: Stage, file: Path, ends_s: float) -> None:
    """Measures the stage's cells until `ends_s` (time.monotonic); a line is written for each of them."""
    left = list(stage.cells)
    while left:
        # A cell with an environment has a process of its own; those up to the next such cell share one.
        part = list(takewhile(lambda cell: cell.env is None, left)) or left[:1]
        before = len(read_lines(file))
        problem = _run_process(stage, part, file, ends_s)
        measured = [line["cell"] for line in read_lines(file)[before:]]
        left = [cell for cell in left if cell.name not in measured]
        if problem is None and measured:
            continue
        # The first cell without a line is the one that was running; the process may also fail after the last.
        running = next((cell for cell in part if cell.name not in measured), None)
        if running is None:
            continue
        write_line(file, {"stage": stage.name, "cell": running.name, "failed": problem or "no result"})
        left.remove(running)
        if time.monotonic() > ends_s - SHORTEST_S:
            break
    for cell in left:
        write_line(file, {"stage": stage.name, "cell": cell.name, "failed": "not run: no time was left"})


def _run_process(stage: Stage, cells: Sequence[Cell], file: Path, ends_s: float) -> str | None:
    """Measures cells in a process; returns None, or why it ended early."""
    limit_s = ends_s - time.monotonic()
    if limit_s < SHORTEST_S:
        return "not run: no time was left"
    given = {
        "file": str(file),
        "stage": stage.name,
        "is_isolated": stage.is_isolated,
        "cells": [asdict(cell) for cell in cells],
    }
    with (file.parent / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_jax.lab.bench.gpu.process"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(cells[0].env or {})},
            start_new_session=True,  # its children are killed with it
        )
        try:
            process.communicate(json.dumps(given).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s, the limit of its stage or of the budget"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode < 0:
        return f"killed by {signal.Signals(-process.returncode).name}"
    return f"ended with status {process.returncode}; see {LOG}" if process.returncode else None


# --- the file -----------------------------------------------------------------------------------------------


def write_line(file: Path, line: dict[str, Any]) -> None:
    """Appends a line of JSON to `file`, and waits until it is on the disk."""
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of `file` that were written in full; an empty list if there is no such file."""
    if not file.exists():
        return []
    whole = (line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [json.loads(line) for line in whole]
