"""What is read from a device's trace, beside counts made by hand."""

from __future__ import annotations

import jax.numpy as jnp

from areal_jax.bench.gpu.inspection import TOP, summary, traced


def test_a_trace_is_summed_by_kernel():
    events = [("gemm", 2.0), ("MemcpyD2H", 0.5), ("fusion_1", 1.0), ("gemm", 2.0), ("MemcpyH2D", 0.1)]
    found = summary([*events, *[(f"small_{i}", 0.001) for i in range(9)]])
    assert (found.kernels, found.device_to_host) == (12, 1)
    assert found.top[:3] == [("gemm", 4.0), ("fusion_1", 1.0), ("MemcpyD2H", 0.5)] and len(found.top) == TOP


def test_a_cpu_has_no_trace():
    assert traced(lambda: jnp.zeros(3)) is None
