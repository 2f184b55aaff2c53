"""Every kernel compiles for the GPUs that it is meant for: Ampere, Ada and Hopper."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from areal_jax.models.kernels import expert_products, packed_attention, paged_attention
from areal_jax.models.kv_pages import KVPages
from areal_jax.plan.costs import costs_of, written
from areal_jax.plan.hlo import parse
from areal_jax.plan.planning import absent_devices
from areal_jax.plan.targets import parse_target

pytestmark = pytest.mark.accelerators

GPUS = ["a100-80", "l40s", "h100"]
QWEN = (12, 2, 128, "bfloat16")
SMOLLM2 = (9, 3, 64, "bfloat16")


def device(target: str) -> Any:
    return absent_devices(parse_target(target))[0]


def test_the_targets_have_the_compute_capabilities_of_these_gpus():
    assert [device(target).compute_capability for target in GPUS] == ["8.0", "8.9", "9.0"]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("sizes", [QWEN, SMOLLM2], ids=["qwen2.5", "smollm2"])
def test_packed_attention(target: str, sizes: tuple, monkeypatch: pytest.MonkeyPatch):
    """cuDNN's packed layout needs Hopper; Triton compiles everywhere, forward and backward."""
    packed_attention.choose.cache_clear()
    choice = packed_attention.choose("gpu", *sizes, absent=device(target))
    if target == "h100":
        assert choice.path == "cudnn"
        without = {"triton": packed_attention.KERNELS["triton"]}
        monkeypatch.setattr(packed_attention, "KERNELS", without)
        packed_attention.choose.cache_clear()
        choice = packed_attention.choose("gpu", *sizes, absent=device(target))
    else:
        assert "requires a GPU with at least Hopper architecture" in choice.rejected["cudnn"]
    assert choice.path == "triton"
    packed_attention.choose.cache_clear()


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("kernel", list(paged_attention.KERNELS))
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_paged_attention(target: str, kernel: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged_attention, "KERNELS", {kernel: paged_attention.KERNELS[kernel]})
    paged_attention.choose.cache_clear()
    choice = paged_attention.choose(
        "gpu", *QWEN, kv_dtype=kv_dtype, page_tokens=64, absent=device(target)
    )  # fmt: skip
    assert (choice.path, dict(choice.rejected)) == (kernel, {})
    paged_attention.choose.cache_clear()


@pytest.mark.parametrize("target", GPUS)
def test_expert_products(target: str):
    """In their three forms, for the experts of Qwen3-30B-A3B."""
    choice = expert_products.choose("gpu", 128, 2048, 768, "bfloat16", absent=device(target))
    assert (choice.path, dict(choice.rejected)) == ("triton", {})


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_the_paged_kernel_reads_a_large_pool_in_place(tokens: int, kv_dtype: str):
    """Keys of 5.5 GiB in bfloat16, and 2.7 GiB in int8, which the kernel sees as words of 16 bits."""
    gpu = device("h100")
    pool = jax.eval_shape(lambda: KVPages.zeros(1, 180_000, 64, 2, 128, kv_dtype, platform="gpu"))
    cache = jax.tree.map(lambda leaf: packed_attention.abstract_on(gpu, (leaf.shape, leaf.dtype))[0], pool)
    q, layer, table, lengths = packed_attention.abstract_on(
        gpu, ((4, tokens, 12, 128), "float32"), ((), "int32"), ((4, 32), "int32"), ((4, tokens), "int32")
    )
    text = jax.jit(paged_attention.pages).lower(q, cache, layer, table, lengths).compile().as_text()
    module = parse(text or "")
    assert costs_of(module).kernels == {"triton paged_attention": 1}
    assert written(module, pool.k.size // 128) == []  # not even the scales
