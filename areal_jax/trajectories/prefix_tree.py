"""The prefix tree of sequences of tokens: which tokens they share, and in which order to visit its leaves.

Two sequences share a token if they are equal up to and including it: its hidden state is then the same, and
one forward pass can compute it for both. The tree has one node per distinct prefix. A sequence that is a
prefix of another one, or equal to it, ends inside the other's path; the remaining sequences are the leaves.
With the leaves in an order in which each subtree's leaves are neighbours, the number of tokens that each leaf
shares with the leaf before it determines the whole tree. Shapes: S sequences, L leaves, n tokens of a
sequence, K ids of a support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from areal_jax.types import Batch, Trajectory


class PrefixTree(NamedTuple):
    """The prefix tree of S sequences, which are numbered in the order in which they were given."""

    leaves: np.ndarray
    """(L,) int64: the sequence of each leaf, in an order in which each subtree's leaves are neighbours."""
    common: np.ndarray
    """(L + 1,) int64: number of tokens that leaf i shares with leaf i - 1; 0 at both ends."""
    leaf_of: np.ndarray
    """(S,) int64: for each sequence the index in `leaves` of a leaf whose path the sequence begins."""
    lengths: np.ndarray
    """(S,) int64: number of tokens of each sequence."""

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """Number of the tree's nodes: distinct prefixes of the sequences, the empty prefix not counted."""
        return int(self.lengths[self.leaves].sum() - self.common.sum())


class Subtree(NamedTuple):
    """Leaves below one node, in an order in which each subtree's leaves are neighbours."""

    end: int
    """Tokens of the path to its last leaf."""
    tokens: int
    """Distinct tokens of the paths to its leaves."""
    leaves: list[int]
    common: list[int]
    """Tokens that each leaf but the first shares with the leaf before it."""

    @classmethod
    def of_children(cls, depth: int, children: Sequence[Subtree]) -> Subtree:
        """Returns the subtree of a node at `depth` tokens, with these children in this order."""
        common = children[0].common[:]
        for child in children[1:]:
            common += [depth, *child.common]
        tokens = depth + sum(child.tokens - depth for child in children)
        leaves = [leaf for child in children for leaf in child.leaves]
        return cls(children[-1].end, tokens, leaves, common)


def reordered(tree: PrefixTree, close: Callable[[int, int, list[Subtree]], list[Subtree]]) -> PrefixTree:
    """Returns the tree with its leaves in another order.

    `close(depth, parent, children)` is called for each node with several children, those below it first, and
    for the root. It returns one subtree of them in their new order; or, except for the root, the children
    themselves, which then are the parent's. `depth`: number of tokens of the path to the node; `parent`: of
    that to the node above.
    """
    if not len(tree.leaves):
        return tree
    ends = tree.lengths[tree.leaves].tolist()
    # Depths and children of the nodes that have more children to come, each within the one before it.
    still_open: list[tuple[int, list[Subtree]]] = [(0, [])]
    for leaf, end in enumerate(ends):
        shared = int(tree.common[leaf + 1])
        closed = [Subtree(end, end, [leaf], [])]
        while still_open[-1][0] > shared:
            depth, children = still_open.pop()
            closed = close(depth, max(still_open[-1][0], shared), [*children, *closed])
        if still_open[-1][0] < shared:
            still_open.append((shared, []))
        still_open[-1][1].extend(closed)
    ((_, children),) = still_open
    (whole,) = close(0, 0, children)
    return tree._replace(
        leaves=tree.leaves[whole.leaves],
        common=np.array([0, *whole.common, 0], np.int64),
        leaf_of=np.argsort(whole.leaves)[tree.leaf_of],
    )


class Sampled(NamedTuple):
    """What decides which tokens of a sequence can be shared with others."""

    tokens: np.ndarray  # (n,) int32
    loss_mask: np.ndarray  # (n,) bool
    temperature: float
    support: np.ndarray | None  # (n, K) int32

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sampled:
        return cls(
            trajectory.tokens, trajectory.loss_mask, trajectory.sampling.temperature, trajectory.support
        )

    @classmethod
    def of_row(cls, batch: Batch, row: int) -> Sampled:
        """Returns the sequence of a row that holds one sequence from its first column on; empty if none."""
        ids = batch.segment_ids[row]
        size = int((ids > 0).sum())
        support = None if batch.support is None else batch.support[row, :size]
        temperature = float(batch.temperature[ids[0] - 1]) if size else 1.0
        return cls(batch.tokens[row, :size], batch.loss_mask[row, :size], temperature, support)


