"""Costs of small programs that XLA compiled for the CPU, and of lines of other compilers, counted by hand."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.config.loading import load_config
from areal_jax.models.config import ModelConfig
from areal_jax.models.device_layout import laid_out
from areal_jax.models.model import Model
from areal_jax.plan import planning
from areal_jax.plan.bounds import lines_of_today, products, seconds
from areal_jax.plan.costs import Assumed, Collective, Costs, Moved, Traffic, costs_of, group_size, written
from areal_jax.plan.hlo import arrays_of, parse
from areal_jax.plan.targets import TARGETS, parse_target
from areal_jax.tasks.tokenizers import CharTokenizer


def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
    with lines_of_today():
        return compiled_once(function, *arguments, **options)


def compiled_once(function: Any, *arguments: Any, **options: Any) -> Any:
    """As the cache has it, if it does."""
    return parse(jax.jit(function, **options).lower(*arguments).compile().as_text())


def f32(*shape: int, on: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on)


def test_a_loops_products_count_as_often_as_it_runs():
    def five_times(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    costs = costs_of(compiled(five_times, f32(8, 16), f32(5, 16, 16)))
    assert costs.flops == {"f32": 5 * 2 * 8 * 16 * 16}
    assert costs.dynamic_loops == costs.conditionals == 0


def test_a_loop_that_depends_on_data_runs_as_often_as_assumed_for_its_scope():
    def until(x: Any, w: Any, n: Any) -> Any:
        with jax.named_scope("rounds"):
            return jax.lax.fori_loop(0, n, lambda _, x: x @ w, x)

    module = compiled(until, f32(8, 16), f32(16, 16), jax.ShapeDtypeStruct((), jnp.int32))
    once = 2 * 8 * 16 * 16
    for trips, times in (({}, 1), ({"rounds": 7}, 7), ({"other": 7}, 1)):
        costs = costs_of(module, Assumed(trips))
        assert (costs.flops["f32"], costs.dynamic_loops) == (times * once, 1)


def test_of_a_conditional_the_assumed_branch_counts():
    def either(flag: Any, x: Any, w: Any) -> Any:
        return jax.lax.cond(flag, lambda x: x @ w @ w, lambda x: x @ w, x)

    module = compiled(either, jax.ShapeDtypeStruct((), jnp.bool_), f32(8, 16), f32(16, 16))
    once = 2 * 8 * 16 * 16
    assert costs_of(module, Assumed(takes_costlier=True)).flops["f32"] == 2 * once
    assert costs_of(module, Assumed(takes_costlier=False)).flops["f32"] == once
    assert costs_of(module).conditionals == 1


def test_a_slice_is_read_and_an_update_in_place_is_written_alone():
    """Of an array of 4 MB, a row of 4 kB: neither the read nor the donated update moves the array."""
    pool, row = f32(1024, 1024), f32(1024)
    at = jax.ShapeDtypeStruct((), jnp.int32)
    read = costs_of(compiled(lambda pool, i: pool[i] + 1.0, pool, at))
    assert 8192 <= read.bytes < 8192 + 64
    module = compiled(lambda pool, row, i: pool.at[i].set(row), pool, row, at, donate_argnums=0)
    assert 8192 <= costs_of(module).bytes < 3 * 8192
    assert written(module, 2**22) == []


def test_traffic_names_arrays_operation_and_line_and_the_largest_come_first():
    """Five trips read and write 4 MB; before them 64 kB are read and a number is written."""

    def five_times(x: Any, y: Any) -> Any:
        with jax.named_scope("rounds"):
            x = jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x), x)
        return x, y.sum()

    costs = costs_of(compiled(five_times, f32(1024, 1024), f32(128, 128)))
    (largest, times), *others = costs.largest_traffic(0.9)
    whole = (Moved("f32[1024,1024]", 2**22),)
    assert (largest.reads, largest.writes, times) == (whole, whole, 5)
    assert largest.operation.endswith("rounds/while/body/closed_call/tanh")
    line = five_times.__code__.co_firstlineno + 2
    assert largest.line.endswith(f"tests/plan/test_costs.py:{line}")
    assert [(one.opcode, count) for one, count in others] in (
        [],
        [("copy", 1)],
    )  # of the argument that is kept
    every = costs.largest_traffic(1.0)
    assert sum(one.bytes * count for one, count in every) == costs.bytes
    (summed,) = (one for one, _ in every if one.operation.endswith("/reduce_sum"))
    assert (summed.reads[0], summed.writes) == (Moved("f32[128,128]", 2**16), (Moved("f32[]", 4),))


def test_bytes_of_a_program_that_the_cache_holds_from_another_line_name_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    def tanh(x: Any) -> Any:
        return jnp.tanh(x)

    def moved(x: Any) -> Any:
        return jnp.tanh(x)

    moved.__name__, moved.__qualname__ = tanh.__name__, tanh.__qualname__
    one = SimpleNamespace(role="host", name="decode")
    recipe = SimpleNamespace(sides=[SimpleNamespace(programs=[one])])
    monkeypatch.setattr(planning, "absent_devices", lambda _: None)
    monkeypatch.setattr(planning, "open_recipe", lambda *_: recipe)
    for of in (tanh, moved):
        found_by = partial(compiled_once, of, f32(32, 1024))
        compile_it = lambda *_, by=found_by: SimpleNamespace(costs=costs_of(by()))  # noqa: E731
        monkeypatch.setattr(planning, "_compiled", compile_it)
        found = planning.largest_traffic(load_config(), parse_target("h100"), "host.decode", print)
        line = found["traffic"][0]["line"]
        assert line.endswith(f"tests/plan/test_costs.py:{of.__code__.co_firstlineno + 1}")


def test_what_writes_a_whole_array_is_found():
    """Without donation the update needs a copy of the array."""
    at = jax.ShapeDtypeStruct((), jnp.int32)
    module = compiled(lambda pool, row, i: pool.at[i].set(row), f32(1024, 1024), f32(1024), at)
    assert [line.split(": ")[1] for line in written(module, 2**22)] == ["copy"]
    assert costs_of(module).bytes >= 2 * 2**22


def mesh(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("x",))


@pytest.mark.parametrize(
    ("function", "kind", "size", "sent"),
    [
        (lambda x: jax.lax.all_gather(x, "x", tiled=True), "all-gather", 4096, 3072),
        (lambda x: jax.lax.psum(x, "x"), "all-reduce", 1024, 1536),
        (lambda x: jax.lax.psum_scatter(x, "x", tiled=True), "reduce-scatter", 1024, 768),
    ],
)
def test_collectives(function: Any, kind: str, size: int, sent: float):
    """Four devices with 256 float32 numbers each: 1,024 bytes."""
    devices = mesh(4)
    spec = PartitionSpec("x")
    of = jax.shard_map(function, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    costs = costs_of(compiled(of, f32(1024, on=NamedSharding(devices, spec))))
    assert costs.collectives == Counter({Collective(kind, "f32", size, 4): 1})
    assert costs.sent == sent


def test_a_collective_in_a_loop_counts_each_time():
    devices = mesh(4)

    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 6, lambda _, x: jax.lax.psum(x, "x") / 4, x)

    spec = PartitionSpec("x")
    of = jax.shard_map(loop, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    costs = costs_of(compiled(of, f32(1024, on=NamedSharding(devices, spec))))
    assert costs.collectives[Collective("all-reduce", "f32", 1024, 4)] == 6


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 4),
        ("replica_groups=[4,2]<=[8], dimensions={0}", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, use_global_device_ids=true", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}, channel_id=3", 8),
        ("source_target_pairs={{0,1},{1,0}}", 2),
    ],
)
def test_groups_of_a_collective(groups: str, size: int):
    assert group_size(groups) == size


def module_of(*lines: str, more: str = "") -> Any:
    body = "\n".join(f"  {line}" for line in lines)
    return parse(f"HloModule test\n\n{more}\nENTRY %main (p: f32[2]) -> f32[2] {{\n{body}\n}}\n")


def test_a_fusion_that_is_not_waited_for_moves_as_many_bytes():
    """Newer compilers for GPUs begin some: here one that reads a row of 896 bfloat16 numbers out of 24."""
    inside = """%slice (p: bf16[24,896], i: s32[]) -> bf16[1,896] {
      %p = bf16[24,896]{1,0} parameter(0)
      %i = s32[] parameter(1)
      %zero = s32[] constant(0)
      ROOT %row = bf16[1,896]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,896}
    }
    """
    given = "%p = bf16[24,896]{1,0} parameter(0)", "%i = s32[] parameter(1)"
    waited = module_of(*given, "ROOT %row = bf16[1,896]{1,0} fusion(%p, %i), calls=%slice", more=inside)
    begun = module_of(
        *given,
        "%start = ((bf16[24,896]{1,0}, s32[]), bf16[1,896]{1,0}, u32[]) fusion-start(%p, %i), calls=%slice",
        "ROOT %row = bf16[1,896]{1,0} fusion-done(%start)",
        more=inside,
    )
    assert costs_of(begun).bytes == costs_of(waited).bytes == 2 * 2 * 896 + 4


def test_numbers_that_a_fusion_picks_are_read_alone():
    """Of 1024 x 1024 numbers that it scales, one in each of 64 rows; where it also sums them, all."""
    picks = """%picks (p: f32[1024,1024], at: s32[64,2]) -> f32[64] {
      %p = f32[1024,1024]{1,0} parameter(0)
      %at = s32[64,2]{1,0} parameter(1)
      %scaled = f32[1024,1024]{1,0} multiply(%p, %p)
      ROOT %some = f32[64]{0} gather(%scaled, %at), offset_dims={}, slice_sizes={1,1}
    }
    """
    given = "%p = f32[1024,1024]{1,0} parameter(0)", "%at = s32[64,2]{1,0} parameter(1)"
    one = "ROOT %row = f32[64]{0} fusion(%p, %at), calls=%picks"
    assert costs_of(module_of(*given, one, more=picks)).bytes == 4 * (64 + 64 * 2 + 64)
    also = "%sums = f32[1024]{0} reduce(%scaled, %at), dimensions={0}\n      ROOT"
    assert costs_of(module_of(*given, one, more=picks.replace("ROOT", also))).bytes == 4 * (2**20 + 128 + 64)


def test_a_tpus_convolution_is_a_product():
    simple = module_of(
        "%x = bf16[64,32]{1,0} parameter(0)",
        "%w = bf16[32,16]{1,0} parameter(1)",
        "ROOT %y = f32[64,16]{1,0} convolution(%x, %w), dim_labels=bf_io->bf",
    )
    assert costs_of(simple).flops == {"bf16": 2 * 64 * 32 * 16}
    # One axis of size 1, padded by 2 on both sides, under a window of 3: of 9 places 3 hold a number.
    padded = module_of(
        "%x = bf16[64,1,32]{2,1,0} parameter(0)",
        "%w = bf16[3,32,16]{2,1,0} parameter(1)",
        "ROOT %y = f32[64,3,16]{2,1,0} convolution(%x, %w), window={size=3 pad=2_2}, dim_labels=b0f_0io->b0f",
    )
    assert costs_of(padded).flops == {"bf16": 2 * 64 * 32 * 16 * 3}


def test_a_loop_without_a_written_number_of_trips_has_it_in_its_condition():
    """As XLA's TPU compiler leaves it: a counter from 0, compared with a constant."""
    more = """
%body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %b = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %x = f32[8,8]{1,0} get-tuple-element(%b), index=1
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,8]) tuple(%next, %y)
}

%condition (c: (s32[], f32[8,8])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(28)
  %j = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}
"""
    module = module_of(
        "%zero = s32[] constant(0)",
        "%start = s32[] copy(%zero)",
        "%p = f32[8,8]{1,0} parameter(0)",
        "%both = (s32[], f32[8,8]) tuple(%start, %p)",
        "ROOT %w = (s32[], f32[8,8]) while(%both), condition=%condition, body=%body",
        more=more,
    )
    costs = costs_of(module)
    assert (costs.flops["f32"], costs.dynamic_loops) == (28 * 2 * 8**3, 0)


