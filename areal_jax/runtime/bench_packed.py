"""Packed against padded: the same sequences of skewed lengths, trained in full rows and in a row each."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from areal_jax.models.transformer import Remat
from areal_jax.runtime.measure import bench_learner, machine, random_trajectory, timed_s
from areal_jax.trajectories.packing import PER_TOKEN, pack
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
    """Real tokens a second of an update in packed rows, beside the same in a row a sequence, in turn.

    Lengths are lognormal, cut at `shortest` and `length`. `row_ratio` is what packing saves in rows,
    `speedup` what it saves in time.
    """
    learner, state = bench_learner(shape, rows, length, "float32", remat)
    vocab_size = learner.model.config.vocab_size
    groups = skewed_groups(sequences, length, median, sigma, shortest, vocab_size)
    batches = {"packed": pack(groups, rows, length), "padded": padded(groups, rows, length)}
    states = [state]
    prepared = {arm: learner.prepare(state, batch) for arm, batch in batches.items()}
    took: dict[str, list[float]] = {arm: [] for arm in batches}

    def update(arm: str) -> Any:
        state, _ = learner.update(states.pop(), prepared[arm])
        states.append(state)
        return state.params

    for repeat in range(repeats + 1):
        for arm in batches:
            seconds = timed_s(lambda arm=arm: update(arm))
            if repeat:  # the first compiles
                took[arm].append(seconds)
    pack_s = statistics.median(timed_s(lambda: pack(groups, rows, length) and None) for _ in range(repeats))
    seconds = {arm: statistics.median(each) for arm, each in took.items()}
    tokens = sum(len(t.tokens) for group in groups for t in group.trajectories)
    used = {arm: _used_rows(batch) for arm, batch in batches.items()}
    row_ratio, speedup = used["padded"] / used["packed"], seconds["padded"] / seconds["packed"]
    return machine(shape, "float32", seconds["packed"], took["packed"]) | {
        "tokens_per_s": tokens / seconds["packed"],
        "padded_tokens_per_s": tokens / seconds["padded"],
        "padded_seconds": seconds["padded"],
        "pack_seconds": pack_s,
        "rows": used,
        "fill": tokens / (used["packed"] * length),
        "row_ratio": row_ratio,
        "speedup": speedup,
        "fraction_of_row_ratio": speedup / row_ratio,
    }


def skewed_groups(
    sequences: int, length: int, median: float, sigma: float, shortest: int, vocab_size: int
) -> list[Group]:
    """Groups of 8 samples of one-token prompts; seeded."""
    rng = np.random.default_rng(0)
    sizes = np.clip(np.round(rng.lognormal(np.log(median), sigma, sequences)), shortest, length).astype(int)
    flat = [
        random_trajectory(SampleId(i // GROUP, i % GROUP), int(size), rng, vocab_size)
        for i, size in enumerate(sizes)
    ]
    starts = range(0, sequences, GROUP)
    return [Group(start // GROUP, Prompt(tokens=[0]), tuple(flat[start : start + GROUP])) for start in starts]


def padded(groups: list[Group], rows: int, length: int) -> Batch:
    """A row a sequence, in as many micro-batches as that takes; as `pack` would with no room for a second."""
    flat = [t for group in groups for t in group.trajectories]
    whole = -(-len(flat) // rows) * rows

    def fill(name: str, empty: Any) -> np.ndarray:
        arrays = [getattr(t, name) for t in flat]
        out = np.full((whole, length), empty, arrays[0].dtype)
        for row, array in enumerate(arrays):
            out[row, : len(array)] = array
        return out

    columns = np.arange(length, dtype=np.int32)[None]
    sizes = np.array([len(t.tokens) for t in flat] + [0] * (whole - len(flat)))[:, None]
    is_token = columns < sizes
    return Batch(
        **{name: fill(name, empty) for name, empty in PER_TOKEN.items()},
        positions=np.where(is_token, columns, 0),
        segment_ids=np.where(is_token, np.arange(1, whole + 1, dtype=np.int32)[:, None], 0),
        previous=np.where(is_token, columns - 1, -1),
        reward=np.array([t.reward for t in flat], np.float32),
        group_ids=np.repeat(np.arange(len(groups), dtype=np.int32), [len(g.trajectories) for g in groups]),
        temperature=np.ones(len(flat), np.float32),
        truncated=np.zeros(len(flat), bool),
    )


def _used_rows(batch: Batch) -> int:
    return int((np.asarray(batch.segment_ids) > 0).any(1).sum())
