"""The one model definition against float64 numpy: packed, prefilled, decoded, in every option."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from areal_jax.models.attention import PackedAttention, PagedAttention
from areal_jax.models.config import ModelConfig, is_router
from areal_jax.models.kv_pages import KVPages
from areal_jax.models.model import Model
from areal_jax.models.transformer import Execution
from areal_jax.tasks.tokenizers import CharTokenizer
from tests.algorithms.batches import positions_of, segments_of
from tests.models import reference

pytestmark = pytest.mark.few_optimizations

SIZES = dict(vocab_size=13, layers=2, width=16, heads=4, kv_heads=2, head_dim=6, mlp_width=24)
EXPERTS = dict(experts=5, expert_width=12)
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": dict(rope_theta=500.0),
    "qwen2": dict(has_qkv_bias=True, norm_eps=1e-6),
    "qwen3": dict(has_qk_norm=True, is_tied=False, kv_heads=4),
    "qwen3_moe": dict(has_qk_norm=True, **EXPERTS, experts_per_token=2, has_unit_weights=True),
    "qwen2_moe": dict(has_qkv_bias=True, **EXPERTS, experts_per_token=3, shared_width=10),
    "olmoe": dict(has_qk_norm=True, is_qk_norm_joint=True, clip_qkv=0.5, **EXPERTS, experts_per_token=1),
    "mixtral": dict(**EXPERTS, experts_per_token=5, has_unit_weights=True),
}
LENGTH = 12
TOKENS = np.random.default_rng(0).integers(0, 13, LENGTH).astype(np.int32)


def randomised(model: Model) -> Any:
    """Parameters of which none is 0 or 1: a bias or a scale left out would show."""
    rng = np.random.default_rng(1)

    def one(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_scale = leaf.ndim < 3  # norms, and the embedding
        return (is_scale + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree.map(one, model.abstract_params)


SOAKED = ("qwen3_moe", "mixtral")
"""Their golden models are compared in every run."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.soak] * (name in SOAKED)) for name in OPTIONS],
)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(ModelConfig(**{**SIZES, **OPTIONS[request.param]}), CharTokenizer("abcdefghijk"))


@pytest.fixture(scope="module")
def params(model: Model) -> Any:
    return randomised(model)


@partial(jax.jit, static_argnums=(0, 5))
def packed(
    model: Model, params: Any, tokens: Any, positions: Any, segments: Any, remat: Any = "none"
) -> jax.Array:
    hidden, _ = model.hidden(params, tokens, positions, PackedAttention(segments), execution=Execution(remat))
    return model.logits(params, hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)


@partial(jax.jit, static_argnums=0)
def paged(
    model: Model, params: Any, tokens: Any, table: Any, positions: Any, is_written: Any, cache: KVPages
) -> tuple[jax.Array, KVPages]:
    hidden, cache = model.hidden(
        params, tokens, positions, PagedAttention(table, positions, is_written), cache
    )
    return model.logits(params, hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1), cache


def test_packed_segments_are_the_reference_each(model: Model, params: Any):
    """GQA, rotary halves, norms, gated MLP, biases, tied or untied head; no segment sees another."""
    segments = segments_of(((5, 7), (9, 2)), 13)
    positions = positions_of(segments)
    tokens = np.random.default_rng(2).integers(0, 13, segments.shape).astype(np.int32)
    got = np.asarray(packed(model, params, tokens, positions, segments))
    for segment in range(1, segments.max() + 1):
        where = segments == segment
        want = reference.logits(model.config, params, tokens[where])
        assert np.abs(want).max() > 1
        np.testing.assert_allclose(got[where], want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_parameters_are_read_as_they_are_published(model: Model, params: Any):
    """Every one of them: with norms in more bits the trainer would have another policy than its hosts.

    Routers are published whole.
    """
    sent = Model(dataclasses.replace(model.config, params_dtype="bfloat16"), model.tokenizer)
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_router(path) else leaf.astype(ml_dtypes.bfloat16).astype(np.float32),
        params,
    )
    args = TOKENS[None], np.arange(LENGTH)[None], np.ones((1, LENGTH), np.int32)
    read = packed(sent, params, *args)
    np.testing.assert_allclose(read, packed(model, rounded, *args), rtol=0, atol=1e-6)
    assert np.abs(read - packed(model, params, *args)).max() > 1e-3


@partial(jax.jit, static_argnums=(0, 5))
@partial(jax.grad, argnums=1)
def slopes(model: Model, params: Any, tokens: Any, positions: Any, segments: Any, remat: Any) -> jax.Array:
    return (packed(model, params, tokens, positions, segments, remat) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "qwen2_moe"], indirect=True)
@pytest.mark.parametrize("remat", ["layer", "dots"])
def test_rematerialising_changes_nothing(model: Model, params: Any, remat: Any):
    """Values and slopes; two segments, the second in a row of two blocks."""
    segments = segments_of(((5, 7),), 13)
    args = (TOKENS[None], positions_of(segments)[:, :LENGTH], segments[:, :LENGTH])
    of_both = (jax.tree.leaves(slopes(model, params, *args, x)) for x in (remat, "none"))
    for one, other in zip(*of_both, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "page_tokens"), [(5, 3), (12, 12), (5, 4), (5, 12), (12, 3), (12, 4)])
def test_prefill_and_decode_through_pages(model: Model, params: Any, page_tokens: int, chunk: int):
    """Two slots, one of them out of step; 7 tokens prefilled in chunks, the rest decoded one by one."""
    pages = LENGTH // page_tokens
    table = 1 + np.random.default_rng(3).permutation(2 * pages).reshape(2, pages).astype(np.int32)
    cache = model.kv_pages(2 * pages, page_tokens, "float32")
    tokens = np.stack([TOKENS, TOKENS[::-1]])
    known = np.array([[7], [4]])
    got = np.zeros((2, LENGTH, 13))
    for start in range(0, 7, chunk):
        positions = np.broadcast_to(start + np.arange(chunk), (2, chunk))
        clipped = np.minimum(positions, LENGTH - 1)
        fed = np.take_along_axis(tokens, clipped, 1)
        out, cache = paged(model, params, fed, table, clipped, positions < known, cache)
        for slot, column in np.argwhere(positions < known):
            got[slot, start + column] = out[slot, column]
    for step in range(LENGTH - 4):
        at = np.minimum(known + step, LENGTH - 1)
        is_live = known + step < LENGTH
        out, cache = paged(model, params, np.take_along_axis(tokens, at, 1), table, at, is_live, cache)
        for slot in np.flatnonzero(is_live):
            got[slot, at[slot, 0]] = out[slot, 0]
    for slot in range(2):
        want = reference.logits(model.config, params, tokens[slot])
        np.testing.assert_allclose(got[slot], want, rtol=0, atol=1e-5)


def test_ids_beyond_the_tokenizer_are_impossible():
    config = ModelConfig(**{**SIZES, "vocab_size": 16})
    model = Model(config, CharTokenizer("abcdefghijk"))
    got = np.asarray(model.logits(randomised(model), np.ones((3, 16), np.float32)))
    assert np.isneginf(got[:, 13:]).all()
    assert np.isfinite(got[:, :13]).all()


@pytest.mark.slow
def test_init_is_a_function_of_the_seed():
    model = Model(ModelConfig(**SIZES), CharTokenizer("abcdefghijk"))
    one, same, other = model.init(3), model.init(3), model.init(4)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, same))
    assert not bool((one["embedding"] == other["embedding"]).any())
    assert model.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(one))
    first, second = one["blocks"]["mlp"]["gate"]
    assert not bool((first == second).any())  # layers draw apart
