"""The order in which a trainer walks over a prefix tree, planned as data before the first forward pass.

A walk visits leaf after leaf. To go down to a leaf it pushes tokens: their KV join those of the path. From
there it pops tokens, the last ones first, down to those that the next leaf shares: each pop computes a block
of tokens again, with gradients. So only one path is alive at a time. A leaf's last block need not be pushed
before it is popped, because no other token reads its KV: the tail is cut. Several walks, each over a part of
the leaves, take their steps together, as rows of the same calls. The method is AReaL-DTA's. Shapes: S
sequences, L leaves, W walks, N steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.prefix_tree import PrefixTree

PUSH, POP = 0, 1


class Op(NamedTuple):
    """One step of one walk: to push or to pop tokens `start` to `start + length` of a leaf's path."""

    kind: int  # PUSH | POP
    leaf: int
    start: int
    length: int
    is_last_block: bool = False
    """Whether a pop is the first one of its leaf, of the path's last tokens."""


class Walk(NamedTuple):
    """N steps of W walks over one prefix tree, of which each takes part in a step or does nothing."""

    kinds: np.ndarray
    """(N,) int32: PUSH or POP."""
    buckets: np.ndarray
    """(N,) int32: number of tokens for which the step's program is compiled, at least every length."""
    rows: np.ndarray
    """(N, W, 5) int32, for each walk: the sequence with the tokens, the first token, the number of tokens (0:
    the walk does nothing), and the range in `order` of the sequences that end in the leaf: first and count,
    which is above 0 only where the leaf's last block is popped or, without gradients, pushed.
    """
    order: np.ndarray
    """(S,) int32: the sequences by leaf."""

    @property
    def pushed_tokens(self) -> int:
        return int(self.rows[self.kinds == PUSH, :, 2].sum())

    @property
    def popped_tokens(self) -> int:
        return int(self.rows[self.kinds == POP, :, 2].sum())

    @property
    def computed_tokens(self) -> int:
        """Tokens of all calls, with the padding of each walk to the step's bucket."""
        return int(self.buckets.astype(np.int64).sum() * self.rows.shape[1])


