"""What `bench migration` says of each way that a sample's KV takes, on a shape that takes no time."""

from __future__ import annotations

import pytest

from areal_jax.lab.bench.migration import migration

pytestmark = pytest.mark.soak


def test_every_way_has_its_turn_beside_a_prefill(tmp_path):
    said = migration(shape="tiny", tokens=100, page_tokens=16, folder=str(tmp_path), repeats=1)
    ways = said["medians_s"].keys() - {"prefill"}
    assert {"direct", "staged"} <= ways
    for way in ways:
        parts = said["medians_s"][way]
        assert 0 < max(parts["offer"], parts["fetch"], parts["insert"]) < parts["whole"]
        assert said["over_prefill"][way] == parts["whole"] / said["medians_s"]["prefill"]["whole"]
    assert said["seconds"] == said["medians_s"]["direct"]["whole"]
    # Keys and values of two layers, seven pages, four heads of 16 numbers in two bytes.
    assert said["bytes"] == 2 * 2 * 7 * 16 * 4 * 16 * 2
    moved_s, prefilled_s = said["bytes"] / said["bytes_per_s"], 100 / said["prefill_tokens_per_s"]
    assert said["is_move_cheaper"] is (moved_s <= prefilled_s)
    assert list(tmp_path.iterdir()) == []
