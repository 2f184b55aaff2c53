"""CUDA attention kernels for packed rows, and the self-test that decides which of them is used.

No kernel is trusted untested: in other systems fused attention over packed rows has attended across segments.
The first kernel that passes `self_test` on this device is used. If none does, attention is computed by the
pairs of blocks of `models.blockwise`, which run on every device. Shapes: B rows, T tokens, H query heads, K
kv heads, h head dimension, M segments of a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from areal_jax.models.blockwise import blockwise_attention, segment_ends
from areal_jax.models.kernels.trials import Trial, failure, tried_apart
from areal_jax.parallel.mesh import row_axes
from areal_jax.parallel.private_jax import cudnn_attention

Kernel = Callable[[Array, Array, Array, Array], Array]
"""`kernel(q (B, T, H, h), k (B, T, K, h), v, segment_ids (B, T))` returns (B, T, H, h): attention that is
causal within each segment.
"""

BLOCKS = "blocks"
"""Name of the path without a kernel, pairs of blocks in JAX code: it runs on every device."""
SEGMENTS = 128
"""Maximum number of segments per row (M) for cuDNN; a batch with more in a row is computed by blocks."""
TRITON_BLOCK = 128
"""Rows longer than this are padded to a multiple of it for the Triton kernel."""

HALF_TOLERANCE = 3e-2
"""Largest accepted error of a kernel's output or gradient, relative to its largest value in float32."""


class KernelChoice(NamedTuple):
    """The selected attention path, and the kernels that failed before it."""

    path: str
    """blocks | cudnn | triton"""
    rejected: Mapping[str, str]
    """Name of each kernel tried before -> the reason why it is not used."""


def cudnn(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Returns causal attention within segments by cuDNN, from each segment's length and offset.

    k and v are repeated for query heads: jax computes the offsets of keys and values with the number of query
    heads, so with fewer kv heads cuDNN would access memory beyond k and v. Requires a Hopper GPU or newer,
    and bfloat16 or float16. If a row has more than SEGMENTS (128) segments, JAX code computes the result
    (`blocks`).
    """
    fused = cudnn_attention()

    def packed(q: Array, k: Array, v: Array) -> Array:
        sizes, offsets = segment_spans(segment_ids, SEGMENTS)
        is_token = (segment_ids > 0)[..., None, None]  # cuDNN writes no output outside segments
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        q, k, v = (_with_gradient_where(is_token, x) for x in (q, k, v))
        out = fused.dot_product_attention(
            q, k, v, q_seqlen=sizes, kv_seqlen=sizes, q_offsets=offsets, kv_offsets=offsets,
            scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.PADDING_CAUSAL,
        )  # fmt: skip
        return jnp.where(is_token, out, 0)

    fits = segment_starts(segment_ids).sum(1).max() <= SEGMENTS
    return jax.lax.cond(fits, packed, lambda q, k, v: blocks(q, k, v, segment_ids).astype(q.dtype), q, k, v)


@jax.custom_vjp
def _with_gradient_where(is_token: Array, x: Array) -> Array:
    """Returns `x`; its gradient is 0 at other tokens, for which cuDNN writes none."""
    return x


_with_gradient_where.defvjp(
    lambda is_token, x: (x, is_token), lambda is_token, slope: (None, jnp.where(is_token, slope, 0))
)


def triton(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Returns causal attention within segments by jax's Triton kernel, k and v repeated for query heads."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    _, length, heads, head_dim = q.shape
    padding = -length % TRITON_BLOCK if length > TRITON_BLOCK else 0
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    attend: Any = mha
    return attend(q, k, v, ids, head_dim**-0.5, True)[:, :length]


def blocks(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Returns causal attention within segments by JAX code: used if no kernel works, and to test kernels."""
    return blockwise_attention(q, k, v, segment_ends(segment_ids), block=TRITON_BLOCK)


KERNELS: Mapping[str, Kernel] = {"cudnn": cudnn, "triton": triton}
"""The kernels, in the order in which `choose` tries them."""


def segment_starts(segment_ids: Int[Array, "B T"]) -> Array:
    """Returns (B, T) bool: whether a token is the first of its segment; False for padding."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids != before) & (segment_ids > 0)


def segment_spans(segment_ids: Int[Array, "B T"], most: int) -> tuple[Int[Array, "B M"], Int[Array, "B M1"]]:
    """Returns the sizes (B, most) and first columns (B, most + 1) of each row's segments, padded with -1.

    Both are in tokens, for at most `most` segments a row, as jax's cuDNN attention requires them. It joins
    the rows' lists, without the padding: a first column too many would shift those of all later rows.
    """
    starts = segment_starts(segment_ids)
    first = jax.vmap(lambda row: jnp.nonzero(row, size=most + 1, fill_value=-1)[0])(starts).astype(jnp.int32)
    # Segments lie side by side from column 0 on; the last one ends where the padding begins.
    end = (segment_ids > 0).sum(1, keepdims=True)
    following = jnp.where(first[:, 1:] >= 0, first[:, 1:], end)
    return jnp.where(first[:, :-1] >= 0, following - first[:, :-1], -1), first


@lru_cache
def choose(
    platform: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    absent: Any | None = None,
) -> KernelChoice:
    """Returns the choice of the first kernel that passes `self_test` on this device, or BLOCKS (JAX code).

    Each self-test runs in a process of its own. On other devices than GPUs, and unless `dtype` is bfloat16,
    the choice is BLOCKS without a test. `absent`: a device of `platform` that is not there
    (`parallel.mesh.absent_device`); the choice is then the first kernel that compiles for this device,
    forward and backward.
    """
    if platform not in ("gpu", "cuda"):
        return KernelChoice(BLOCKS, dict.fromkeys(KERNELS, f"needs CUDA; this device is {platform}"))
    if dtype != "bfloat16":
        return KernelChoice(BLOCKS, dict.fromkeys(KERNELS, f"needs model.dtype=bfloat16; it is {dtype}"))
    if absent is not None:
        arrays = [((1, 256, n, head_dim), dtype) for n in (heads, kv_heads, kv_heads)]
        arguments = abstract_on(absent, *arrays, ((1, 256), "int32"))
        return first_passing(KERNELS, lambda kernel: compiled_trial(_both(kernel), *arguments))
    return first_passing(KERNELS, lambda each: tried_apart(self_test, each, heads, kv_heads, head_dim, dtype))


def _both(kernel: Kernel) -> Callable[..., Any]:
    """Returns a function that computes the kernel's output and the gradients of the output's sum."""

    def summed(q: Array, k: Array, v: Array, ids: Array) -> tuple[Array, Array]:
        out = kernel(q, k, v, ids)
        return out.astype(jnp.float32).sum(), out

    return jax.value_and_grad(summed, argnums=(0, 1, 2), has_aux=True)


def abstract_on(device: Any, *arrays: tuple[tuple[int, ...], Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns abstract arrays on `device`, one for each (shape, dtype)."""
    here = SingleDeviceSharding(device)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in arrays]


