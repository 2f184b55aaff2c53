"""Sizes that cannot be are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from areal_jax.models.config import SHAPES, Lora, model_config
from areal_jax.models.io.families import read_config, write_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import ArealError
from tests.models.golden import abstract_of


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


MIXTURE = {"experts": 4, "experts_per_token": 2, "expert_width": 8}


@pytest.mark.parametrize(
    ("shape", "overrides", "message"),
    [
        ("tinny", {}, "model.shape=tinny is unknown; did you mean tiny?"),
        ("zzz", {}, "choose one of: tiny, 5m"),
        ("tiny", {"layer": 2}, "unknown key model.overrides.layer; did you mean model.overrides.layers?"),
        ("tiny", {"zzz": 2}, "unknown key model.overrides.zzz; known keys are: clip_qkv, expert_width"),
        ("tiny", {"dtype": "bfloat16"}, "unknown key model.overrides.dtype"),
        ("tiny", {"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ("tiny", {"head_dim": 15}, "head_dim=15 is odd"),
        ("tiny", {"shape": "5m"}, "unknown key model.overrides.shape"),
        ("tiny", {"vocab_size": "many"}, "vocab_size='many' is not a valid size"),
        ("tiny", {"layers": 0}, "layers=0 is not a valid size"),
        ("tiny", {"layers": "two"}, "layers='two' is not a valid size"),
        ("tiny", {"width": 64.0}, "width=64.0 is not a valid size"),
        ("tiny", {"heads": True}, "heads=True is not a valid size"),
        ("tiny", {"experts": -1}, "experts=-1 is not a valid size; give a whole number of at least 0"),
        ("tiny", {"experts": "many"}, "experts='many' is not a valid size"),
        ("tiny", {"expert_width": 8}, "expert_width=8 with experts=0, a model without experts"),
        ("tiny", {"experts": 4, "expert_width": 8}, "experts_per_token=0 with experts=4; give 1 to 4"),
        ("tiny", {**MIXTURE, "experts_per_token": 5}, "experts_per_token=5 with experts=4; give 1 to 4"),
        ("tiny", {**MIXTURE, "expert_width": 0}, "expert_width=0 with experts=4; give the width"),
    ],
)
def test_what_cannot_be_is_named(shape: str, overrides: dict[str, Any], message: str):
    with pytest.raises(ArealError) as caught:
        model_config(shape, 19, **overrides)
    assert message in str(caught.value)


PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
}
"""Numbers of parameters in the publishers' files; a tied head counts once."""


@pytest.mark.parametrize("shape", PUBLISHED)
def test_a_built_in_size_has_as_many_parameters_as_the_published_model(shape: str):
    assert Model(model_config(shape, 256), ByteTokenizer()).parameter_count == PUBLISHED[shape]


@pytest.mark.parametrize("shape", PUBLISHED)
def test_the_files_of_a_built_in_size_have_as_many_parameters(shape: str):
    leaves = jax.tree.leaves(abstract_of(model_config(shape, 256)))
    assert sum(leaf.size for leaf in leaves) == PUBLISHED[shape]


@pytest.mark.parametrize("shape", PUBLISHED)
def test_a_built_in_size_is_written_as_its_own_family(shape: str):
    config = model_config(shape, 256)
    assert read_config(write_config(config, "float32")) == config


def test_a_token_passes_through_its_own_experts_alone():
    """Of 30.5 billion parameters 3.35: of 48 layers, 120 of 128 experts with three matrices are idle."""
    model = Model(model_config("qwen3-30b-a3b", 256), ByteTokenizer())
    assert model.active_parameter_count == PUBLISHED["qwen3-30b-a3b"] - 48 * 120 * 3 * 2048 * 768
    dense = Model(model_config("tiny", 256), ByteTokenizer())
    assert dense.active_parameter_count == dense.parameter_count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora": Lora(2, 4.0)},
            "model.lora.targets=.* matches down, gate, up, which are matrices",
        ),
        ({"quantize": "int4", "expert_width": 7}, "expert_width=7 is odd; use model.quantize=int8"),
    ],
)
def test_what_experts_cannot_have_is_named(options: dict[str, Any], message: str):
    config = model_config("tiny", 19, **MIXTURE)
    with pytest.raises(ArealError) as caught:
        dataclasses.replace(config, **options)
    assert message in str(caught.value)
    assert dataclasses.replace(config, lora=Lora(2, 4.0, "q|k|v|out")).lora is not None
