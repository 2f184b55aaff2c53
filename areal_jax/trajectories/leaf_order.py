"""Blocks of tokens in which a trainer walks over a prefix tree; the order of leaves that fills them best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
    joins_subtrees: bool = True
    """Whether a call computes whole subtrees, and several that leave the path at the same token."""
    call_tokens: int = 64
    """A call costs about as much as the computation of this many tokens, beside that of its own."""
    sorts_leaves: bool = True
    """Whether leaves are visited in the order of `depth_first`, rather than of their tokens."""

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of tokens for which programs are compiled, at most six, ascending: parts of `most`."""
        parts = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
        sizes = [-(-math.ceil(self.most * part) // self.smallest) * self.smallest for part in parts]
        return tuple(sorted({min(size, self.most) for size in sizes}))

    def bucket(self, tokens: int) -> int:
        """Returns the smallest bucket for `tokens` tokens."""
        return next(size for size in self.buckets if size >= tokens)

    def cost(self, tokens: int) -> int:
        """Returns the number of tokens, with padding and for each call, that `tokens` tokens cost."""
        if not tokens:
            return 0
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

    def joined(self, sizes: Sequence[int], own: int = 0) -> Joined:
        """Returns the cheapest division of successive subtrees into calls.

        `sizes`: each subtree's number of tokens. `own`: number of tokens at the end of the path to the
        subtrees that still have to be computed; the last call may compute them, too.
        """
        sums = [0, *accumulate(sizes)]
        best = [(0, 0)]  # of the first i subtrees: their cost, and how many the last call computes
        for end in range(1, len(sums)):
            is_last = end == len(sizes)
            options = []
            for count in range(1, end + 1 if self.joins_subtrees else 2):
                tokens = sums[end] - sums[end - count]
                if tokens > self.most:
                    break
                cost = self.with_own(tokens, own)[0] if is_last else self.bucket(tokens) + self.call_tokens
                options.append((best[end - count][0] + cost, count))
            best.append(min(options))
        counts, end = [], len(sizes)
        while end:
            counts.append(best[end][1])
            end -= counts[-1]
        last = sums[-1] - sums[-1 - counts[0]] if counts else 0
        return Joined(best[-1][0], counts[::-1], self.with_own(last, own)[1])

    def with_own(self, tokens: int, own: int) -> tuple[int, int]:
        """Returns the cost of a call of `tokens` tokens and of `own` ones of the path; how many join it."""
        rooms = [size - tokens for size in self.buckets if size >= tokens]
        joins = {min(room, own) for room in rooms if own and room}
        if self.joins_subtrees or not joins:
            joins.add(0)
        cost, n = min(
            (self.bucket(tokens + n) + self.call_tokens + self.cost(own - n), n) for n in sorted(joins)
        )
        return cost, n


class Joined(NamedTuple):
    """Calls that compute successive subtrees."""

    cost: int
    counts: list[int]
    """Number of subtrees of each call."""
    own: int
    """How many of the path's last tokens the last call also computes."""


def depth_first(tree: PrefixTree, blocks: Blocks) -> PrefixTree:
    """Returns the tree with its leaves in an order that needs few calls and little padding.

    Of a node's children, those that do not fit a block come first; the others are sorted so that they fill
    blocks, of which the last one has room for the node's own tokens. A fork that saves less than its calls
    cost is left out: its children then share only what they share with others.
    """
    if not blocks.sorts_leaves:
        return tree

    def close(depth: int, parent: int, children: list[Subtree]) -> list[Subtree]:
        node = _Fork(depth, parent, blocks)
        is_root = depth == 0
        return [node.closed(children)] if is_root or node.is_worth(children) else children

    return reordered(tree, close)


class _Fork(NamedTuple):
    """A node with several children."""

    depth: int  # tokens of the path to it
    parent: int  # tokens of the path to the node above it
    blocks: Blocks

    def is_worth(self, children: Sequence[Subtree]) -> bool:
        """Returns whether sharing the node's tokens saves more tokens of forward passes than its calls cost.

        A subtree that fits a block costs no further call. Otherwise each child but one is spared a forward
        pass and a backward pass, which counts as two; one more forward pass is needed to push the tokens.
        """
        own = self.depth - self.parent
        tokens = own + sum(child.tokens - self.depth for child in children)
        fits = self.blocks.joins_subtrees and tokens <= self.blocks.most
        return fits or (3 * (len(children) - 1) - 1) * own > self.blocks.call_tokens

    def closed(self, children: Sequence[Subtree]) -> Subtree:
        """Returns the node's subtree in its new order."""
        small = [child for child in children if self._is_one_call(child)]
        others = [child for child in children if not self._is_one_call(child)]
        others.sort(key=lambda child: (self._saved(child), child.end))
        return Subtree.of_children(self.depth, [*others, *self._filled(small)])

    def _is_one_call(self, child: Subtree) -> bool:
        """Returns whether one call computes the child."""
        is_one = len(child.leaves) == 1 or self.blocks.joins_subtrees
        return is_one and child.tokens - self.depth <= self.blocks.most

    def _saved(self, child: Subtree) -> int:
        """Returns the tokens saved if the pop of the child's last leaf goes on into the node's own tokens."""
        together = self.blocks.cost(child.end - self.parent)
        return self.blocks.cost(child.end - self.depth) - together

    def _filled(self, children: Sequence[Subtree]) -> list[Subtree]:
        """Returns the children in an order in which successive ones fill blocks.

        The last block has the room that the node's own tokens leave; the others come the fullest first.
        """
        most = self.blocks.most
        last: list[Subtree] = []
        room = most - (self.depth - self.parent) % most
        filled: list[tuple[int, list[Subtree]]] = []
        for child in sorted(children, key=lambda child: -child.tokens):
            size = child.tokens - self.depth
            if size <= room:
                room -= size
                last.append(child)
                continue
            place = next((i for i, (used, _) in enumerate(filled) if used + size <= most), None)
            if place is None:
                filled.append((size, [child]))
            else:
                used, members = filled[place]
                filled[place] = used + size, [*members, child]
        return [child for _, members in sorted(filled, key=lambda each: -each[0]) for child in members] + last
