"""Sizes that cannot be are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.models.config import SHAPES, model_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import ByteTokenizer
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


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
    ],
)
def test_a_built_in_size_has_as_many_parameters_as_the_published_model(shape: str, parameters: int):
    """As its publisher's files say; a tied head counts once."""
    assert Model(model_config(shape, 256), ByteTokenizer()).parameter_count == parameters
