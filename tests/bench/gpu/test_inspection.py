"""What is read from a program's text and from a device's trace, beside counts made by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from areal_jax.bench.gpu.inspection import TOP, large_copies, products_by_dtype, summary, traced


def test_products_are_counted_by_the_dtypes_of_their_operands():
    def two(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        first = jnp.dot(x, y, preferred_element_type=jnp.float32)
        return jnp.einsum("bij,bjk->bik", jnp.stack([first, first]), z)

    half = jnp.zeros((4, 4), jnp.bfloat16)
    text = jax.jit(two).lower(half, half, jnp.zeros((2, 4, 3))).as_text()
    assert products_by_dtype(text) == {"bf16 x bf16": 1, "f32 x f32": 1}
    assert products_by_dtype(jax.jit(jnp.sin).lower(half).as_text()) == {}


def test_large_copies_are_those_of_at_least_as_many_bytes():
    text = """
      %copy.1 = bf16[2,65,8]{2,1,0} copy(%p)
      %copy.2 = f32[2,65,4]{2,1,0:T(8,128)} copy(%q)
      %copy.3 = s8[2,65,8]{2,1,0} copy(%r)
      %fusion.1 = bf16[2,65,8]{2,1,0} fusion(%copy.1)
    """
    assert large_copies(text, 2 * 2 * 65 * 8) == ["bf16[2,65,8]", "f32[2,65,4]"]
    assert large_copies(text, 10**6) == []


def test_a_trace_is_summed_by_kernel():
    events = [("gemm", 2.0), ("MemcpyD2H", 0.5), ("fusion_1", 1.0), ("gemm", 2.0), ("MemcpyH2D", 0.1)]
    found = summary([*events, *[(f"small_{i}", 0.001) for i in range(9)]])
    assert (found.kernels, found.device_to_host) == (12, 1)
    assert found.top[:3] == [("gemm", 4.0), ("fusion_1", 1.0), ("MemcpyD2H", 0.5)] and len(found.top) == TOP


def test_a_cpu_has_no_trace():
    assert traced(lambda: jnp.zeros(3)) is None
