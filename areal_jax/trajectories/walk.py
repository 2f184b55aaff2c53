"""The order in which a trainer walks over a prefix tree, planned as data before the first forward pass.

A walk visits leaf after leaf. To go down to a leaf it pushes tokens: their KV join those of the path. From
there it pops tokens, the last ones first, down to those that the next leaf shares: each pop computes a block
of tokens again, with gradients. So only one path is alive at a time. A leaf's last block need not be pushed
before it is popped, because no other token reads its KV: the tail is cut. The tails of several leaves that
leave the path at the same token are popped in one call, as pieces that do not see each other. Several walks,
each over a part of the leaves, take their steps together, as rows of the same calls. The method is
AReaL-DTA's; joined tails are ours. Shapes: S sequences, L leaves, W walks, N steps, n columns of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.prefix_tree import PrefixTree

PUSH, POP = 0, 1


class Piece(NamedTuple):
    """Tokens `start` to `start + length` of a leaf's path."""

    leaf: int
    start: int
    length: int
    is_end: bool
    """Whether these are the path's last tokens, with which the leaf's sequences are complete."""


class Op(NamedTuple):
    """One step of one walk: to push or to pop pieces, which all continue the path at the same token."""

    kind: int  # PUSH | POP
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def takes(self, piece: Piece, blocks: Blocks) -> bool:
        """Returns whether `piece` can join this step: it then is a leaf's tail beside others."""
        return (
            blocks.joins_tails
            and all(each.is_end for each in self.pieces)
            and self.start == piece.start
            and self.tokens + piece.length <= blocks.most
        )

    def joined(self, piece: Piece) -> Op:
        return self._replace(pieces=(*self.pieces, piece))


class Columns(NamedTuple):
    """The tokens of a step, a column each; columns beyond a walk's tokens repeat its first one."""

    sequence: np.ndarray  # (W, n) int32: a sequence with the token
    position: np.ndarray  # (W, n) int32: the token's place in it
    piece: np.ndarray  # (W, n) int32: number of the token's piece in the step; -1 = no token


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
    """(S, 2) int32: a sequence, and the column of the first token of its piece, in the order of the steps."""

    def tokens(self, kind: int) -> int:
        """Returns the number of tokens that all steps of a kind compute, without padding."""
        return int(self.rows[self.kinds == kind, :, 1].sum())

    @property
    def buckets(self) -> np.ndarray:
        """(N,) int64: the number of columns of each step."""
        return np.array([each.piece.shape[1] for each in self.columns], np.int64)

    def of_rows(self, rows: np.ndarray) -> Walk:
        """Returns the walk with sequence i numbered rows[i]."""
        columns = [each._replace(sequence=rows[each.sequence].astype(np.int32)) for each in self.columns]
        endings = np.stack([rows[self.endings[:, 0]], self.endings[:, 1]], axis=1).astype(np.int32)
        return self._replace(columns=columns, endings=endings)

    @property
    def computed_tokens(self) -> int:
        """Tokens of all calls, with the padding of each walk to the step's bucket."""
        return int(self.buckets.sum()) * self.rows.shape[1]


