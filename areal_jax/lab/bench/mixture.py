"""The products of a mixture's experts beside one dense product of as many rows."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from areal_jax.assembly.devices import machine
from areal_jax.lab.bench.measure import timed_s
from areal_jax.models.experts import Arithmetic, Rows, block_size, product
from areal_jax.types import ArealError


def experts(
    *,
    tokens: int = 512,
    k: int = 8,
    experts: int = 64,
    inputs: int = 256,
    outputs: int = 128,
    dtype: str = "float32",
    repeats: int = 15,
) -> dict[str, Any]:
    """Measures the product of each of `tokens` x `k` sorted rows with the matrix of its expert.

    In the result, `even` has about as many rows of each expert and `skewed` has half of all rows with one of
    them; each is measured in turn with the product of all rows with one matrix. `..._over_dense` are the
    medians of the ratios of seconds, and `..._gradients_over_dense` those of the gradients of rows and
    matrices together. `memory_over_rows` is what a product allocates, its result included, over the bytes of
    the rows that it reads and writes.
    """
    if experts < k:
        raise ArealError(f"bench experts: k={k} with experts={experts}; a token has at most all of them")
    numbers = np.random.default_rng(0)
    each = np.stack([numbers.permutation(experts)[:k] for _ in range(tokens)])
    skewed = np.where(np.arange(k) < k // 2, 0, each)
    rows = Rows.of(jnp.asarray(each), experts, block_size(tokens * k, experts))
    x = jnp.asarray(numbers.normal(size=(len(rows.order), inputs)), dtype)
    slope = jnp.asarray(numbers.normal(size=(len(rows.order), outputs)), dtype)
    matrices = jnp.asarray(numbers.normal(size=(experts, inputs, outputs)) / inputs, dtype)

    def of_experts(x: Array, matrices: Array, starts: Array) -> Array:
        return product(x, matrices, starts, rows.block, Arithmetic(dtype))

    def dense(x: Array, matrices: Array, starts: Array) -> Array:
        return jnp.matmul(x[: tokens * k], matrices[0], preferred_element_type=jnp.float32)

    def backward(f: Any, x: Array, matrices: Array, starts: Array) -> Any:
        out, pull = jax.vjp(partial(f, starts=starts), x, matrices)
        return pull(slope[: len(out)].astype(out.dtype))

    starts = {"even": rows.starts, "skewed": Rows.of(jnp.asarray(skewed), experts, rows.block).starts}
    calls = {
        "dense": (dense, "even"),
        "even": (of_experts, "even"),
        "skewed": (of_experts, "skewed"),
        "dense_gradients": (partial(backward, dense), "even"),
        "even_gradients": (partial(backward, of_experts), "even"),
        "skewed_gradients": (partial(backward, of_experts), "skewed"),
    }
    ready = {name: partial(jax.jit(f), x, matrices, starts[which]) for name, (f, which) in calls.items()}
    for call in ready.values():
        timed_s(call)
    runs: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, call in ready.items():
            runs[name].append(timed_s(call))
    ratios = {}
    for name in ("even", "skewed", "even_gradients", "skewed_gradients"):
        beside = runs["dense_gradients" if name.endswith("gradients") else "dense"]
        ratios[f"{name}_over_dense"] = statistics.median(map(lambda a, b: a / b, runs[name], beside))
    memory: Any = jax.jit(of_experts).lower(x, matrices, rows.starts).compile().memory_analysis()
    allocated = memory.temp_size_in_bytes + memory.output_size_in_bytes
    moved = tokens * k * (inputs + outputs) * x.dtype.itemsize
    return machine(f"{tokens} x {k} rows, {experts} x {inputs} x {outputs}", dtype, runs["even"]) | {
        **{f"{name}_seconds": statistics.median(each) for name, each in runs.items()},
        **ratios,
        "memory_over_rows": allocated / moved,
        "flops_per_s": 2 * tokens * k * inputs * outputs / statistics.median(runs["even"]),
    }
