"""The stages of `bench gpu`, as data: which measurements run, with which settings, and for how long.

Stages are in the order of their value: what matters most is measured even if the rest finds no time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    name: str
    call: str
    """A function of `lab.bench.gpu.cells.CALLS`, or `module:function`, which returns the figures."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    halved: str = ""
    """Name of the setting that is halved, once, if the device's memory does not suffice; empty: none."""
    env: Mapping[str, str] | None = None
    """Environment variables of a process for this cell alone; None: it shares a process with others."""


@dataclass(frozen=True)
class Stage:
    name: str
    limit_s: float
    """Seconds after which the stage's process is killed, its other cells are skipped, and the next begins."""
    cells: tuple[Cell, ...]
    is_isolated: bool = False
    """Whether a kernel that failed ends the process: it may have left the GPU unusable there."""


UNTRAINED = ("trainer.supervised.steps=0",)
"""Settings of runs that measure speed alone, of a model that has learned nothing."""


PACKED_ROWS = 4
"""Rows in the trials of packed attention: what is wrong in the second row does not show with one."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that the measurements of a model's shape have."""

    heads: tuple[tuple[int, int, int], ...]
    """Query heads, kv heads and head dimension of each attention that is tried."""
    lengths: tuple[int, ...]
    """Tokens of a row in the trials of packed attention; only the first heads are tried at all of them."""
    experts: tuple[int, int, int, int]
    """Experts of a mixture, experts a token, inputs and outputs of an expert's matrix."""
    page_tokens: tuple[int, ...]
    long_pool_tokens: int
    """Tokens of a pool of KV pages whose bytes need offsets of more than 32 bits; 0: it is not tried."""
    slots: tuple[int, ...]
    sampled_slots: tuple[int, ...]
    vocabulary: int
    prompt: int
    decode_steps: int
    rebuilt: tuple[int, int]
    """Slots, and tokens of each, whose KV is recomputed."""
    rows: tuple[int, ...]
    row_tokens: int
    steps: int
    """Training steps of whole runs with the quickstart's model."""
    words: tuple[str, ...]
    """Further settings of these runs."""
    large: str
    """The built-in size of the model in the other whole runs, and in tests of determinism."""
    large_steps: int
    transfers: int
    """Rounds in which the transfer of a version is measured."""


FULL = Sizes(
    heads=((12, 2, 128), (9, 3, 64), (8, 8, 128)),
    lengths=(4096, 512),
    experts=(128, 8, 2048, 768),
    page_tokens=(64, 16),
    # Two layers of 2 kv heads of 128 in bfloat16 take 1 KiB a token, half of it keys.
    long_pool_tokens=9 * 2**20,
    slots=(64, 1, 256, 8),
    sampled_slots=(64, 256),
    vocabulary=151_936,
    prompt=512,
    decode_steps=4,
    rebuilt=(64, 1024),
    rows=(2, 4),
    row_tokens=4096,
    steps=40,
    words=(),
    large="smollm2-135m",
    large_steps=5,
    transfers=2,
)
TINY = Sizes(
    heads=((4, 2, 16),),
    lengths=(64,),
    experts=(8, 2, 16, 24),
    page_tokens=(16,),
    long_pool_tokens=0,
    slots=(4,),
    sampled_slots=(4,),
    vocabulary=256,
    prompt=16,
    decode_steps=2,
    rebuilt=(4, 16),
    rows=(2,),
    row_tokens=64,
    steps=2,
    words=UNTRAINED,
    large="tiny",
    large_steps=2,
    transfers=1,
)
"""Sizes that show in a minute on a CPU whether every stage runs."""


def stages(shape: str) -> tuple[Stage, ...]:
    """Returns all stages for a model of the built-in size `shape`, in the order in which they run."""
    s = TINY if shape == "tiny" else FULL
    return (
        Stage("ceilings", 25, _ceilings()),
        Stage("kernels", 90, _kernels(s), is_isolated=True),
        Stage("decode", 130, _decode(shape, s)),
        Stage("sampling", 50, _sampling(shape, s)),
        Stage("update", 80, _update(shape, s)),
        Stage("parity", 40, _parity(shape, s)),
        Stage("run", 60, _run(s)),
        Stage("async", 70, _async(s)),
    )


def _ceilings() -> tuple[Cell, ...]:
    products = [
        Cell(f"{dtype} product", "matrix_product", {"dtype": dtype}) for dtype in ("bfloat16", "float32")
    ]
    return Cell("versions", "versions"), *products, Cell("memory", "memory")


