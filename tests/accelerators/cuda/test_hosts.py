"""What XLA makes of a host's programs of Qwen2.5-1.5B for H100s: one device a host, and two by heads.

128 slots of 2,048 tokens in pages of 64, 16 tokens a call, as in the packaged recipe.
"""

from __future__ import annotations

import re

import pytest

from tests.accelerators.compiling import Setting, compiled, off_the_committed_costs, opened

pytestmark = pytest.mark.accelerators

NAME = "qwen2.5_1.5b_gsm8k_8gpu.yaml"
HOSTS = {
    "1": Setting("host on H100", "h100x5", NAME, ("runtime.hosts=1",)),
    "tensor 2": Setting(
        "host tensor 2 on H100", "h100x6", NAME, ("runtime.hosts=1", "runtime.host_tensor=2")
    ),
}
POOL = 28 * 4097 * 2 * 64 * 128 * 2
"""Bytes of the pool's keys, and of its values."""
PROGRAMS = ["prefill", "insert", "decode", "recompute", "extract"]

every_host = pytest.mark.parametrize("host", HOSTS)


def pool_of(host: str) -> int:
    return POOL // opened(HOSTS[host]).config.runtime.host_tensor


@every_host
def test_decoding_multiplies_in_bfloat16_and_attends_by_the_paged_kernel(host: str):
    found = compiled(HOSTS[host], "decode")
    assert set(found.products) == {"bf16 x bf16"}
    assert opened(HOSTS[host]).sides[1].attention == "pages"
    assert sum(found.costs.kernels.values()) == 16 * 28
    assert all("paged_attention" in name for name in found.costs.kernels)


STACKED_GB = {"1": 251.2, "tensor 2": 145.2}
"""10^9 bytes that a decode call moved when its weights were stacked: in each of 16 steps the matrices of 28
layers, 2.62 of them, were copied before their products, which wrote and read them once more.
"""
NO_KERNEL = ("parameter", "get-tuple-element", "tuple", "bitcast", "while")


@every_host
def test_decoding_reads_each_layers_matrices_in_place(host: str):
    """XLA joins queries, keys and values in one product, gate and up in another, without joining matrices."""
    found, shards = compiled(HOSTS[host], "decode"), opened(HOSTS[host]).config.runtime.host_tensor
    layers = 28 * (2 * 1536 * 1536 + 2 * 256 * 1536 + 3 * 1536 * 8960) * 2 / shards
    assert found.costs.bytes == pytest.approx(1e9 * STACKED_GB[host] - 16 * 2 * layers, rel=0.02)
    matrix = sorted((1536, 8960 // shards))
    made = [
        one.name
        for computation in found.module.computations.values()
        for one in computation
        if one.opcode not in NO_KERNEL
        and any(sorted(size for size in array.shape if size > 1) == matrix for array in one.arrays)
    ]
    assert made == []
    products = [line for line in found.text.splitlines() if re.match(r"%gemm_fusion.* -> .* {$", line)]
    matrices = [len(re.findall(r": bf16\[1536,", line)) for line in products]
    assert matrices.count(3) >= 28 and matrices.count(2) >= 28


@every_host
def test_decoding_touches_no_memory_of_the_host(host: str):
    """The tokens of a call are its result, which the caller copies once."""
    found = compiled(HOSTS[host], "decode")
    assert found.costs.host_bytes == 0
    assert not any(word in found.text for word in (" send(", " recv(", " outfeed(", " infeed("))


@every_host
def test_decoding_has_no_conditional_and_no_loop_that_depends_on_data(host: str):
    costs = compiled(HOSTS[host], "decode").costs
    assert (costs.conditionals, costs.dynamic_loops) == (0, 0)


@every_host
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_of_a_host_copies_the_pool(host: str, program: str):
    from areal_jax.plan.costs import written

    assert written(compiled(HOSTS[host], program).module, pool_of(host)) == []


@every_host
@pytest.mark.parametrize("program", ["prefill", "recompute"])
def test_prefill_and_recompute_attend_by_the_kernel(host: str, program: str):
    found = compiled(HOSTS[host], program)
    assert set(found.products) == {"bf16 x bf16"}
    # The last layer's attention changes no KV, and XLA leaves it out.
    assert found.costs.kernels == {"triton paged_attention": 27}
    assert (found.costs.conditionals, found.costs.dynamic_loops) == (0, 0)


@every_host
@pytest.mark.parametrize("program", PROGRAMS)
def test_costs_are_those_of_the_committed_table(host: str, program: str):
    assert off_the_committed_costs(HOSTS[host], program) == ""
