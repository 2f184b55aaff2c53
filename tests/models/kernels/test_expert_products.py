"""The kernels for a mixture's experts against float64, and their self-test, which must refuse faults."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.config import model_config
from areal_jax.models.experts import Arithmetic, ExpertKernels, product
from areal_jax.models.kernels.expert_products import choose, choose_for, self_test, tokamax
from areal_jax.models.kernels.expert_triton import rows_times_matrices, rows_times_rows, sums_of_rows
from areal_jax.parallel.mesh import one_device

pytestmark = pytest.mark.few_optimizations


def interpreted() -> ExpertKernels:
    each = rows_times_matrices, rows_times_rows, sums_of_rows
    return ExpertKernels(*(partial(kernel, interpret=True) for kernel in each))


def by_tokamax(monkeypatch: pytest.MonkeyPatch) -> ExpertKernels:
    """tokamax's products, if its function did what the one of jax with the same arguments does."""

    def ragged_dot_general(*args: Any, implementation: str, **kwargs: Any) -> Any:
        assert implementation == "mosaic_gpu"
        return jax.lax.ragged_dot_general(*args, **kwargs)

    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(ragged_dot_general=ragged_dot_general))
    return tokamax()._replace(sums=interpreted().sums)


@pytest.mark.parametrize(
    ("kernels", "inputs", "outputs"),
    [
        ("own", 24, 40),
        ("tokamax", 24, 40),
        pytest.param("own", 130, 257, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_are_each_experts_products_and_each_tokens_sums(
    kernels: str, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
):
    """In the interpreter, against float64; widths that tiles do not divide."""
    rng, of = np.random.default_rng(1), interpreted() if kernels == "own" else by_tokamax(monkeypatch)
    starts = jnp.array([0, 0, 1, 20, 90, 90])
    x, slope = rng.normal(size=(93, inputs)), rng.normal(size=(93, outputs))
    matrices = rng.normal(size=(5, inputs, outputs))
    place = np.where(rng.random((21, 3)) < 0.7, rng.integers(0, 90, (21, 3)), -1)
    x[90:] = slope[90:] = np.nan
    given = [jnp.asarray(each, jnp.float32) for each in (x, matrices, slope)]

    @jax.jit
    def run(x: Any, matrices: Any, slope: Any) -> Any:
        return (
            of.rows(x, matrices, starts, 0, jnp.float32),
            of.rows(slope, matrices, starts, 1, jnp.float32),
            of.matrices(x, slope, starts),
            of.sums(x, jnp.asarray(place)),
        )

    out, of_x, of_matrices, sums = run(*given)
    for e in range(5):
        own = slice(starts[e], starts[e + 1])
        np.testing.assert_allclose(out[own], x[own] @ matrices[e], atol=5e-5)
        np.testing.assert_allclose(of_x[own], slope[own] @ matrices[e].T, atol=5e-5)
        np.testing.assert_allclose(of_matrices[e], x[own].T @ slope[own], atol=5e-5)
    each = np.where((place >= 0)[..., None], x[place], 0)
    np.testing.assert_allclose(sums, each.sum(1), atol=1e-5)


@pytest.mark.slow
def test_what_a_mixture_computes_by_the_kernels_is_what_blocks_compute():
    """The products of sorted rows, and the gradients of rows and matrices."""
    rng = np.random.default_rng(2)
    starts = jnp.array([0, 3, 3, 30])
    x, matrices = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((38, 6), (3, 6, 5)))
    slope = jnp.asarray(rng.normal(size=(38, 5)), jnp.float32).at[30:].set(0)

    def both(by: Arithmetic) -> Any:
        out, pull = jax.vjp(lambda *floats: product(*floats, starts, 8, by), x, matrices)
        of_x, of_matrices = pull(slope)
        return out[:30], of_x[:30], of_matrices

    blocks, kernels = (
        jax.jit(partial(both, Arithmetic("float32", kernels=of)))() for of in (None, interpreted)
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, atol=2e-5), blocks, kernels)


def larger() -> ExpertKernels:
    of = interpreted()
    return of._replace(rows=lambda x, *rest: of.rows(1.05 * x, *rest))


def of_all_rows() -> ExpertKernels:
    """Reads the first rows without an expert too."""
    of = interpreted()
    return of._replace(matrices=lambda x, slope, starts: of.matrices(x, slope, starts.at[-1].add(5)))


def beside() -> ExpertKernels:
    """Each expert's results depend a little on the matrix of the next one."""
    of = interpreted()
    return of._replace(rows=lambda x, m, *rest: of.rows(x, m + 1e-3 * jnp.roll(m, 1, axis=0), *rest))


def from_elsewhere() -> ExpertKernels:
    """A place without a row counts the last one."""
    of = interpreted()
    return of._replace(sums=lambda y, place: of.sums(y, place % 6))


def broken() -> ExpertKernels:
    return interpreted()._replace(sums=lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "problem"),
    [
        (interpreted, None),
        (larger, "its output differs from float32 by"),
        (of_all_rows, "its gradient of the matrices differs from float32 by nan"),
        (beside, "its output of one expert depends on another expert's rows or matrix"),
        (from_elsewhere, "its sum of a token's rows differs from float32 by"),
        (broken, "ZeroDivisionError: division by zero"),
    ],
)
def test_faults_are_found(kernels: Any, problem: str | None):
    found = self_test(kernels, 6, 24, 40, "float32").problem
    assert (found or "").startswith(problem or "") and (found is None) == (problem is None)


def test_off_gpus_no_kernel_is_tried():
    assert choose("cpu", 8, 64, 32, "bfloat16").rejected == {"triton": "needs CUDA; this device is cpu"}
    assert "needs model.dtype=bfloat16" in choose("gpu", 8, 64, 32, "float32").rejected["triton"]
    choice, kernels = choose_for(model_config("qwen3-30b-a3b", 1000, "bfloat16"), one_device())
    assert (choice.path, kernels) == ("blocks", None)
    assert choose_for(model_config("tiny", 1000, "bfloat16"), one_device())[1] is None
