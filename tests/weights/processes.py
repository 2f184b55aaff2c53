"""A trainer-like process and a host of its own, with nothing between them but a folder or a socket.

`python -m tests.weights.processes publish STORE FOLDER FIRST LAST [HANG]`: versions FIRST..LAST, each once a
host has adopted the one before; with HANG it stops for ever when that version is whole and not committed.
`python -m tests.weights.processes adopt STORE FOLDER LAST`: on two devices; adopts and decodes until LAST.
Both print a JSON object a version. STORE is orbax (files in FOLDER) or transfer (FOLDER holds the address).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from areal_jax.generation.engine import Engine
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.orbax import OrbaxReader, OrbaxStore
from areal_jax.weights.prefetch import Prefetcher
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import load_newer
from areal_jax.weights.transfer.publisher import TransferStore
from areal_jax.weights.transfer.reader import TransferReader
from tests.hangs import HANG_S

DEADLINE_S = HANG_S
PROMPT, TOKENS = 5, 4
SECRET = "of this test"


def make_engine(devices: int) -> Engine:
    sizes = dict(layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
    model = Model(ModelConfig(vocab_size=37, **sizes), CharTokenizer("".join(map(chr, range(97, 132)))))
    mesh = make_mesh({"tensor": devices}, jax.devices(), "the host")
    return Engine(model, slots=1, length=16, decode_steps=TOKENS, mesh=mesh)


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def tell_address(folder: Path, store: TransferStore) -> None:
    (folder / ".address").write_text(store.address)
    (folder / ".address").rename(folder / "address")


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} did not come"
        time.sleep(0.01)


def publish(kind: str, folder: Path, first: int, last: int, hang: int = -1) -> None:
    engine = make_engine(1)
    settings = PublisherSettings(engine.canary, deadline_s=DEADLINE_S)
    if kind == "orbax":
        store = OrbaxStore(folder / "weights", settings, keep=2)
    else:
        store = TransferStore(settings, secret=SECRET)
        tell_address(folder, store)
    update = jax.jit(lambda p: jax.tree.map(lambda leaf: leaf * 1.01, p), donate_argnums=0)

    def before_commit(wire: VersionedParams) -> None:
        if wire.version == hang:
            say(staged=wire.version)
            time.sleep(DEADLINE_S)

    params = engine.model.init(0)
    for version in range(last + 1):
        if version >= first:
            wire = store.publish(VersionedParams(version, params, digest(params)), before_commit)
            say(version=version, digest=wire.digest)
        params = update(params)
        if version == hang:
            break
        if version >= first:
            wait_for(folder / f"adopted-{version}")
    store.close(DEADLINE_S)


def adopt(kind: str, folder: Path, last: int) -> None:
    assert jax.device_count() == 2
    engine, version = make_engine(2), -1
    if kind == "orbax":
        reader = OrbaxReader(folder / "weights", engine.canary)
    else:
        wait_for(folder / "address")
        address = (folder / "address").read_text()
        reader = TransferReader(address, engine.canary, DEADLINE_S, SECRET)
    ahead = Prefetcher(reader, engine.param_shardings, engine.load_params)
    end_s = time.monotonic() + DEADLINE_S
    while version < last:
        assert time.monotonic() < end_s, f"no version came after {version}"
        if isinstance(reader, TransferReader) and reader.address != (folder / "address").read_text():
            reader.move_to((folder / "address").read_text())
            ahead.forget()
        value = load_newer(ahead, engine.param_shardings, version)
        if value is None:
            time.sleep(0.01)
            continue
        version, end_s = value.version, time.monotonic() + DEADLINE_S
        say(version=version, digest=digest(value.params), tokens=decode(engine, value))
        (folder / f"adopted-{version}").touch()
    ahead.close(DEADLINE_S)


def decode(engine: Engine, value: VersionedParams) -> list[int]:
    value = engine.load_params(value)
    prefix = engine.prefill(params=value, padded_tokens=np.arange(PROMPT), true_length=PROMPT)
    request = engine.request(SampleId(0, 0), 0, Sampling(temperature=1.0, max_tokens=TOKENS), PROMPT)
    state = engine.insert(prefix, engine.init_decode_state(), 0, request=request)
    results = engine.generate(value, state)[1]
    return results.rows["tokens"][0].tolist()


if __name__ == "__main__":
    role, kind, folder, *numbers = sys.argv[1:]
    {"publish": publish, "adopt": adopt}[role](kind, Path(folder), *map(int, numbers))
