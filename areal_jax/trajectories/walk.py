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
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.leaf_ranges import TOKENS, LeafCosts, ranges
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


class _Steps:
    """Collects the steps of one walk. Tails wait until it is known which of them share a call."""

    def __init__(self, kind: int, blocks: Blocks) -> None:
        """`kind`: that of the steps that compute tails."""
        self._kind, self._blocks = kind, blocks
        self._done: list[Op] = []
        self._tails: list[Piece] = []

    def add(self, kind: int, pieces: Sequence[Piece]) -> None:
        """Adds a step for each piece, in this order."""
        if pieces:
            self._join_tails()
            self._done += [Op(kind, (piece,)) for piece in pieces]

    def add_tail(self, piece: Piece) -> None:
        """Adds a leaf's last tokens, which continue the path as it now is."""
        if self._tails and self._tails[0].start != piece.start:
            self._join_tails()
        self._tails.append(piece)

    def extra_cost(self, start: int, length: int) -> int:
        """Returns what a tail of `length` tokens from `start` on would cost beside those that wait."""
        waiting = [piece.length for piece in self._tails if piece.start == start]
        return self._blocks.joined([*waiting, length])[0] - self._blocks.joined(waiting)[0]

    def done(self) -> list[Op]:
        self._join_tails()
        return self._done

    def _join_tails(self) -> None:
        _, counts = self._blocks.joined([piece.length for piece in self._tails])
        waiting = iter(self._tails)
        self._done += [Op(self._kind, tuple(islice(waiting, count))) for count in counts]
        self._tails = []


def _pieces(leaf: int, start: int, end: int, blocks: Blocks) -> list[Piece]:
    """Returns tokens `start` to `end` of a leaf's path in blocks, none of which ends the path."""
    return [Piece(leaf, *block, is_end=False) for block in blocks.cut(start, end)] if end > start else []


def _own_pieces(leaf: int, start: int, end: int, fork: int, blocks: Blocks) -> list[Piece]:
    """Returns tokens `start` to `end` of a leaf's path in blocks, the last of which ends the path.

    From token `fork` on, no other leaf has them: then they may join others, and stay one piece if they fit.
    """
    if start >= fork and end - start <= blocks.most:
        return [Piece(leaf, start, end - start, is_end=True)]
    *before, tail = _pieces(leaf, start, end, blocks)
    return [*before, tail._replace(is_end=True)]


def steps_of(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk over the leaves `first` up to, but without, `last`."""
    steps = _Steps(POP, blocks)
    path = 0
    for leaf in range(first, last):
        end = int(tree.lengths[tree.leaves[leaf]])
        below = int(tree.common[leaf + 1]) if leaf + 1 < last else 0
        top = below
        if below < path and blocks.joins_tails and end - path <= blocks.most:
            # The leaf is its node's last child: its pop continues into the node's tokens, unless that costs
            # more than to let the leaf's tail join others.
            apart = steps.extra_cost(path, end - path) + blocks.cost(path - below)
            top = path if apart < blocks.cost(end - below) else below
        *before, tail = _own_pieces(leaf, top, end, path, blocks)
        steps.add(PUSH, _pieces(leaf, path, tail.start if blocks.cuts_tail else end, blocks))
        steps.add_tail(tail)
        steps.add(POP, before[::-1])
        steps.add(POP, _pieces(leaf, below, top, blocks)[::-1])
        path = below
    return steps.done()


def steps_down(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk that only pushes, without gradients, over these leaves."""
    steps = _Steps(PUSH, blocks)
    path = 0
    for leaf in range(first, last):
        end = int(tree.lengths[tree.leaves[leaf]])
        below = int(tree.common[leaf + 1]) if leaf + 1 < last else 0
        own = max(path, below)  # no other leaf reads the tokens from here on
        top = own if blocks.joins_tails and end - own <= blocks.most else path
        *before, tail = _own_pieces(leaf, top, end, own, blocks)
        steps.add(PUSH, [*_pieces(leaf, path, top, blocks), *before])
        steps.add_tail(tail)
        path = below
    return steps.done()


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
        step = Columns(*(np.full((walks, call.bucket), fill, np.int32) for fill in (0, 0, -1)))
        for walk, op in enumerate(call.ops):
            if op is None:
                continue
            before, column = len(endings), 0
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
        rows.append(row)
        columns.append(step)
    return Walk(
        np.array([call.kind for call in calls], np.int32),
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
