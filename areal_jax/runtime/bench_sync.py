"""How long it takes to hand a version from the trainer to a host: in memory, through files, through Orbax's
defaults; beside one copy of the same bytes, all in turn in one run.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.generation.engine import Engine
from areal_jax.generation.host import POLL_S
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.devices import use_virtual_cpus
from areal_jax.runtime.measure import machine, random_model, timed_s
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore

DEADLINE_S = 600.0

Times = dict[str, float]
"""Seconds by the name of what took them."""


def sync(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    folder: str | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Publish and adopt, medians of `repeats` rounds in which everybody has one turn; `dtype` is the wire's.

    Files lie in `folder` (the system's temporary one unless given). `seconds` is publish and adopt through
    files until a reader in another store can decode with it, `limit` one warm copy of the bytes by numpy.
    """
    use_virtual_cpus(2)
    model = random_model(shape, "float32")
    params = jax.block_until_ready(model.init(0))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        arms = _arms(model, params, dtype, Path(place))
        rounds = [{name: arm(version) for name, arm in arms.items()} for version in range(repeats + 1)]
    times = {
        arm: {part: [one[arm][part] for one in rounds[1:]] for part in rounds[0][arm]} for arm in arms
    }  # the first round compiles
    sums = {arm: [sum(round[arm].values()) for round in rounds[1:]] for arm in arms}
    seconds = {arm: statistics.median(runs) for arm, runs in sums.items()}
    runs = [one["staged"]["publish"] + one["staged"]["adopt"] for one in rounds[1:]]
    whole = statistics.median(runs)
    copy_s, stall = seconds["memcpy"], statistics.median(times["staged"]["stall"])
    return machine(shape, dtype, whole, runs) | {
        "bytes": sum(leaf.size for leaf in jax.tree.leaves(params)) * np.dtype(_numpy(dtype)).itemsize,
        "limit": copy_s,
        "fraction_of_limit": copy_s / whole,
        "folder": folder or "temporary",
        "medians_s": {
            arm: {part: statistics.median(runs) for part, runs in parts.items()}
            for arm, parts in times.items()
        },
        "memory_over_memcpy": seconds["memory"] / copy_s,
        "memory_other_device_over_memcpy": seconds["memory_other_device"] / copy_s,
        "staged_over_orbax_per_layer": whole / seconds["orbax_per_layer"],
        "staged_over_orbax_stacked": whole / seconds["orbax_stacked"],
        "stall_over_publish": stall / statistics.median(times["staged"]["publish"]),
    }


def _numpy(dtype: str) -> Any:
    return jax.numpy.dtype(dtype)


def _arms(model: Model, params: Params, dtype: str, place: Path) -> dict[str, Callable[[int], Times]]:
    """What has its turn in each round, told the round's number."""
    here, there = (
        Engine(model, slots=1, length=32, mesh=make_mesh({"tensor": 1}, devices, "a host"))
        for devices in (jax.devices()[:1], jax.devices()[-1:])
    )
    published = digest(params)

    def of_round(version: int) -> VersionedParams:
        return VersionedParams(version, params, published)

    source = np.concatenate([np.asarray(leaf.astype(dtype)).ravel() for leaf in jax.tree.leaves(params)])
    target = np.zeros_like(source)
    stores = {engine: MemoryStore(engine.canary, dtype) for engine in (here, there)}
    writer, reader = (OrbaxStore(place / "weights", here.canary, dtype, keep=2) for _ in range(2))

    def memory(engine: Engine, version: int) -> Times:
        store = stores[engine]
        return {
            "publish": timed_s(lambda: store.publish(of_round(version)).params),
            "adopt": timed_s(lambda: store.load(version, engine.param_shardings).params),
        }

    def staged(version: int) -> Times:
        stall = timed_s(lambda: writer.publish(of_round(version)) and None)
        commit = timed_s(lambda: _wait_for(reader, version))
        adopt = timed_s(lambda: reader.load(version, here.param_shardings).params)
        prune = timed_s(lambda: writer.wait(DEADLINE_S))
        return {"stall": stall, "publish": stall + commit, "adopt": adopt, "prune": prune}

    layered = _per_layer(params)
    return {
        "memcpy": lambda version: {"copy": timed_s(lambda: np.copyto(target, source))},
        "digest": lambda version: {"digest": timed_s(lambda: digest(params))},
        "memory": lambda version: memory(here, version),
        "memory_other_device": lambda version: memory(there, version),
        "staged": staged,
        "orbax_per_layer": lambda version: _orbax_defaults(layered, place / "layered"),
        "orbax_stacked": lambda version: _orbax_defaults(params, place / "stacked"),
    }


def _wait_for(reader: OrbaxStore, version: int) -> None:
    """As a host does, between two decode calls."""
    end_s = time.monotonic() + DEADLINE_S
    while reader.latest() != version:
        if time.monotonic() > end_s:
            raise ArealError(
                f"version {version} was not committed within {DEADLINE_S:g} s; is the disk full?"
            )
        time.sleep(POLL_S)


def _per_layer(params: Params) -> dict[str, Any]:
    """The layout that others save: a leaf a layer, not a stack of layers."""
    rest = {name: leaf for name, leaf in params.items() if name != "blocks"}
    count = len(jax.tree.leaves(params["blocks"])[0])
    layers = {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in range(count)}
    return jax.block_until_ready({**rest, **layers})


def _orbax_defaults(tree: Any, path: Path) -> Times:
    """Save, wait and restore as Orbax's documentation shows it."""
    import orbax.checkpoint as ocp

    shutil.rmtree(path, ignore_errors=True)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    with ocp.StandardCheckpointer() as checkpointer:

        def save() -> None:
            checkpointer.save(path.absolute(), tree)
            checkpointer.wait_until_finished()

        return {
            "save": timed_s(save),
            "restore": timed_s(lambda: checkpointer.restore(path.absolute(), abstract)),
        }
