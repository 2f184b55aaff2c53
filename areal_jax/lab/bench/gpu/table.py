"""The table that `bench gpu` prints: a line for each measurement, with the figures that matter most."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LONGEST = 60
"""Most lines of the table: what a terminal, or the end of a log, shows at once."""

Figures = Mapping[str, Any]


def lines(result: Mapping[str, Any]) -> list[str]:
    """Returns the table of `bench gpu`'s result: at most LONGEST lines.

    If there are more measurements, those that failed and the first ones of the others are shown.
    """
    cells = result["cells"]
    rows = [_line(cell) for cell in cells]
    room = LONGEST - 2
    if len(rows) > room:
        keep = {i for i, cell in enumerate(cells) if "failed" in cell}
        others = [i for i in range(len(rows)) if i not in keep]
        keep |= set(others[: max(0, room - len(keep))])
        rows = [row for i, row in enumerate(rows) if i in keep][:room]
    failed = result["failed"]
    return [
        f"bench gpu shape={result['shape']}: {len(cells)} measurements, {len(failed)} without figures",
        *rows,
        f"all figures: {result['file']}",
    ]


def _line(cell: Mapping[str, Any]) -> str:
    start = f"{cell['stage']:<9} {cell['cell']:<34}"
    if "failed" in cell:
        return f"{start} FAILED: {cell['failed'][:100]}"
    shown = "  ".join(_shown(cell["figures"]))
    return f"{start} {shown}" + (f"  ({cell['note']})" if "note" in cell else "")


def _shown(figures: Figures) -> Iterator[str]:
    if figures.get("problem"):
        yield f"not used: {figures['problem'][:90]}"
    for name, show in SHOWN.items():
        if figures.get(name) is not None:
            yield show(figures[name])


def _per_s(unit: str, scale: float, digits: int = 0) -> Callable[[float], str]:
    return lambda value: f"{value / scale:.{digits}f} {unit}"


def _ms(name: str) -> Callable[[float], str]:
    return lambda seconds: f"{name} {1000 * seconds:.3g} ms"


def _percent(name: str) -> Callable[[float], str]:
    return lambda share: f"{name} {100 * share:.0f} %"


SHOWN: Mapping[str, Callable[[Any], str]] = {
    "devices": lambda kinds: f"{len(kinds)} x {kinds[0]}",
    "packages": lambda found: f"jax {found['jax']}, jaxlib {found['jaxlib']}",
    "flops_per_s": _per_s("TFLOP/s", 1e12, 1),
    "read_bytes_per_s": _per_s("GB/s read", 1e9),
    "copied_bytes_per_s": _per_s("GB/s copied", 1e9),
    "gap": lambda gap: f"error {gap:.2g}",
    "kernel_s": _ms("kernel"),
    "chunk_s": _ms("chunk"),
    "chunk_flops_per_s": _per_s("TFLOP/s", 1e12),
    "forward_s": _ms("forward"),
    "both_s": _ms("with backward"),
    "async_over_sync": lambda ratio: f"{ratio:.2f}x",
    "mean": lambda nats: f"mean {nats:.2g} nats",
    "max": lambda nats: f"max {nats:.2g} nats",
    "bits": lambda bits: f"bits {zlib.crc32(bits.encode()):08x}",
    "is_repeatable": lambda same: "equal bits" if same else "DIFFERENT BITS",
    "reward_last": lambda reward: f"reward {reward:.2f}",
    "run_s": _per_s("s", 1, 1),
    "trained_tokens_per_s": _per_s("trained tokens/s", 1),
    "decode_gap_p99_s": _ms("gap p99"),
    "trainer_wait_share": _percent("trainer waits"),
    "generator_idle_share": _percent("generator idle"),
    "tokens_per_s": _per_s("tokens/s", 1),
    "seconds": _ms(""),
    "mfu": _percent("MFU"),
    "logp_mfu": _percent("log-prob MFU"),
    "engine_over_bare": lambda ratio: f"engine/bare {ratio:.2f}",
    "fraction_of_bandwidth": _percent("bandwidth"),
    "fraction_of_peak": _percent("of peak"),
    "dispatch_s": _ms("dispatch"),
    "kernels": lambda count: f"{count} kernels",
    "device_to_host": lambda count: f"{count} read-backs",
    "busy_s": _ms("device busy"),
    "insert_s": _ms("insert"),
    "extract_s": _ms("extract"),
    "plain_seconds": _ms("plain"),
    "top_p_seconds": _ms("top-p"),
    "top_k_256_seconds": _ms("top-k"),
    "log_prob_seconds": _ms("log-prob"),
    "large_copies": lambda found: f"pool-sized copies: {sum(map(len, found.values()))}",
    "compile_s": lambda seconds: f"compile {seconds:.0f} s",
    "peak_bytes": _per_s("GB peak", 1e9, 1),
    "forecast_bytes": _per_s("GB forecast", 1e9, 1),
    "attention": lambda path: f"attention {path}",
    "products": lambda found: ", ".join(f"{count} {dtypes}" for dtypes, count in found.items()),
}
"""Figure -> how the table shows it, in this order; others are in the file alone."""
