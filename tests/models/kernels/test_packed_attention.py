"""Kernels are used where they pass their self-test, and the self-test fails what must not be used."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental.pallas.ops.gpu import attention

from areal_jax.models.kernels import packed_attention as attention_kernels
from areal_jax.models.kernels.packed_attention import (
    blocks,
    choose,
    cudnn,
    ragged_rows,
    segment_spans,
    self_test,
    softmax_over,
    triton,
)

SHAPE = (4, 2, 16, "float32")  # heads, kv heads, head dimension, dtype
LENGTH = 64


def test_blocks_pass():
    found = self_test(blocks, *SHAPE, length=LENGTH)
    assert found.problem is None and found.gap is not None and 0.0 < found.gap < 1e-5


@pytest.mark.slow
def test_the_triton_kernel_passes_in_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    """The kernel's mathematics and our padding and repeating of heads; only its speed needs a GPU."""
    monkeypatch.setattr(attention, "mha", partial(attention.mha, interpret=True))
    assert self_test(triton, *SHAPE, length=LENGTH).problem is None


def across_segments(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return blocks(q, k, v, jnp.ones_like(ids))


def not_causal(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return blocks(q[:, ::-1], k[:, ::-1], v[:, ::-1], ids[:, ::-1])[:, ::-1]


def leaks_a_little(q: Any, k: Any, v: Any, ids: Any) -> Any:
    """Within the tolerance, and yet a segment's bits depend on its neighbour's."""
    return blocks(q, k, v, ids) + 1e-6 * jnp.abs(v).mean()


def wrong_after_the_first_row(q: Any, k: Any, v: Any, ids: Any) -> Any:
    """As attention is whose offsets of the second row are those of the first."""
    return jnp.concatenate([blocks(q[:1], k[:1], v[:1], ids[:1]), across_segments(q, k, v, ids)[1:]])


def reads_another_row(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return blocks(q, k, v, ids) + 1e-6 * jnp.abs(v[-1]).mean()


def raises(q: Any, k: Any, v: Any, ids: Any) -> Any:
    raise NotImplementedError("no such device")


def with_slope(change: Any) -> Any:
    """Attention whose gradient with respect to the queries is `change(gradient)`."""

    @jax.custom_vjp
    def unchanged(q: Any) -> Any:
        return q

    unchanged.defvjp(lambda q: (q, None), lambda _, slope: (change(slope),))
    return lambda q, k, v, ids: blocks(unchanged(q), k, v, ids)


def other_bits_each_time(amount: float) -> Any:
    """Attention whose gradient is correct in the first call, and in each further one larger by `amount`."""
    calls = count()
    factor = lambda: np.float32(1 + amount * next(calls))  # noqa: E731
    return with_slope(lambda slope: slope * jax.pure_callback(factor, jax.ShapeDtypeStruct((), jnp.float32)))


slope_across_segments = with_slope(lambda slope: slope + 1e-6 * jnp.abs(slope).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (slope_across_segments, "its dq of one segment depends on another segment's content"),
        (other_bits_each_time(0.05), "its dq of one segment depends on another segment's content"),
        (across_segments, "its output differs from float32 by"),
        (not_causal, "its output differs from float32 by"),
        (wrong_after_the_first_row, "its output differs from float32 by"),
        (reads_another_row, "depends on another segment's content"),
        (leaks_a_little, "depends on another segment's content"),
        (raises, "NotImplementedError: no such device"),
    ],
)
def test_what_must_not_be_used_is_found(kernel: Any, problem: str):
    assert problem in str(self_test(kernel, *SHAPE, length=LENGTH).problem)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [("", None), ("--xla_gpu_deterministic_ops=true", "gives other bits when it is called again")],
)
def test_gradients_in_no_fixed_order_pass_unless_bits_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: str, problem: str | None
):
    """As those of cuDNN over rows of several thousand tokens on an H200."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = self_test(other_bits_each_time(1e-3), *SHAPE, length=LENGTH).problem
    assert found is None if problem is None else problem in str(found)


def test_the_comparison_is_with_products_in_float32(monkeypatch: pytest.MonkeyPatch):
    """Not in TF32, a GPU's default; the kernel itself is tested at the precision that it has in a run."""
    read: dict[str, list[str | None]] = {"kernel": [], "reference": []}

    def noting(name: str) -> Any:
        def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
            read[name].append(jax.config.jax_default_matmul_precision)
            return softmax_over(q, k, v, ids)

        return attend

    monkeypatch.setattr(attention_kernels, "softmax_over", noting("reference"))
    assert self_test(noting("kernel"), *SHAPE, length=LENGTH).problem is None
    assert set(read["kernel"]) == {None} and set(read["reference"]) == {"highest"}


