"""Tiles and what is built of them: equal bits wherever a row lies, and the gradients of the fast form."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import ModelConfig
from areal_jax.models.exact import (
    KV_BLOCK,
    TILE,
    ExactPackedAttention,
    as_attended,
    in_tiles,
    is_exact,
    rounded,
)
from areal_jax.models.model import Model
from areal_jax.models.transformer import as_published
from areal_jax.tasks.tokenizers import CharTokenizer

SIZES = dict(layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
LENGTH = 2 * KV_BLOCK
"""Of a row."""


EXPERTS = dict(experts=8, experts_per_token=3, expert_width=12, shared_width=8)


@pytest.fixture(scope="module", params=[{}, EXPERTS], ids=["dense", "experts"])
def model(request: pytest.FixtureRequest) -> Model:
    config = ModelConfig(vocab_size=19, numerics="exact", **SIZES, **request.param)
    return Model(config, CharTokenizer("abcdefghijklmnopq"))


@pytest.fixture(scope="module")
def params(model: Model) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: (0.4 * rng.normal(size=leaf.shape) + (leaf.ndim < 3)).astype(np.float32),
        model.abstract_params,
    )


# --- tiles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, TILE - 1, TILE, 3 * TILE + 1])
def test_tiles_give_each_row_its_own_result(count):
    x = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
    number = np.arange(count)
    double, total = jax.jit(lambda x, n: in_tiles(lambda x, n: (2 * x, x.sum(-1) + n[:, None][:, 0]), x, n))(
        x, number
    )
    np.testing.assert_array_equal(double, 2 * x)
    np.testing.assert_allclose(total, x.sum(-1) + number, rtol=1e-6)


def test_a_tile_without_a_live_row_is_not_computed():
    is_live = np.zeros(4 * TILE, bool)
    is_live[[2 * TILE + 3, 3 * TILE]] = True
    got = jax.jit(lambda x, live: in_tiles(lambda x: 1 / x, x, is_live=live))(np.ones(4 * TILE), is_live)
    np.testing.assert_array_equal(got, np.repeat([0.0, 0.0, 1.0, 1.0], TILE))


def of_its_form(attend: Any, fixed: Any, x: jax.Array, factor: jax.Array) -> Any:
    """The first run chooses a power of x, which a second run gets."""
    n, power = fixed
    power = jnp.where(x > 5.25, 2, 1) if power is None else power
    return n * factor * (x if is_exact(attend) else x**2) ** power, power


def result_of(attend: Any, n: int, x: jax.Array, factor: jax.Array, kept: str | None = None) -> jax.Array:
    return as_attended(of_its_form, attend, (jnp.int32(n), None), x, factor, kept)[0]


def test_the_value_is_of_one_form_and_the_gradient_of_the_other():
    ids = jnp.ones((1, 1), jnp.int32)
    attend = ExactPackedAttention.of(PackedAttention(ids), ids - 1, None)
    of = jax.value_and_grad(partial(result_of, attend, 3), (0, 1))
    assert of(jnp.float32(5), jnp.float32(2)) == (30.0, (60.0, 75.0))


def test_a_second_run_for_the_gradient_repeats_the_choices_of_the_first():
    """5.25 + 2^-9 chooses the power 2; it is stored as 5.25, which would choose the power 1."""
    attend, x = PackedAttention(jnp.ones((1, 1), jnp.int32)), jnp.float32(5.25 + 2**-9)
    value, of_x = jax.value_and_grad(partial(result_of, attend, 1, kept="bfloat16"))(x, 1.0)
    assert (value, of_x) == (pytest.approx(float(x) ** 4), pytest.approx(4 * 5.25**3))


def test_a_second_run_for_the_gradient_begins_with_what_was_stored():
    """1 + 2^-9 is not a bfloat16 number, and 1 is the nearest; the value is that of the first run."""
    x, attend = jnp.float32(1 + 2**-9), PackedAttention(jnp.ones((1, 1), jnp.int32))
    for kept, stored in ((None, x), ("bfloat16", 1.0), ("float32", x)):
        of = partial(result_of, attend, 3, kept=kept)
        value, (of_x, of_factor) = jax.value_and_grad(of, (0, 1))(x, jnp.float32(2))
        assert value == pytest.approx(6 * float(x) ** 2, abs=1e-6)
        assert (of_x, of_factor) == pytest.approx((12 * float(stored), 3 * float(stored) ** 2), abs=1e-6)


# --- rounding -----------------------------------------------------------------------------------------------


def test_rounding_is_that_of_a_cast_and_lets_gradients_through():
    x = (np.random.default_rng(0).normal(size=1000) * 10.0 ** np.arange(-5, 5).repeat(100)).astype(np.float32)
    want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: rounded(x, "bfloat16"))(x), want)
    np.testing.assert_array_equal(rounded(x, "float32"), x)
    slope = np.linspace(-1, 1, 1000).astype(np.float32)
    read, pull = jax.vjp(lambda x: as_published(x, "bfloat16"), x)
    np.testing.assert_array_equal(read, want)
    np.testing.assert_array_equal(pull(slope)[0], slope)


# --- packed rows --------------------------------------------------------------------------------------------


def segments(seed: int) -> list[np.ndarray]:
    """Token ids of samples around the borders of tiles and blocks."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 19, n) for n in (TILE - 1, TILE + 1, KV_BLOCK - 1, KV_BLOCK + 1)]


