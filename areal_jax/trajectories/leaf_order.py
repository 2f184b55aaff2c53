"""Blocks of tokens in which a trainer walks over a prefix tree; the order of leaves that fills them best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from areal_jax.trajectories.prefix_tree import PrefixTree, Subtree, reordered


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
    if not blocks.sorts_leaves:
        return tree

    def close(depth: int, parent: int, children: list[Subtree]) -> list[Subtree]:
        node = _Node(depth, parent, blocks)
        is_root = depth == 0
        return [node.closed(children)] if is_root or node.is_worth(len(children)) else children

    return reordered(tree, close)


class _Node(NamedTuple):
    """A node with several children."""

    depth: int  # tokens of the path to it
    parent: int  # tokens of the path to the node above it
    blocks: Blocks

    def is_worth(self, children: int) -> bool:
        """Returns whether sharing the node's tokens saves more tokens of forward passes than its calls cost.

        Each child but one is spared a forward pass and a backward pass, which counts as two; one more forward
        pass is needed to push them.
        """
        return (3 * (children - 1) - 1) * (self.depth - self.parent) > self.blocks.call_tokens

    def closed(self, children: Sequence[Subtree]) -> Subtree:
        """Returns the node's subtree in its new order."""

        def saved(child: Subtree) -> tuple[int, int]:
            together = self.blocks.cost(child.end - self.parent)
            return self.blocks.cost(child.end - self.depth) - together, child.end

        last = max(range(len(children)), key=lambda place: saved(children[place]))
        rest = [child for place, child in enumerate(children) if place != last]
        is_tail = [len(child.leaves) == 1 and child.end - self.depth <= self.blocks.most for child in rest]
        tails = [child for child, is_one in zip(rest, is_tail, strict=True) if is_one]
        others = [child for child, is_one in zip(rest, is_tail, strict=True) if not is_one]
        others.sort(key=lambda child: child.end)
        return Subtree.of_children(self.depth, [*others, *self._filled(tails), children[last]])

    def _filled(self, tails: Sequence[Subtree]) -> list[Subtree]:
        """Returns leaves in an order in which successive ones fill blocks, the longest first."""
        filled: list[tuple[int, list[Subtree]]] = []
        for tail in sorted(tails, key=lambda child: -child.end):
            size = tail.end - self.depth
            place = next((i for i, (used, _) in enumerate(filled) if used + size <= self.blocks.most), None)
            if place is None:
                filled.append((size, [tail]))
            else:
                used, members = filled[place]
                filled[place] = used + size, [*members, tail]
        # The emptiest block comes last: the node's last child may join it.
        return [tail for _, members in sorted(filled, key=lambda each: -each[0]) for tail in members]
