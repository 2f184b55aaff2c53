"""Kernels of decode steps: used where they pass their self-test, which fails what must not be used."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import paged_attention

from areal_jax.models.attention import PagedAttention
from areal_jax.models.config import model_config
from areal_jax.models.kernels import paged_attention as paged_kernels
from areal_jax.models.kernels.paged_attention import choose, choose_for, pages, self_test, softmax_over
from areal_jax.models.kv_pages import KVPages
from areal_jax.parallel.mesh import make_mesh

SHAPE = (4, 2, 16)
"""Heads, kv heads, head dimension."""
SMALL: dict[str, Any] = {"kv_dtype": "float32", "page_tokens": 16, "length": 96}


def by_blocks(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """What every device runs, with the last token written again where it stands."""
    at = jnp.maximum(lengths - 1, 0)
    page = jnp.take_along_axis(table, at[:, None] // cache.page_tokens, axis=1)[:, 0]
    k, v = (x[:, None] for x in cache.read(layer, page, slice(None), at % cache.page_tokens))
    attend = PagedAttention(table, at[:, None], (lengths > 0)[:, None])
    return attend(layer, q[:, None], k, v, cache)[0][:, 0]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_blocks_pass(kv_dtype: str):
    assert self_test(by_blocks, *SHAPE, kv_dtype=kv_dtype, page_tokens=16, length=96).problem is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "page_tokens", "length"),
    [("bfloat16", 16, 600), ("bfloat16", 24, 96), ("bfloat16", 128, 300), ("int8", 64, 256)],
)
def test_the_triton_kernel_passes_in_the_interpreter(
    kv_dtype: str, page_tokens: int, length: int, monkeypatch: pytest.MonkeyPatch
):
    """Its mathematics and our tables of tiles, several a page, a page, and splits; only speed needs a GPU."""
    interpreted = partial(paged_attention.paged_attention, interpret=True)
    monkeypatch.setattr(paged_attention, "paged_attention", interpreted)
    fault = self_test(pages, *SHAPE, kv_dtype=kv_dtype, page_tokens=page_tokens, length=length)
    assert fault.problem is None


def far(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    return softmax_over(q, cache, layer, table, jnp.full_like(lengths, table.shape[1] * cache.page_tokens))


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
    return softmax_over(q[:, order], cache, layer, table, lengths)[:, order]


def mixes(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """Within the tolerance, and yet a slot's bits depend on another's."""
    out = softmax_over(q, cache, layer, table, lengths)
    return out + 1e-6 * jnp.where(lengths > 0, out.mean((1, 2)), 0).sum()


def split_by_content(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    """Rounds otherwise where the longest slot is shorter: the shape rule's trap."""
    out = softmax_over(q, cache, layer, table, lengths)
    return jnp.where(lengths.max() > 60, out, out.astype(jnp.bfloat16).astype(jnp.float32))


def raises(q: Any, cache: KVPages, layer: Any, table: Any, lengths: Any) -> Any:
    raise NotImplementedError("no such device")


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (far, "reads keys beyond a slot's length"),
        (next_page, "reads keys beyond a slot's length or from another slot's pages"),
        (first_layer, "reads keys beyond a slot's length or from another"),
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
    assert (on_cpu.path, set(on_cpu.rejected)) == ("blocks", {"pages", "cudnn"})
    assert choose("gpu", *SHAPE, "float32", kv_dtype="bfloat16", page_tokens=16).path == "blocks"
    assert choose("gpu", *SHAPE, "bfloat16", kv_dtype="float32", page_tokens=16).path == "blocks"
    tried = {"pages": raises, "cudnn": by_blocks}
    monkeypatch.setattr(paged_kernels, "KERNELS", tried)
    here = lambda test, *given, **named: test(*given, **named)  # noqa: E731 - test_trials.py has the process
    monkeypatch.setattr(paged_kernels, "tried_apart", here)
    choice = choose("gpu", *SHAPE, "bfloat16", kv_dtype="int8", page_tokens=16)
    assert choice.path == "cudnn"
    assert choice.rejected == {"pages": "NotImplementedError: no such device"}
    choose.cache_clear()
    monkeypatch.setattr(paged_kernels, "KERNELS", {"pages": raises})
    assert choose("gpu", *SHAPE, "bfloat16", kv_dtype="int8", page_tokens=16).path == "blocks"
    choose.cache_clear()


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "pages", "reason"),
    [
        ({}, "bfloat16", 100, "needs CUDA; this device is cpu"),
        ({"numerics": "exact"}, "bfloat16", 100, "trainer.numerics=exact requires"),
        ({}, "int8", 2**31 // (2 * 4 * 16 * 16), "cannot address"),
    ],
)
def test_where_no_kernel_is_even_tried(
    changes: dict[str, Any], kv_dtype: str, pages: int, reason: str, monkeypatch: pytest.MonkeyPatch
):
    if reason != "needs CUDA; this device is cpu":
        monkeypatch.setattr(paged_kernels, "choose", raises)
    config = replace(model_config("tiny", 20, "bfloat16"), **changes)
    mesh = make_mesh({"tensor": 1}, jax.devices(), "a host")
    choice, kernel = choose_for(config, mesh, kv_dtype, 16, pages)
    assert (choice.path, kernel) == ("blocks", None)
    assert all(reason in said for said in choice.rejected.values())


