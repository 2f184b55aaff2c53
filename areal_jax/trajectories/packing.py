"""Trajectories of any length into static rows, and back: AReaL's dynamic batching (its Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from areal_jax.types import NOT_SAMPLED, ArealError, Batch, Group, Trajectory


class PackingError(ArealError):
    """Trajectories that fit no row or make no batch; the message names the sample and the setting."""


PER_TOKEN = {"tokens": 0, "loss_mask": False, "behavior_logp": 0.0, "versions": NOT_SAMPLED, "turn_ids": -1}
"""A batch's arrays that are copied from trajectories, and what padding holds."""

PREPARED = (
    "ages", "proximal_logp", "proximal_mix", "advantages", "weights", "off_policy_weight", "ref_logp",
    "teacher_logp", "token_rewards", "values", "returns",
)  # fmt: skip
"""Those that `prepare` adds."""


def allocate(lengths: Sequence[int], capacity: int, k_min: int = 1) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`: at least `k_min` bins, each sequence in one.

    Longest first; a sequence opens a bin while there are fewer than `k_min` or where nothing fits, and else
    joins the fitting bin of fewest sequences, the lowest of equals. Fewer sequences than `k_min` get a bin
    each. Raises PackingError for a sequence longer than `capacity`.
    Fu et al., AReaL: A Large-Scale Asynchronous RL System for Language Reasoning, Algorithm 1.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and sizes.max() > capacity:
        longest = int(sizes.argmax())
        raise PackingError(
            f"sequence {longest} has {sizes[longest]} tokens, more than the capacity {capacity}"
        )
    order = np.argsort(-sizes, kind="stable")
    bins: list[list[int]] = []
    room = np.zeros(len(order), np.int64)  # tokens left, by bin
    rank = np.full(len(order), np.iinfo(np.int64).max)  # by number of sequences, then by index
    for index in order.tolist():
        size = sizes[index]
        best = -1
        if len(bins) >= k_min:
            fitting = np.flatnonzero(room[: len(bins)] >= size)
            best = int(fitting[rank[fitting].argmin()]) if fitting.size else -1
        if best < 0:
            best = len(bins)
            bins.append([])
            room[best], rank[best] = capacity, best
        bins[best].append(index)
        room[best] -= size
        rank[best] += len(order)
    return bins


def pack(groups: Sequence[Group], rows: int, length: int, minibatches: int = 1) -> Batch:
    """The batch of these groups, in ordinal order: micro-batches of `rows` rows of `length` tokens.

    Every minibatch has the same number of micro-batches, a power of two, so that few shapes are compiled;
    rows that got nothing are padding. Segments count from 1 in the order (group, member). Raises
    PackingError.
    """
    groups = sorted(groups, key=lambda group: group.ordinal)
    if not groups or len(groups) % minibatches:
        raise PackingError(
            f"{len(groups)} groups cannot be split into {minibatches} equal minibatches; change "
            "algorithm.minibatches or trainer.batch_size"
        )
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = np.array([len(trajectory.tokens) for trajectory in flat])
    _check(flat, lengths, length)
    group_ids = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    bounds = np.searchsorted(group_ids, np.arange(minibatches + 1) * (len(groups) // minibatches))
    row, offset, micro_batches = _places(lengths, bounds, rows, length)

    shape = (minibatches * micro_batches * rows, length)
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.repeat(row * length + offset, lengths) + position

    def fill(values: np.ndarray, empty: Any) -> np.ndarray:
        out = np.full((shape[0] * length, *values.shape[1:]), empty, values.dtype)
        out[place] = values
        return out.reshape(*shape, *values.shape[1:])

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(trajectory, name) for trajectory in flat])

    has_support = flat[0].support is not None
    return Batch(
        **{name: fill(joined(name), empty) for name, empty in PER_TOKEN.items()},
        positions=fill(position.astype(np.int32), 0),
        previous=fill(np.where(position > 0, place % length - 1, -1).astype(np.int32), -1),
        segment_ids=fill(np.repeat(np.arange(1, len(flat) + 1, dtype=np.int32), lengths), 0),
        reward=np.array([trajectory.reward for trajectory in flat], np.float32),
        group_ids=group_ids.astype(np.int32),
        temperature=np.array([trajectory.sampling.temperature for trajectory in flat], np.float32),
        truncated=np.array([trajectory.truncated for trajectory in flat], np.bool_),
        support=fill(joined("support"), -1) if has_support else None,
    )


def unpack(batch: Batch) -> list[dict[str, Any]]:
    """Each segment's arrays and values, by name, in segment order; the inverse of `pack`."""
    present = [*PER_TOKEN, "positions", *(n for n in ("support", *PREPARED) if getattr(batch, n) is not None)]
    arrays = {name: np.asarray(getattr(batch, name)) for name in present}
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    ids = np.asarray(batch.segment_ids).reshape(-1)
    count = len(np.asarray(batch.reward))
    order = np.argsort(
        ids, kind="stable"
    )  # a segment's tokens keep their order: they lie side by side in a row
    edges = np.searchsorted(ids[order], np.arange(1, count + 2))
    segments = []
    for segment in range(count):
        where = order[edges[segment] : edges[segment + 1]]
        segments.append(
            {name: array[where] for name, array in flat.items()}
            | {
                "reward": float(batch.reward[segment]),
                "group_id": int(batch.group_ids[segment]),
                "temperature": float(batch.temperature[segment]),
                "truncated": bool(batch.truncated[segment]),
            }
        )
    return segments


def _places(
    lengths: np.ndarray, bounds: np.ndarray, rows: int, length: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Row and first column of every sequence, and micro-batches a minibatch."""
    parts = [allocate(lengths[start:end].tolist(), length) for start, end in pairwise(bounds)]
    needed = -(-max(len(part) for part in parts) // rows)
    micro_batches = 1 << (needed - 1).bit_length()
    row = np.zeros(len(lengths), np.int64)
    offset = np.zeros(len(lengths), np.int64)
    for minibatch, part in enumerate(parts):
        for number, members in enumerate(part, minibatch * micro_batches * rows):
            column = 0
            for index in members:
                index += bounds[minibatch]
                row[index], offset[index] = number, column
                column += lengths[index]
    return row, offset, micro_batches


def _check(flat: list[Trajectory], lengths: np.ndarray, length: int) -> None:
    """Raise PackingError for the first trajectory that cannot be part of the batch."""
    width = None if flat[0].support is None else flat[0].support.shape[1:]
    for trajectory, tokens in zip(flat, lengths.tolist(), strict=True):
        if not 1 <= tokens <= length:
            raise PackingError(
                f"{trajectory.sample} has {tokens} tokens; a row holds 1 to {length}: raise trainer.length"
            )
        if trajectory.reward is None:
            raise PackingError(f"{trajectory.sample} has no reward; score its group before it is packed")
        if width != (None if trajectory.support is None else trajectory.support.shape[1:]):
            raise PackingError(
                f"{trajectory.sample} and {flat[0].sample} differ in their support; sample all of a "
                "batch's trajectories with the same top_k and support_size"
            )