def packed(rows: list[list[np.ndarray]], parents: dict[int, int] | None = None) -> dict[str, np.ndarray]:
    """Rows of segments, side by side; `parents`: number of a segment -> segment whose tokens it continues."""
    names = ("tokens", "positions", "segment_ids", "subtree_ends", "previous")
    out = {name: np.zeros((len(rows), LENGTH), np.int32) for name in names}
    out["previous"] -= 1
    number, parents = 0, parents or {}
    whole: dict[int, tuple[int, int]] = {}  # of each segment: tokens up to its end, and its last column
    for row, members in enumerate(rows):
        column = 0
        for ids in members:
            number += 1
            start, before = whole.get(parents.get(number, 0), (0, -1))
            size = len(ids) - start
            at = slice(column, column + size)
            out["tokens"][row, at] = ids[start:]
            out["positions"][row, at] = np.arange(start, start + size)
            out["segment_ids"][row, at] = number
            out["previous"][row, at] = np.arange(column - 1, column + size - 1)
            out["previous"][row, column] = before
            column += size
            whole[number] = len(ids), column - 1
            ancestor = number
            while ancestor:
                out["subtree_ends"][row][out["segment_ids"][row] == ancestor] = column
                ancestor = parents.get(ancestor, 0)
    return out


@cache
def forward(model: Model) -> Any:
    def hidden(params: Any, p: dict[str, Any]) -> Any:
        bounded = PackedAttention(p["segment_ids"], p["subtree_ends"])
        attend = ExactPackedAttention.of(bounded, p["positions"], p["previous"])
        return model.hidden(params, p["tokens"], p["positions"], attend)[0]

    return jax.jit(hidden)


def of_segment(hidden: Any, p: dict[str, np.ndarray], number: int) -> np.ndarray:
    return np.asarray(hidden)[p["segment_ids"] == number]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_segments_bits_do_not_depend_on_where_it_lies(model, params, dtype):
    """Another row, another column, other neighbours, another number of rows and of live tiles."""
    model = Model(dataclasses.replace(model.config, dtype=dtype), model.tokenizer)
    a, b, c, d = segments(0)
    other = segments(1)
    here = packed([[a, d], [c, b], [other[3]]])
    there = packed([[other[1], b, c], [other[3], a], [d, other[0]]])
    one, two = forward(model)(params, here), forward(model)(params, there)
    alone = forward(model)(params, packed([[b]]))
    for number, place in ((1, 5), (2, 6), (3, 3), (4, 2)):
        mine = of_segment(one, here, number)
        assert np.isfinite(mine).all() and mine.std() > 0.1
        assert mine.tobytes() == of_segment(two, there, place).tobytes()
    assert of_segment(alone, packed([[b]]), 1).tobytes() == of_segment(one, here, 4).tobytes()


def test_shared_prefixes_give_the_bits_of_repeated_ones(model, params):
    """A prompt, a sample that leaves there, and a turn that two samples share, away from the prompt."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(2, 19, n) for n in (TILE + 3, TILE - 1, TILE, 2 * TILE + 1, TILE + 1)]
    prompt, turn = texts[0], np.concatenate(texts[:2])
    samples = [np.concatenate([turn, tail]) for tail in texts[2:4]] + [np.concatenate([prompt, texts[4]])]
    own = packed([[each] for each in samples])
    shared = packed([[prompt, samples[2], turn, *samples[:2]]], {2: 1, 3: 1, 4: 3, 5: 3})
    assert shared["subtree_ends"].max(initial=0) == 2 * TILE + 2 + sum(map(len, texts[2:]))
    repeated, once = forward(model)(params, own), forward(model)(params, shared)
    for number, place, start in ((1, 4, len(turn)), (2, 5, len(turn)), (3, 2, len(prompt))):
        tail = of_segment(repeated, own, number)[start:]
        assert tail.tobytes() == of_segment(once, shared, place).tobytes()


@pytest.mark.slow
def test_exact_hidden_states_and_gradients_are_the_bounded_ones_but_for_rounding(model, params):
    a, b, c, d = segments(3)
    p = packed([[a, d], [c, b]])
    weights = np.where(p["segment_ids"] > 0, 1.0, 0.0)[..., None]
    slopes = np.random.default_rng(4).normal(size=(*p["tokens"].shape, SIZES["width"])) * weights

    def bounded_hidden(params: Any) -> Any:
        attend = PackedAttention(p["segment_ids"])
        return model.hidden(params, p["tokens"], p["positions"], attend)[0]

    def both(hidden: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda params: (hidden(params) * slopes).sum()))(params)

    (one, slope), (other, want) = both(lambda params: forward(model)(params, p)), both(bounded_hidden)
    assert one == pytest.approx(float(other), rel=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * float(np.abs(y).max())),
        slope,
        want,
    )
