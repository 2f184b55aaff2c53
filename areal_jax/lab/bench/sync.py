"""Measures how long the weights of a new policy version take from the trainer to a generation host.

The weights are sent in memory, from device to device between two processes, and through files. For
comparison, Orbax with its default settings, safetensors, and one plain copy of the bytes are measured too.
"""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.assembly.devices import machine, use_virtual_cpus
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import POLL_S
from areal_jax.lab.bench.measure import random_model, timed_s
from areal_jax.models.config import Lora
from areal_jax.models.lora import adapters_of, base_of, with_adapters
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest, to_plain
from areal_jax.weights.links import Weights
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxReader, OrbaxStore
from areal_jax.weights.prefetch import Prefetcher
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import FetchingReader, ParamReader
from areal_jax.weights.transfer.publisher import TransferStore
from areal_jax.weights.transfer.reader import TransferReader

DEADLINE_S = 600.0
TMPFS = "/dev/shm"
LORA = Lora(rank=8, alpha=16.0)

Times = dict[str, float]
"""Part of a transfer -> seconds. `whole`: from the start of publishing until a host can decode. `bytes` is no
time, but the number of bytes sent.
"""
Arm = Callable[[int], Times]
"""A function of the round's number that makes one measurement; every round calls each such function once."""


def sync(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    folder: str | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures publishing and adopting new weights on each transfer path: medians of `repeats` rounds.

    Weights are sent in `dtype`. Files are written below `folder` (None: the system's temporary folder), and
    to tmpfs if there is one. In the result, `medians_s` has the seconds of each path: `pause` is how long a
    host's decode loop stops to adopt a version that is already laid out for decoding, `stall` how long the
    trainer stops to publish a version. `seconds` is the duration of the whole transfer between two processes;
    `limit` is the time in which numpy copies the bytes once in memory.
    """
    use_virtual_cpus(4)
    model = random_model(shape, "float32")
    params = jax.block_until_ready(model.init(0))
    engines = [
        Engine(model, slots=1, length=32, mesh=make_mesh({"tensor": 1}, devices, "a host"))
        for devices in (jax.devices()[:1], jax.devices()[-1:])
    ]
    with ExitStack() as open_now:
        arms = _in_memory(engines, params, dtype) | _between_processes(open_now, shape, dtype)
        arms["link"] = _link(model, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
        disks = {"": folder} | ({"_tmpfs": TMPFS} if Path(TMPFS).is_dir() else {})
        for name, place in disks.items():
            made = Path(open_now.enter_context(tempfile.TemporaryDirectory(dir=place)))
            in_files = _in_files(open_now, engines[0], params, dtype, made)
            arms |= {arm + name: run for arm, run in in_files.items()}
        rounds = [{name: arm(version) for name, arm in arms.items()} for version in range(repeats + 1)]
    return _summary(rounds[1:], shape, dtype, params) | {
        "folder": folder or "temporary"
    }  # the first compiles


def _summary(rounds: list[dict[str, Times]], shape: str, dtype: str, params: Params) -> dict[str, Any]:
    medians = {
        arm: {part: statistics.median(one[arm][part] for one in rounds) for part in parts}
        for arm, parts in rounds[0].items()
    }
    whole = {arm: parts["whole"] for arm, parts in medians.items() if "whole" in parts}
    runs = [one["transfer"]["whole"] for one in rounds]
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    return machine(shape, dtype, runs) | {
        "bytes": sum(sizes) * np.dtype(jax.numpy.dtype(dtype)).itemsize,
        "limit": whole["memcpy"],
        "fraction_of_limit": whole["memcpy"] / whole["transfer"],
        "medians_s": {
            arm: {part: value for part, value in parts.items() if part != "bytes"}
            for arm, parts in medians.items()
        },
        "adapter_bytes_share": medians["transfer_adapters"]["bytes"] / medians["transfer"]["bytes"],
        "over_memcpy": {arm: whole[arm] / whole["memcpy"] for arm in whole if "memory" in arm},
        "orbax_over_two_meshes": {
            arm: whole[arm] / whole["memory_other_device"] for arm in whole if "orbax" in arm
        },
        "orbax_over_link": {arm: whole[arm] / whole["link"] for arm in whole if "orbax" in arm},
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
    """Returns name -> function for the measurements that need only this process.

    Measured are: sending `params` in `dtype` to the decoding engine on the same device (`engines[0]`) and on
    another device (`engines[1]`), a plain copy of the bytes, the digest of `params`, and their conversion to
    the layout for decoding.
    """
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


def _link(model: Model, params: Params) -> Arm:
    """Returns the measurement of the transfer alone, from a trainer's mesh to a host's with another layout.

    Like Orbax's save and load, it computes no digest and no log-probs, and converts nothing for decoding.
    """
    devices = jax.devices()
    trainer, host = (
        param_shardings(model.logical_axes, model.abstract_params, make_mesh(axes, part, owner))
        for axes, part, owner in (
            ({"fsdp": 2}, devices[:2], "the trainer"),
            ({"tensor": 2}, devices[2:4], "a host"),
        )
    )
    source, link = jax.block_until_ready(jax.device_put(params, trainer)), Weights(host)
    return lambda version: {"whole": timed_s(lambda: link(source))}


def _between_processes(open_now: ExitStack, shape: str, dtype: str) -> dict[str, Arm]:
    """Returns name -> function for the measurements of a transfer between two processes' devices.

    `transfer` sends a version in which all parameters changed. `transfer_adapters` sends two versions in
    which only the LoRA adapters changed, and measures the second, because the reader keeps a parameter only
    after it was equal in two versions. The sender is another process, which closing `open_now` ends.
    """
    engine = Engine(_adapted_model(shape), slots=1, length=32)
    pipe = open_now.enter_context(_publisher(shape, dtype))
    reader = TransferReader(_received(pipe), engine.canary, DEADLINE_S)
    open_now.callback(reader.close)
    ahead = _ahead(open_now, reader, engine)
    held: list[VersionedParams] = []

    def transfer(version: int, what: str) -> Times:
        before = reader.pulled_bytes
        pipe.send((version, what))
        began, stall = _received(pipe)
        pause = _adopt(ahead, version, engine, held)
        whole = time.time() - began
        return {"stall": stall, "pause": pause, "whole": whole, "bytes": reader.pulled_bytes - before}

    return {
        # Three versions per round: 3 n changes every leaf, 3 n + 1 and 3 n + 2 change the adapters.
        "transfer": lambda version: transfer(3 * version, "all"),
        "transfer_adapters": lambda version: [transfer(3 * version + n, "adapters") for n in (1, 2)][-1],
    }


def _in_files(open_now: ExitStack, engine: Engine, params: Params, dtype: str, place: Path) -> dict[str, Arm]:
    writer = OrbaxStore(place / "weights", PublisherSettings(engine.canary, dtype), keep=2)
    reader = OrbaxReader(place / "weights", engine.canary)
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


def _ahead(open_now: ExitStack, reader: FetchingReader, engine: Engine) -> Prefetcher:
    ahead = Prefetcher(reader, engine.param_shardings, engine.load_params)
    open_now.callback(ahead.close, DEADLINE_S)
    return ahead


def _adopt(ahead: Prefetcher, version: int, engine: Engine, held: list[VersionedParams]) -> float:
    """Waits until `ahead` has loaded the version, adopts it as a host does; returns the seconds to adopt it.

    `held` contains the previous version, which, as on a host, is freed only after the adoption.
    """
    _wait_for(ahead, version)
    load = lambda: held.append(engine.load_params(ahead.load(version, engine.param_shardings)))  # noqa: E731
    pause = timed_s(load)
    del held[:-1]
    return pause


def _wait_for(reader: ParamReader, version: int) -> None:
    """Waits until `version` is the newest version that `reader` finds; raises ArealError after DEADLINE_S."""
    end_s = time.monotonic() + DEADLINE_S
    while reader.latest() != version:
        if time.monotonic() > end_s:
            raise ArealError(
                f"version {version} was not committed within {DEADLINE_S:g} s, so the benchmark ends; see "
                "the publishing process's last lines above"
            )
        time.sleep(POLL_S)


def _per_layer(params: Params) -> dict[str, Any]:
    """Returns the parameters with separate arrays for each layer, as other frameworks save them."""
    rest = {name: leaf for name, leaf in params.items() if name != "blocks"}
    count = len(jax.tree.leaves(params["blocks"])[0])
    layers = {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in range(count)}
    return jax.block_until_ready({**rest, **layers})


def _orbax_defaults(tree: Any, path: Path) -> Times:
    """Saves and restores `tree` with Orbax's defaults; returns the seconds of saving and of restoring."""
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
    """Saves `tree` with safetensors, loads it onto a device; returns the seconds of saving and of loading."""
    from safetensors.numpy import load_file, save_file

    plain = to_plain(tree)
    save_s = timed_s(lambda: save_file({name: np.asarray(leaf) for name, leaf in plain.items()}, path))
    load_s = timed_s(lambda: jax.device_put(load_file(path), jax.devices()[0]))
    return {"save": save_s, "load": load_s, "whole": save_s + load_s}


# --- the trainer's process ----------------------------------------------------------------------------------


def _adapted_model(shape: str) -> Model:
    """Returns a model of the built-in size `shape`, with LoRA adapters beside every projection matrix."""
    plain = random_model(shape, "float32")
    return Model(dataclasses.replace(plain.config, lora=LORA), plain.tokenizer)


@contextmanager
def _publisher(shape: str, dtype: str) -> Iterator[Connection]:
    """Context manager: starts a child process that runs `_publish`; yields the pipe to it, and kills it."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_publish, args=(there, shape, dtype), daemon=True)
    process.start()
    there.close()  # else the pipe stays open when the child ends
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _received(pipe: Connection) -> Any:
    """Returns the child's next message; raises ArealError if it ended, or after DEADLINE_S seconds."""
    if not pipe.poll(DEADLINE_S):
        raise ArealError(
            f"the benchmark's other process sent no message for {DEADLINE_S:g} s, so the benchmark ends; see "
            "its last lines above"
        )
    try:
        return pipe.recv()
    except EOFError:
        raise ArealError(
            "the benchmark's other process ended unexpectedly, so the benchmark ends; see its traceback above"
        ) from None


def _publish(pipe: Connection, shape: str, dtype: str) -> None:
    """Sends its address; then, for each (version, what) from the pipe, changes its parameters and publishes.

    `what`: all or adapters. The answer is the time when publishing began (time.time()), and for how many
    seconds it blocked this process.
    """
    model = _adapted_model(shape)
    params = jax.block_until_ready(model.init(0))
    probe = Engine(model, slots=1, length=32).canary
    store = TransferStore(PublisherSettings(probe, dtype, DEADLINE_S))
    scale = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.001 + 1e-3, tree), donate_argnums=0)
    pipe.send(store.address)
    while True:
        version, what = pipe.recv()
        if what == "all":
            params = scale(params)
        else:
            params = with_adapters(base_of(params), scale(adapters_of(params)))
        value = VersionedParams(version, params, digest(params))
        began = time.time()
        store.publish(value)
        pipe.send((began, time.time() - began))
        store.wait(DEADLINE_S)
