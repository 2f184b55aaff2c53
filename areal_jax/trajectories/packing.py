"""Packs trajectories of any length into rows of a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.allocation import Placed, allocate
from areal_jax.trajectories.paths import paths_of
from areal_jax.trajectories.plan import BatchLayout, BatchPlan, PackingError, Pieces, fill
from areal_jax.trajectories.prefix_tree import PrefixTree
from areal_jax.trajectories.shared_prefixes import longest_first, shareable_tree, unshared_tree
from areal_jax.types import Batch, Group, Trajectory


def pack(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    layout: BatchLayout = "shared",
    own_rows: Callable[[int], np.ndarray] = np.arange,
) -> Batch:
    """Returns a batch of these groups, sorted by ordinal and laid out by `plan_batch` with these arguments.

    `own_rows(B)`: which of the batch's B rows to return, as ascending indices; by default all. Raises
    PackingError as `plan_batch` does.
    """
    plan = plan_batch(groups, rows, length, minibatches, layout)
    return fill(plan, own_rows(plan.rows), by_place(groups))


def by_place(groups: Sequence[Group]) -> dict[int, Trajectory]:
    """Returns the index of each path in the groups' plan -> the sample's trajectory that has the path."""
    samples = [one for group in _in_order(groups) for one in group.trajectories]
    return dict(enumerate([one for one in samples for _ in (one, *one.branches)]))


def plan_batch(
    groups: Sequence[Group],
    rows: int,
    length: int,
    minibatches: int = 1,
    layout: BatchLayout = "shared",
) -> BatchPlan:
    """Returns the plan of these groups' batch: micro-batches of `rows` rows of `length` tokens.

    `minibatches`: number of equal parts of the batch. Each part has the same number of micro-batches, a power
    of two, so that few shapes are compiled; unused rows are padding. A trajectory's tokens in a row are a
    segment. Segments are numbered from 1 in the order (group, member, path of the sample), with groups sorted
    by ordinal. If a sample branched, their number is filled up to a power of two (`Batch.sample_ids`). With
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
    samples = [trajectory for group in groups for trajectory in group.trajectories]
    counts = np.array([1 + len(sample.branches) for sample in samples])
    has_branches = bool((counts > 1).any())
    flat = [path for sample in samples for path in paths_of(sample)] if has_branches else samples
    lengths = np.array([len(trajectory.tokens) for trajectory in flat])
    _check(samples, flat, lengths, length)
    group_ids = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    group_ids = np.repeat(group_ids, counts)
    bounds = np.searchsorted(group_ids, np.arange(minibatches + 1) * (len(groups) // minibatches))
    if layout == "apart":
        most = int(np.diff(bounds).max())
        per_minibatch = _power_of_two(most) if has_branches else most
        bins = _apart(bounds, per_minibatch)
    else:
        trees = _trees(flat, lengths, group_ids, bounds, layout)
        bins, micro_batches = _bins(trees, bounds, rows, length)
        per_minibatch = micro_batches * rows
    # Each number of sequences is compiled, so few may occur; those that fill it up have no tokens.
    more = _power_of_two(len(flat)) - len(flat) if has_branches else 0
    owners = np.pad(np.repeat(np.arange(len(samples)), counts), (0, more), mode="edge")
    of = [samples[owner] for owner in owners.tolist()]
    return BatchPlan(
        rows=minibatches * per_minibatch,
        length=length,
        layout=layout,
        support=0 if flat[0].support is None else flat[0].support.shape[1],
        experts=0 if flat[0].experts is None else flat[0].experts.shape[1],
        samples=np.array([sample.sample for sample in of], np.int64),
        tokens=np.pad(lengths, (0, more)),
        reward=np.array([sample.reward for sample in of], np.float32),
        group_ids=np.pad(group_ids, (0, more), mode="edge").astype(np.int32),
        temperature=np.array([sample.sampling.temperature for sample in of], np.float32),
        truncated=np.array([sample.truncated for sample in of], np.bool_),
        pieces=_pieces(bins, lengths, len(of)),
        sample_ids=owners.astype(np.int32) if has_branches else None,
    )


def _power_of_two(count: int) -> int:
    """Returns the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _in_order(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.ordinal)


def _apart(bounds: np.ndarray, count: int) -> list[tuple[int, list[Placed]]]:
    """Returns (row, its trajectory), with `count` rows for each minibatch; `bounds`: as for `_bins`."""
    first = np.repeat(np.arange(len(bounds) - 1) * count - bounds[:-1], np.diff(bounds))
    return [(index + start, [Placed(index, 0)]) for index, start in enumerate(first.tolist())]


def _trees(
    flat: Sequence[Trajectory],
    lengths: np.ndarray,
    group_ids: np.ndarray,
    bounds: np.ndarray,
    layout: BatchLayout,
) -> list[PrefixTree]:
    """Returns for each minibatch the tree of what its trajectories share; `bounds`: as for `_bins`."""
    if layout == "repeated":
        return [unshared_tree(lengths[start:end]) for start, end in pairwise(bounds)]
    return [shareable_tree(flat[start:end], group_ids[start:end]) for start, end in pairwise(bounds)]


def _bins(
    trees: Sequence[PrefixTree], bounds: np.ndarray, rows: int, length: int
) -> tuple[list[tuple[int, list[Placed]]], int]:
    """Returns (row, its trajectories) for every row in use, and the micro-batches per minibatch.

    Minibatch i has the tree `trees[i]`, of the trajectories `bounds[i]` up to, but without, `bounds[i + 1]`.
    A micro-batch has `rows` rows of `length` tokens.
    """
    parts = [allocate(longest_first(tree), length) for tree in trees]
    needed = -(-max(len(part) for part in parts) // rows)
    micro_batches = _power_of_two(needed)  # every count of micro-batches is compiled, so few may occur
    placed = []
    for minibatch, part in enumerate(parts):
        first = int(bounds[minibatch])
        for number, members in enumerate(part, minibatch * micro_batches * rows):
            placed.append((number, [Placed(index + first, shared) for index, shared in members]))
    return placed, micro_batches


def _pieces(bins: Sequence[tuple[int, list[Placed]]], lengths: np.ndarray, sequences: int) -> Pieces:
    """Returns the positions of all pieces (`Pieces`): each trajectory's own tokens, then the shared ones.

    `bins`: the rows in use, as `_bins` returns them. `lengths`: number of tokens of each trajectory.
    `sequences`: number of segments with trajectories, or without tokens.
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
            segment = sequences + len(shared) + 1
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


def _check(samples: list[Trajectory], flat: list[Trajectory], lengths: np.ndarray, length: int) -> None:
    """Raises PackingError if a trajectory cannot be part of the batch.

    A trajectory, of the paths `flat` of all samples, cannot if it is empty or longer than `length` tokens, if
    its sample has no reward, or if it has another number of kept token ids per position than the batch's
    first trajectory. `lengths`: tokens of each trajectory.
    """
    if unscored := [sample.sample for sample in samples if sample.reward is None]:
        raise PackingError(f"{unscored[0]} has no reward; score its group before it is packed")
    width = None if flat[0].support is None else flat[0].support.shape[1:]
    routes = None if flat[0].experts is None else flat[0].experts.shape[1:]
    for trajectory, tokens in zip(flat, lengths.tolist(), strict=True):
        if not 1 <= tokens <= length:
            raise PackingError(
                f"{trajectory.sample} has {tokens} tokens, but a packed row has space for 1 to {length}; "
                "raise trainer.length"
            )
        if width != (None if trajectory.support is None else trajectory.support.shape[1:]):
            raise PackingError(
                f"{trajectory.sample} and {flat[0].sample} differ in the number of kept token ids per "
                "position; sample all trajectories with the same generation.top_k and generation.support_size"
            )
        if routes != (None if trajectory.experts is None else trajectory.experts.shape[1:]):
            raise PackingError(
                f"{trajectory.sample} and {flat[0].sample} differ in the number of experts per token; sample "
                "all trajectories with the same model and the same algorithm.routes"
            )
