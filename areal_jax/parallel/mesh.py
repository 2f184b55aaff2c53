"""Device meshes, and the rules by which a parameter's named axes (embed, mlp, ...) are split over mesh axes.

The trainer's mesh has the axes data, fsdp, tensor, context, expert; context is reserved (size 1). A
generation host's mesh has only the axis tensor, over which it splits experts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.types import ArealError

RULES: dict[str, str | tuple[str, ...] | None] = {
    "experts": ("expert", "tensor"),
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "layers": None,
}
"""Logical name of a parameter's axis -> mesh axis; of several, the first that the mesh has."""
ROW_AXES = ("data", "fsdp", "expert")
"""Axes of the trainer's mesh over which the rows of a batch are split; `tensor` shares them."""


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any], owner: str) -> Mesh:
    """Returns a mesh of `shape` (axis name -> size), made of the first devices in `devices`.

    Raises ArealError if there are too few devices; the message names `owner`, such as "the trainer".
    """
    needed = int(np.prod(list(shape.values())))
    if needed > len(devices):
        axes = " x ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1)
        raise ArealError(
            f"{owner}'s mesh {axes or 'of one device'} needs {needed} devices, but only {len(devices)} are "
            "there; make the mesh smaller (trainer.mesh, runtime.host_tensor), or on a CPU use more virtual "
            "devices (runtime.placement=split creates them)"
        )
    return Mesh(np.array(devices[:needed]).reshape(tuple(shape.values())), tuple(shape))


def one_device() -> Mesh:
    """Returns the trainer's mesh over jax's first device."""
    return make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices(), "the trainer")


def platform_of(mesh: Mesh | None) -> str:
    """Returns the platform of a mesh's devices: cpu, gpu or tpu; None: that of jax's default device."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def absent_device(mesh: Mesh) -> Any | None:
    """Returns the mesh's first device if it is not there: programs can be compiled for it, but not run.

    None for a mesh of real devices. `areal-jax plan` makes the others (`plan.absent`).
    """
    first = mesh.devices.flat[0]
    return first if first.client.runtime_type == "compile_only_runtime" else None


FP8_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with fp8 in hardware (Ada)."""


def has_fp8(mesh: Mesh) -> bool:
    """Whether the mesh's devices compute in fp8: NVIDIA GPUs from FP8_CAPABILITY on.

    True for GPUs that are not there, because jax does not know their capability.
    """
    if platform_of(mesh) not in ("gpu", "cuda"):
        return False
    capability = getattr(mesh.devices.flat[0], "compute_capability", None)
    if capability is None:
        return absent_device(mesh) is not None
    return tuple(int(part) for part in str(capability).split(".")) >= FP8_CAPABILITY


def own_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Returns the ascending indices of the rows, of a batch of `rows` rows, that this process's devices hold.

    A single process has all rows. Raises ArealError if the mesh has no device of this process.
    """
    if not mesh.local_devices:
        axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        raise ArealError(
            f"process {jax.process_index()} of {jax.process_count()} has no device of the mesh "
            f"{axes or 'of one device'}, which takes {mesh.size} of {jax.device_count()} devices; enlarge "
            "trainer.mesh, or lower runtime.trainer_processes"
        )
    owned = rows_over(mesh).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[index] for index in owned.values() if index]))


def param_shardings(logical_axes: Any, abstract_params: Any, mesh: Mesh) -> Any:
    """Returns, for each leaf of `abstract_params`, the NamedSharding that splits the leaf over the mesh.

    `logical_axes` names the axes of each leaf, and RULES maps each name to a mesh axis. A leaf's axis stays
    unsplit if the mesh lacks the mesh axis, or if the size of the mesh axis does not divide the size of the
    leaf's axis.
    """

    def place(names: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, spec_of(names, leaf.shape, mesh))

    return jax.tree.map(place, logical_axes, abstract_params, is_leaf=lambda x: isinstance(x, PartitionSpec))


def spec_of(names: Iterable[str | None], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Returns the partition over the mesh of a parameter of `shape`, with these logical names of its axes.

    Each mesh axis splits at most one of them, the first that it divides.
    """
    spec: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        rule = RULES[name] if name else None
        there = [axis for axis in ((rule,) if isinstance(rule, str) else rule or ()) if axis in mesh.shape]
        axis = there[0] if there else None
        is_free = axis is not None and axis not in spec and size % mesh.shape[axis] == 0
        spec.append(axis if is_free else None)
    return PartitionSpec(*spec)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts the whole array on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def row_axes(mesh: Mesh) -> PartitionSpec:
    """Returns the partition of an array whose first axis are a batch's rows, over the trainer's mesh.

    Only the axes of more than one device split the rows, but data and fsdp, which always do.
    """
    return PartitionSpec(tuple(axis for axis in ROW_AXES if axis != "expert" or mesh.shape.get(axis, 1) > 1))


def row_parts(mesh: Mesh) -> int:
    """Returns the number of parts into which the trainer's mesh splits the rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ROW_AXES)


def rows_over(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that splits an array's first axis, a batch's rows, over the trainer's mesh."""
    return NamedSharding(mesh, row_axes(mesh))
