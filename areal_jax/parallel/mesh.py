"""Meshes, and the rules from a parameter's logical axes to a mesh's.

The trainer's mesh has the axes data, fsdp, tensor, context, expert (the last two reserved at size 1); a
generation host's has tensor alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.types import ArealError

RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "layers": None,
}
ROWS = PartitionSpec(("data", "fsdp"))
"""How a batch's rows lie on the trainer's mesh."""


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any], who: str) -> Mesh:
    """A mesh of `shape` over the first devices. Raises ArealError when there are too few."""
    needed = int(np.prod(list(shape.values())))
    if needed > len(devices):
        axes = " x ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1)
        raise ArealError(
            f"{who}'s mesh {axes or 'of one device'} needs {needed} devices, there are {len(devices)}; make "
            "it smaller, or on a CPU raise the number of virtual devices (runtime.placement=split makes them)"
        )
    return Mesh(np.array(devices[:needed]).reshape(tuple(shape.values())), tuple(shape))


def own_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of a batch's rows lie on this process's devices, ascending: all of them in a process of its own.

    Raises ArealError where the mesh has no device of this process.
    """
    if not mesh.local_devices:
        axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise ArealError(
            f"process {jax.process_index()} of {jax.process_count()} has no device of the mesh "
            f"{axes or 'of one device'}, which takes {mesh.size} of {jax.device_count()} devices; enlarge "
            "trainer.mesh, or start fewer processes"
        )
    owned = NamedSharding(mesh, ROWS).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[index] for index in owned.values() if index]))


def param_shardings(logical_axes: Any, abstract_params: Any, mesh: Mesh) -> Any:
    """A NamedSharding a leaf. An axis that the mesh lacks, or that does not divide, stays whole."""

    def place(names: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = [RULES[name] if name else None for name in names]
        fits = [
            axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree.map(place, logical_axes, abstract_params, is_leaf=lambda x: isinstance(x, PartitionSpec))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
