"""Kernels are used where they pass their self-test, and the self-test fails what must not be used."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import attention

from areal_jax.models.kernels import packed_attention as attention_kernels
from areal_jax.models.kernels.packed_attention import blocks, choose, segment_bounds, self_test, triton

SHAPE = (4, 2, 16, "float32", 64)  # heads, kv heads, head dimension, dtype, length


def test_blocks_pass():
    assert self_test(blocks, *SHAPE) is None


@pytest.mark.slow
def test_the_triton_kernel_passes_in_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    """The kernel's mathematics and our padding and repeating of heads; only its speed needs a GPU."""
    monkeypatch.setattr(attention, "mha", partial(attention.mha, interpret=True))
    assert self_test(triton, *SHAPE) is None


def across_segments(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return blocks(q, k, v, jnp.ones_like(ids))


def not_causal(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return blocks(q[:, ::-1], k[:, ::-1], v[:, ::-1], ids[:, ::-1])[:, ::-1]


def leaks_a_little(q: Any, k: Any, v: Any, ids: Any) -> Any:
    """Within the tolerance, and yet a segment's bits depend on its neighbour's."""
    return blocks(q, k, v, ids) + 1e-6 * jnp.abs(v).mean()


def raises(q: Any, k: Any, v: Any, ids: Any) -> Any:
    raise NotImplementedError("no such device")


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (across_segments, "its output differs from float32 by"),
        (not_causal, "its output differs from float32 by"),
        (leaks_a_little, "depends on another segment's content"),
        (raises, "NotImplementedError: no such device"),
    ],
)
def test_what_must_not_be_used_is_found(kernel: Any, problem: str):
    assert problem in str(self_test(kernel, *SHAPE))


def test_the_choice_names_what_was_rejected(monkeypatch: pytest.MonkeyPatch):
    choose.cache_clear()
    on_cpu = choose("cpu", 4, 2, 16, "bfloat16")
    assert (on_cpu.path, set(on_cpu.rejected)) == ("blocks", {"cudnn", "triton"})
    assert choose("gpu", 4, 2, 16, "float32").path == "blocks"
    tried = {"cudnn": raises, "triton": blocks}
    monkeypatch.setattr(attention_kernels, "KERNELS", tried)
    choice = choose("gpu", 4, 2, 16, "bfloat16")
    assert choice.path == "triton"
    assert choice.rejected == {"cudnn": "NotImplementedError: no such device"}
    choose.cache_clear()


def test_segment_bounds():
    """Three segments and padding; two that fill the row; none at all."""
    ids = np.array([[7, 7, 9, 2, 2, 0], [4, 4, 4, 4, 5, 5], [0, 0, 0, 0, 0, 0]], np.int32)
    sizes, offsets = segment_bounds(jnp.asarray(ids), 4)
    np.testing.assert_array_equal(sizes, [[2, 1, 2, -1], [4, 2, -1, -1], [-1] * 4])
    np.testing.assert_array_equal(offsets, [[0, 2, 3, 5, -1], [0, 4, 6, -1, -1], [-1] * 5])