@pytest.mark.slow
def test_the_choice_names_what_was_rejected(monkeypatch: pytest.MonkeyPatch):
    choose.cache_clear()
    on_cpu = choose("cpu", 4, 2, 16, "bfloat16")
    assert (on_cpu.path, set(on_cpu.rejected)) == ("blocks", {"cudnn", "triton"})
    assert choose("gpu", 4, 2, 16, "float32").path == "blocks"
    tried = {"cudnn": raises, "triton": blocks}
    monkeypatch.setattr(attention_kernels, "KERNELS", tried)
    here = lambda test, *given: test(*given, length=LENGTH)  # noqa: E731 - tests/models/kernels/test_trials.py has the process
    monkeypatch.setattr(attention_kernels, "tried_apart", here)
    choice = choose("gpu", 4, 2, 16, "bfloat16")
    assert choice.path == "triton"
    assert choice.rejected == {"cudnn": "NotImplementedError: no such device"}
    choose.cache_clear()


IDS = np.array([[7, 7, 9, 2, 2, 0], [4, 4, 4, 4, 5, 5], [0, 0, 0, 0, 0, 0], [3, 8, 8, 0, 0, 0]], np.int32)
"""Three segments and padding; two that fill the row; none; two and padding."""


def test_segment_spans():
    sizes, starts = segment_spans(jnp.asarray(IDS), 4)
    np.testing.assert_array_equal(sizes, [[2, 1, 2, -1], [4, 2, -1, -1], [-1] * 4, [1, 2, -1, -1]])
    np.testing.assert_array_equal(
        starts, [[0, 2, 3, -1, -1], [0, 4, -1, -1, -1], [-1] * 5, [0, 1, -1, -1, -1]]
    )


@pytest.mark.slow
def test_cudnn_gets_every_segments_place_and_as_many_kv_heads_as_query_heads(monkeypatch: pytest.MonkeyPatch):
    """The arguments go through jax's own conversion to offsets in memory, which is where a mistake shows."""
    (rows, length), heads, head_dim = IDS.shape, 4, 8
    given: dict[str, Any] = {}

    def recorded(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        spans = [arguments[name] for name in ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")]
        given["sizes_and_offsets"] = fused._fix_seqlen_offsets(*spans, q, k)
        given["shapes"] = q.shape, k.shape, v.shape
        return q

    monkeypatch.setattr(fused, "dot_product_attention", recorded)
    q = jnp.ones((rows, length, heads, head_dim), jnp.bfloat16)
    with jax.disable_jit():
        cudnn(q, q[:, :, :2], q[:, :, :2], jnp.asarray(IDS))
    assert given["shapes"] == (q.shape,) * 3
    # By hand: (row, first column, size) of each segment, in order; a token's memory is heads * head_dim.
    spans = [(0, 0, 2), (0, 2, 1), (0, 3, 2), (1, 0, 4), (1, 4, 2), (3, 0, 1), (3, 1, 2)]
    offsets = [(row * length + column) * heads * head_dim for row, column, _ in spans]
    q_sizes, kv_sizes, q_offsets, kv_offsets = (np.asarray(x).ravel() for x in given["sizes_and_offsets"])
    for sizes in (q_sizes, kv_sizes):
        assert sizes[: len(spans)].tolist() == [size for *_, size in spans] and not sizes[len(spans) :].any()
    for found in (q_offsets, kv_offsets):
        assert found[: len(spans)].tolist() == offsets
        assert (found[len(spans) :] == q.size).all()  # the end of the array


def test_ragged_rows_have_unequal_segments_and_padding():
    ids = ragged_rows(5, 32)
    sizes = [np.unique(row[row > 0], return_counts=True)[1].tolist() for row in ids]
    assert sizes == [[8, 16, 4], [32], [1, 4, 12, 2, 8], [], [8, 16, 4]]
    assert all((np.diff(row[row > 0]) >= 0).all() and not row[(row > 0).sum() :].any() for row in ids)


def test_what_cudnn_leaves_unwritten_of_a_gradient_is_zero():
    is_token = jnp.array([True, True, False])
    value, pull = jax.vjp(lambda x: attention_kernels._with_gradient_where(is_token, x), jnp.arange(3.0))
    np.testing.assert_array_equal(value, [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(pull(jnp.array([5.0, 6.0, jnp.nan]))[0], [5.0, 6.0, 0.0])
