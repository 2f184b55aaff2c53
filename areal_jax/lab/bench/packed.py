"""Compares packed training with two ways to lay out the same sequences: one per row, or evenly split."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.lab.bench.measure import bench_learner, in_turn, random_trajectory, timed_s, updates
from areal_jax.models.transformer import Remat
from areal_jax.trajectories.packing import pack, plan_batch
from areal_jax.trajectories.plan import Pieces, fill
from areal_jax.types import Batch, Group, Prompt, SampleId

GROUP = 8


def packed(
    *,
    shape: str = "5m",
    sequences: int = 64,
    rows: int = 8,
    length: int = 256,
    median: float = 64.0,
    sigma: float = 0.8,
    shortest: int = 16,
    repeats: int = 5,
    remat: Remat = "layer",
) -> dict[str, Any]:
    """Measures an update's tokens per second with packed rows and with two other layouts, in turn.

    Padded: one sequence per row. Split: micro-batches of equally many sequences (`split`), AReaL's baseline
    for its dynamic batches. Micro-batches have `rows` rows of `length` tokens; padding does not count as
    tokens. Sequence lengths are lognormal with the median `median` and the standard deviation `sigma` of the
    logarithm, clipped to `shortest`..`length`. In the result, `row_ratio` is the number of rows without
    packing / with packing, and `speedup` the seconds of an update without packing / with packing;
    `micro_batch_ratio` and `split_speedup` are the same for micro-batches and the split layout.
    """
    learner, state = bench_learner(shape, rows, length, "float32", remat)
    vocab_size = learner.model.config.vocab_size
    groups = skewed_groups(sequences, length, median, sigma, shortest, vocab_size)
    batches = {
        "packed": pack(groups, rows, length),
        "padded": padded(groups, rows, length),
        "split": split(groups, rows, length),
    }
    update = updates(learner, state)
    prepared = {arm: learner.prepare(state, batch) for arm, batch in batches.items()}
    took = in_turn(
        {arm: partial(timed_s, partial(update, batch)) for arm, batch in prepared.items()}, repeats
    )
    pack_s = statistics.median(timed_s(lambda: pack(groups, rows, length) and None) for _ in range(repeats))
    seconds = {arm: statistics.median(each) for arm, each in took.items()}
    tokens = sum(len(t.tokens) for group in groups for t in group.trajectories)
    used = {arm: _used_rows(batch) for arm, batch in batches.items()}
    row_ratio, speedup = used["padded"] / used["packed"], seconds["padded"] / seconds["packed"]
    micro_batches = {arm: len(batch.tokens) // rows for arm, batch in batches.items()}
    return machine(shape, "float32", took["packed"]) | {
        "tokens_per_s": tokens / seconds["packed"],
        "padded_tokens_per_s": tokens / seconds["padded"],
        "padded_seconds": seconds["padded"],
        "pack_seconds": pack_s,
        "rows": used,
        "fill": tokens / (used["packed"] * length),
        "row_ratio": row_ratio,
        "speedup": speedup,
        "fraction_of_row_ratio": speedup / row_ratio,
        "micro_batches": micro_batches,
        "micro_batch_ratio": micro_batches["split"] / micro_batches["packed"],
        "split_seconds": seconds["split"],
        "split_speedup": seconds["split"] / seconds["packed"],
    }


def skewed_groups(
    sequences: int, length: int, median: float, sigma: float, shortest: int, vocab_size: int
) -> list[Group]:
    """Returns groups of GROUP random samples with one-token prompts, `sequences` samples in all.

    Their lengths in tokens have the distribution that `packed` describes; token ids are below `vocab_size`.
    """
    rng = np.random.default_rng(0)
    sizes = np.clip(np.round(rng.lognormal(np.log(median), sigma, sequences)), shortest, length).astype(int)
    flat = [
        random_trajectory(SampleId(i // GROUP, i % GROUP), int(size), rng, vocab_size)
        for i, size in enumerate(sizes)
    ]
    starts = range(0, sequences, GROUP)
    return [Group(start // GROUP, Prompt(tokens=[0]), tuple(flat[start : start + GROUP])) for start in starts]


def padded(groups: list[Group], rows: int, length: int) -> Batch:
    """Returns a batch with one sequence per row of `length` tokens.

    The batch has as many micro-batches of `rows` rows as needed. `pack` would return the same batch if no two
    of the sequences fitted into one row.
    """
    plan = plan_batch(groups, rows, length, layout="repeated")
    count = len(plan.tokens)
    whole = -(-count // rows) * rows
    pieces = plan.pieces._replace(row=np.arange(count), column=np.zeros(count, np.int64))
    flat = (t for group in groups for t in group.trajectories)
    return fill(plan._replace(rows=whole, pieces=pieces), np.arange(whole), dict(enumerate(flat)))


def split(groups: list[Group], rows: int, length: int) -> Batch:
    """Returns a batch in micro-batches of equally many sequences, in their order; the counts differ by 1.

    There are as few micro-batches of `rows` rows as possible. Within its micro-batch a sequence is packed as
    by `pack`.
    """
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    alone = [Group(ordinal, Prompt(tokens=[0]), (trajectory,)) for ordinal, trajectory in enumerate(flat)]
    for count in range(1, len(alone) + 1):
        parts = np.array_split(np.arange(len(alone)), count)
        plans = [plan_batch(alone[part[0] : part[-1] + 1], rows, length, layout="repeated") for part in parts]
        if all(plan.rows == rows for plan in plans):
            break
    pieces = []
    for number, (part, plan) in enumerate(zip(parts, plans, strict=True)):
        of_part = plan.pieces
        sources = of_part.source + part[0]
        pieces.append(of_part._replace(source=sources, segment=sources + 1, row=of_part.row + number * rows))
    whole = plan_batch(groups, rows, length, layout="repeated")._replace(
        rows=count * rows, pieces=Pieces(*map(np.concatenate, zip(*pieces, strict=True)))
    )
    return fill(whole, np.arange(whole.rows), dict(enumerate(flat)))


def _used_rows(batch: Batch) -> int:
    return int((np.asarray(batch.segment_ids) > 0).any(1).sum())
