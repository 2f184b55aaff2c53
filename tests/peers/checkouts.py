"""Whether this checkout is slower than another one: `areal-jax bench` of both in turn; prints JSON.

    python tests/peers/checkouts.py OTHER [--pairs N] [--bench NAME ...] [NAME.setting=value ...]

OTHER is the root of another checkout of areal-jax, which this interpreter can run. Each figure (decode,
update, loop, and three ways of sync) is measured in N pairs of processes, one of each checkout, which change
places from pair to pair. A ratio is this checkout's seconds over the other's of one pair. `median` comes with
a 95 % interval [`low`, `high`] of order statistics, whatever the distribution of the ratios. Exits with 1
where a `low` exceeds 1.03: then this checkout is slower, and not by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]
LIMIT = 1.03
LEAST_PAIRS = 9
DEADLINE_S = 1800

BENCHES: dict[str, dict[str, Any]] = {
    "decode": {"dtype": "float32", "page_tokens": 32, "repeats": 2},
    "update": {"shape": "5m", "rows": 16, "repeats": 3},
    "loop": {"steps": 100, "repeats": 1},
    "sync": {"repeats": 2},
}
"""What is measured unless words say otherwise."""

SYNC_WAYS = ("memory", "files", "transfer")

PROGRAM = """
import sys, areal_jax
root = sys.argv.pop(1)
assert areal_jax.__file__.startswith(root + "/"), f"{areal_jax.__file__} is not below {root}"
from areal_jax.cli.main import app
app()
"""
"""The command line of the checkout in its first argument, whichever one is installed."""


def seconds_of(name: str, checkout: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by figure, from one process of its own."""
    words = [f"{key}={value}" for key, value in settings.items()]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # or `bench` starts itself again
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkout), "bench", name, *words, "--json"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if name == "sync":
        return {f"sync {way}": found["medians_s"][way]["whole"] for way in SYNC_WAYS}
    return {name: found["seconds"]}


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median: the k-th least and the k-th largest, for the largest k that suffices.

    The median lies below the k-th least of n as often as fewer than k of n fair coins show heads.
    """
    n, ordered = len(ratios), sorted(ratios)
    below = [sum(math.comb(n, heads) for heads in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = sum(chance <= 0.025 for chance in below)
    if k < 1:
        raise ValueError(f"{n} ratios have no 95 % interval of their median; measure at least 6 pairs")
    return ordered[k - 1], ordered[n - k]


def compared(name: str, other: Path, pairs: int, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By figure of the bench: the ratios of all pairs, their median and its interval."""
    runs: dict[Path, list[dict[str, float]]] = {HERE: [], other: []}
    for pair in range(pairs):
        for checkout in (HERE, other) if pair % 2 else (other, HERE):
            runs[checkout].append(seconds_of(name, checkout, settings))
        sys.stderr.write(f"{name}: pair {pair + 1} of {pairs}: {runs[HERE][-1]} beside {runs[other][-1]}\n")
    found = {}
    for figure in runs[HERE][0]:
        ratios = [a[figure] / b[figure] for a, b in zip(runs[HERE], runs[other], strict=True)]
        low, high = interval(ratios)
        found[figure] = {
            "median": statistics.median(ratios),
            "low": low,
            "high": high,
            "is_slower": low > LIMIT,
            "ratios": ratios,
            "settings": dict(settings),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=lambda word: Path(word).resolve(strict=True))
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument("--bench", action="append", choices=list(BENCHES))
    parser.add_argument("words", nargs="*", metavar="NAME.setting=value")
    asked = parser.parse_intermixed_args()
    settings = {name: dict(own) for name, own in BENCHES.items()}
    for word in asked.words:
        key, _, value = word.partition("=")
        name, _, setting = key.partition(".")
        if name not in BENCHES or not setting:
            parser.error(f"{word} sets nothing; give NAME.setting=value with NAME of {', '.join(BENCHES)}")
        settings[name][setting] = value
    figures: dict[str, dict[str, Any]] = {}
    for name in asked.bench or BENCHES:
        figures |= compared(name, asked.other, asked.pairs, settings[name])
    sys.stdout.write(json.dumps({"figures": figures, "load": os.getloadavg()}) + "\n")
    return int(any(figure["is_slower"] for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
