"""Run as a program, on 8 virtual devices: small jobs that differ by config alone, and what they left where.

Prints one JSON object: job -> meshes, live arrays by executor after the last update, and rows of metrics.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from areal_jax.assembly.parts import assemble
from areal_jax.jobs.local import run
from areal_jax.replay.folder_audit import audit_run
from areal_jax.runtime import trainer_loop
from tests.small_run import small

SHARED = (
    "run.steps=2",
    "model.dtype=bfloat16",
    "model.overrides={layers: 1, width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "runtime.placement=split",
    "trainer.remat=none",
)
JOBS = {
    "ppo": (
        "algorithm.preset=ppo",
        "algorithm.minibatches=1",
        "algorithm.critic.kind=shared",
        "algorithm.kl={coef: 0.05}",
        "trainer.mesh.fsdp=2",
        "runtime.reference={mesh: {tensor: 2}, dtype: bfloat16}",
    ),
    "grpo": (
        "algorithm.preset=grpo",
        "algorithm.kl.coef=0.05",
        "trainer.mesh.data=2",
        "runtime.reference={mesh: {}, dtype: float32}",
        "runtime.host_tensor=2",
    ),
    "rloo": ("algorithm.preset=rloo", "runtime.reference.mesh={data: 4}"),
    "aipo": (
        "algorithm.preset=aipo",
        "trainer.mesh.tensor=2",
        "generation.quantize=int8",
        "generation.weight_layout=stacked",
    ),
}


def live_arrays() -> list[tuple[list[int], list[int], str]]:
    """Devices, shape and dtype of every array that any device of this process holds."""
    return [
        (sorted(device.id for device in array.sharding.device_set), list(array.shape), str(array.dtype))
        for array in jax.live_arrays()
        if not array.is_deleted()
    ]


def job(folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    config = small(folder, *SHARED, *words)
    parts = assemble(config)
    seen: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        trained = train_batch(*args, **kwargs)
        seen[:] = live_arrays()
        return trained

    train_batch = trainer_loop.train_batch
    with mock.patch.object(trainer_loop, "train_batch", watched):
        rows = run(config, stream=io.StringIO()).metrics
    d = parts.devices
    meshes = {"trainer": d.trainer, "reference": d.reference, "generator": d.hosts[0]}
    return {
        "audit": audit_run(folder).ok,
        "meshes": {
            name: [dict(mesh.shape), [device.id for device in mesh.devices.flat]]
            for name, mesh in meshes.items()
            if mesh is not None
        },
        "live": seen,
        "kv": list(jax.eval_shape(parts.engine(0).init_decode_state).cache.k.shape),
        "matrices": sorted(
            leaf.shape for leaf in jax.tree.leaves(parts.model.abstract_params) if leaf.ndim > 1
        ),
        "rows": [{name: row.get(name) for name in ("reward_mean", "kl", "logp_gap_mean")} for row in rows],
    }


if __name__ == "__main__":
    found = {name: job(Path(sys.argv[1]) / name, words) for name, words in JOBS.items()}
    sys.stdout.write(json.dumps(found))
