"""Attention over a path: two calls give the hidden states and the gradient of one call over the whole row."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.models.transformer import Execution
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trees.prefix_attention import KVStack, PrefixAttention

SIZES = dict(vocab_size=12, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
MODEL = Model(ModelConfig(**SIZES), CharTokenizer("abcdefghij"))
WALKS, LENGTH, SIZE, PLACES = 2, 20, 16, 48
CUT = np.array([7, 12])
"""Tokens of each row's path."""


@pytest.fixture(scope="module")
def params() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda leaf: (0.4 * rng.normal(size=leaf.shape) + (leaf.ndim < 3)).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, MODEL.abstract_params)


RNG = np.random.default_rng(1)
TOKENS = jnp.asarray(RNG.integers(0, 10, (WALKS, LENGTH)), jnp.int32)
SLOPE = jnp.asarray(RNG.normal(size=(WALKS, LENGTH, 16)), jnp.float32)


def whole(params: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    return MODEL.hidden(params, TOKENS, positions, PackedAttention(jnp.ones_like(TOKENS)))[0]


def rows(x: jax.Array, start: jax.Array) -> jax.Array:
    """SIZE elements of each row from `start` on; beyond a row's end its last one."""
    return jax.vmap(lambda row, at: row[jnp.minimum(at + jnp.arange(SIZE), LENGTH - 1)])(x, start)


def part(
    params: Any,
    start: Any,
    cache: KVStack,
    stack: KVStack | None = None,
    remat: Any = "none",
    model: Model = MODEL,
) -> tuple[jax.Array, KVStack]:
    start = jnp.asarray(start)
    attend = PrefixAttention(start, start, jnp.full((WALKS, SIZE), SIZE), stack)
    return model.hidden(
        params, rows(TOKENS, start), start[:, None] + jnp.arange(SIZE), attend, cache, Execution(remat)
    )


PART = jax.jit(part)


def test_tokens_behind_a_path_get_the_hidden_states_of_the_whole_row(params: Any):
    right, empty = jax.jit(whole)(params), KVStack.zeros(MODEL.config, WALKS, PLACES)
    first, stack = PART(params, np.zeros(2, int), empty)
    np.testing.assert_allclose(first, right[:, :SIZE], rtol=0, atol=1e-5)
    # What the first call wrote behind the paths is not seen.
    second, _ = PART(params, CUT, stack)
    for row, cut in enumerate(CUT):
        np.testing.assert_allclose(second[row, : LENGTH - cut], right[row, cut:], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_gradients_through_the_path_are_those_of_the_whole_row(params: Any, remat: str):
    right = jax.jit(jax.grad(lambda params: (whole(params) * SLOPE).sum()))(params)
    _, stack = PART(params, np.zeros(2, int), KVStack.zeros(MODEL.config, WALKS, PLACES))
    slopes, total = KVStack.zeros(MODEL.config, WALKS, PLACES, "float32"), None

    @partial(jax.jit, donate_argnums=1)
    def back(params: Any, slopes: KVStack, start: jax.Array, sizes: jax.Array) -> Any:
        def run(params: Any, port: KVStack) -> Any:
            return part(params, start, port, stack, remat)

        is_own = (jnp.arange(SIZE) < sizes[:, None])[..., None]
        pull = jax.vjp(run, params, slopes)[1]
        return pull((jnp.where(is_own, rows(SLOPE, start), 0.0), slopes))

    for start, sizes in ((CUT, LENGTH - CUT), (np.zeros(2, int), CUT)):
        grads, slopes = back(params, slopes, jnp.asarray(start), jnp.asarray(sizes))
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        assert jnp.any(slopes.keys[:, 0, : CUT[0]]) == (start[0] > 0)
    for found, expected in zip(jax.tree.leaves(total), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert not any(jnp.any(x) for x in slopes)  # every gradient was taken out again


@pytest.mark.slow
def test_no_copy_of_the_stack_is_made():
    """With `remat` layer, what a call needs for a longer stack does not depend on the number of layers."""

    def temporary(layers: int, places: int) -> int:
        model = Model(ModelConfig(**{**SIZES, "layers": layers}), MODEL.tokenizer)
        stack = jax.eval_shape(lambda: KVStack.zeros(model.config, WALKS, places))

        def back(params: Any, stack: KVStack, slopes: KVStack) -> Any:
            run = partial(part, start=CUT, stack=stack, remat="layer", model=model)
            return jax.vjp(lambda params, port: run(params, cache=port), params, slopes)[1](
                (rows(SLOPE, jnp.asarray(CUT)), slopes)
            )

        lowered = jax.jit(back, donate_argnums=2).lower(model.abstract_params, stack, stack)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    two, six = (temporary(layers, 4096) - temporary(layers, 512) for layers in (2, 6))
    assert 0 < six < 1.1 * two
