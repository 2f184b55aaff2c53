"""The KV pages of a moving sample that are in use, in pieces of a few sizes.

The cache of a prefix has more pages than its tokens need: a scratch page, and up to four times as many as are
in use. Only those with KV move. They are cut into runs of pages, each as long as a power of two, since every
size compiles a program once. The receiver lays the runs into a cache of the original size; the pages in
between are zero there, and attention never reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from areal_jax.generation.slots import HostArray, Prefix
from areal_jax.models.kv_pages import KVPages
from areal_jax.types import ArealError
from areal_jax.weights.digest import to_plain
from areal_jax.weights.transfer.pieces import Box, are_whole, assemble, cut, own_pieces

KVPieces = Mapping[str, Sequence[tuple[Box, HostArray]]]
"""Leaf of KVPages -> (box, data) of each piece; box: the piece's position in the leaf, data: (L, run, K,
page, h) in device memory or host memory.
"""


def used_pages(kv: Prefix) -> int:
    """Returns how many pages have KV: that of all tokens but the last one."""
    return -(-(int(kv.true_length) - 1) // kv.cache.page_tokens)


def used_bytes(kv: Prefix) -> int:
    """Returns the size in bytes of the pages that move."""
    leaves = jax.tree.leaves(kv.cache)
    return used_pages(kv) * sum(leaf.size // leaf.shape[1] * leaf.dtype.itemsize for leaf in leaves)


def runs(pages: int) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of each run of pages 1 to `pages`, the longest run first."""
    found, start = [], 1
    for bit in reversed(range(pages.bit_length())):
        if pages >> bit & 1:
            found.append((start, start + (1 << bit)))
            start += 1 << bit
    return found


def pieces_of(kv: Prefix) -> KVPieces:
    """Returns the pieces of the pages in use, where the prefix is: on devices or in host memory."""
    spans = runs(used_pages(kv))
    return {
        name: [piece for span in spans for piece in _run(leaf, *span)]
        for name, leaf in to_plain(kv.cache).items()
    }


def _run(leaf: HostArray, start: int, stop: int) -> list[tuple[Box, HostArray]]:
    layers, _, *rest = leaf.shape
    if not isinstance(leaf, jax.Array):
        return [(((0, layers), (start, stop), *((0, size) for size in rest)), leaf[:, start:stop])]
    pages = cut(leaf, [0, start, 0, 0, 0], (layers, stop - start, *rest))
    return [
        ((box[0], (box[1][0] + start, box[1][1] + start), *box[2:]), data) for box, data in own_pieces(pages)
    ]


def assembled(kv: Prefix, pieces: KVPieces) -> Prefix:
    """Returns `kv`, with leaves that are ShapeDtypeStructs with shardings, with arrays made of `pieces`.

    Raises ArealError if the pieces do not cover the pages in use.
    """
    used, leaves = used_pages(kv), []
    for name, like in to_plain(kv.cache).items():
        boxes = [box for box, _ in pieces[name]]
        if not are_whole(boxes, (like.shape[0], used, *like.shape[2:])):
            raise ArealError(f"the pieces {boxes} do not cover {used} pages of the leaf {name} {like.shape}")
        leaves.append(assemble(like.shape, like.dtype, like.sharding, pieces[name]))
    cache: KVPages = jax.tree.unflatten(jax.tree.structure(kv.cache), leaves)
    return kv.replace(cache=cache)
