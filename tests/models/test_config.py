"""Sizes that cannot be are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.models.config import SHAPES, model_config
from areal_jax.types import ArealError


@pytest.mark.parametrize("shape", SHAPES)
def test_every_named_shape_is_one(shape: str):
    config = model_config(shape, 99)
    assert config.vocab_size == max(99, SHAPES[shape].get("vocab_size", 0))
    assert config.heads % config.kv_heads == 0


def test_overrides_win():
    config = model_config("tiny", 19, "bfloat16", layers=3, kv_heads=2)
    assert model_config("tiny", 19, vocab_size=32).vocab_size == 32
    assert model_config("tiny", 19, vocab_size=8).vocab_size == 19
    assert (config.layers, config.kv_heads, config.width, config.dtype) == (3, 2, 64, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        ("tinny", {}, "model.shape=tinny is unknown; did you mean tiny?"),
        ("zzz", {}, "choose one of: tiny, 5m"),
        ("tiny", {"layer": 2}, "unknown key model.overrides.layer; did you mean model.overrides.layers?"),
        ("tiny", {"zzz": 2}, "unknown key model.overrides.zzz; known keys are: has_qk_norm"),
        ("tiny", {"dtype": "bfloat16"}, "unknown key model.overrides.dtype"),
        ("tiny", {"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ("tiny", {"head_dim": 15}, "head_dim=15 is odd"),
        ("tiny", {"shape": "5m"}, "unknown key model.overrides.shape"),
        ("tiny", {"vocab_size": "many"}, "vocab_size='many' is not a valid size"),
        ("tiny", {"layers": 0}, "layers=0 is not a valid size"),
        ("tiny", {"layers": "two"}, "layers='two' is not a valid size"),
        ("tiny", {"width": 64.0}, "width=64.0 is not a valid size"),
        ("tiny", {"heads": True}, "heads=True is not a valid size"),
    ],
)
def test_what_cannot_be_is_named(shape: str, overrides: dict[str, Any], message: str):
    with pytest.raises(ArealError) as caught:
        model_config(shape, 19, **overrides)
    assert message in str(caught.value)