def steps_of(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk over the leaves `first` up to, but without, `last`."""
    steps: list[Op] = []
    path = 0
    for leaf in range(first, last):
        end = int(tree.lengths[tree.leaves[leaf]])
        below = int(tree.common[leaf + 1]) if leaf + 1 < last else 0
        top = _top_of_tail(steps, path, below, end, blocks)
        cut = blocks.cut(top, end)
        pushed = cut[-1][0] if blocks.cuts_tail else end
        steps += _in_blocks(PUSH, leaf, path, pushed, blocks)
        tail = Piece(leaf, *cut[-1], is_end=True)
        if steps and steps[-1].kind == POP and tail.start == path and steps[-1].takes(tail, blocks):
            steps[-1] = steps[-1].joined(tail)
        else:
            steps.append(Op(POP, (tail,)))
        steps += [Op(POP, (Piece(leaf, *block, is_end=False),)) for block in reversed(cut[:-1])]
        steps += reversed(_in_blocks(POP, leaf, below, top, blocks))
        path = below
    return steps


def _top_of_tail(steps: Sequence[Op], path: int, below: int, end: int, blocks: Blocks) -> int:
    """Returns the first token of the pops that are a leaf's own: of the path, or of what is popped with it.

    Where the walk goes on below the path, the leaf is its node's last child. Its pop continues into the
    node's tokens, unless that costs more than to let the leaf's tail join others.
    """
    if below >= path or not blocks.joins_tails or end - path > blocks.most:
        return min(below, end)
    tail = Piece(0, path, end - path, is_end=True)
    extra = blocks.cost(tail.length)
    if steps and steps[-1].kind == POP and steps[-1].takes(tail, blocks):
        extra = blocks.bucket(steps[-1].tokens + tail.length) - blocks.bucket(steps[-1].tokens)
    return path if extra + blocks.cost(path - below) < blocks.cost(end - below) else below


def _in_blocks(kind: int, leaf: int, start: int, end: int, blocks: Blocks) -> list[Op]:
    if end <= start:
        return []
    return [Op(kind, (Piece(leaf, *block, is_end=False),)) for block in blocks.cut(start, end)]


def steps_down(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk that only pushes, without gradients, over these leaves."""
    steps: list[Op] = []
    path = 0
    for leaf in range(first, last):
        end = int(tree.lengths[tree.leaves[leaf]])
        below = int(tree.common[leaf + 1]) if leaf + 1 < last else 0
        own = max(path, below)  # no other leaf reads the tokens from here on
        joins = blocks.joins_tails and end - own <= blocks.most
        top = own if joins else path
        steps += _in_blocks(PUSH, leaf, path, top, blocks)
        *blocks_before, tail = (Piece(leaf, *block, is_end=False) for block in blocks.cut(top, end))
        tail = tail._replace(is_end=True)
        steps += [Op(PUSH, (piece,)) for piece in blocks_before]
        if joins and steps and steps[-1].takes(tail, blocks):
            steps[-1] = steps[-1].joined(tail)
        else:
            steps.append(Op(PUSH, (tail,)))
        path = below
    return steps


def ranges(tree: PrefixTree, count: int) -> np.ndarray:
    """Returns `count` + 1 ascending bounds that cut the leaves into ranges of nearly equal numbers of tokens.

    The tokens of a range are those of its own tree: its first leaf shares nothing. Ranges may be empty. The
    largest range is the smallest possible, found by bisection.
    """
    ends, common = tree.lengths[tree.leaves], tree.common[:-1]
    own = np.concatenate([[0], np.cumsum(ends - common)])

    def cut(limit: int) -> list[int]:
        bounds = [0]
        while bounds[-1] < len(ends) and len(bounds) <= count:
            start = bounds[-1]
            room = limit - common[start] + own[start]
            bounds.append(max(start + 1, int(np.searchsorted(own, room, side="right")) - 1))
        return bounds

    low, high = int(ends.max(initial=0)), int(ends.sum())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(middle)[-1] == len(ends) else (middle + 1, high)
    bounds = cut(low)
    return np.array(bounds + [len(ends)] * (count + 1 - len(bounds)), np.int64)


def plan_walk(tree: PrefixTree, walks: int, blocks: Blocks, *, with_gradients: bool = True) -> Walk:
    """Returns the steps of `walks` walks over the tree's leaves, each over a range of them.

    A call computes one kind of step for all walks that are about to take one, with as many tokens as the
    longest of them; the others wait. Without gradients nothing is popped.
    """
    order = np.argsort(tree.leaf_of, kind="stable")
    firsts = np.searchsorted(tree.leaf_of[order], np.arange(len(tree.leaves) + 1))
    bounds = ranges(tree, walks)
    planned = steps_of if with_gradients else steps_down
    waiting = [planned(tree, int(a), int(b), blocks)[::-1] for a, b in pairwise(bounds)]
    kinds: list[int] = []
    rows: list[np.ndarray] = []
    columns: list[Columns] = []
    endings: list[tuple[int, int]] = []
    while any(waiting):
        kind, bucket = _fullest(waiting, blocks)
        row = np.zeros((walks, 4), np.int32)
        step = Columns(*(np.full((walks, bucket), fill, np.int32) for fill in (0, 0, -1)))
        for walk, steps in enumerate(waiting):
            if not steps or steps[-1].kind != kind or steps[-1].tokens > bucket:
                continue
            op, before, column = steps.pop(), len(endings), 0
            step.sequence[walk], step.position[walk] = tree.leaves[op.pieces[0].leaf], op.start
            for number, piece in enumerate(op.pieces):
                own = slice(column, column + piece.length)
                step.sequence[walk, own] = tree.leaves[piece.leaf]
                step.position[walk, own] = np.arange(piece.start, piece.start + piece.length)
                step.piece[walk, own] = number
                if piece.is_end:
                    ended = order[firsts[piece.leaf] : firsts[piece.leaf + 1]]
                    endings += [(int(sequence), column) for sequence in ended]
                column += piece.length
            row[walk] = op.start, op.tokens, before, len(endings) - before
        kinds.append(kind)
        rows.append(row)
        columns.append(step)
    return Walk(
        np.array(kinds, np.int32),
        np.array(rows, np.int32).reshape(-1, walks, 4),
        columns,
        np.array(endings, np.int32).reshape(-1, 2),
    )


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