def test_an_attention_kernel_costs_its_products_over_the_keys_seen():
    """cuDNN's forward pass over 2 rows of 64 tokens, 4 heads of 8, where a query sees 32 keys in the mean."""
    module = module_of(
        "%q = bf16[2,64,4,8]{3,2,1,0} parameter(0)",
        "%k = bf16[2,64,2,8]{3,2,1,0} parameter(1)",
        "%v = bf16[2,64,2,8]{3,2,1,0} parameter(2)",
        "ROOT %a = (bf16[2,64,4,8]{3,2,1,0}, f32[8,64]{1,0}, u8[0]{0}) custom-call(%q, %k, %v),"
        ' custom_call_target="__cudnn$fmhaSoftmax", operand_layout_constraints={bf16[2,64,4,8]{3,2,1,0}}',
    )
    costs = costs_of(module, Assumed(keys=32))
    assert costs.kernels == {"cudnn attention fwd": 1}
    assert costs.flops == {"bf16": 2 * 2 * (2 * 64 * 4 * 8) * 32}
    assert costs.bytes == 2 * (4096 + 2048 + 2048) + 2 * 4096 + 4 * 8 * 64


@pytest.mark.parametrize("tokens", [1, 32])
def test_the_paged_kernel_reads_the_pages_of_its_tables_and_not_the_pool(tokens: int):
    """3 slots, 2 kv heads of 16, 4 query heads each; a query sees 100 keys in the mean, of 116 read."""
    module = module_of(
        f"%q = bf16[3,{tokens},2,4,16]{{4,3,2,1,0}} parameter(0)",
        "%k = bf16[28,10000,2,64,16]{4,3,2,1,0} parameter(1)",
        "%v = bf16[28,10000,2,64,16]{4,3,2,1,0} parameter(2)",
        "%table = s32[3,4]{1,0} parameter(3)",
        f"%lengths = s32[3,{tokens}]{{1,0}} parameter(4)",
        "%layer = s32[1]{0} parameter(5)",
        f"ROOT %a = (bf16[1,3,{tokens},2,4,16]{{5,4,3,2,1,0}}, f32[1,3,{tokens},2,4]{{4,3,2,1,0}}) "
        "custom-call(%q, %k, %v, %table, %lengths, %layer),"
        ' custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "paged_attention"}',
    )
    costs = costs_of(module, Assumed(keys=100, context=116))
    queries = 3 * tokens * 2 * 4
    assert costs.kernels == {"triton paged_attention": 1}
    assert costs.flops == {"bf16": 2 * 2 * queries * 16 * 100}
    of_tables = 4 * (3 * 4 + 3 * tokens + 1)
    assert costs.bytes == 2 * (3 * 116 * 2 * 16 * 2) + of_tables + 2 * queries * 16 * 2 + queries * 4


