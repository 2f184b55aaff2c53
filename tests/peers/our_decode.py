"""Our engine: a decode step of every slot, bare and whole, as JSON; arguments as of torch_decode.py."""

from __future__ import annotations

import sys

from timing import report_seconds

from areal_jax.generation.engine import Engine
from areal_jax.lab.bench.decode import decode
from areal_jax.lab.bench.hosting import drain, published, started, starts_of
from areal_jax.lab.bench.measure import random_model, random_params, timed_s


def batch_seconds(shape: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> list[float]:
    """Seconds of `repeats` runs of a host: one prompt per slot, `tokens` sampled tokens each."""
    model = random_model(shape, dtype)
    length = prompt + tokens
    engine = Engine(
        model,
        slots=slots,
        length=length + -length % 32,
        decode_steps=8,
        page_tokens=32,
        prefill_chunk=4 * prompt,
    )
    store = published(engine, random_params(model, dtype))
    starts = starts_of([tokens] * slots, prompt, engine)

    def whole() -> None:
        assert drain(started(engine, store, starts)) == slots * tokens

    return [timed_s(whole) for _ in range(repeats + 1)][1:]  # the first run compiles


def main(name: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> None:
    found = decode(
        shape=name, slots=slots, dtype=dtype, prompt=prompt, tokens=tokens, page_tokens=32, repeats=repeats
    )
    whole = batch_seconds(name, slots, dtype, prompt, tokens, repeats)
    report_seconds(found["runs"]["bare"], whole, engine=found["runs"]["whole"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
