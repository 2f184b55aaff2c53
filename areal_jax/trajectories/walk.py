"""The order in which a trainer walks over a prefix tree, planned as data before the first forward pass.

A walk visits subtree after subtree. A subtree whose distinct tokens fit a block is computed whole, in one
call in which each token sees those above it in the tree; several that leave the path at the same token share
a call. To get into a larger subtree the walk pushes the tokens that its leaves share: their KV join those of
the path. From there it pops tokens, the last ones first, down to those that the next subtree shares: each pop
computes a block of tokens again, with gradients. So only one path is alive at a time. What a leaf's last pop
computes need not be pushed before, because no other token reads its KV: the tail is cut. Several walks, each
over a part of the leaves, take their steps together, as rows of the same calls. The method is AReaL-DTA's;
computing small subtrees whole is ours. Shapes: S sequences, L leaves, W walks, N steps, n columns of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.leaf_ranges import TOKENS, LeafCosts, ranges
from areal_jax.trajectories.prefix_tree import PrefixTree

PUSH, POP = 0, 1


class PathPiece(NamedTuple):
    """Tokens `start` to `start + length` of a leaf's path."""

    leaf: int
    start: int
    length: int
    is_end: bool
    """Whether these are the path's last tokens, with which the leaf's sequences are complete."""


class Op(NamedTuple):
    """One step of one walk: to push or to pop the tokens of a part of the tree."""

    kind: int  # PUSH | POP
    pieces: tuple[PathPiece, ...]
    """The first one continues the path; the others continue the path or pieces before them, depth first."""

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)


class Columns(NamedTuple):
    """The tokens of a step, a column each; columns beyond a walk's tokens repeat its first one."""

    sequence: np.ndarray  # (W, n) int32: a sequence with the token
    position: np.ndarray  # (W, n) int32: the token's place in it
    previous: np.ndarray  # (W, n) int32: column of the token before it; -1 = the path's last token
    ends: np.ndarray
    """(W, n) int32: the column after the last token below this one; 0 = no token. The token of column i has
    below it, and is seen by, those of columns i to ends[i] - 1."""


class Walk(NamedTuple):
    """N steps of W walks over one prefix tree, of which each takes part in a step or does nothing."""

    kinds: np.ndarray
    """(N,) int32: PUSH or POP."""
    rows: np.ndarray
    """(N, W, 4) int32, for each walk: the number of tokens on the path, the number of tokens of the step (0:
    the walk does nothing), and the range in `endings` of the sequences that are complete with this step:
    first and count.
    """
    columns: list[Columns]
    """The tokens of each step; n is the number of tokens for which the step's program is compiled."""
    endings: np.ndarray
    """(S, 2) int32: a sequence, and the column of the last token of its leaf, in the order of the steps."""

    def tokens(self, kind: int) -> int:
        """Returns the number of tokens that all steps of a kind compute, without padding."""
        return int(self.rows[self.kinds == kind, :, 1].sum())

    @property
    def buckets(self) -> np.ndarray:
        """(N,) int64: the number of columns of each step."""
        return np.array([each.ends.shape[1] for each in self.columns], np.int64)

    def of_rows(self, rows: np.ndarray) -> Walk:
        """Returns the walk with sequence i numbered rows[i]."""
        columns = [each._replace(sequence=rows[each.sequence].astype(np.int32)) for each in self.columns]
        endings = np.stack([rows[self.endings[:, 0]], self.endings[:, 1]], axis=1).astype(np.int32)
        return self._replace(columns=columns, endings=endings)

    @property
    def computed_tokens(self) -> int:
        """Tokens of all calls, with the padding of each walk to the step's bucket."""
        return int(self.buckets.sum()) * self.rows.shape[1]


class _Node(NamedTuple):
    """Leaves `first` to `last` - 1, which share the tokens of the path."""

    first: int
    last: int
    path: int
    """Number of tokens on the path."""
    below: int
    """Number of tokens that stay on the path after these leaves."""


class _Child(NamedTuple):
    """The leaves `first` to `last` - 1 below a node, which also share the next token."""

    first: int
    last: int
    tokens: int
    """Number of distinct tokens behind the path."""