def test_the_pool_reaches_the_kernel_as_it_lies():
    """Lowered for CUDA: of all that is as large as the pool there are writes of one token and reshapes."""
    slots, places = 4, 6
    shape = (2, 9, 2, 128, 64)  # layers, pages, kv heads, page, head dimension
    cache = KVPages(jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16))
    table = jnp.zeros((slots, places), jnp.int32)

    def step(q: Any, k: Any, v: Any, cache: KVPages, layer: Any, at: Any) -> Any:
        return PagedAttention(table, at[:, None], at[:, None] > 0, pages)(layer, q, k, v, cache)

    q, kv = jnp.zeros((slots, 1, 8, 64)), jnp.zeros((slots, 1, 2, 64))
    traced = jax.jit(step).trace(q, kv, kv, cache, jnp.int32(1), jnp.zeros(slots, jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    size = int(np.prod(shape))
    large = []
    for line in text.splitlines():
        name = re.search(r"= \"?(stablehlo\.\w+|call)|(\}\)) :", line)
        results = line.rpartition("->")[2].split(" loc(")[0]
        shapes = re.findall(r"<((?:\d+x)+)", results)
        if name and any(np.prod([int(n) for n in dims.split("x")[:-1]]) >= size for dims in shapes):
            large.append(name.group(1) or "scatter")
    assert sorted(large) == ["scatter", "scatter", "stablehlo.reshape", "stablehlo.reshape"]
    assert text.count("scatter_dims_to_operand_dims = [0, 1, 2, 3]") == 2  # else it is transposed for it
    assert text.count("xla.gpu.triton") == 1


def test_a_token_that_is_no_number_is_seen_by_those_who_look_alone():
    """Its page goes to another slot, or lies in the scratch page: not a bit of anybody else moves."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 1, 2, 8)), jnp.float32) for _ in range(3))
    table = jnp.array([[1, 0], [2, 3]])

    def run(cache: KVPages, k: Any, v: Any, at: list[int]) -> tuple[np.ndarray, KVPages]:
        attend = PagedAttention(table, jnp.array(at)[:, None], jnp.ones((2, 1), bool))
        out, cache = attend(jnp.int32(0), q, k, v, cache)
        return np.asarray(out), cache

    clean = KVPages.zeros(1, 3, 4, 2, 8, "float32")
    want, _ = run(clean, k, v, [0, 5])
    for bad in (np.nan, np.inf, -3.2e38):
        out, spoilt = run(clean, k, v.at[0].set(bad), [2, 5])  # a former user of the page, and scratch
        assert np.isnan(out[0]).all()
        scratch = jnp.zeros((1, 4), int), jnp.arange(4)[None]
        spoilt = spoilt.written(0, *scratch, *jnp.full((2, 1, 4, 2, 8), bad))
        assert run(spoilt, k, v, [0, 5])[0].tobytes() == want.tobytes()
