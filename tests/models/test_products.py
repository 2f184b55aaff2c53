"""Products with a weight: float32 sums as gradients of bfloat16 ones, JAX's own bits for float32 ones."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.products import product

ROWS, INPUTS, OUTPUTS = 512, 48, 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, INPUTS)).astype(np.float32)
SLOPE = RNG.normal(size=(ROWS, OUTPUTS)).astype(np.float32)
WEIGHT = RNG.normal(size=(INPUTS, OUTPUTS)).astype(np.float32)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_are_the_float32_sums_of_bfloat16_operands(axis: int):
    """To float32's rounding, of float64 products; rounded to bfloat16, they would be off by 0.4 %."""
    weight = WEIGHT if axis == 0 else WEIGHT.T
    out, pull = jax.vjp(partial(product, dtype="bfloat16", axis=axis), jnp.asarray(X), jnp.asarray(weight))
    of_x, of_weight = pull(jnp.asarray(SLOPE))
    x, w, slope = map(as_bfloat16, (X, WEIGHT, SLOPE))
    want = x.T @ slope if axis == 0 else slope.T @ x
    for found, wanted in ((out, x @ w), (of_x, slope @ w.T), (of_weight, want)):
        assert found.dtype == np.float32 and found.shape == wanted.shape
        assert np.abs(np.asarray(found) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_gradients_of_bfloat16_arguments_are_bfloat16():
    x, weight = jnp.asarray(X, jnp.bfloat16), jnp.asarray(WEIGHT, jnp.bfloat16)
    _, pull = jax.vjp(partial(product, dtype="bfloat16"), x, weight)
    assert [one.dtype for one in pull(jnp.asarray(SLOPE))] == [jnp.bfloat16] * 2


@pytest.mark.parametrize("axis", [0, 1])
def test_a_float32_product_is_jaxs_own(axis: int):
    """The same program, forward and backward, and so the same bits as ever."""

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        last = (((1,), (axis,)), ((), ()))
        return jax.lax.dot_general(x, weight, last, preferred_element_type=jnp.float32)

    def text(f) -> str:
        value = lambda x, weight: (f(x, weight) * SLOPE).sum()  # noqa: E731
        return jax.jit(jax.grad(value, (0, 1))).lower(X, WEIGHT if axis == 0 else WEIGHT.T).as_text()

    assert text(partial(product, dtype="float32", axis=axis)) == text(plain)
