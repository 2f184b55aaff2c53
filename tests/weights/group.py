"""One of several processes that publish as one: `python -m tests.weights.group FOLDER PROCESSES INDEX PORT`.

Versions 0 and 1 of `params_of`, sharded over all their devices; each until a file says that it was adopted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.cluster.trainer_group import joined
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import Probe
from areal_jax.weights.transfer.publisher import TransferStore
from tests.weights.processes import DEADLINE_S, SECRET, tell_address, wait_for

SPECS = {
    "rows": PartitionSpec("fsdp"),
    "columns": PartitionSpec(None, "fsdp"),
    "same": PartitionSpec(),
    "frozen": PartitionSpec("fsdp"),
}


def params_of(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    changing = {"rows": (16, 6), "columns": (3, 8), "same": (5,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in changing.items()}
    return params | {"frozen": np.arange(32, dtype=np.float32).reshape(8, 4)}


@Probe
@jax.jit
def probe(params) -> jax.Array:
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))[None]


def main(folder: Path, processes: int, index: int, port: int) -> None:
    with joined(f"localhost:{port}", processes, index):
        mesh = Mesh(np.array(jax.devices()), ("fsdp",))
        shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        store = TransferStore(PublisherSettings(probe, deadline_s=DEADLINE_S), secret=SECRET)
        assert store.addresses[index] == store.address and len(set(store.addresses)) == processes
        if index == 0:
            tell_address(folder, store)
        for version in range(2):
            given = params_of(version)
            params = {
                name: jax.make_array_from_callback(
                    leaf.shape, shardings[name], lambda at, leaf=leaf: leaf[at]
                )
                for name, leaf in given.items()
            }
            time.sleep(0.5 * index)  # they need not be equally fast
            store.publish(VersionedParams(version, params, digest(params)))
            wait_for(folder / f"adopted-{version}")
        store.close(DEADLINE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