@dataclass(frozen=True)
class Blocks:
    """Into which blocks of tokens a walk cuts what it pushes and pops."""

    most: int
    """Most tokens of a block."""
    smallest: int = 32
    """Smallest number of tokens for which a program is compiled."""
    cuts_tail: bool = True
    """Whether a leaf's last block is not pushed."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of tokens for which programs are compiled, at most six: halves of `most`, ascending."""
        sizes = [self.most]
        while len(sizes) < 6 and sizes[-1] > self.smallest:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(reversed(sizes))

    def bucket(self, tokens: int) -> int:
        """Returns the smallest bucket for `tokens` tokens."""
        return next(size for size in self.buckets if size >= tokens)

    def padded(self, tokens: int) -> int:
        """Returns the number of tokens that are computed for `tokens` tokens, padding included."""
        return sum(self.bucket(size) for _, size in self.cut(0, tokens))

    def cut(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns (start, length) of blocks from `start` to `end`; all but the first have `most` tokens."""
        first = end - (end - start - 1) // self.most * self.most
        bounds = [start, *range(first, end, self.most), end]
        return [(one, other - one) for one, other in pairwise(bounds)]


def depth_first(tree: PrefixTree, blocks: Blocks) -> PrefixTree:
    """Returns the tree with its leaves in an order that needs few short pops.

    The last pop of a node's last child continues into the node's own tokens. That child is the one with which
    the blocks of all last pops have the least padding; the other children come before it, the shortest first.
    """
    if not len(tree.leaves):
        return tree
    ends = tree.lengths[tree.leaves].tolist()
    # Nodes whose last child is still to come, each within the one before it; the first one is the root.
    still_open = [_Node(0, [])]
    for leaf, end in enumerate(ends):
        shared = int(tree.common[leaf + 1])
        closed = _Subtree(end, [leaf], [])
        while still_open[-1].depth > shared:
            node = still_open.pop()
            parent = max(still_open[-1].depth, shared)
            closed = node.closed([*node.children, closed], parent, blocks)
        if still_open[-1].depth < shared:
            still_open.append(_Node(shared, []))
        still_open[-1].children.append(closed)
    (root,) = still_open
    whole = root.closed(root.children, 0, blocks)
    return tree._replace(
        leaves=tree.leaves[whole.leaves],
        common=np.array([0, *whole.common, 0], np.int64),
        leaf_of=np.argsort(whole.leaves)[tree.leaf_of],
    )


class _Subtree(NamedTuple):
    """A node's subtree in its new order."""

    end: int  # tokens of the path to its last leaf
    leaves: list[int]
    common: list[int]  # tokens that each leaf but the first shares with the leaf before it


class _Node(NamedTuple):
    """A node with several children; `depth`: number of tokens of the path to it."""

    depth: int
    children: list[_Subtree]

    def closed(self, children: Sequence[_Subtree], parent: int, blocks: Blocks) -> _Subtree:
        """Returns the node's subtree; `parent`: number of tokens of the path to the node above it."""

        def saved(child: _Subtree) -> tuple[int, int]:
            together = blocks.padded(child.end - parent)
            return blocks.padded(child.end - self.depth) - together, child.end

        last = max(range(len(children)), key=lambda place: saved(children[place]))
        rest = sorted((c for place, c in enumerate(children) if place != last), key=lambda child: child.end)
        ordered = [*rest, children[last]]
        common = ordered[0].common[:]
        for child in ordered[1:]:
            common += [self.depth, *child.common]
        return _Subtree(children[last].end, [leaf for child in ordered for leaf in child.leaves], common)


def steps_of(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk over the leaves `first` up to, but without, `last`."""
    steps, path = [], 0
    for leaf in range(first, last):
        end = int(tree.lengths[tree.leaves[leaf]])
        below = int(tree.common[leaf + 1]) if leaf + 1 < last else 0
        cut = blocks.cut(below, end)
        pushed = cut[-1][0] if blocks.cuts_tail else end
        if pushed > path:
            steps += [Op(PUSH, leaf, start, size) for start, size in blocks.cut(path, pushed)]
        steps += [
            Op(POP, leaf, start, size, is_last_block=start == cut[-1][0]) for start, size in reversed(cut)
        ]
        path = below
    return steps


def steps_down(tree: PrefixTree, first: int, last: int, blocks: Blocks) -> list[Op]:
    """Returns the steps of one walk that only pushes, without gradients, over these leaves."""
    steps = []
    for leaf in range(first, last):
        end = int(tree.lengths[tree.leaves[leaf]])
        cut = blocks.cut(int(tree.common[leaf]) if leaf > first else 0, end)
        steps += [Op(PUSH, leaf, start, size, start == cut[-1][0]) for start, size in cut]
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
    kinds, buckets, rows = [], [], []
    while any(waiting):
        kind, bucket = _fullest(waiting, blocks)
        step = np.zeros((walks, 5), np.int32)
        for walk, steps in enumerate(waiting):
            if steps and steps[-1].kind == kind and steps[-1].length <= bucket:
                op = steps.pop()
                first, last = firsts[op.leaf : op.leaf + 2] if op.is_last_block else (0, 0)
                step[walk] = tree.leaves[op.leaf], op.start, op.length, first, last - first
        kinds.append(kind)
        buckets.append(bucket)
        rows.append(step)
    return Walk(
        np.array(kinds, np.int32),
        np.array(buckets, np.int32),
        np.array(rows, np.int32).reshape(-1, walks, 5),
        order.astype(np.int32),
    )


def _fullest(waiting: Sequence[Sequence[Op]], blocks: Blocks) -> tuple[int, int]:
    """Returns kind and bucket of the call, of those that some walk waits for, with the least padding.

    `waiting`: for each walk its steps in reverse, the next one last.
    """
    ahead = [steps[-1] for steps in waiting if steps]

    def used(call: tuple[int, int]) -> tuple[float, int]:
        kind, bucket = call
        tokens = sum(op.length for op in ahead if op.kind == kind and op.length <= bucket)
        return tokens / bucket, tokens

    return max(((op.kind, blocks.bucket(op.length)) for op in ahead), key=used)