def test_the_paged_kernel_reads_the_scales_of_int8_pages():
    """The kernel sees int8 codes in pairs, as words of 16 bits."""
    module = module_of(
        "%q = bf16[3,1,2,4,16]{4,3,2,1,0} parameter(0)",
        "%k = s16[28,10000,2,64,8]{4,3,2,1,0} parameter(1)",
        "%v = s16[28,10000,2,64,8]{4,3,2,1,0} parameter(2)",
        "%ks = f32[28,10000,2,64,1]{4,3,2,1,0} parameter(3)",
        "%vs = f32[28,10000,2,64,1]{4,3,2,1,0} parameter(4)",
        "ROOT %a = bf16[1,3,1,2,4,16]{5,4,3,2,1,0} custom-call(%q, %k, %v, %ks, %vs),"
        ' custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "paged_attention"}',
    )
    costs = costs_of(module, Assumed(keys=100, context=100))
    assert costs.bytes == 2 * 3 * 100 * 2 * (16 + 4) + 2 * (3 * 2 * 4 * 16 * 2)


def test_the_kernels_of_experts_multiply_the_rows_of_the_devices_own_experts():
    """Of 512 rows a quarter; half of its 8 experts have a row. Gradients of all of them are written."""
    products = module_of(
        "%x = bf16[512,32]{1,0} parameter(0)",
        "%w = bf16[8,32,16]{2,1,0} parameter(1)",
        "%expert = s32[12]{0} parameter(2)",
        "ROOT %y = f32[512,16]{1,0} custom-call(%x, %w, %expert),"
        ' custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "expert_products"}',
    )
    gradients = module_of(
        "%x = bf16[512,32]{1,0} parameter(0)",
        "%slope = bf16[512,16]{1,0} parameter(1)",
        "ROOT %y = f32[8,32,16]{2,1,0} custom-call(%x, %slope),"
        ' custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "expert_gradients"}',
    )
    assumed = Assumed(expert_rows=0.25, experts_read=0.5)
    forward, backward = (costs_of(module, assumed) for module in (products, gradients))
    assert forward.flops == backward.flops == {"bf16": 2 * 128 * 32 * 16}
    assert forward.bytes == 128 * 32 * 2 + 4 * 32 * 16 * 2 + 12 * 4 + 128 * 16 * 4
    assert backward.bytes == 128 * (32 + 16) * 2 + 8 * 32 * 16 * 4
    sums = module_of(
        "%y = f32[512,16]{1,0} parameter(0)",
        "%place = s32[64,2]{1,0} parameter(1)",
        "ROOT %out = f32[64,16]{1,0} custom-call(%y, %place),"
        ' custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "expert_sums"}',
    )
    found = costs_of(sums, assumed)
    assert (found.flops, found.bytes) == ({}, 128 * 16 * 4 + 64 * 2 * 4 + 64 * 16 * 4)