def compiled_trial(function: Callable[..., Any], *arguments: Any) -> Trial:
    """Returns whether `function` compiles for the devices of its abstract arguments; nothing runs."""
    try:
        jax.jit(function).lower(*arguments).compile()
    except Exception as error:  # noqa: BLE001 - a kernel that cannot be compiled may raise anything
        return Trial(failure(error))
    return Trial(None)


def first_passing(kernels: Mapping[str, Callable], test: Callable[[Any], Trial]) -> KernelChoice:
    """Returns the first kernel in which `test` finds no problem, or BLOCKS (JAX code) if there is none.

    The result also has the problem of each kernel that was tried before it.
    """
    rejected: dict[str, str] = {}
    for name, kernel in kernels.items():
        if (problem := test(kernel).problem) is None:
            return KernelChoice(name, rejected)
        rejected[name] = problem
    return KernelChoice(BLOCKS, rejected)


def ragged_rows(rows: int, length: int) -> Int[np.ndarray, "B T"]:
    """Returns segment ids of `rows` rows of `length` tokens, a multiple of 8, with unequal segments.

    Rows repeat after four: three segments and padding, one segment, five segments (two of 1 or 2 tokens), and
    padding alone.
    """
    eighth = length // 8
    sizes = [2 * eighth, 4 * eighth, eighth], [length], [1, eighth, 3 * eighth, 2, 2 * eighth], []
    ids = np.zeros((rows, length), np.int32)
    for row in range(rows):
        of_row = sizes[row % len(sizes)]
        ids[row, : sum(of_row)] = np.repeat(np.arange(len(of_row)) + 1, of_row)
    return ids


def self_test(
    kernel: Kernel, heads: int, kv_heads: int, head_dim: int, dtype: str, *, length: int = 1024, rows: int = 4
) -> Trial:
    """Tests a kernel on this device, forward and backward, on `ragged_rows`.

    Outputs and gradients are compared with those of `softmax_over` in float32. Changing the content of
    all other tokens must not change a bit of the first row's second segment. Only gradients of a kernel that
    adds in no fixed order, which gives other bits when it is called again, may differ by a rounding; if
    XLA_FLAGS asks for deterministic kernels, such a kernel fails.
    """
    ids, inputs, _ = _trial_inputs(heads, kv_heads, head_dim, rows, length)
    sizes = heads, kv_heads, head_dim, rows, length
    watched = np.asarray(ids == 2) & (np.arange(rows) == 0)[:, None]
    try:
        both = _output_and_slopes(kernel, dtype, *sizes)
        got = both(*inputs)
        moved = both(*(jnp.where(watched[..., None, None], x, -3.0 * x) for x in inputs))
        other_bits = [
            name
            for name, one, other in zip(RESULTS, got, moved, strict=True)
            if one[watched].tobytes() != other[watched].tobytes()
        ]
        varies = bool(other_bits) and any(_bits(both(*inputs)) != _bits(got) for _ in range(REPEATS))
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run here may raise anything
        return Trial(failure(error))
    gaps = [_gap(one, want) for one, want in zip(got, _wanted(*sizes, dtype), strict=True)]
    for name, gap in zip(RESULTS, gaps, strict=True):
        if not gap <= HALF_TOLERANCE:
            return Trial(
                f"its {name} differs from float32 by {gap:.2g} of the largest value, more than the "
                f"tolerance {HALF_TOLERANCE:g}",
                gap,
            )
    for name, one, other in zip(RESULTS, got, moved, strict=True):
        is_rounding = (
            varies and name != "output" and np.abs(one - other)[watched].max() <= np.abs(one).max() / 128
        )
        if name in other_bits and not is_rounding:
            return Trial(f"its {name} of one segment depends on another segment's content", max(gaps))
    if varies and DETERMINISTIC in os.environ.get("XLA_FLAGS", ""):
        return Trial(
            "it gives other bits when it is called again, although XLA_FLAGS forbids that", max(gaps)
        )
    return Trial(None, max(gaps))


