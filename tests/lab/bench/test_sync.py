"""What `bench sync` says of every way that a version takes, on a shape that takes no time."""

from __future__ import annotations

import pytest

from areal_jax.lab.bench.sync import sync

pytestmark = pytest.mark.soak


def test_every_way_has_its_turn_and_hands_over_what_it_says(tmp_path):
    said = sync(shape="tiny", folder=str(tmp_path), repeats=1)
    ways = {"memory", "memory_other_device", "transfer", "transfer_adapters"}
    files = {"files", "orbax_per_layer", "orbax_stacked", "safetensors"}
    assert ways | files | {"memcpy", "digest"} <= said["medians_s"].keys()
    for way in ways | {"files"}:
        parts = said["medians_s"][way]
        assert 0 < parts["pause"] <= parts["whole"] and 0 < parts["stall"] <= parts["whole"]
    assert said["seconds"] == said["medians_s"]["transfer"]["whole"]
    assert said["seconds_min"] <= said["seconds"] <= said["seconds_max"]
    # Two layers of width 64 and MLP width 256; an adapter of rank 8 has 8 (inputs + outputs) parameters.
    adapters = 4 * 2 * (4 * 8 * (64 + 64) + 3 * 8 * (64 + 256))
    assert said["adapter_bytes_share"] == pytest.approx(adapters / (said["bytes"] + adapters), rel=1e-3)
    assert list(tmp_path.iterdir()) == []