def test_a_decode_step_reads_the_matrices_of_no_more_experts_than_its_rows_have():
    """8 tokens with 2 of 128 experts each: at most 16 experts' matrices a layer, in the layout of hosts."""
    sizes = dict(vocab_size=16, layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32)
    mixture = dict(experts=128, experts_per_token=2, expert_width=24)
    model = Model(ModelConfig(**sizes, **mixture), CharTokenizer("abcdefghijklmn"))
    cache = jax.eval_shape(lambda: model.kv_pages(8, 16, "float32"))

    def step(params: Any, ids: Any, cache: Any) -> Any:
        attend = model.paged_attention(jnp.arange(1, 9)[:, None], ids * 0, ids >= 0)
        return model.hidden(params, ids, ids * 0, attend, cache)

    ids = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    params = jax.eval_shape(partial(laid_out, model, layout="split", platform="cpu"), model.abstract_params)
    costs = costs_of(
        compiled(step, params, ids, cache, donate_argnums=2), Assumed(trips={"expert_blocks": 16})
    )
    read = [
        moved.bytes * times
        for traffic, times in costs.largest_traffic(1.0)
        for moved in traffic.reads
        if "[128," in moved.array
    ]
    assert sum(read) == 2 * 3 * 16 * (4 * 32 * 24)


