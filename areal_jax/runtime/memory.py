"""A device's memory while it trains: forecast before a step, compared after it; programs compiled late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, Batch

GIB = 2**30


class MemoryWatch:
    """Of one learner on one device; `note` hears of forecasts and of programs compiled after the first step.

    A forecast holds what the compiler says of the learner's own programs. Where the device also serves, the
    rows of `run --dry-run` come on top.
    """

    def __init__(self, learner: Learner, note: Callable[[str], None]) -> None:
        self._learner, self._note = learner, note
        self._device = learner.mesh.local_devices[0]
        self._forecasts: dict[Any, int] = {}
        self._steps = 0

    def before(self, state: TrainState, batch: Batch, is_alone: bool) -> None:
        """Forecast training a prepared batch of this shape, the first time one comes.

        `is_alone` as in `Learner.forecast`. Raises ArealError for more than the device has.
        """
        shape = batch.tokens.shape
        if shape in self._forecasts:
            return
        forecast = self._learner.forecast(state, batch, is_alone)
        self._forecasts[shape] = forecast.peak
        largest = forecast.largest
        parts = f"{_gib(forecast.resident)} resident, {_gib(forecast.needs[largest])} in {largest}"
        rows, length = shape
        limit = self._stats().get("bytes_limit")
        if limit is not None and forecast.peak > limit:
            raise ArealError(
                f"training a batch of {rows} x {length} will take {_gib(forecast.peak)} of device memory "
                f"({parts}), and there are {_gib(limit)}; lower trainer.rows or trainer.logp_chunk, set "
                "trainer.remat=layer or trainer.optimizer_memory=host, or shard over more devices"
            )
        self._note(f"memory: {_gib(forecast.peak)} a device for a batch of {rows} x {length}: {parts}")

    def after(self) -> dict[str, float]:
        """Figures of the step that ended: the forecast, the device's peak where it keeps one, programs."""
        compiled, self._learner.compiled[:] = list(self._learner.compiled), []
        if self._steps:
            for program, shapes in compiled:
                self._note(f"compiled {program} once more, for {_some(shapes)}")
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
    named = ", ".join(shapes[:most]) or "a new combination"
    return named + (f" and {len(shapes) - most} more" if len(shapes) > most else "")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def reset_peak() -> None:
    """Start the process's peak resident size anew; only Linux can."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident_bytes(name: str = "VmHWM") -> int:
    """The process's resident size: VmHWM its peak since `reset_peak`, VmRSS now."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
