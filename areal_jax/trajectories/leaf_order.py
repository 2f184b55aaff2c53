"""Blocks of tokens in which a trainer walks over a prefix tree; the order of leaves that fills them best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Blocks:
    """Into which blocks of tokens a walk cuts what it pushes and pops."""

    most: int
    """Most tokens of a block."""
    smallest: int = 32
    """Smallest number of tokens for which a program is compiled."""
    cuts_tail: bool = True
    """Whether a leaf's last block is not pushed."""
    joins_tails: bool = True
    """Whether tails that leave the path at the same token are computed in one call."""
    call_tokens: int = 64
    """A call costs about as much as the computation of this many tokens, beside that of its own."""
    sorts_leaves: bool = True
    """Whether leaves are visited in the order of `depth_first`, rather than of their tokens."""

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

    def cost(self, tokens: int) -> int:
        """Returns the number of tokens, with padding and for each call, that `tokens` tokens cost."""
        return sum(self.bucket(size) + self.call_tokens for _, size in self.cut(0, tokens))

    def cut(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns (start, length) of blocks from `start` to `end`.

        All but the first few have `most` tokens. The rest is cut further if that saves more padding than it
        costs: a call, and to push what is not the last block.
        """
        first = end - (end - start - 1) // self.most * self.most
        bounds = [first, *range(first + self.most, end, self.most), end]
        while first > start:
            size = first - start
            smaller = max((each for each in self.buckets if each < size), default=0)
            saved = (
                self.bucket(size) - smaller - self.bucket(size - smaller) - self.call_tokens if smaller else 0
            )
            first = first - smaller if 3 * saved > size - smaller else start
            bounds.insert(0, first)
        return [(one, other - one) for one, other in pairwise(bounds) if other > one]

    def joined(self, tails: Sequence[int]) -> tuple[int, list[int]]:
        """Returns the least cost of tails of these lengths, and how many successive ones share each call."""
        sums = [0, *accumulate(tails)]
        best = [(0, 0)]  # of the first i tails: their cost, and how many the last call computes
        for end in range(1, len(sums)):
            options = []
            for count in range(1, end + 1 if self.joins_tails else 2):
                tokens = sums[end] - sums[end - count]
                if tokens > self.most:
                    break
                options.append((best[end - count][0] + self.bucket(tokens) + self.call_tokens, count))
            best.append(min(options))
        counts, end = [], len(tails)
        while end:
            counts.append(best[end][1])
            end -= counts[-1]
        return best[-1][0], counts[::-1]


def depth_first(tree: PrefixTree, blocks: Blocks) -> PrefixTree:
    """Returns the tree with its leaves in an order that needs few calls and little padding.

    The last pop of a node's last child continues into the node's own tokens. That child is the one with which
    the blocks of all last pops have the least padding. Of the other children, subtrees come first, then the
    leaves, sorted so that their tails fill blocks. A fork that saves less than its calls cost is left out:
    its children then share only what they share with others.
    """
    if not (len(tree.leaves) and blocks.sorts_leaves):
        return tree
    ends = tree.lengths[tree.leaves].tolist()
    # Nodes whose last child is still to come, each within the one before it; the first one is the root.
    still_open = [_Node(0, [])]
    for leaf, end in enumerate(ends):
        shared = int(tree.common[leaf + 1])
        closed = [_Subtree(end, [leaf], [])]
        while still_open[-1].depth > shared:
            node = still_open.pop()
            parent = max(still_open[-1].depth, shared)
            children = [*node.children, *closed]
            is_worth = node.saved(len(children), parent) > blocks.call_tokens
            closed = [node.closed(children, parent, blocks)] if is_worth else children
        if still_open[-1].depth < shared:
            still_open.append(_Node(shared, []))
        still_open[-1].children.extend(closed)
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

    def saved(self, children: int, parent: int) -> int:
        """Returns what sharing the node's tokens saves, in tokens of forward passes.

        Each child but one is spared a forward pass and a backward pass, which counts as two; one more forward
        pass is needed to push them. `parent`: number of tokens of the path to the node above it.
        """
        return (3 * (children - 1) - 1) * (self.depth - parent)

    def closed(self, children: Sequence[_Subtree], parent: int, blocks: Blocks) -> _Subtree:
        """Returns the node's subtree; `parent`: number of tokens of the path to the node above it."""

        def saved(child: _Subtree) -> tuple[int, int]:
            together = blocks.cost(child.end - parent)
            return blocks.cost(child.end - self.depth) - together, child.end

        last = max(range(len(children)), key=lambda place: saved(children[place]))
        rest = [child for place, child in enumerate(children) if place != last]
        is_tail = [len(child.leaves) == 1 and child.end - self.depth <= blocks.most for child in rest]
        tails = [child for child, is_one in zip(rest, is_tail, strict=True) if is_one]
        others = [child for child, is_one in zip(rest, is_tail, strict=True) if not is_one]
        ordered = [*sorted(others, key=lambda child: child.end), *self._filled(tails, blocks), children[last]]
        common = ordered[0].common[:]
        for child in ordered[1:]:
            common += [self.depth, *child.common]
        return _Subtree(children[last].end, [leaf for child in ordered for leaf in child.leaves], common)

    def _filled(self, tails: Sequence[_Subtree], blocks: Blocks) -> list[_Subtree]:
        """Returns leaves in an order in which successive ones fill blocks, the longest first."""
        filled: list[tuple[int, list[_Subtree]]] = []
        for tail in sorted(tails, key=lambda child: -child.end):
            size = tail.end - self.depth
            place = next((i for i, (used, _) in enumerate(filled) if used + size <= blocks.most), None)
            if place is None:
                filled.append((size, [tail]))
            else:
                used, members = filled[place]
                filled[place] = used + size, [*members, tail]
        # The emptiest block comes last: the node's last child may join it.
        return [tail for _, members in sorted(filled, key=lambda each: -each[0]) for tail in members]
