"""Attention kernels of CUDA devices for packed rows, and the self-test that decides which is used.

None is trusted by its name: packed use of fused attention has attended across segments elsewhere. A kernel is
used where it passes `self_test` on the device at hand; otherwise the pairs of blocks of `models.blockwise`
are, which every device runs. Shapes: B rows, T tokens, H query heads, K kv heads, h head dimension, M
segments of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.models.blockwise import blockwise_attention
from areal_jax.parallel.mesh import ROWS

Kernel = Callable[[Array, Array, Array, Array], Array]
"""`kernel(q (B, T, H, h), k (B, T, K, h), v, segment_ids (B, T)) -> (B, T, H, h)`, causal within segments."""

BLOCKS = "blocks"
"""The path that every device has."""
SEGMENTS = 128
"""Segments of a row (M) that the cuDNN path takes; a batch with more in any row goes by blocks."""
TRITON_BLOCK = 128
"""Rows are padded to a multiple of it for the Triton kernel."""

HALF_TOLERANCE = 3e-2
"""Largest difference, of outputs and gradients of order 1, between bfloat16 kernels and float32."""


class Choice(NamedTuple):
    path: str
    """blocks | cudnn | triton"""
    rejected: Mapping[str, str]
    """Paths tried before it, and why each is not used."""


def cudnn(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """cuDNN's packed layout: a length and an offset a segment. Hopper and newer, bfloat16 or float16."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def packed(q: Array, k: Array, v: Array) -> Array:
        sizes, offsets = segment_bounds(segment_ids, SEGMENTS)
        is_token = (segment_ids > 0)[..., None, None]  # what lies in no segment is not written
        q, k, v = (jnp.where(is_token, x, 0) for x in (q, k, v))
        attend: Any = fused.dot_product_attention
        out = attend(
            q, k, v, q_seqlen=sizes, kv_seqlen=sizes, q_offsets=offsets, kv_offsets=offsets,
            scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.PADDING_CAUSAL,
        )  # fmt: skip
        return jnp.where(is_token, out, 0)

    fits = segment_starts(segment_ids).sum(1).max() <= SEGMENTS
    return jax.lax.cond(fits, packed, lambda q, k, v: blocks(q, k, v, segment_ids).astype(q.dtype), q, k, v)


def triton(q: Array, k: Array, v: Array, segment_ids: Array, interpret: bool = False) -> Array:
    """jax's Triton kernel, with segment ids; it has no grouped queries, so keys and values are repeated."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    _, length, heads, head_dim = q.shape
    padding = -length % TRITON_BLOCK if length > TRITON_BLOCK else 0
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    attend: Any = mha
    return attend(q, k, v, ids, head_dim**-0.5, True, interpret=interpret)[:, :length]


def blocks(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    rows, length, heads, head_dim = q.shape
    grouped = q.reshape(rows, length, k.shape[2], heads // k.shape[2], head_dim)
    return blockwise_attention(grouped, k, v, segment_ids, block=TRITON_BLOCK).reshape(q.shape)


KERNELS: Mapping[str, Kernel] = {"cudnn": cudnn, "triton": triton}
"""In the order in which they are tried."""


def segment_starts(segment_ids: Int[Array, "B T"]) -> Array:
    """Whether a segment begins at each token."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids != before) & (segment_ids > 0)


def segment_bounds(segment_ids: Int[Array, "B T"], most: int) -> tuple[Int[Array, "B M"], Int[Array, "B M1"]]:
    """Sizes (B, most), -1 beyond a row's segments; starts and the last one's end (B, most + 1), -1 beyond."""
    rows, length = segment_ids.shape
    starts = segment_starts(segment_ids)
    place = jnp.where(segment_ids > 0, jnp.cumsum(starts, axis=1) - 1, most)
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], place.shape)
    sizes = jnp.zeros((rows, most + 1), jnp.int32).at[row, place].add(1, mode="drop")[:, :most]
    count = starts.sum(1)
    offsets = jnp.full((rows, most + 1), -1, jnp.int32)
    columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], place.shape)
    offsets = offsets.at[row, jnp.where(starts, place, most + 1)].set(columns, mode="drop")
    end = (segment_ids > 0).sum(1).astype(jnp.int32)  # segments lie side by side from column 0 on
    offsets = offsets.at[jnp.arange(rows), count].set(jnp.where(count > 0, end, -1), mode="drop")
    return jnp.where(jnp.arange(most)[None] < count[:, None], sizes, -1), offsets


