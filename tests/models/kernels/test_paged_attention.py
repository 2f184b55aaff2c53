"""The kernel over pages against float64, and its self-test, which must refuse kernels with faults."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import PagedAttention
from areal_jax.models.config import model_config
from areal_jax.models.kernels import paged_attention as paged_kernels
from areal_jax.models.kernels.paged_attention import choose, choose_for, pages, self_test, softmax_over
from areal_jax.models.kernels.paged_triton import attend
from areal_jax.models.kv_pages import KVPages
from areal_jax.parallel.mesh import make_mesh

SHAPE = (4, 2, 16)
"""Heads, kv heads, head dimension."""
SMALL: dict[str, Any] = {"kv_dtype": "float32", "page_tokens": 16, "length": 96}


def by_blocks(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """What every device runs, with the queries' own tokens written again where they stand."""
    at = jnp.maximum(lengths - 1, 0)
    page = jnp.take_along_axis(table, at // cache.page_tokens, axis=1)
    head = jnp.arange(cache.k.shape[2])
    k, v = cache.read(layer, page[..., None], head, at[..., None] % cache.page_tokens)
    return PagedAttention(table, at, lengths > 0)(layer, q, k, v, cache)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_blocks_pass(kv_dtype: str):
    assert self_test(by_blocks, *SHAPE, kv_dtype=kv_dtype, page_tokens=16, length=96).problem is None


def filled(rng: np.random.Generator, kv_dtype: str, page_tokens: int, pages: int) -> KVPages:
    """Two layers of pages with 2 kv heads of 16; layer 1 has random tokens."""
    cache = KVPages.zeros(2, pages, page_tokens, 2, 16, kv_dtype)
    k, v = rng.normal(size=(2, pages + 1, page_tokens, 2, 16)).astype(np.float32)
    page, place = np.mgrid[: pages + 1, :page_tokens]
    return cache.written(1, jnp.asarray(page), jnp.asarray(place), jnp.asarray(k), jnp.asarray(v))


TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 2e-2}
"""Largest accepted error, relative to a head's largest value."""


@pytest.mark.parametrize(
    ("kv_dtype", "tokens", "heads", "page_tokens", "places"),
    [
        ("float32", 1, 4, 16, 40),  # three splits of a slot's keys
        pytest.param(
            "float32", 37, 6, 24, 9, marks=pytest.mark.slow
        ),  # 111 rows of 3 query heads: two programs a slot and kv head
        # 17 query heads a kv head, and pages that blocks of keys do not divide
        pytest.param("bfloat16", 1, 34, 24, 5, marks=pytest.mark.slow),
        pytest.param("int8", 1, 4, 16, 40, marks=pytest.mark.slow),
        ("int8", 5, 6, 8, 13),
    ],
)
def test_the_kernel_is_softmax_over_what_a_query_sees(
    kv_dtype: str, tokens: int, heads: int, page_tokens: int, places: int
):
    """In the interpreter, against float64 over what the pages hold. A query without keys gets 0."""
    rng, slots, tolerance = np.random.default_rng(3), 3, TOLERANCES[kv_dtype]
    room, group = places * page_tokens, heads // 2
    cache = filled(rng, kv_dtype, page_tokens, slots * places)
    table = 1 + rng.permutation(slots * places).reshape(slots, places)
    q = rng.normal(size=(slots, tokens, heads, 16)).astype(np.float32)
    lengths = np.sort(rng.integers(0, room + 1, (slots, tokens)), axis=1)
    lengths[0, -1], lengths[1, 0] = room, 0
    run = jax.jit(partial(attend, interpret=True))
    got = np.asarray(run(q, cache, jnp.int32(1), jnp.asarray(table), jnp.asarray(lengths)))
    keys, values = (np.asarray(x, np.float64) for x in cache.read(1))
    for slot, token, head in np.ndindex(slots, tokens, heads):
        at = np.arange(int(lengths[slot, token]))
        where = table[slot, at // page_tokens], head // group, at % page_tokens
        scores = keys[where] @ q[slot, token, head].astype(np.float64) / 4
        weights = np.exp(scores - scores.max(initial=-np.inf))
        want = weights @ values[where] / max(weights.sum(), 1)
        np.testing.assert_allclose(got[slot, token, head], want, atol=tolerance * max(abs(want).max(), 0.1))


def test_the_kernel_passes_in_the_interpreter():
    kernel = partial(attend, interpret=True)
    assert self_test(kernel, *SHAPE, kv_dtype="int8", page_tokens=16, length=96).problem is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "page_tokens", "length"),
    [
        pytest.param("bfloat16", 16, 600, marks=pytest.mark.soak),
        pytest.param("bfloat16", 24, 96, marks=pytest.mark.soak),
        pytest.param("bfloat16", 128, 300, marks=pytest.mark.soak),
        ("int8", 64, 600),
    ],
)
def test_the_kernel_passes_with_other_pages(kv_dtype: str, page_tokens: int, length: int):
    """Pages of other sizes, one that divides no block of keys, and several splits of a slot's keys."""
    kernel = partial(attend, interpret=True)
    fault = self_test(kernel, *SHAPE, kv_dtype=kv_dtype, page_tokens=page_tokens, length=length)
    assert fault.problem is None


