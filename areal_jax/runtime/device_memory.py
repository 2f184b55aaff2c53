"""Forecasts a training step's device memory, measures it afterwards, and reports late compilations.

A compilation is late if it happens after the first step that this process trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.trainer.learner import Learner, TrainsBatches
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError

GIB = 2**30


class MemoryWatch:
    """Calls `note(text)` with forecasts of the memory that a learner needs on one device.

    `note` is also called for each program that is compiled after the first step of this process, since
    compiling takes time and memory. A forecast is based on what the compiler reports for the learner's
    programs. The memory of a generation host on the same device is left out; the table of
    `areal-jax run --dry-run` lists it.
    """

    def __init__(self, learner: Learner, note: Callable[[str], None]) -> None:
        self._learner, self._note = learner, note
        self._device = learner.mesh.local_devices[0]
        self._forecasts: dict[Any, int] = {}
        self._steps = 0

    def before(self, learns: TrainsBatches, state: TrainState, batch: Any, is_alone: bool) -> None:
        """Forecast the memory that `learns.update` takes for this prepared batch, once for each batch shape.

        `is_alone`: False if hosts decode on the device between the programs of the update. Raises ArealError
        if the forecast exceeds the device's memory.
        """
        shape = batch.tokens.shape
        if (key := (type(batch), shape)) in self._forecasts:
            return
        forecast = learns.forecast(state, batch, is_alone)
        self._forecasts[key] = forecast.peak
        largest = forecast.largest
        parts = f"{_gib(forecast.resident)} resident, {_gib(forecast.needs[largest])} in {largest}"
        rows, length = shape
        limit = self._stats().get("bytes_limit")
        if limit is not None and forecast.peak > limit:
            raise ArealError(
                f"training a batch of {rows} rows of {length} tokens will take {_gib(forecast.peak)} of "
                f"device memory ({parts}), but the device has {_gib(limit)}; lower trainer.rows or "
                "trainer.logp_chunk, set trainer.remat=layer or trainer.optimizer_memory=host, or shard "
                "over more devices"
            )
        self._note(
            f"forecast of device memory for a batch of {rows} rows of {length} tokens: "
            f"{_gib(forecast.peak)} ({parts})"
        )

    def after(self) -> dict[str, float]:
        """Return metrics of the finished step: compiled programs, and device memory in bytes.

        The memory is the largest forecast so far, and the peak since the process started; the peak is left
        out if the device does not report it.
        """
        compiled, self._learner.compiled[:] = list(self._learner.compiled), []
        if self._steps:
            for program, shapes in compiled:
                self._note(
                    f"the program {program} was compiled after the first step, because no earlier step "
                    f"called it with these shapes ({_some(shapes)}); the run continues, but compiling took "
                    "time"
                )
        self._steps += 1
        figures = {
            "compiled_programs": float(len(compiled)),
            "memory_forecast_bytes": float(max(self._forecasts.values())),
        }
        peak = self._stats().get("peak_bytes_in_use")
        return figures if peak is None else figures | {"memory_peak_bytes": float(peak)}

    def _stats(self) -> dict[str, int]:
        return self._device.memory_stats() or {}


def _some(shapes: Sequence[str], most: int = 3) -> str:
    named = ", ".join(shapes[:most]) or "a combination of earlier shapes"
    return named + (f" and {len(shapes) - most} more" if len(shapes) > most else "")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def reset_peak() -> None:
    """Reset the peak resident memory that the kernel records for this process. Linux only."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident_bytes(name: str = "VmHWM") -> int:
    """Return this process's resident memory in bytes. Linux only.

    `name`: VmHWM for the peak since `reset_peak`, VmRSS for the present size.
    """
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
