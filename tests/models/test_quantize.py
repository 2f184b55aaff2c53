"""Quantised matrices: rounding against numpy, packed bytes, the forward pass, equal bits in bfloat16."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from areal_jax.models.lora import adapters_of, base_of, with_adapters
from areal_jax.models.quantize import TILE, dequantized, quantized
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import wire_copy
from tests.algorithms.batches import positions_of
from tests.models import reference
from tests.models.test_lora import by_hand, model_with
from tests.models.test_transformer import packed, randomised

KINDS = ("int8", "int4", "nf4")

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The data type's values as printed in appendix E of arXiv:2305.14314."""


def by_tiles(w: np.ndarray, axis: int, tile: int, kind: str) -> np.ndarray:
    """w rounded to the nearest value of the type, each tile of `axis` scaled by its own largest magnitude.

    Integers: halves to even, and the range is what 4 or 8 bits hold. fp8: e4m3, up to 448.
    """
    moved = np.moveaxis(w, axis, -1)
    tiles = moved.reshape(*moved.shape[:-1], -1, tile)
    bits = {"int8": 8, "int4": 4}.get(kind, 0)
    largest = {"nf4": 1, "fp8": 448}.get(kind) or 2 ** (bits - 1) - 0.5
    scale = np.abs(tiles).max(-1, keepdims=True) / np.float32(largest)
    if kind == "fp8":
        nearest = (tiles / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif kind == "nf4":
        nearest = np.array(NF4)[np.abs(tiles[..., None] / scale[..., None] - NF4).argmin(-1)]
    else:
        nearest = np.clip(np.round(tiles / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    stored = scale.astype(ml_dtypes.bfloat16).astype(np.float64)
    return np.moveaxis((nearest * stored).reshape(moved.shape), -1, axis)


@pytest.mark.slow
@pytest.mark.parametrize("kind", (*KINDS, "fp8"))
@pytest.mark.parametrize("shape, inputs", [((2, 128, 6), 1), ((2, 48, 2, 4), 1), ((2, 3, 6, 8), 2)])
def test_each_tile_is_rounded_to_the_types_values(kind: str, shape: tuple[int, ...], inputs: int):
    tile = {128: TILE, 48: 16, 6: 2}[shape[inputs]]
    rng = np.random.default_rng(0)
    w = rng.normal(size=shape).astype(np.float32)
    largest = np.moveaxis(w, inputs, -1)[..., ::tile]  # positive: at the negative end of a range is a tie
    largest[...] = rng.uniform(4, 8, largest.shape)
    leaf = quantized(jnp.asarray(w), kind, inputs)
    got = np.asarray(dequantized(**leaf, kind=kind))
    np.testing.assert_allclose(got, by_tiles(w, inputs, tile, kind), rtol=0, atol=1e-6)
    assert leaf["codes"].nbytes == w.size // (1 if kind in ("int8", "fp8") else 2)
    assert leaf["scale"].size == w.size // tile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_the_forward_pass_reads_codes_and_adapters(kind: str):
    """Against float64 numpy on the matrices that the codes stand for, with the adapters added to them."""
    plain = model_with("q|out|down")
    model = type(plain)(dataclasses.replace(plain.config, quantize=kind), plain.tokenizer)
    floats = randomised(plain)
    params = model.from_base(base_of(floats), 0)
    assert jax.tree.structure(params) == jax.tree.structure(model.abstract_params)
    rng = np.random.default_rng(5)
    params = jax.tree.map(  # adapters of which no factor is 0
        lambda leaf, want: (
            leaf if want.dtype != np.float32 or leaf.any() else rng.normal(size=want.shape) * 0.3
        ),
        params,
        model.abstract_params,
    )
    params = jax.tree.map(lambda leaf, want: np.asarray(leaf, want.dtype), params, model.abstract_params)
    base = model.without_adapters(params)
    merged = by_hand(with_adapters(base, adapters_of(params)))
    segments, tokens = np.ones((1, 12), np.int32), np.arange(12, dtype=np.int32)[None]
    got = np.asarray(packed(model, params, tokens, positions_of(segments), segments))
    np.testing.assert_allclose(got[0], reference.logits(model.config, merged, tokens[0]), rtol=0, atol=1e-4)
    assert model.parameter_count == plain.parameter_count


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_served_in_bfloat16_it_is_the_same_matrix(kind: str):
    """What a host multiplies by is what the trainer does, bit for bit, and codes travel as they are."""
    w = np.random.default_rng(1).normal(size=(2, 64, 4)).astype(np.float32)
    leaf = quantized(jnp.asarray(w), kind, 1)
    served = wire_copy(VersionedParams(0, {"w": leaf}, digest({"w": leaf})), "bfloat16").params["w"]
    assert (served["codes"].dtype, served["scale"].dtype) == (leaf["codes"].dtype, jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(served["scale"], jnp.uint16)  # as a CPU's host holds it
    for scale in (served["scale"], bits):
        there = dequantized(served["codes"], scale, kind)
        np.testing.assert_array_equal(np.asarray(there), np.asarray(dequantized(**leaf, kind=kind)))
    flipped = leaf | {"codes": leaf["codes"].at[0, 3, 1].add(1)}
    assert digest({"w": flipped}) != digest({"w": leaf})