def far(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    return softmax_over(q, cache, layer, table, jnp.full_like(lengths, table.shape[1] * cache.page_tokens))


def not_causal(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """Each query sees what the last of its slot sees: right in a decode step."""
    longest = jnp.broadcast_to(lengths.max(1, keepdims=True), lengths.shape)
    return softmax_over(q, cache, layer, table, longest)


def next_page(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    return softmax_over(q, cache, layer, jnp.roll(table, 1, axis=1), lengths)


def first_layer(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    return softmax_over(q, cache, 0 * layer, table, lengths)


def adds_what_is_masked(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """0 * values, all of them: a value that is no number would be seen."""
    return softmax_over(q, cache, layer, table, lengths) + 0 * cache.read(layer, 0)[1].sum()


def one_too_few(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    return softmax_over(q, cache, layer, table, jnp.maximum(lengths - 1, 1))


def unscaled(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    return softmax_over(q * 4, cache, layer, table, lengths)


def other_heads(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """Query heads dealt out to kv heads in turn instead of in runs."""
    order = jnp.array([0, 2, 1, 3])
    return softmax_over(q[:, :, order], cache, layer, table, lengths)[:, :, order]


def mixes(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """Within the tolerance, and yet a slot's bits depend on another's."""
    out = softmax_over(q, cache, layer, table, lengths)
    return out + 1e-6 * jnp.where(lengths > 0, out.mean((2, 3)), 0).sum()


def split_by_content(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """Rounds otherwise where the longest slot is shorter: the shape rule's trap."""
    out = softmax_over(q, cache, layer, table, lengths)
    return jnp.where(lengths.max() > 60, out, out.astype(jnp.bfloat16).astype(jnp.float32))


def raises(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    raise NotImplementedError("no such device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (far, "with 1 query token per slot: it reads keys beyond a token's position"),
        (next_page, "reads keys beyond a token's position or from another slot's pages"),
        (first_layer, "reads keys beyond a token's position or from another"),
        (not_causal, "with 37 query tokens per slot: its output differs from float32 by"),
        (one_too_few, "its output differs from float32 by"),
        (unscaled, "its output differs from float32 by"),
        (other_heads, "its output differs from float32 by"),
        (mixes, "depends on its neighbours' content or length"),
        (split_by_content, "depends on its neighbours' content or length"),
        (raises, "NotImplementedError: no such device"),
    ],
)
def test_what_must_not_be_used_is_found(kernel: Any, problem: str):
    assert problem in str(self_test(kernel, *SHAPE, **SMALL).problem)


def test_what_is_masked_may_be_multiplied_by_0():
    assert self_test(adds_what_is_masked, *SHAPE, **SMALL).problem is None


def test_the_choice_names_what_was_rejected(monkeypatch: pytest.MonkeyPatch):
    choose.cache_clear()
    on_cpu = choose("cpu", *SHAPE, "bfloat16", kv_dtype="bfloat16", page_tokens=16)
    assert (on_cpu.path, set(on_cpu.rejected)) == ("blocks", {"pages"})
    assert choose("gpu", *SHAPE, "float32", kv_dtype="bfloat16", page_tokens=16).path == "blocks"
    assert choose("gpu", *SHAPE, "bfloat16", kv_dtype="float32", page_tokens=16).path == "blocks"
    tried = {"pages": raises, "other": softmax_over}
    monkeypatch.setattr(paged_kernels, "KERNELS", tried)
    here = lambda test, *given, **named: test(*given, **named, length=96)  # noqa: E731 - test_trials.py has the process
    monkeypatch.setattr(paged_kernels, "tried_apart", here)
    choice = choose("gpu", *SHAPE, "bfloat16", kv_dtype="int8", page_tokens=16)
    assert choice.path == "other"
    reason = "with 1 query token per slot: NotImplementedError: no such device"
    assert choice.rejected == {"pages": reason}
    choose.cache_clear()
    monkeypatch.setattr(paged_kernels, "KERNELS", {"pages": raises})
    assert choose("gpu", *SHAPE, "bfloat16", kv_dtype="int8", page_tokens=16).path == "blocks"
    choose.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "needs CUDA; this device is cpu"),
        ({"numerics": "exact"}, "trainer.numerics=exact requires"),
    ],
)
def test_where_no_kernel_is_even_tried(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch):
    if changes:
        monkeypatch.setattr(paged_kernels, "choose", raises)
    config = replace(model_config("tiny", 20, "bfloat16"), **changes)
    mesh = make_mesh({"tensor": 1}, jax.devices(), "a host")
    choice, kernel = choose_for(config, mesh, "bfloat16", 16)
    assert (choice.path, kernel) == ("blocks", None)
    assert all(reason in said for said in choice.rejected.values())


def lowered(tokens: int, kv_dtype: str, shape: tuple[int, ...]) -> str:
    """StableHLO for CUDA of attention with the kernel, over a pool of `shape` (L, P, K, page, h)."""
    slots, places = 4, 6
    layers, pool, kv_heads, size, head_dim = shape
    zeros = partial(KVPages.zeros, layers, pool - 1, size, kv_heads, head_dim, kv_dtype, platform="gpu")
    table = jnp.zeros((slots, places), jnp.int32)

    def step(q: Any, k: Any, v: Any, cache: KVPages, layer: Any, at: Any) -> Any:
        return PagedAttention(table, at, at > 0, pages)(layer, q, k, v, cache)

    abstract = jax.ShapeDtypeStruct
    q, kv = (abstract((slots, tokens, n, head_dim), jnp.float32) for n in (4 * kv_heads, kv_heads))
    at = abstract((slots, tokens), jnp.int32)
    traced = jax.jit(step).trace(q, kv, kv, jax.eval_shape(zeros), abstract((), jnp.int32), at)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize(("kv_dtype", "viewed"), [("bfloat16", []), ("int8", ["reshape", "bitcast_convert"])])
def test_the_pool_reaches_the_kernel_as_it_lies(tokens: int, kv_dtype: str, viewed: list[str]):
    """Lowered for CUDA: of all that is as large as the pool there are writes of one token and views."""
    shape = (2, 99, 2, 128, 64)
    text = lowered(tokens, kv_dtype, shape)
    size = int(np.prod(shape)) // 2  # a view may have half as many numbers
    large = []
    for line in text.splitlines():
        name = re.search(r"= \"?(?:stablehlo\.(\w+)|call)|(\}\)) :", line)
        results = line.rpartition("->")[2].split(" loc(")[0]
        shapes = re.findall(r"<((?:\d+x)+)", results)
        if name and any(np.prod([int(n) for n in dims.split("x")[:-1]]) >= size for dims in shapes):
            large.append(name.group(1) or "scatter")
    assert sorted(large) == sorted(["scatter", "scatter", *viewed, *viewed])
    of_scales = 2 * (kv_dtype == "int8")
    assert text.count("scatter_dims_to_operand_dims = [0, 1, 2, 3]") == 2 + of_scales  # else it is transposed
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("bfloat16", 2), ("int8", 1)])
def test_no_offset_in_a_pool_overflows(kv_dtype: str, itemsize: int):
    """Up to 2**32 bytes Pallas computes offsets of elements as signed 32-bit numbers, beyond with 64 bits."""
    pool = 2**32 // (2 * 2 * 64 * 64 * itemsize)
    call = lowered(1, kv_dtype, (2, pool, 2, 64, 64)).rpartition("@__gpu$xla.gpu.triton")[2]
    operands = call[call.index(" : (") : call.index(" -> ")]
    large = [
        (int(np.prod([int(n) for n in dims.split("x")[:-1]])), bits)
        for dims, bits in re.findall(r"<((?:\d+x)+)\D+(\d+)>", operands)
    ]
    assert sum(count * int(bits) == 2**35 for count, bits in large) == 2  # the keys, and the values
    assert max(count for count, _ in large) == 2**31


@pytest.mark.slow
def test_a_token_that_is_no_number_is_seen_by_those_who_look_alone():
    """Its page goes to another slot, or lies in the scratch page: not a bit of anybody else moves."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 1, 2, 8)), jnp.float32) for _ in range(3))
    table = jnp.array([[1, 0], [2, 3]])

    @jax.jit
    def attended(cache: KVPages, k: Any, v: Any, at: Any) -> tuple[jax.Array, KVPages]:
        return PagedAttention(table, at[:, None], jnp.ones((2, 1), bool))(jnp.int32(0), q, k, v, cache)

    def run(cache: KVPages, k: Any, v: Any, at: list[int]) -> tuple[np.ndarray, KVPages]:
        out, cache = attended(cache, k, v, np.array(at))
        return np.asarray(out), cache

    clean = KVPages.zeros(1, 3, 4, 2, 8, "float32")
    want, _ = run(clean, k, v, [0, 5])
    for bad in (np.nan, np.inf, -3.2e38):
        out, spoilt = run(clean, k, v.at[0].set(bad), [2, 5])  # a former user of the page, and scratch
        assert np.isnan(out[0]).all()
        scratch = jnp.zeros((1, 4), int), jnp.arange(4)[None]
        spoilt = spoilt.written(0, *scratch, *jnp.full((2, 1, 4, 2, 8), bad))
        assert run(spoilt, k, v, [0, 5])[0].tobytes() == want.tobytes()