class _Steps:
    """Plans the steps of one walk, with gradients."""

    def __init__(self, tree: PrefixTree, blocks: Blocks) -> None:
        self._blocks = blocks
        self._ends: list[int] = tree.lengths[tree.leaves].tolist()
        self._common: list[int] = tree.common.tolist()
        self._done: list[Op] = []

    def over(self, first: int, last: int) -> list[Op]:
        """Returns the steps over the leaves `first` to `last` - 1."""
        ahead = [_Node(first, last, 0, 0)]
        while ahead:  # a stack, since trees may be deeper than Python's calls
            ahead += self._visit(ahead.pop())
        return self._done

    def _visit(self, node: _Node) -> list[_Node]:
        """Adds steps for children of the node; returns what is left to visit, the next one last."""
        whole: list[_Child] = []
        for child in self._children(node):
            is_leaf = child.last == child.first + 1
            if child.tokens <= self._blocks.most and (is_leaf or self._blocks.joins_subtrees):
                whole.append(child)
                continue
            self._pop_whole(whole, node.path, node.path)
            # The last child's pops go on into the tokens above it.
            is_last = child.last == node.last
            below = node.below if is_last else node.path
            rest = [] if is_last else [node._replace(first=child.last)]
            if is_leaf:
                self._leaf(child.first, node.path, below)
                return rest
            fork = min(self._common[child.first + 1 : child.last])
            self._add(PUSH, self._pieces(child.first, node.path, fork))
            return [*rest, _Node(child.first, child.last, fork, below)]
        self._pop_whole(whole, node.path, node.below)
        return []

    def _children(self, node: _Node) -> Iterator[_Child]:
        first = node.first
        while first < node.last:
            last, tokens = first + 1, self._ends[first] - node.path
            while last < node.last and self._common[last] > node.path:
                tokens += self._ends[last] - self._common[last]
                last += 1
            yield _Child(first, last, tokens)
            first = last

    def _leaf(self, leaf: int, path: int, below: int) -> None:
        """Adds the steps for a leaf with more tokens behind the path than a block has."""
        *before, tail = self._pieces(leaf, below, self._ends[leaf])
        self._add(PUSH, self._pieces(leaf, path, tail.start if self._blocks.cuts_tail else self._ends[leaf]))
        self._add(POP, [tail._replace(is_end=True), *before[::-1]])

    def _pop_whole(self, whole: Sequence[_Child], path: int, below: int) -> None:
        """Adds the steps for subtrees that are computed whole, then for the path's tokens from `below` on."""
        if not whole:
            return
        if not self._blocks.cuts_tail:
            for leaf in range(whole[0].first, whole[-1].last):
                start = path if leaf == whole[0].first else max(path, self._common[leaf])
                self._add(PUSH, self._pieces(leaf, start, self._ends[leaf]))
        joined = self._blocks.joined([child.tokens for child in whole], path - below)
        place = 0
        for count in joined.counts:
            place += count
            start = path - joined.own if place == len(whole) else path
            self._done.append(Op(POP, self._joined(whole[place - count : place], path, start)))
        self._add(POP, self._pieces(whole[-1].first, below, path - joined.own)[::-1])

    def _joined(self, children: Sequence[_Child], path: int, start: int) -> tuple[PathPiece, ...]:
        """Returns a piece for each leaf of the children: its tokens that no leaf before it has.

        The first leaf's piece begins at `start`, so it also has what the children share from there on.
        """
        pieces = []
        for leaf in range(children[0].first, children[-1].last):
            pieces.append(PathPiece(leaf, start, self._ends[leaf] - start, is_end=True))
            start = max(path, self._common[leaf + 1])
        return tuple(pieces)

    def _pieces(self, leaf: int, start: int, end: int) -> list[PathPiece]:
        """Returns tokens `start` to `end` of a leaf's path in blocks, none of which ends the path."""
        cut = self._blocks.cut(start, end) if end > start else []
        return [PathPiece(leaf, *block, is_end=False) for block in cut]

    def _add(self, kind: int, pieces: Sequence[PathPiece]) -> None:
        """Adds a step for each piece, in this order."""
        self._done += [Op(kind, (piece,)) for piece in pieces]


