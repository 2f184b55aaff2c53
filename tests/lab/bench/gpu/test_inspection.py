"""What is read from a device's trace, beside counts made by hand."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from areal_jax.lab.bench.gpu.inspection import FIGURES, TOP, summary, traced


def test_a_trace_is_summed_by_kernel():
    named = [("gemm", 0.0, 2.0), ("MemcpyD2H", 1.0, 0.5), ("fusion_1", 9.0, 1.0), ("gemm", 9.5, 2.0)]
    small = [(f"small_{i}", 20.0 + i, 0.001) for i in range(TOP)]
    found = summary([*small, *named, ("MemcpyH2D", 40.0, 0.1)])
    assert (found["kernels"], found["device_to_host"]) == (3 + TOP, 1)
    assert found["top_kernels"][:3] == [("gemm", 4.0), ("fusion_1", 1.0), ("MemcpyD2H", 0.5)]
    assert len(found["top_kernels"]) == TOP
    assert found["busy_s"] == pytest.approx(2.0 + 2.5 + TOP * 0.001 + 0.1), "events side by side count once"


def test_a_cpu_has_no_trace():
    assert traced(lambda: jnp.zeros(3)) == dict.fromkeys(FIGURES)
