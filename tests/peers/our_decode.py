"""Our engine: a decode step of every slot, bare and whole, as JSON; arguments as of torch_decode.py."""

from __future__ import annotations

import sys

from timing import report_seconds

from areal_jax.runtime.bench_decode import decode
from areal_jax.runtime.bench_serve import batch_seconds


def main(name: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> None:
    found = decode(
        shape=name, slots=slots, dtype=dtype, prompt=prompt, tokens=tokens, page_tokens=32, repeats=repeats
    )
    whole = batch_seconds(name, slots, dtype, prompt, tokens, repeats)
    report_seconds(found["runs"]["bare"], whole, engine=found["runs"]["whole"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
