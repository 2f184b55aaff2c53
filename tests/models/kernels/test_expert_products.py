"""The kernels of a mixture's products against float64, and their self-test, which must refuse faults."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.config import model_config
from areal_jax.models.experts import Arithmetic, product
from areal_jax.models.kernels.expert_products import choose, choose_for, self_test, triton
from areal_jax.models.kernels.expert_triton import rows_times_matrices, rows_times_rows
from areal_jax.parallel.mesh import one_device

pytestmark = pytest.mark.few_optimizations


def interpreted(left: Any, right: Any, starts: Any, axis: int = 0, dtype: Any = "float32") -> Any:
    if right.ndim == 2:
        return rows_times_rows(left, right, starts, interpret=True)
    return rows_times_matrices(left, right, starts, axis, dtype, interpret=True)


def blocks(left: Any, right: Any, starts: Any, axis: int = 0, dtype: Any = "float32") -> Any:
    """What every device runs. In a model, the rows without an expert are finite."""
    by = Arithmetic(str(left.dtype))
    left, right = jnp.nan_to_num(left), jnp.nan_to_num(right)
    pad = lambda x: jnp.pad(x, ((0, 8), (0, 0)))  # noqa: E731
    if right.ndim == 2:
        zeros = jnp.zeros((len(starts) - 1, left.shape[1], right.shape[1]))
        pull = jax.vjp(lambda m: product(pad(left), m, starts, 8, by), zeros)[1]
        return pull(pad(right).astype(jnp.float32))[0]
    matrices = right if axis == 0 else jnp.swapaxes(right, 1, 2)
    return product(pad(left), matrices, starts, 8, by)[:-8].astype(dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), pytest.param(130, 257, marks=pytest.mark.slow)])
def test_the_kernels_are_each_experts_products(inputs: int, outputs: int):
    """In the interpreter, against float64; widths that tiles do not divide."""
    rng = np.random.default_rng(1)
    starts = np.array([0, 0, 1, 20, 90, 90])
    x, slope = rng.normal(size=(93, inputs)), rng.normal(size=(93, outputs))
    matrices = rng.normal(size=(5, inputs, outputs))
    x[90:] = slope[90:] = np.nan
    given = [jnp.asarray(a, jnp.float32) for a in (x, matrices, slope)]
    out = jax.jit(partial(interpreted))(given[0], given[1], starts)
    of_x = jax.jit(partial(interpreted, axis=1))(given[2], given[1], starts)
    of_matrices = jax.jit(interpreted)(given[0], given[2], starts)
    for e in range(5):
        own = slice(starts[e], starts[e + 1])
        np.testing.assert_allclose(out[own], x[own] @ matrices[e], atol=2e-5)
        np.testing.assert_allclose(of_x[own], slope[own] @ matrices[e].T, atol=2e-5)
        np.testing.assert_allclose(of_matrices[e], x[own].T @ slope[own], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [interpreted, blocks])
def test_what_is_right_passes(kernel: Any):
    assert self_test(kernel, 6, 24, 40, "float32").problem is None


def larger(left: Any, right: Any, *rest: Any) -> Any:
    return blocks(1.05 * left, right, *rest)


def of_all_rows(left: Any, right: Any, starts: Any, *rest: Any) -> Any:
    """Reads the first rows without an expert too."""
    return interpreted(left, right, starts.at[-1].add(5) if right.ndim == 2 else starts, *rest)


def beside(left: Any, right: Any, starts: Any, *rest: Any) -> Any:
    """Each expert's results depend a little on the matrix of the next one."""
    if right.ndim == 3:
        right = right + 1e-3 * jnp.roll(right, 1, axis=0)
    return blocks(left, right, starts, *rest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (larger, "its output differs from float32 by"),
        (of_all_rows, "its gradient of the matrices differs from float32 by nan"),
        (beside, "its output of one expert depends on another expert's rows or matrix"),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_faults_are_found(kernel: Any, problem: str):
    found = self_test(kernel, 6, 24, 40, "float32").problem
    assert found is not None and found.startswith(problem)


def test_off_gpus_no_kernel_is_tried():
    assert choose("cpu", 8, 64, 32, "bfloat16").rejected == {"triton": "needs CUDA; this device is cpu"}
    assert "needs model.dtype=bfloat16" in choose("gpu", 8, 64, 32, "float32").rejected["triton"]
    choice, kernel = choose_for(model_config("qwen3-30b-a3b", 1000, "bfloat16"), one_device())
    assert (choice.path, kernel) == ("blocks", None)
    assert choose_for(model_config("tiny", 1000, "bfloat16"), one_device())[1] is None
    assert triton.__name__ == "triton"
