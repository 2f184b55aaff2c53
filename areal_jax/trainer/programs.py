"""A learner's jitted programs: the shapes each was compiled for, and the memory it takes.

Shapes are a small set known before the first step; a program that is compiled for another one later says so,
with the shape, since each costs seconds and none should.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding


class Compiled(NamedTuple):
    """A program met a shape it was not compiled for."""

    program: str
    shapes: tuple[str, ...]
    """What is new, as "micro.tokens int32[8,256]"."""


class ProgramMemory(NamedTuple):
    """Bytes on one device, by the compiler's own account."""

    program: str
    arguments: int
    outputs: int
    reused: int
    """Of the outputs, those that lie in donated arguments."""
    temporaries: int

    @property
    def beyond_arguments(self) -> int:
        """What has to be free when the program starts."""
        return self.temporaries + self.outputs - self.reused


class Forecast(NamedTuple):
    """Bytes of one device that a step will take, before it is taken."""

    resident: int
    """What lies there through all of its programs."""
    needs: Mapping[str, int]
    """By program, what it needs beside that."""

    @property
    def largest(self) -> str:
        """The program that needs most."""
        return max(self.needs, key=lambda program: self.needs[program])

    @property
    def peak(self) -> int:
        return self.resident + self.needs[self.largest]


class Program:
    """`jax.jit(function, **options)` that tells `report` of every set of shapes it meets for the first time.

    Called like the function. Donation and shardings are jit's.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], report: Callable[[Compiled], None], **options: Any
    ) -> None:
        self.name = name
        self._jitted = jax.jit(function, **options)
        self._report = report
        self._seen: set[tuple[Any, ...]] = set()
        self._parts: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._seen:
            self._seen.add(key)
            self._tell_what_is_new(args)
        return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """As jit's: for arrays or jax.ShapeDtypeStruct."""
        return self._jitted.lower(*args)

    def memory(self, *args: Any) -> ProgramMemory:
        """Of the program for these arguments, arrays or jax.ShapeDtypeStruct; it is compiled for good.

        All 0 beside the name where the backend keeps no account.
        """
        analysis = self.lower(*args).compile().memory_analysis()
        if analysis is None:
            return ProgramMemory(self.name, 0, 0, 0, 0)
        return ProgramMemory(
            self.name,
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
        )

    def _tell_what_is_new(self, args: Sequence[Any]) -> None:
        parts = {
            f"{jax.tree_util.keystr(path)} {leaf.dtype.name}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(args))
        }
        new, self._parts = tuple(sorted(parts - self._parts)), self._parts | parts
        self._report(Compiled(self.name, new))


def bytes_on_one_device(tree: Any) -> int:
    """Of a tree of arrays or jax.ShapeDtypeStruct: the shard of every leaf, added up."""

    def of_leaf(leaf: Any) -> int:
        sharding: Sharding | None = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for extent in shape:
            size *= extent
        return size

    return sum(of_leaf(leaf) for leaf in jax.tree.leaves(tree))
