"""google-tunix's Sampler on its own Llama: a static batch, greedy, as JSON; arguments of torch_decode.py."""

from __future__ import annotations

import sys
import time

import jax
import numpy as np
from shapes import SHAPES
from timing import report_seconds
from tunix.generate import sampler
from tunix_model import make


class Numbers:
    """Text is token ids, in words."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return -1  # nothing ends early

    def pad_id(self) -> int:
        return 0


def main(name: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> None:
    s = SHAPES[name]
    cache = sampler.CacheConfig(prompt + tokens + 2, s["layers"], s["kv_heads"], s["head_dim"])
    sample = sampler.Sampler(make(name), Numbers(), cache)
    numbers = np.random.default_rng(0).integers(2, s["vocab"], (slots, prompt - 1))
    prompts = [" ".join(map(str, row)) for row in numbers]

    def seconds_of(count: int) -> float:
        started = time.perf_counter()
        out = sample(prompts, max_generation_steps=count, max_prompt_length=prompt)
        jax.block_until_ready(out.tokens)
        return time.perf_counter() - started

    seconds_of(tokens), seconds_of(1)
    runs = [(seconds_of(1), seconds_of(tokens + 1)) for _ in range(repeats)]
    report_seconds([(whole - first) / tokens for first, whole in runs], [whole for _, whole in runs])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