def test_bytes_to_the_hosts_memory_are_counted_apart():
    module = module_of(
        "%p = f32[256]{0:S(5)} parameter(0)",
        "%begun = (f32[256]{0}, f32[256]{0:S(5)}, u32[]) copy-start(%p)",
        "ROOT %done = f32[256]{0} copy-done(%begun)",
    )
    costs = costs_of(module)
    assert (costs.host_bytes, costs.bytes) == (1024, 1024)


def test_arrays_of_a_type():
    found = arrays_of("(bf16[28,4097]{1,0:T(8,128)(2,1)S(1)}, /*index=5*/pred[], s4[3]{0}, f8e4m3fn[5])")
    assert [array.bytes for array in found] == [28 * 4097 * 2, 1, 2, 5]
    assert [array.space for array in found] == [1, 0, 0, 0]


def test_products_of_a_lowered_program():
    def mixed(x: Any, w: Any) -> Any:
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) @ w

    text = jax.jit(mixed).lower(f32(8, 16), f32(16, 16)).as_text()
    assert products(text) == {"bf16 x bf16": 1, "f32 x f32": 1}


def test_the_slowest_resource_bounds_the_time():
    traffic = Traffic("copy", "", "", (Moved("u8[3352000000]", 3.352e9),), ())
    costs = Costs(Counter({"bf16": 989.4e9, "f32": 494.7e9}), Counter({traffic: 1}))
    costs.collectives[Collective("all-gather", "bf16", 4_500_000, 4)] = 2
    found = seconds(costs, TARGETS["h100"])
    assert found["compute"] == pytest.approx(2e-3)
    assert found["memory"] == pytest.approx(1e-3)
    assert found["links"] == pytest.approx(2 * 0.75 * 1e-5)