def steps_of(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk over the leaves `first` up to, but without, `last`."""
    return _Steps(tree, blocks).over(first, last)


def steps_down(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk that only pushes, without gradients, over these leaves.

    They are the pops in reverse: what a pop leaves on the path was pushed before it.
    """
    return [Op(PUSH, op.pieces) for op in steps_of(tree, first, last, blocks)[::-1] if op.kind == POP]


class Call(NamedTuple):
    """One step of all walks."""

    kind: int
    bucket: int
    """The number of tokens for which the step's program is compiled."""
    ops: tuple[Op | None, ...]
    """What each walk does; None: it waits."""


def calls_of(
    tree: PrefixTree,
    walks: int,
    blocks: Blocks,
    costs: LeafCosts = TOKENS,
    *,
    with_gradients: bool = True,
) -> list[Call]:
    """Returns the steps of `walks` walks, each over a range of the tree's leaves, cut by `costs`.

    A call computes one kind of step for all walks that are about to take one, with as many tokens as the
    longest of them; the others wait. Without gradients nothing is popped.
    """
    planned = steps_of if with_gradients else steps_down
    bounds = ranges(tree, walks, costs).tolist()
    waiting = [planned(tree, first, last, blocks)[::-1] for first, last in pairwise(bounds)]
    calls = []
    while any(waiting):
        kind, bucket = _fullest(waiting, blocks)
        takes_part = [
            bool(steps) and steps[-1].kind == kind and steps[-1].tokens <= bucket for steps in waiting
        ]
        ops = tuple(steps.pop() if takes else None for steps, takes in zip(waiting, takes_part, strict=True))
        calls.append(Call(kind, bucket, ops))
    return calls


def plan_walk(
    tree: PrefixTree,
    walks: int,
    blocks: Blocks,
    costs: LeafCosts = TOKENS,
    *,
    with_gradients: bool = True,
) -> Walk:
    """Returns the steps of `walks` walks as arrays; the arguments are those of `calls_of`."""
    calls = calls_of(tree, walks, blocks, costs, with_gradients=with_gradients)
    order = np.argsort(tree.leaf_of, kind="stable")
    firsts = np.searchsorted(tree.leaf_of[order], np.arange(len(tree.leaves) + 1))
    rows: list[np.ndarray] = []
    columns: list[Columns] = []
    endings: list[tuple[int, int]] = []
    for call in calls:
        row = np.zeros((walks, 4), np.int32)
        step = Columns(*(np.full((walks, call.bucket), fill, np.int32) for fill in (0, 0, -1, 0)))
        for walk, op in enumerate(call.ops):
            if op is None:
                continue
            before = len(endings)
            step.sequence[walk], step.position[walk] = tree.leaves[op.pieces[0].leaf], op.start
            ended_at = _fill(tree, op, Columns(*(x[walk] for x in step)))
            for piece, column in zip(op.pieces, ended_at, strict=True):
                if piece.is_end:
                    ended = order[firsts[piece.leaf] : firsts[piece.leaf + 1]]
                    endings += [(int(sequence), column) for sequence in ended]
            row[walk] = op.start, op.tokens, before, len(endings) - before
        rows.append(row)
        columns.append(step)
    return Walk(
        np.array([call.kind for call in calls], np.int32),
        np.array(rows, np.int32).reshape(-1, walks, 4),
        columns,
        np.array(endings, np.int32).reshape(-1, 2),
    )


def _fill(tree: PrefixTree, op: Op, step: Columns) -> list[int]:
    """Writes a walk's tokens into its columns; returns the column of each piece's last token."""
    column, last = 0, []
    open_columns = np.empty(0, np.int64)  # those of the tokens from the path to the newest one
    for piece in op.pieces:
        above, closed = np.split(open_columns, [piece.start - op.start])
        step.ends[closed] = column
        own = np.arange(column, column + piece.length)
        step.sequence[own] = tree.leaves[piece.leaf]
        step.position[own] = np.arange(piece.start, piece.start + piece.length)
        step.previous[own] = np.append(above[-1:] if len(above) else -1, own[:-1])
        open_columns = np.append(above, own)
        column += piece.length
        last.append(column - 1)
    step.ends[open_columns] = column
    return last


def _fullest(waiting: Sequence[Sequence[Op]], blocks: Blocks) -> tuple[int, int]:
    """Returns kind and bucket of the call, of those that some walk waits for, with the least padding.

    `waiting`: for each walk its steps in reverse, the next one last.
    """
    ahead = [steps[-1] for steps in waiting if steps]

    def used(call: tuple[int, int]) -> tuple[float, int]:
        kind, bucket = call
        tokens = sum(op.tokens for op in ahead if op.kind == kind and op.tokens <= bucket)
        return tokens / bucket, tokens

    return max(((op.kind, blocks.bucket(op.tokens)) for op in ahead), key=used)
