"""The measurements of `bench gpu` that are no benchmark of their own, and the table of all of them.

Each function takes plain settings and returns plain figures, so that a cell can be sent to a process and its
result written as a line of JSON.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.generation.canary import canary
from areal_jax.lab.bench.decode import bench_engine, decode_figures, decoding_calls, filled, prefill, sample
from areal_jax.lab.bench.gpu.inspection import traced
from areal_jax.lab.bench.hosting import swap
from areal_jax.lab.bench.loop import loop, whole_run
from areal_jax.lab.bench.measure import (
    bench_learner,
    compile_seconds,
    copy_bandwidth,
    full_batch,
    matrix_peak,
    median_s,
    random_model,
    random_params,
    read_bandwidth,
    timed_s,
    updates,
)
from areal_jax.lab.bench.parity import parity
from areal_jax.lab.bench.sync import sync
from areal_jax.models.device_layout import WeightLayout
from areal_jax.models.experts import Arithmetic, Rows, block_size, product
from areal_jax.models.kernels import expert_products, packed_attention, paged_attention
from areal_jax.models.kv_pages import KVPages
from areal_jax.plan.bounds import products
from areal_jax.plan.costs import written
from areal_jax.plan.hlo import parse
from areal_jax.plan.targets import target_of
from areal_jax.plugin import version_of
from areal_jax.types import SampleId, Sampling


def versions() -> dict[str, Any]:
    """Returns the versions of the packages that decide what runs, the devices, and the settings of XLA."""
    packages = (
        "areal-jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "flax", "tokamax",
    )  # fmt: skip
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "devices": [device.device_kind for device in devices],
        "platform_version": devices[0].client.platform_version,
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "packages": {name: version_of(name) for name in packages},
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_", "NCCL_"))
        },
    }


def matrix_product(*, dtype: str) -> dict[str, Any]:
    """Measures the FLOP/s of a large matrix product; on a GPU, float32 operands are read as TF32."""
    return {"flops_per_s": matrix_peak(dtype)}


def memory() -> dict[str, Any]:
    """Measures the bytes per second at which the device reads an array, and copies one (both directions)."""
    return {"read_bytes_per_s": read_bandwidth(), "copied_bytes_per_s": copy_bandwidth()}


# --- kernels ------------------------------------------------------------------------------------------------


def packed_kernel(
    *, path: str, heads: int, kv_heads: int, head_dim: int, rows: int, length: int, repeats: int = 5
) -> dict[str, Any]:
    """Tries and measures packed attention by the kernel named `path`; blocks: by the blocks in JAX code.

    In the result, `problem` says why a run would not use the kernel (None: it passes), `gap` is the largest
    error relative to the largest value in float32, and the times are seconds of a forward pass, and of a
    forward and a backward pass, over `rows` rows of `length` tokens in bfloat16. A kernel that fails is not
    timed. The blocks, which run on every device, are measured without a trial.
    """
    if path == packed_attention.BLOCKS:
        attend, figures = packed_attention.blocks, {}
    else:
        attend = packed_attention.KERNELS[path]
        trial = packed_attention.self_test(
            attend, heads, kv_heads, head_dim, "bfloat16", length=length, rows=rows
        )
        figures: dict[str, Any] = {"problem": trial.problem, "gap": trial.gap}
        if trial.problem:
            return figures
    ids = jnp.asarray(packed_attention.ragged_rows(rows, length))
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (jax.random.normal(jax.random.key(i), shape, "bfloat16") for i, shape in enumerate(shapes))
    out = lambda q, k, v: attend(q, k, v, ids).astype(jnp.float32).sum()  # noqa: E731
    forward, both = jax.jit(out), jax.jit(jax.grad(out, (0, 1, 2)))
    return figures | {
        "forward_s": median_s(lambda: forward(q, k, v), repeats),
        "both_s": median_s(lambda: both(q, k, v), repeats),
    }


def paged_kernel(
    *,
    path: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    kv_dtype: str,
    pool_tokens: int = 0,
    slots: int = 64,
    tokens: int = 1024,
    chunk: int = 256,
    repeats: int = 5,
) -> dict[str, Any]:
    """Tries the kernel of paged attention named `path`, and measures one layer of decoding and of recompute.

    In the result, `problem` and `gap` are as in `packed_kernel`; `kernel_s` is the time of a decode step for
    `slots` slots of `tokens` tokens each, and `fraction_of_bandwidth` the bytes of their KV / `kernel_s` /
    the bandwidth measured here. `chunk_s` is the time for the last `chunk` tokens of every slot, as recompute
    attends, and `chunk_flops_per_s` the FLOPs of two products over the keys that each token sees / `chunk_s`.
    `pool_tokens`: size of the pool of pages, of which the slots use the last ones; 0: as many as the slots
    use.
    """
    kernel, places = paged_attention.KERNELS[path], -(-tokens // page_tokens)
    trial = paged_attention.self_test(
        kernel, heads, kv_heads, head_dim, kv_dtype=kv_dtype, page_tokens=page_tokens
    )
    figures: dict[str, Any] = {"problem": trial.problem, "gap": trial.gap}
    if trial.problem:
        return figures
    pages = max(pool_tokens // page_tokens, slots * places)
    table = 1 + pages - slots * places + jnp.arange(slots * places, dtype=jnp.int32).reshape(slots, places)
    cache = _random_pages(table, (2, pages, page_tokens, kv_heads, head_dim, kv_dtype))
    chunk, layer, run = min(chunk, tokens), jnp.int32(1), jax.jit(kernel)
    q = jax.random.normal(jax.random.key(0), (slots, chunk, heads, head_dim))
    lengths = jnp.tile(jnp.arange(tokens - chunk, tokens, dtype=jnp.int32) + 1, (slots, 1))
    step = q[:, -1:], cache, layer, table, lengths[:, -1:]
    want = jax.jit(paged_attention.softmax_over)(*step)
    gap = float(jnp.abs(run(*step) - want).max() / jnp.abs(want).max())
    seconds = median_s(lambda: run(*step), repeats)
    chunk_s = median_s(lambda: run(q, cache, layer, table, lengths), repeats)
    read = (
        slots * tokens * sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) / 2 / (pages + 1) / page_tokens
    )
    if not gap <= packed_attention.HALF_TOLERANCE:
        figures["problem"] = f"in the pool of {pages} pages its output differs from float32 by {gap:.2g}"
    return figures | {
        "gap": max(gap, trial.gap or 0.0),
        "kernel_s": seconds,
        "pool_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(cache)),
        "fraction_of_bandwidth": read / seconds / read_bandwidth(),
        "chunk_s": chunk_s,
        "chunk_flops_per_s": 4 * heads * head_dim * int(lengths.sum()) / chunk_s,
    }


def expert_kernel(
    *, path: str, experts: int, k: int, inputs: int, outputs: int, tokens: int, repeats: int = 5
) -> dict[str, Any]:
    """Tries and measures the products of a mixture's experts by the kernels named `path`; blocks: JAX code.

    The figures are as in `packed_kernel`, of the product of `tokens` x `k` sorted rows in bfloat16 with one
    matrix of each of the experts, which are equally busy; `flops_per_s` is the speed of the first.
    """
    figures: dict[str, Any] = {}
    kernels = None if path == packed_attention.BLOCKS else expert_products.KERNELS[path]
    if kernels is not None:
        trial = expert_products.self_test(kernels, experts, inputs, outputs)
        figures = {"problem": trial.problem, "gap": trial.gap}
        if trial.problem:
            return figures
    numbers = np.random.default_rng(0)
    chosen = np.stack([numbers.permutation(experts)[:k] for _ in range(tokens)])
    rows = Rows.of(jnp.asarray(chosen), experts, block_size(tokens * k, experts))
    x, matrices = (
        jax.random.normal(jax.random.key(i), shape, "bfloat16")
        for i, shape in enumerate([(len(rows.order), inputs), (experts, inputs, outputs)])
    )
    by = Arithmetic("bfloat16", kernels=kernels)

    def out(x: jax.Array, matrices: jax.Array) -> jax.Array:
        found: Any = product(x, matrices, rows.starts, rows.block, by)
        return found.sum()

    forward, both = jax.jit(out), jax.jit(jax.grad(out, (0, 1)))
    seconds = median_s(lambda: forward(x, matrices), repeats)
    return figures | {
        "forward_s": seconds,
        "both_s": median_s(lambda: both(x, matrices), repeats),
        "flops_per_s": 2 * tokens * k * inputs * outputs / seconds,
    }


def _random_pages(table: jax.Array, sizes: tuple[Any, ...]) -> KVPages:
    """Returns a pool of `sizes` (`KVPages.zeros`), with random tokens in layer 1 of the pages in `table`."""
    _, _, page_tokens, kv_heads, head_dim, _ = sizes

    @jax.jit
    def pool() -> KVPages:
        page = jnp.repeat(table, page_tokens, axis=1)
        place = jnp.tile(jnp.arange(page_tokens), table.shape)
        k, v = jax.random.normal(jax.random.key(1), (2, *page.shape, kv_heads, head_dim))
        return KVPages.zeros(*sizes).written(1, page, place, k, v)

    return jax.block_until_ready(pool())


# --- a host -------------------------------------------------------------------------------------------------


def decoding(
    *,
    shape: str,
    slots: int,
    prompt: int,
    decode_steps: int,
    layout: WeightLayout | Literal["auto"],
    dtype: str = "bfloat16",
    page_tokens: int = 64,
    repeats: int = 3,
) -> dict[str, Any]:
    """Measures decode steps as `bench decode` does, and what a call costs the host and the device.

    `layout`: that of the weights (`models.device_layout`). In the result, `dispatch_s` is the time until
    a decode call returns to Python, while the device still computes; `kernels`, `device_to_host` and `busy_s`
    are per call, from a trace of the device (None on a CPU).
    """
    engine, value = bench_engine(
        shape,
        dtype,
        prompt + 8 * decode_steps,
        slots=slots,
        decode_steps=decode_steps,
        page_tokens=min(page_tokens, prompt),
        weight_layout=layout,
    )
    figures = decode_figures(
        engine, value, shape=shape, prompt=prompt, tokens=8 * decode_steps, repeats=repeats
    )
    call = decoding_calls(engine, value, prompt)
    returned = [_returned_s(call) for _ in range(4)]
    return figures | {
        "dispatch_s": statistics.median(returned[1:]),
        "layout": engine.weight_layout,
        **traced(call),
    }


def _returned_s(call: Callable[[], Any]) -> float:
    """Returns the seconds until `call` returns; then waits until the device has computed its result."""
    started = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started
    jax.block_until_ready(result)
    return seconds


def moves(
    *, shape: str, slots: int, prompt: int, dtype: str = "bfloat16", repeats: int = 5
) -> dict[str, Any]:
    """Measures seconds to insert a prefilled prompt into a slot, and to extract a sample from one.

    In the result, `large_copies` lists the instructions of the compiled programs that write a new array as
    large as one of those of the pool of KV pages: such a copy moves all slots' KV for one slot.
    """
    engine, value = bench_engine(
        shape, dtype, 2 * prompt, slots=slots, decode_steps=4, page_tokens=min(64, prompt)
    )
    state = filled(engine, value, prompt)
    prefix = engine.prefill(params=value, padded_tokens=np.arange(prompt) % 200, true_length=prompt)
    states = [state]

    def insert() -> Any:
        states.append(engine.insert(prefix, states.pop(), 1))
        return states[0]

    insert_s = median_s(insert, repeats)
    extract_s = median_s(lambda: engine.extract(0, states[0], prompt), repeats)
    pool = min(leaf.nbytes for leaf in jax.tree.leaves(states[0].cache))
    request = engine.request(SampleId(0, 0), 0, Sampling(max_tokens=prompt), prompt)
    lowered = {
        "insert": engine.jitted.insert.lower(states[0], prefix, 1, request, -1),
        "extract": engine.jitted.extract.lower(states[0], 0, engine._bucket(prompt)),
    }
    return {
        "insert_s": insert_s,
        "extract_s": extract_s,
        "large_copies": {
            name: written(parse(each.compile().as_text() or ""), pool) for name, each in lowered.items()
        },
    }


# --- the trainer --------------------------------------------------------------------------------------------


def training(
    *, shape: str, rows: int, length: int, dtype: str = "bfloat16", remat: str = "layer", repeats: int = 3
) -> dict[str, Any]:
    """Measures an update of one micro-batch of full rows, and the pass that computes its log-probs.

    In the result, `mfu` is 6 FLOPs per parameter and token / seconds / the device's nominal FLOP/s (None for
    an unknown device), `logp_mfu` the same with 2 FLOPs; what remat recomputes is not counted.
    `peak_bytes` is the most device memory in use (None on a CPU), beside `forecast_bytes`. `products` counts
    the matrix products of the update's program by the dtypes of their operands, and `attention` names the
    kernel (blocks: JAX code). `kernels`, `device_to_host` and `busy_s` are from a trace of one update.
    """
    with compile_seconds() as compiled:
        learner, state = bench_learner(shape, rows, length, dtype, remat)  # type: ignore[arg-type]
        given = full_batch(learner)
        batch = learner.prepare(state, given)
        forecast = learner.forecast(state, batch)
        lowered = learner.programs.begin.lower(state, learner.micro_batches(batch)[0][0])
        jax.block_until_ready(learner.prepare(state, given))
        logp_s = [timed_s(lambda: learner.prepare(state, given)) for _ in range(repeats)]
        once = partial(updates(learner, state), batch)
        timed_s(once)
    took = [timed_s(once) for _ in range(repeats)]
    tokens, seconds = rows * length, statistics.median(took)
    target = target_of(jax.devices()[0].device_kind)
    flops = learner.model.active_parameter_count * tokens
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "mfu": target and 6 * flops / seconds / target.flops["bf16"],
        "logp_s": statistics.median(logp_s),
        "logp_mfu": target and 2 * flops / statistics.median(logp_s) / target.flops["bf16"],
        "compile_s": sum(compiled),
        "forecast_bytes": forecast.peak,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "products": dict(products(lowered.as_text())),
        "attention": learner.objective.forward.attention.path,
        **traced(once),
    }


# --- bits ---------------------------------------------------------------------------------------------------


def log_prob_gap(*, shape: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Measures how far log-probs of host and trainer differ on the same tokens, as `areal-jax parity`."""
    found = parity(shape, prompts=4, members=4, max_tokens=32, dtypes=[dtype], numerics=["bounded"])
    return found["rows"][0]


def canary_log_probs(*, shape: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Returns the canary's log-probs, which two processes with equal parameters must compute alike."""
    model = random_model(shape, dtype)
    log_probs = np.asarray(canary(model)(random_params(model, dtype)))
    return {"log_probs": log_probs.tolist(), "bits": log_probs.tobytes().hex()}


def repeated_update(*, shape: str, rows: int, length: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Returns whether an update of equal parameters by equal batches gives the same bits twice."""
    learner, state = bench_learner(shape, rows, length, dtype, remat="layer")
    given, digests = full_batch(learner), []
    for one in (state, learner.init(learner.model.init(0))):
        after, _ = learner.update(one, learner.prepare(one, given))
        digests.append(learner.versioned(after).digest)
    return {"is_repeatable": digests[0] == digests[1], "digests": digests}


CALLS: Mapping[str, Callable[..., dict[str, Any]]] = {
    call.__name__: call
    for call in (
        versions, matrix_product, memory, packed_kernel, paged_kernel, expert_kernel, decoding, moves,
        training, log_prob_gap, canary_log_probs, repeated_update, whole_run, sample, prefill, swap, loop,
        sync,
    )
}  # fmt: skip
"""Name -> measurement."""