class TrainedOnPaths(NamedTuple):
    """Which tokens of the leaves' paths are trained; each array has a row of T tokens per sequence."""

    is_trained: np.ndarray
    """(S, T) bool: whether any sequence with this prefix trains its last token."""
    temperature: np.ndarray
    """(S, T) float32: temperature at which these sequences sampled the token; 1 where none trains it."""


def prefix_tree(keys: Sequence[np.ndarray]) -> PrefixTree:
    """Returns the prefix tree of sequences, with the leaves in lexicographic order.

    `keys`: for each sequence an (n,) array of integers of at least 0 and below 2^32, one per token; two
    tokens are shared only if their keys and all keys before are equal.
    """
    lengths = np.array([len(each) for each in keys], np.int64)
    # Big-endian bytes are ordered like the integers, and Python compares them with a prefix first.
    texts = [each.astype(">u4").tobytes() for each in keys]
    order = np.array(sorted(range(len(keys)), key=texts.__getitem__), np.int64)
    shared = np.array([_common_tokens(keys[one], keys[other]) for one, other in pairwise(order)], np.int64)
    # Sorted, a prefix of any sequence is a prefix of its successor.
    is_leaf = np.append(shared < lengths[order[:-1]], True)[: len(order)]
    leaf_of = np.empty(len(order), np.int64)
    leaf_of[order] = np.cumsum(is_leaf) - is_leaf
    return PrefixTree(
        leaves=order[is_leaf],
        common=np.concatenate([[0], shared[is_leaf[:-1]], [0]]).astype(np.int64)[: is_leaf.sum() + 1],
        leaf_of=leaf_of,
        lengths=lengths,
    )


def _common_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the number of leading elements in which two arrays are equal."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def tree_of(sequences: Sequence[Sampled]) -> PrefixTree:
    """Returns the prefix tree of sequences of tokens, for computing their log-probs.

    The log-prob of a trained token also depends on the temperature and on the token's support. Sequences
    therefore share no trained token for which these differ. Loss masks, versions, log-probs and rewards may
    differ on shared tokens.
    """
    return prefix_tree(_keys(sequences))


def _keys(sequences: Sequence[Sampled]) -> list[np.ndarray]:
    """Returns for each sequence an (n,) array of integers, as `prefix_tree` needs them."""
    temperatures = [each.temperature for each in sequences]
    # From its first trained token on, a sequence shares with others of its temperature alone. One
    # temperature, the commonest, needs no mark.
    commonest_first = sorted(set(temperatures), key=lambda each: (-temperatures.count(each), each))
    marks = {each: mark for mark, each in enumerate(commonest_first)}
    has_support = any(each.support is not None for each in sequences)
    if len(marks) <= 1 and not has_support:
        return [each.tokens for each in sequences]
    parts = []
    for each in sequences:
        is_marked = np.cumsum(each.loss_mask) > 0
        columns = [each.tokens, np.where(is_marked, marks[each.temperature], 0)]
        parts.append(np.column_stack(columns if each.support is None else [*columns, each.support]))
    _, numbers = np.unique(np.concatenate(parts), axis=0, return_inverse=True)
    return np.split(numbers.reshape(-1), np.cumsum([len(part) for part in parts])[:-1])


def trained_on_paths(tree: PrefixTree, sequences: Sequence[Sampled], length: int) -> TrainedOnPaths:
    """Returns which tokens of each leaf's path any sequence trains, in rows of `length` tokens.

    `tree`: that of the sequences, as `tree_of` returns it. The rows of the leaves' sequences are set.
    """
    is_trained = np.zeros((len(sequences), length), bool)
    temperature = np.ones((len(sequences), length), np.float32)

    def join(leaf: int, tokens: int, mask: np.ndarray, values: np.ndarray | float) -> None:
        row = tree.leaves[leaf]
        temperature[row, :tokens] = np.where(mask[:tokens], values, temperature[row, :tokens])
        is_trained[row, :tokens] |= mask[:tokens]

    for each, leaf in zip(sequences, tree.leaf_of.tolist(), strict=True):
        join(leaf, len(each.tokens), each.loss_mask, each.temperature)
    pairs = list(pairwise(range(len(tree.leaves))))
    # Forth and back, what one leaf's path trains reaches all leaves that share the token.
    for leaf, other in [*pairs, *((two, one) for one, two in reversed(pairs))]:
        shared = int(tree.common[max(leaf, other)])
        row = tree.leaves[leaf]
        join(other, shared, is_trained[row, :shared], temperature[row, :shared])
    return TrainedOnPaths(is_trained, temperature)