@lru_cache
def choose(platform: str, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Choice:
    """The first kernel that passes its self-test on this device, or blocks."""
    if platform not in ("gpu", "cuda"):
        return Choice(BLOCKS, dict.fromkeys(KERNELS, f"is for CUDA; this is {platform}"))
    if dtype != "bfloat16":
        return Choice(BLOCKS, dict.fromkeys(KERNELS, f"reads bfloat16; model.dtype is {dtype}"))
    rejected: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        if (problem := self_test(kernel, heads, kv_heads, head_dim, dtype)) is None:
            return Choice(name, rejected)
        rejected[name] = problem
    return Choice(BLOCKS, rejected)


def self_test(
    kernel: Kernel, heads: int, kv_heads: int, head_dim: int, dtype: str, length: int = 256
) -> str | None:
    """What is wrong with the kernel here; None where it may be used.

    Three segments and padding in a row: outputs and gradients against blocks in float32, and not one bit of
    the second segment may move with the first one's content.
    """
    ids = jnp.asarray(np.repeat([1, 2, 3, 0], [length // 4, length // 2, length // 8, length // 8])[None])
    ids = ids.astype(jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, slope = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    is_token = (ids > 0)[..., None, None]

    def value(attend: Kernel, inputs: tuple[Array, ...]) -> tuple[Float[Array, ""], Array]:
        queries, keys, values = inputs
        out = jnp.where(is_token, attend(queries, keys, values, ids).astype(jnp.float32), 0)
        return (out * slope).sum(), out

    def both(attend: Kernel, kind: str, *inputs: Array) -> list[np.ndarray]:
        read = tuple(x.astype(kind) for x in inputs)
        of = jax.jit(jax.value_and_grad(lambda x: value(attend, x), has_aux=True))
        (_, out), slopes = of(read)
        return [np.asarray(x, np.float32) for x in (out, *slopes)]

    try:
        got = both(kernel, dtype, q, k, v)
        moved = both(kernel, dtype, *(x.at[:, : length // 4].multiply(-3.0) for x in (q, k, v)))
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run here fails in ways of its own
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
    want = both(blocks, "float32", *(x.astype(dtype).astype(jnp.float32) for x in (q, k, v)))
    for name, one, other in zip(("output", "dq", "dk", "dv"), got, want, strict=True):
        gap = float(np.abs(one - other).max() / np.abs(other).max())
        if not gap <= HALF_TOLERANCE:
            return f"its {name} differs from float32 by {gap:.2g} of the largest, over {HALF_TOLERANCE:g}"
    second = np.asarray(ids[0] == 2)
    for name, one, other in zip(("output", "dq", "dk", "dv"), got, moved, strict=True):
        if one[0, second].tobytes() != other[0, second].tobytes():
            return f"its {name} of one segment moves with another's content"
    return None


def on_mesh(choice: Choice, mesh: Mesh, kv_heads: int) -> Kernel | None:
    """The chosen kernel over a trainer's mesh; None for blocks, which take contexts too."""
    return None if choice.path == BLOCKS else over_mesh(KERNELS[choice.path], mesh, kv_heads)


def over_mesh(attend: Callable[..., Array], mesh: Mesh, kv_heads: int, ids: int = 1) -> Callable[..., Array]:
    """`attend(q, k, v, *ids)`, a device its rows and heads: none asks another what its rows see.

    q, k and v are (B, T, heads, ...), each of the ids (B, T). Heads that the tensor axis does not divide stay
    whole.
    """
    if mesh.size == 1:
        return attend
    heads = "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None
    row = ROWS[0]
    each = PartitionSpec(row, None, heads)
    specs = (each, each, each, *[ROWS] * ids)
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=each, check_vma=False)


def describe(choice: Choice) -> dict[str, Any]:
    """For people and JSON."""
    return {"path": choice.path, "not_used": dict(choice.rejected)}
