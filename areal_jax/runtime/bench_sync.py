"""How long it takes to hand a version from the trainer to a host: in memory, from device to device between
two processes, through files; beside Orbax's defaults, safetensors and one copy of the bytes, all in turn.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.generation.engine import Engine
from areal_jax.generation.host import POLL_S
from areal_jax.models.model import Params
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.bench_publisher import DEADLINE_S, adapted_model, publisher
from areal_jax.runtime.devices import use_virtual_cpus
from areal_jax.runtime.measure import machine, random_model, timed_s
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.prefetch import Prefetcher
from areal_jax.weights.staged import to_plain
from areal_jax.weights.store import ParamReader
from areal_jax.weights.transfer import TransferReader

TMPFS = "/dev/shm"

Times = dict[str, float]
"""Seconds by the name of what took them; `whole` is from the publish until a host can decode with it."""
Arm = Callable[[int], Times]
"""What has its turn in each round, told the round's number."""


def sync(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    folder: str | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Publish and adopt, medians of `repeats` rounds in which everybody has one turn; `dtype` is the wire's.

    Files lie in `folder` (the system's temporary one unless given), and on tmpfs where there is one. `pause`
    is what the host's decode loop stands still for a version, laid out for decoding, `stall` what the trainer
    does. `seconds` is the whole of a transfer between two processes, `limit` one warm copy of the bytes by
    numpy.
    """
    use_virtual_cpus(2)
    model = random_model(shape, "float32")
    params = jax.block_until_ready(model.init(0))
    engines = [
        Engine(model, slots=1, length=32, mesh=make_mesh({"tensor": 1}, devices, "a host"))
        for devices in (jax.devices()[:1], jax.devices()[-1:])
    ]
    with ExitStack() as open_now:
        arms = _in_memory(engines, params, dtype) | _between_processes(open_now, shape, dtype)
        disks = {"": folder} | ({"_tmpfs": TMPFS} if Path(TMPFS).is_dir() else {})
        for name, place in disks.items():
            made = Path(open_now.enter_context(tempfile.TemporaryDirectory(dir=place)))
            in_files = _in_files(open_now, engines[0], params, dtype, made)
            arms |= {arm + name: run for arm, run in in_files.items()}
        rounds = [{name: arm(version) for name, arm in arms.items()} for version in range(repeats + 1)]
    return _told(rounds[1:], shape, dtype, params) | {"folder": folder or "temporary"}  # the first compiles


def _told(rounds: list[dict[str, Times]], shape: str, dtype: str, params: Params) -> dict[str, Any]:
    medians = {
        arm: {part: statistics.median(one[arm][part] for one in rounds) for part in parts}
        for arm, parts in rounds[0].items()
    }
    whole = {arm: parts["whole"] for arm, parts in medians.items() if "whole" in parts}
    runs = [one["transfer"]["whole"] for one in rounds]
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    return machine(shape, dtype, whole["transfer"], runs) | {
        "bytes": sum(sizes) * np.dtype(jax.numpy.dtype(dtype)).itemsize,
        "limit": whole["memcpy"],
        "fraction_of_limit": whole["memcpy"] / whole["transfer"],
        "medians_s": {
            arm: {part: value for part, value in parts.items() if part != "bytes"}
            for arm, parts in medians.items()
        },
        "adapter_bytes_share": medians["transfer_adapters"]["bytes"] / medians["transfer"]["bytes"],
        "over_memcpy": {arm: whole[arm] / whole["memcpy"] for arm in whole if "memory" in arm},
        "orbax_over_transfer": {arm: whole[arm] / whole["transfer"] for arm in whole if "orbax" in arm},
        "files_over_orbax": {
            arm: whole[arm] / whole[arm.replace("files", "orbax_per_layer")]
            for arm in whole
            if "files" in arm
        },
        "stall_over_publish": {
            arm: parts["stall"] / (parts["whole"] - parts["pause"])
            for arm, parts in medians.items()
            if "stall" in parts
        },
    }


def _in_memory(engines: list[Engine], params: Params, dtype: str) -> dict[str, Arm]:
    """One process: on the publisher's device, and on another; beside a copy, and a digest."""
    here, there = engines
    source = np.concatenate([np.asarray(leaf.astype(dtype)).ravel() for leaf in jax.tree.leaves(params)])
    target, published = np.zeros_like(source), digest(params)
    plain = VersionedParams(0, params, published)
    stores = {engine: MemoryStore(engine.canary, dtype) for engine in engines}

    def memory(engine: Engine, version: int) -> Times:
        store, value = stores[engine], VersionedParams(version, params, published)
        stall = timed_s(lambda: store.publish(value).params)
        pause = timed_s(lambda: engine.load_params(store.load(version, engine.param_shardings)).params)
        return {"stall": stall, "pause": pause, "whole": stall + pause}

    return {
        "memcpy": lambda version: {"whole": timed_s(lambda: np.copyto(target, source))},
        "digest": lambda version: {"digest": timed_s(lambda: digest(params))},
        "layout": lambda version: {"layout": timed_s(lambda: here.load_params(plain).params)},
        "memory": lambda version: memory(here, version),
        "memory_other_device": lambda version: memory(there, version),
    }


def _between_processes(open_now: ExitStack, shape: str, dtype: str) -> dict[str, Arm]:
    """From device to device: every leaf changed, or the adapters alone, for the second time in a row: what
    stayed the same once is held by the reader from then on.
    """
    engine = Engine(adapted_model(shape), slots=1, length=32)
    trainer = open_now.enter_context(publisher(shape, dtype))
    reader = TransferReader(trainer.address, engine.canary, DEADLINE_S)
    open_now.callback(reader.close)
    ahead = _ahead(open_now, reader, engine)
    held: list[VersionedParams] = []

    def transfer(version: int, what: str) -> Times:
        before = reader.pulled_bytes
        began, stall = trainer.publish(version, what)
        pause = _adopt(ahead, version, engine, held)
        whole = time.time() - began
        return {"stall": stall, "pause": pause, "whole": whole, "bytes": reader.pulled_bytes - before}

    return {
        "transfer": lambda version: transfer(3 * version, "all"),
        "transfer_adapters": lambda version: [transfer(3 * version + n, "adapters") for n in (1, 2)][-1],
    }


def _in_files(open_now: ExitStack, engine: Engine, params: Params, dtype: str, place: Path) -> dict[str, Arm]:
    writer, reader = (OrbaxStore(place / "weights", engine.canary, dtype, keep=2) for _ in range(2))
    ahead = _ahead(open_now, reader, engine)
    layered, published = _per_layer(params), digest(params)
    held: list[VersionedParams] = []

    def files(version: int) -> Times:
        value = VersionedParams(version, params, published)
        stall = timed_s(lambda: writer.publish(value) and None)
        began = time.perf_counter()
        pause = _adopt(ahead, version, engine, held)
        whole = stall + time.perf_counter() - began
        prune = timed_s(lambda: writer.wait(DEADLINE_S))
        return {"stall": stall, "pause": pause, "prune": prune, "whole": whole}

    return {
        "files": files,
        "orbax_per_layer": lambda version: _orbax_defaults(layered, place / "layered"),
        "orbax_stacked": lambda version: _orbax_defaults(params, place / "stacked"),
        "safetensors": lambda version: _safetensors(layered, place / "all.safetensors"),
    }


def _ahead(open_now: ExitStack, reader: ParamReader, engine: Engine) -> Prefetcher:
    ahead = Prefetcher(reader, engine.param_shardings, engine.load_params)
    open_now.callback(ahead.close, DEADLINE_S)
    return ahead


def _adopt(ahead: Prefetcher, version: int, engine: Engine, held: list[VersionedParams]) -> float:
    """As a host does, which holds the version in force; seconds between two of its decode calls."""
    _wait_for(ahead, version)
    load = lambda: held.append(engine.load_params(ahead.load(version, engine.param_shardings)))  # noqa: E731
    pause = timed_s(load)
    del held[:-1]
    return pause


def _wait_for(reader: ParamReader, version: int) -> None:
    """As a host does, between two decode calls."""
    end_s = time.monotonic() + DEADLINE_S
    while reader.latest() != version:
        if time.monotonic() > end_s:
            raise ArealError(
                f"version {version} was not committed within {DEADLINE_S:g} s; is the publisher alive?"
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

        save_s = timed_s(save)
        restore_s = timed_s(lambda: checkpointer.restore(path.absolute(), abstract))
    return {"save": save_s, "restore": restore_s, "whole": save_s + restore_s}


def _safetensors(tree: Any, path: Path) -> Times:
    """Its own save and load through numpy, onto the device."""
    from safetensors.numpy import load_file, save_file

    plain = to_plain(tree)
    save_s = timed_s(lambda: save_file({name: np.asarray(leaf) for name, leaf in plain.items()}, path))
    load_s = timed_s(lambda: jax.device_put(load_file(path), jax.devices()[0]))
    return {"save": save_s, "load": load_s, "whole": save_s + load_s}
