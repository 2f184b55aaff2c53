"""Links: the four ways in which arrays move from one executor to another of the same process.

Trainer, reference policy, teacher and generation hosts are executors, each on a mesh of its own. A link has
one direction, to the mesh or the shardings of the executor that receives, and one kind of content:

| link | content | every receiving device gets |
|---|---|---|
| Weights | a model's parameters | its shards of them |
| Broadcast | arrays that each device needs whole, such as those per sequence | all of them |
| Scatter | rows of work, such as a micro-batch's tokens | its rows, split over data, fsdp and expert |
| Gather | rows of results, such as log-probs | its rows, on the mesh that asked for them |

All move from device to device. `jax.device_put` does so only if each part on the receiving mesh is a part on
the sending one; it copies any other array through host memory. Links therefore cut and join parts on the
devices. LlamaRL calls them communication channels (Wu et al., arXiv:2505.24034).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from areal_jax.parallel.mesh import replicated, row_parts, rows_over
from areal_jax.types import ArealError
from areal_jax.weights.transfer.pieces import assemble, own_pieces


@dataclass(frozen=True)
class Weights:
    """Carries parameters to an executor's `shardings`, a tree like them."""

    shardings: Any

    def __call__(self, params: Any) -> Any:
        """Returns `params` laid out by the shardings; a leaf that lies so already is returned unchanged."""
        return jax.tree.map(_moved, params, self.shardings)


@dataclass(frozen=True)
class Broadcast:
    """Carries arrays to every device of the mesh `to`."""

    to: Mesh

    def __call__(self, x: jax.Array) -> jax.Array:
        return _moved(x, replicated(self.to))


@dataclass(frozen=True)
class Scatter:
    """Carries rows of work to the mesh `to`: it splits the first axis over the axes data, fsdp and expert."""

    to: Mesh

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Returns the rows on the mesh; raises ArealError if it does not divide them evenly."""
        return _moved_rows(rows, self.to)


@dataclass(frozen=True)
class Gather:
    """Carries rows of results from the mesh `of` back to the mesh `to`, which sent the work."""

    of: Mesh
    to: Mesh

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Returns the rows on `to`.

        Raises ArealError if they are not on the mesh `of`, or if `to` does not divide them evenly.
        """
        # A link has one direction: results of another mesh mean that a caller mixed up two executors.
        if rows.sharding.device_set != set(self.of.devices.flat):
            raise ArealError(
                f"rows on {sorted(map(str, rows.sharding.device_set))} are not results of the mesh "
                f"{dict(self.of.shape)}; gather them with a link of their own mesh"
            )
        return _moved_rows(rows, self.to)


def _moved_rows(rows: jax.Array, to: Mesh) -> jax.Array:
    shards = row_parts(to)
    if rows.shape[0] % shards:
        raise ArealError(
            f"{rows.shape[0]} rows do not divide evenly over the data x fsdp x expert = {shards} shards of "
            f"the mesh {dict(to.shape)}; set trainer.rows to a multiple of {shards}, or make the mesh smaller"
        )
    return _moved(rows, rows_over(to))


def _moved(x: jax.Array, sharding: Sharding) -> jax.Array:
    # Unchanged, not copied: readers of the memory store then share the published arrays.
    if x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    # Not jax.device_put: between shards that differ it fetches the whole array into host memory.
    return assemble(x.shape, x.dtype, sharding, own_pieces(x))
