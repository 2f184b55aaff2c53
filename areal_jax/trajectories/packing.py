"""Packs trajectories of any length into rows of a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.allocation import Placed, allocate
from areal_jax.trajectories.plan import BatchPlan, Layout, PackingError, Pieces, fill
from areal_jax.trajectories.prefix_tree import PrefixTree
from areal_jax.trajectories.shared_prefixes import longest_first, shareable_tree, unshared_tree
from areal_jax.types import Batch, Group, Trajectory


def pack(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    layout: Layout = "shared",
    own_rows: Callable[[int], np.ndarray] = np.arange,
) -> Batch:
    """Returns a batch of these groups, sorted by ordinal and laid out by `plan_batch` with these arguments.

    `own_rows(B)`: which of the batch's B rows to return, as ascending indices; by default all. Raises
    PackingError as `plan_batch` does.
    """
    plan = plan_batch(groups, rows, length, minibatches, layout)
    flat = (one for group in _in_order(groups) for one in group.trajectories)
    return fill(plan, own_rows(plan.rows), dict(enumerate(flat)))


def plan_batch(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    layout: Layout = "shared",
) -> BatchPlan:
    """Returns the plan of these groups' batch: micro-batches of `rows` rows of `length` tokens.

    `minibatches`: number of equal parts of the batch. Each part has the same number of micro-batches, a power
    of two, so that few shapes are compiled; unused rows are padding. A trajectory's tokens in a row are a
    segment. Segments are numbered from 1 in the order (group, member), with groups sorted by ordinal. With
    layout "shared", tokens that trajectories of a row can share (`shared_prefixes`) are stored and computed
    once per row, in segments of their own, which the tokens that continue them see (`Batch.subtree_ends`).
    With "repeated", each trajectory is stored with all its tokens. With "apart", each is stored in a row of
    its own; there are no micro-batches, and `rows` does not matter. Raises PackingError if `minibatches` does
    not divide the number of groups, or if a trajectory cannot be packed.
    """
    groups = _in_order(groups)
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
    if layout == "apart":
        count = int(np.diff(bounds).max())
        first = np.repeat(np.arange(minibatches) * count - bounds[:-1], np.diff(bounds))
        bins = [(index + start, [Placed(index, 0)]) for index, start in enumerate(first.tolist())]
        needed = minibatches * count
    else:
        trees = [
            shareable_tree(flat[start:end], group_ids[start:end])
            if layout == "shared"
            else unshared_tree(lengths[start:end])
            for start, end in pairwise(bounds)
        ]
        bins, micro_batches = _bins(trees, bounds, rows, length)
        needed = minibatches * micro_batches * rows
    return BatchPlan(
        rows=needed,
        length=length,
        layout=layout,
        support=0 if flat[0].support is None else flat[0].support.shape[1],
        samples=np.array([trajectory.sample for trajectory in flat], np.int64),
        tokens=lengths,
        reward=np.array([trajectory.reward for trajectory in flat], np.float32),
        group_ids=group_ids.astype(np.int32),
        temperature=np.array([trajectory.sampling.temperature for trajectory in flat], np.float32),
        truncated=np.array([trajectory.truncated for trajectory in flat], np.bool_),
        pieces=_pieces(bins, lengths),
    )


def _in_order(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.ordinal)


def _bins(
    trees: Sequence[PrefixTree], bounds: np.ndarray, rows: int, length: int
) -> tuple[list[tuple[int, list[Placed]]], int]:
    """Returns (row, its trajectories) for every row in use, and the micro-batches per minibatch.

    Minibatch i has the tree `trees[i]`, of the trajectories `bounds[i]` up to, but without, `bounds[i + 1]`.
    A micro-batch has `rows` rows of `length` tokens.
    """
    parts = [allocate(longest_first(tree), length) for tree in trees]
    needed = -(-max(len(part) for part in parts) // rows)
    # The next power of two: every count of micro-batches is compiled, so few counts may occur.
    micro_batches = 1 << (needed - 1).bit_length()
    placed = []
    for minibatch, part in enumerate(parts):
        first = int(bounds[minibatch])
        for number, members in enumerate(part, minibatch * micro_batches * rows):
            placed.append((number, [Placed(index + first, shared) for index, shared in members]))
    return placed, micro_batches


def _pieces(bins: Sequence[tuple[int, list[Placed]]], lengths: np.ndarray) -> Pieces:
    """Returns the positions of all pieces (`Pieces`): each trajectory's own tokens, then the shared ones.

    `bins`: the rows in use, as `_bins` returns them. `lengths`: number of tokens of each trajectory.
    """
    own: list[tuple[int, ...]] = [()] * len(lengths)
    shared: list[tuple[int, ...]] = []
    for row, members in bins:
        column = 0
        closed: list[_Shared] = []
        # Shared pieces of the current trajectory, each continuing the one before it.
        path: list[_Shared] = []
        for (index, before), (_, after) in pairwise([*members, Placed(-1, 0)]):
            closed += _leave(path, before, column)
            if after > before:
                path.append(_Shared(index, before, after, column, _last_column(path)))
                column += after - before
            start, end = max(before, after), int(lengths[index])
            size = end - start
            own[index] = (index, start, size, row, column, column + size, index + 1, _last_column(path))
            column += size
        closed += _leave(path, 0, column)
        for source, start, stop, first, previous, end in sorted(closed, key=lambda piece: piece.column):
            segment = len(lengths) + len(shared) + 1
            shared.append((source, start, stop - start, row, first, end, segment, previous))
    return Pieces(*np.array([*own, *shared], np.int64).T)


class _Shared(NamedTuple):
    """A shared piece of a row."""

    source: int
    start: int
    stop: int  # the piece has the tokens from `start` up to, but without, `stop` of its trajectory
    column: int
    previous: int
    end: int = -1


def _last_column(path: Sequence[_Shared]) -> int:
    return path[-1].column + path[-1].stop - path[-1].start - 1 if path else -1


def _leave(path: list[_Shared], tokens: int, column: int) -> list[_Shared]:
    """Removes from the path all but its first `tokens` tokens; returns the pieces removed.

    The tokens that see them end before `column`.
    """
    closed = []
    while path and path[-1].stop > tokens:
        last = path.pop()
        if last.start < tokens:  # only a part of it is removed, so there are two pieces
            path.append(last._replace(stop=tokens))
            split = last.column + tokens - last.start
            last = last._replace(start=tokens, column=split, previous=split - 1)
        closed.append(last._replace(end=column))
    return closed


def _check(flat: list[Trajectory], lengths: np.ndarray, length: int) -> None:
    """Raises PackingError if a trajectory cannot be part of the batch.

    A trajectory cannot if it is empty or longer than `length` tokens, has no reward, or has another number of
    kept token ids per position than the batch's first trajectory. `lengths`: tokens of each trajectory.
    """
    width = None if flat[0].support is None else flat[0].support.shape[1:]
    for trajectory, tokens in zip(flat, lengths.tolist(), strict=True):
        if not 1 <= tokens <= length:
            raise PackingError(
                f"{trajectory.sample} has {tokens} tokens, but a packed row has space for 1 to {length}; "
                "raise trainer.length"
            )
        if trajectory.reward is None:
            raise PackingError(f"{trajectory.sample} has no reward; score its group before it is packed")
        if width != (None if trajectory.support is None else trajectory.support.shape[1:]):
            raise PackingError(
                f"{trajectory.sample} and {flat[0].sample} differ in the number of kept token ids per "
                "position; sample all trajectories with the same generation.top_k and generation.support_size"
            )
