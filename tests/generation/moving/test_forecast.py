"""A sample's KV moves where that is faster than to compute it again."""

from __future__ import annotations

import pytest

from areal_jax.generation.moving.forecast import is_move_cheaper

KV_BYTES = 30 * 2 * 3 * 64 * 2 * 1000
"""1,000 tokens of SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 heads of 64 numbers of 2 bytes."""


@pytest.mark.parametrize(
    ("bytes_per_s", "prefill_tokens_per_s", "is_cheaper"),
    [
        (1e9, 300.0, True),  # 23 ms against 3.3 s
        (1e9, 100_000.0, False),  # 23 ms against 10 ms
        (23.04e6, 1000.0, True),  # 1 s against 1 s: nothing is computed twice
        (23.03e6, 1000.0, False),
        (None, 1e9, True),  # the first move measures
    ],
)
def test_the_cheaper_way_is_chosen(bytes_per_s, prefill_tokens_per_s, is_cheaper):
    rates = {"bytes_per_s": bytes_per_s, "prefill_tokens_per_s": prefill_tokens_per_s}
    assert is_move_cheaper(KV_BYTES, 1000, **rates) is is_cheaper
