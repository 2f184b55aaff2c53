"""A learner's jitted programs: the shapes for which each was compiled, and the memory that each needs.

A run needs few shapes. A program reports every call with shapes that no earlier call had, because each
compilation takes seconds during which nothing is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from areal_jax.parallel.program_errors import Running


class Compiled(NamedTuple):
    """Reported when a program is called with shapes for which it has not been compiled yet."""

    program: str
    shapes: tuple[str, ...]
    """Leaves of the arguments with shapes that no earlier call had, such as "[1].tokens int32[8, 256]"."""


class Forecast(NamedTuple):
    """Forecast of the bytes of memory that an update needs on one device."""

    resident: int
    """Bytes of the arrays that stay in memory during all programs of the update."""
    needs: Mapping[str, int]
    """Bytes that each program, by name, needs in addition to `resident`."""

    @property
    def largest(self) -> str:
        """Name of the program that needs the most bytes."""
        return max(self.needs, key=lambda program: self.needs[program])

    @property
    def peak(self) -> int:
        return self.resident + self.needs[self.largest]


class Program:
    """A jitted function that calls `report` when its arguments have shapes that no earlier call had.

    A program is called like `function`; `options` (donation, shardings) are passed to jax.jit. `name`
    identifies the program in reports.
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
            self._report_new(args)
        with Running(self.name):
            return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """Returns the function lowered (jax.stages.Lowered) for `args`, arrays or jax.ShapeDtypeStruct."""
        return self._jitted.lower(*args)

    def beyond_arguments(self, *args: Any) -> int:
        """Compiles the program for `args`; returns the bytes needed on one device besides the arguments.

        `args` are arrays or jax.ShapeDtypeStruct. Returns 0 if the backend does not report memory.
        """
        memory = self.lower(*args).compile().memory_analysis()
        if memory is None:
            return 0
        # Outputs that lie in donated arguments need no bytes of their own.
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def _report_new(self, args: Sequence[Any]) -> None:
        parts = {
            f"{jax.tree_util.keystr(path)} {leaf.dtype.name}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(args))
        }
        new, self._parts = tuple(sorted(parts - self._parts)), self._parts | parts
        self._report(Compiled(self.name, new))


def bytes_on_one_device(tree: Any) -> int:
    """Returns the bytes of a tree of arrays or jax.ShapeDtypeStruct, all with shardings, on one device.

    This is the sum over the leaves of the size of one shard.
    """
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
