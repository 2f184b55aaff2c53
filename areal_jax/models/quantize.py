"""Matrices as codes with a scale per tile, by the package qwix: int8, int4 (symmetric), nf4, fp8.

A matrix W (L, I..., O...) of L layers, with input axes I and output axes O, becomes {"codes", "scale"}, with
one scale for each output and each tile of inputs, so that W is about codes x scale. nf4's 16 values are the
quantiles of a normal distribution (QLoRA, Dettmers et al., arXiv:2305.14314); fp8 is e4m3, with 4 bits of
exponent and 3 of mantissa (Micikevicius et al., arXiv:2209.05433). A byte stores two codes of 4 bits, which
are neighbours along the last axis. Scales are rounded to bfloat16, so that publishing weights in
bfloat16 does not change the scales. The rounding adds an error of at most a quarter of the distance between
two codes for int8, and a negligible error for int4 and nf4.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.models.config import EXPERT_PROJECTIONS, PROJECTIONS
from areal_jax.plugin import needing

CODES, SCALE = "codes", "scale"
FP8 = "float8_e4m3fn"
TILE = 64
"""Most inputs that share a scale; the number is gcd(TILE, size of the last input axis)."""


def inputs_of(name: str) -> int:
    """Returns the number of axes of projection `name` before its outputs.

    2 for `out` (head, head dimension) and for the matrices of experts (expert, input), else 1.
    """
    return 2 if name == "out" or name in EXPERT_PROJECTIONS else 1


def quantized(matrix: Float[Array, "L ..."], kind: str, inputs: int) -> dict[str, Array]:
    """Returns {"codes", "scale"} of a projection's matrices in all layers.

    `kind`: int8, int4, nf4 or fp8. `inputs`: the matrix's number of input axes, which follow the axis of
    layers (`inputs_of` returns this number).
    """
    qwix = _qwix()
    tile = math.gcd(matrix.shape[inputs], TILE)
    whole = [axis for axis in range(matrix.ndim) if axis != inputs]
    qtype = FP8 if kind == "fp8" else kind
    found = qwix.quantize(
        matrix, qtype, channelwise_axes=whole, tiled_axes={inputs: tile}, scale_dtype=jnp.bfloat16
    )
    return {CODES: _packed(found.qvalue, kind), SCALE: found.scale.astype(jnp.float32)}


def dequantized(codes: Array, scale: Array, kind: str) -> Float[Array, "..."]:
    """Returns codes x scale in float32, for one layer or all; a uint16 `scale` contains bits of bfloat16."""
    qwix = _qwix()
    if scale.dtype == jnp.uint16:
        scale = jax.lax.bitcast_convert_type(scale, jnp.bfloat16)
    qtype = {"nf4": "nf4", "fp8": FP8}.get(kind, jnp.int8)
    return qwix.dequantize(qwix.QArray(_unpacked(codes, kind), scale.astype(jnp.float32), qtype=qtype))


def _qwix() -> Any:
    with needing("model.quantize or generation.quantize", "quantize"):
        import qwix
    return qwix


def _packed(codes: Array, kind: str) -> Array:
    if kind in ("int8", "fp8"):
        return codes
    nibbles = (codes.astype(jnp.int8) + (8 if kind == "int4" else 0)).astype(jnp.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def _unpacked(codes: Array, kind: str) -> Array:
    if kind in ("int8", "fp8"):
        return codes
    nibbles = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return nibbles.astype(jnp.uint4) if kind == "nf4" else nibbles.astype(jnp.int8) - 8


@partial(jax.jit, static_argnums=1)
def quantize_tree(params: Any, kind: str) -> Any:
    """Returns the parameters with every projection of the blocks replaced by its codes and scale."""

    def one(path: Any, leaf: Array) -> Any:
        name = path[-1].key
        if name not in (*PROJECTIONS, *EXPERT_PROJECTIONS):
            return leaf
        return quantized(leaf.astype(jnp.float32), kind, inputs_of(name))  # published ones may be bfloat16

    return jax.tree_util.tree_map_with_path(one, params)


def dequantize_tree(params: Any, kind: str) -> Any:
    """Returns the parameters with codes and scales replaced by float32 matrices; inverts `quantize_tree`.

    Parameters without codes are returned as they are.
    """

    def one(node: Any) -> Any:
        return dequantized(**node, kind=kind) if _is_quantised(node) else node

    return jax.tree.map(one, params, is_leaf=_is_quantised)


def has_codes(params: Any) -> bool:
    """Whether any matrix of the parameters is quantised."""
    return any(_is_quantised(node) for node in jax.tree.leaves(params, is_leaf=_is_quantised))


def _is_quantised(node: Any) -> bool:
    return isinstance(node, dict) and CODES in node
