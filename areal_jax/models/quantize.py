"""Frozen matrices as integer codes with a scale a tile, by qwix: int8, int4 (symmetric), nf4.

A matrix W (L, I..., O...) becomes {"codes", "scale"}: a scale for each output and each TILE inputs, so that W
is about codes x scale. nf4's 16 values are the quantiles of a normal distribution (QLoRA, Dettmers et al.,
arXiv:2305.14314). Two codes of 4 bits lie in a byte, neighbours along the last axis. Scales are rounded to
bfloat16 (at most a quarter of int8's step, next to nothing of the others'), so a cast to it changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.models.config import PROJECTIONS
from areal_jax.types import ArealError

CODES, SCALE = "codes", "scale"
TILE = 64
"""Most inputs that share a scale: the greatest common divisor of this and the last input axis."""


def inputs_of(name: str) -> int:
    """How many axes of that projection's matrix are contracted."""
    return 2 if name == "out" else 1


def shapes(kind: str, shape: tuple[int, ...], inputs: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the codes and the scale of one layer's matrix."""
    codes = (*shape[:-1], shape[-1] // (1 if kind == "int8" else 2))
    scale = list(shape)
    scale[inputs - 1] //= math.gcd(scale[inputs - 1], TILE)
    dtype = jnp.int8 if kind == "int8" else jnp.uint8
    return {
        CODES: jax.ShapeDtypeStruct(codes, dtype),
        SCALE: jax.ShapeDtypeStruct(tuple(scale), jnp.float32),
    }


def quantized(matrix: Float[Array, "L ..."], kind: str, inputs: int) -> dict[str, Array]:
    """Codes and scale of all layers' matrices."""
    qwix = _qwix()
    tile = math.gcd(matrix.shape[inputs], TILE)
    whole = [axis for axis in range(matrix.ndim) if axis != inputs]
    found = qwix.quantize(
        matrix, kind, channelwise_axes=whole, tiled_axes={inputs: tile}, scale_dtype=jnp.bfloat16
    )
    return {CODES: _packed(found.qvalue, kind), SCALE: found.scale.astype(jnp.float32)}


def dequantized(codes: Array, scale: Array, kind: str) -> Float[Array, "..."]:
    """The float32 matrix that they stand for, of one layer or all. The scale may come as bfloat16's bits."""
    qwix = _qwix()
    if scale.dtype == jnp.uint16:
        scale = jax.lax.bitcast_convert_type(scale, jnp.bfloat16)
    qtype = "nf4" if kind == "nf4" else jnp.int8
    return qwix.dequantize(qwix.QArray(_unpacked(codes, kind), scale.astype(jnp.float32), qtype=qtype))


def _qwix() -> Any:
    try:
        import qwix
    except ModuleNotFoundError:
        raise ArealError("model.quantize needs the package qwix: pip install 'areal-jax[quantize]'") from None
    return qwix


def _packed(codes: Array, kind: str) -> Array:
    if kind == "int8":
        return codes
    nibbles = (codes.astype(jnp.int8) + (8 if kind == "int4" else 0)).astype(jnp.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def _unpacked(codes: Array, kind: str) -> Array:
    if kind == "int8":
        return codes
    nibbles = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return nibbles.astype(jnp.uint4) if kind == "nf4" else nibbles.astype(jnp.int8) - 8


def quantize_tree(params: Any, kind: str) -> Any:
    """Parameters with every projection of their blocks quantised."""

    def one(name: str, leaf: Any) -> Any:
        return quantized(leaf, kind, inputs_of(name))

    return _of_projections(params, one)


def dequantize_tree(params: Any, kind: str) -> Any:
    """The inverse, up to rounding."""
    return _of_projections(params, lambda _, leaf: dequantized(**leaf, kind=kind))


def _of_projections(params: Any, change: Any) -> Any:
    blocks = params["blocks"]
    changed = {
        part: {
            name: change(name, leaf) if name in PROJECTIONS else leaf for name, leaf in blocks[part].items()
        }
        for part in ("attention", "mlp")
    }
    return params | {"blocks": blocks | changed}
