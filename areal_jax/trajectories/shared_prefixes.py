"""Which tokens the sequences of a packed row can share, and where a row's sequences lie then.

A column carries the loss of one sequence. So sequences share only tokens that come before the first trained
token of each of them; from there on, and at least in its last token, a sequence's tokens are its own. The
tokens that sequences share form a prefix tree, which a row holds depth first: whatever continues a token lies
in one range of columns behind it. Shapes: S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.trajectories.prefix_tree import PrefixTree, Subtree, prefix_tree, reordered
from areal_jax.types import Trajectory

LEAST_ACROSS_GROUPS = 16
"""Groups share prefixes only if samples of theirs begin with this many equal tokens, as with the same rules.
Chat templates and common words make the first few tokens of unrelated prompts equal. To share these would tie
the rows of all groups together, and save next to nothing.
"""


def shareable_tree(trajectories: Sequence[Trajectory], groups: np.ndarray) -> PrefixTree:
    """Returns the prefix tree of the tokens that sequences can share; each sequence is a leaf.

    `groups`: (S,) group of each sequence.
    """
    sizes = [_shareable_tokens(each) for each in trajectories]
    keys = []
    for index, family in enumerate(_families(trajectories, sizes, groups.tolist())):
        # Ids are below 2^31. The last key is the sequence's alone, so no sequence ends on another's path.
        keys.append(np.concatenate([[family], trajectories[index].tokens[: sizes[index]], [2**31 + index]]))
    tree = prefix_tree(keys)
    lengths = np.array([len(each.tokens) for each in trajectories], np.int64)
    return tree._replace(common=np.maximum(tree.common - 1, 0), lengths=lengths)


def unshared_tree(lengths: np.ndarray) -> PrefixTree:
    """Returns the tree of sequences with these numbers of tokens, of which no two share a token."""
    each = np.arange(len(lengths))
    return PrefixTree(leaves=each, common=np.zeros(len(lengths) + 1, np.int64), leaf_of=each, lengths=lengths)


def _shareable_tokens(trajectory: Trajectory) -> int:
    mask = trajectory.loss_mask
    sampled = int(mask.argmax()) if mask.any() else len(mask)
    # One token stays the trajectory's own, so that its segment is never empty.
    return min(sampled, len(mask) - 1)


def _families(trajectories: Sequence[Trajectory], sizes: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Returns the family of each sequence: groups that share prefixes have the same one.

    `sizes`, `groups`: number of shareable tokens and group of each sequence.
    """
    family = {group: group for group in groups}

    def found(group: int) -> int:
        while family[group] != group:
            group = family[group]
        return group

    first: dict[bytes, int] = {}  # beginning -> a group with it
    for each, size, group in zip(trajectories, sizes, groups, strict=True):
        if size >= LEAST_ACROSS_GROUPS:
            one = found(group)
            other = found(first.setdefault(each.tokens[:LEAST_ACROSS_GROUPS].tobytes(), group))
            family[max(one, other)] = min(one, other)
    return [found(group) for group in groups]


def longest_first(tree: PrefixTree) -> PrefixTree:
    """Returns the tree with each node's children sorted by their longest sequence, the longest first.

    Of equally long ones, sequences come before subtrees, and each in their order in the batch.
    """
    lengths = tree.lengths[tree.leaves].tolist()
    sequences = tree.leaves.tolist()

    def rank(child: Subtree) -> tuple[int, bool, int]:
        if len(child.leaves) == 1:
            return -child.end, False, sequences[child.leaves[0]]
        longest = max(map(lengths.__getitem__, child.leaves))
        return -longest, True, min(map(sequences.__getitem__, child.leaves))

    def close(depth: int, _parent: int, children: list[Subtree]) -> list[Subtree]:
        return [Subtree.of_children(depth, sorted(children, key=rank))]

    return reordered(tree, close)