RESULTS = "output", "dq", "dk", "dv"
REPEATS = 3
"""Calls in which a kernel that adds in no fixed order is taken to give other bits at least once."""
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def _trial_inputs(
    heads: int, kv_heads: int, head_dim: int, rows: int, length: int
) -> tuple[Array, tuple[Array, ...], Array]:
    """Returns the segment ids of the self-test, its queries, keys and values, and a slope of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    *inputs, slope = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return jnp.asarray(ragged_rows(rows, length)), tuple(inputs), slope


def _output_and_slopes(attend: Kernel, dtype: str, *sizes: int) -> Callable[..., list[np.ndarray]]:
    """Returns a function of q, k and v that computes RESULTS, the gradients of (output x slope).sum()."""
    ids, _, slope = _trial_inputs(*sizes)

    def value(inputs: tuple[Array, ...]) -> tuple[Float[Array, ""], Array]:
        q, k, v = inputs
        out = jnp.where((ids > 0)[..., None, None], attend(q, k, v, ids).astype(jnp.float32), 0)
        return (out * slope).sum(), out

    both = jax.jit(jax.value_and_grad(value, has_aux=True))

    def results(*inputs: Array) -> list[np.ndarray]:
        (_, out), slopes = both(tuple(x.astype(dtype) for x in inputs))
        return [np.asarray(x, np.float32) for x in (out, *slopes)]

    return results


def _wanted(heads: int, kv_heads: int, head_dim: int, rows: int, length: int, dtype: str) -> list[np.ndarray]:
    """Returns the correct RESULTS of the self-test: those of `softmax_over`, of inputs in `dtype`."""
    sizes = heads, kv_heads, head_dim, rows, length
    inputs = (x.astype(dtype) for x in _trial_inputs(*sizes)[1])
    with jax.default_matmul_precision("highest"):  # a GPU would compute float32 products in TF32
        return _output_and_slopes(softmax_over, "float32", *sizes)(*inputs)


def softmax_over(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Returns the correct result, to test kernels: a softmax over all keys of a row at once, in float32."""
    rows, length, _, head_dim = q.shape
    grouped = q.reshape(rows, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum("btkrh,bskh->bkrts", grouped, k) * head_dim**-0.5
    at = jnp.arange(length)
    # A padding token sees all padding before it: its output is not read.
    is_seen = (segment_ids[:, :, None] == segment_ids[:, None]) & (at[:, None] >= at)
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkrts,bskh->btkrh", weights, v).reshape(q.shape)


def _gap(one: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(one - want).max() / np.abs(want).max())


def _bits(results: list[np.ndarray]) -> list[bytes]:
    return [each.tobytes() for each in results]


def on_mesh(choice: KernelChoice, mesh: Mesh, kv_heads: int) -> Kernel | None:
    """Returns the chosen kernel, split over a trainer's mesh; None if the choice is BLOCKS."""
    return None if choice.path == BLOCKS else over_mesh(KERNELS[choice.path], mesh, kv_heads)


def over_mesh(attend: Callable[..., Array], mesh: Mesh, kv_heads: int, ids: int = 1) -> Callable[..., Array]:
    """Returns the function `attend(q, k, v, *per_token)`, split so that each device computes its part.

    That is its rows and its heads; heads are split only if the mesh's tensor axis divides `kv_heads`. q, k
    and v are (B, T, heads, h); `ids` is the number of (B, T) arrays that follow them.
    """
    if mesh.size == 1:
        return attend
    heads = "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None
    rows = row_axes(mesh)
    each = PartitionSpec(*rows, None, heads)
    specs = (each, each, each, *[rows] * ids)
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=each, check_vma=False)


def describe(choice: KernelChoice) -> dict[str, Any]:
    """Returns the choice as a dict of plain values, for reports and JSON."""
    return {"path": choice.path, "not_used": dict(choice.rejected)}