def _kernels(s: Sizes) -> tuple[Cell, ...]:
    def packed(path: str, of_heads: tuple[int, int, int], length: int) -> Cell:
        heads, kv_heads, head_dim = of_heads
        settings = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rows=PACKED_ROWS, length=length)
        return Cell(
            f"{path} {heads}/{kv_heads} {PACKED_ROWS} x {length}", "packed_kernel", {"path": path, **settings}
        )

    kernels = [
        packed(path, of_heads, length)
        for of_heads, length, path in product(s.heads, s.lengths, ("cudnn", "triton"))
        if of_heads == s.heads[0] or length == s.lengths[0]
    ]
    heads, kv_heads, head_dim = s.heads[0]
    of_model = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    pools = [
        (f"pages of {page} {dtype}", page, dtype, 0)
        for page, dtype in product(s.page_tokens, ("bfloat16", "int8"))
    ]
    if s.long_pool_tokens:
        # Of int8 codes, two thirds of the tokens have between 2**31 and 2**32.
        pools.append(("pages of 64 bfloat16, keys over 4 GiB", 64, "bfloat16", s.long_pool_tokens))
        pools.append(("pages of 64 int8, keys over 2 GiB", 64, "int8", s.long_pool_tokens * 2 // 3))
    paged = [
        Cell(
            name,
            "paged_kernel",
            dict(path="pages", **of_model, page_tokens=page, kv_dtype=dtype, pool_tokens=tokens),
        )
        for name, page, dtype, tokens in pools
    ]
    blocks = packed("blocks", s.heads[0], s.lengths[0])
    names = ("experts", "k", "inputs", "outputs")
    products = [
        Cell(
            f"experts, {path}, {s.row_tokens} tokens",
            "expert_kernel",
            dict(path=path, tokens=s.row_tokens, **dict(zip(names, s.experts, strict=True))),
        )
        for path in (*(["tokamax"] if find_spec("tokamax") else []), "triton", "blocks")
    ]
    # The model's own heads come first, with both kinds of kernel; then experts and the other heads.
    return *kernels[:2], *paged, *products, *kernels[2:], blocks


def _decode(shape: str, s: Sizes) -> tuple[Cell, ...]:
    def cell(slots: int, layout: str) -> Cell:
        settings = dict(shape=shape, slots=slots, prompt=s.prompt, decode_steps=s.decode_steps, layout=layout)
        name = f"{slots} slots" + ("" if layout == "auto" else f", {layout} weights")
        return Cell(name, "decoding", settings, halved="slots")

    first, *others = s.slots
    return cell(first, "auto"), cell(first, "stacked"), *[cell(slots, "auto") for slots in others]


def _sampling(shape: str, s: Sizes) -> tuple[Cell, ...]:
    sampled = [
        Cell(f"sample {slots} x {s.vocabulary}", "sample", dict(slots=slots, vocabulary=s.vocabulary))
        for slots in s.sampled_slots
    ]
    slots, tokens = s.rebuilt
    of_model = dict(shape=shape, dtype="bfloat16")
    return (
        *sampled,
        Cell(
            f"prefill {s.prompt}",
            "prefill",
            of_model | dict(prompts=4, prompt=s.prompt, prefill_chunk=512, repeats=3),
        ),
        Cell(
            f"recompute {slots} x {tokens}",
            "swap",
            of_model | dict(slots=slots, tokens=tokens, repeats=3),
            halved="slots",
        ),
        Cell(
            f"insert and extract {s.prompt}",
            "moves",
            dict(shape=shape, slots=slots, prompt=s.prompt),
            halved="slots",
        ),
    )


def _update(shape: str, s: Sizes) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            f"{rows} x {s.row_tokens}",
            "training",
            dict(shape=shape, rows=rows, length=s.row_tokens),
            halved="rows",
        )
        for rows in s.rows
    )


def _parity(shape: str, s: Sizes) -> tuple[Cell, ...]:
    update = dict(shape=s.large, rows=2, length=min(512, s.row_tokens))
    flags = os.environ.get("XLA_FLAGS", "")
    deterministic = {"XLA_FLAGS": f"{flags} --xla_gpu_deterministic_ops=true".strip()}
    return (
        Cell("log-prob gap of host and trainer", "log_prob_gap", dict(shape=shape)),
        Cell("the same update twice", "repeated_update", update),
        *[
            Cell(f"canary, process {number}", "canary_log_probs", dict(shape=shape), env={})
            for number in (1, 2)
        ],
        Cell("the same update twice, deterministic", "repeated_update", update, env=deterministic),
    )


def _run(s: Sizes) -> tuple[Cell, ...]:
    large = [f"model.shape={s.large}", "model.dtype=bfloat16", *UNTRAINED]
    return (
        Cell("quickstart, shared", "whole_run", dict(steps=s.steps, words=s.words)),
        Cell(f"{s.large} bfloat16, shared", "whole_run", dict(steps=s.large_steps, words=large)),
    )


def _async(s: Sizes) -> tuple[Cell, ...]:
    settings = dict(shape=s.large, dtype="bfloat16")
    runs = settings | dict(steps=2 * s.large_steps, repeats=1, words=UNTRAINED)
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}  # of the memory, for each of two processes
    return (
        Cell("asynchronous over sync", "loop", runs),
        Cell("transfer of a version", "sync", settings | dict(repeats=s.transfers), env=share),
    )
