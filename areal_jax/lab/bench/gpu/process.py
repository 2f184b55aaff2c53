"""A process of `bench gpu`: measures one cell after the other, and writes a line of JSON as each one ends.

`gpu.timed_stages` starts it and writes the stage, the cells and the file's name as JSON to its standard
input.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from areal_jax.assembly.devices import use_compilation_cache
from areal_jax.lab.bench.gpu.cells import CALLS
from areal_jax.lab.bench.gpu.stages import Cell
from areal_jax.lab.bench.gpu.timed_stages import write_line
from areal_jax.plugin import load_object

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "OUT_OF_MEMORY")


def measured(cell: Cell) -> dict[str, Any]:
    """Returns the cell's part of a line: `figures`, or `failed` with the reason; and its seconds.

    If the device's memory does not suffice, the setting `cell.halved` is halved once, and `note` says so.
    """
    started = time.perf_counter()
    settings, result = dict(cell.settings), {}
    for attempt in range(2):
        try:
            result["figures"] = load_object(cell.call, CALLS, "measurement")(**settings)
            break
        except Exception as error:  # noqa: BLE001 - a measurement may fail in any way, and the next one runs
            text = f"{type(error).__name__}: {error}"
            if attempt or not cell.halved or not any(sign in text for sign in OUT_OF_MEMORY):
                traceback.print_exc()
                result["failed"] = text.strip().splitlines()[0][:300]
                break
        # Outside of the except block, so that the exception's frames no longer hold arrays.
        settings[cell.halved] = max(1, settings[cell.halved] // 2)
        result["note"] = f"out of memory; measured with {cell.halved}={settings[cell.halved]}"
    return result | {"seconds": round(time.perf_counter() - started, 3)}


def is_sound(result: dict[str, Any]) -> bool:
    """Whether later cells can be measured in this process, after a kernel's cell with this result.

    False if the kernel ran and gave a wrong result, since it may have written anywhere, or if the device no
    longer computes.
    """
    figures = result.get("figures", {})
    if figures.get("problem") and figures.get("gap") is not None:
        return False
    try:
        return int(jnp.arange(8).sum()) == 28
    except Exception:  # noqa: BLE001 - a device that is lost may raise anything
        traceback.print_exc()
        return False


def main(file: Path, stage: str, is_isolated: bool, cells: list[Cell]) -> None:
    """Measures `cells`; if `is_isolated`, ends early after a cell that leaves the device unreliable."""
    use_compilation_cache()
    for cell in cells:
        result = measured(cell)
        write_line(file, {"stage": stage, "cell": cell.name, **result})
        if is_isolated and not is_sound(result):
            return


if __name__ == "__main__":
    given = json.load(sys.stdin)
    main(Path(given["file"]), given["stage"], given["is_isolated"], [Cell(**cell) for cell in given["cells"]])
