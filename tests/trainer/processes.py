"""One of the processes that make up a trainer's mesh, or one that is alone; started by test_processes.

`python -m tests.trainer.processes FOLDER NAME PROCESSES INDEX PORT MESH...`, MESH as data=2,tensor=2: trains
the steps that lie in FOLDER on each mesh and writes NAME-<mesh>.npz there: parameters, metrics, digests.
Of a step it reads the plan, and the trajectories of its own rows.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import optax

from areal_jax.cluster.trainer_group import joined
from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import make_mesh, replicated
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.codec import decode
from areal_jax.trajectories.plan import BatchPlan, fill
from areal_jax.types import Batch

LENGTH, ROWS, STEPS = 16, 4, 3


def read_batch(folder: Path, step: int, rows: Any) -> Batch:
    """The rows of a step that `rows(number of rows)` names; of its trajectories no others are opened."""
    plan = BatchPlan.from_wire(msgpack.unpackb((folder / f"plan-{step}").read_bytes()))
    own = rows(plan.rows)
    read = {place: (folder / f"{step}-{place}").read_bytes() for place in plan.sources(own)}
    return fill(plan, own, {place: decode(blob) for place, blob in read.items()})


def learner(shape: dict[str, int]) -> Learner:
    sizes = dict(layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
    model = Model(ModelConfig(vocab_size=37, **sizes), CharTokenizer("".join(map(chr, range(97, 132)))))
    settings = {
        "preset": "grpo",
        "kl": {"coef": 0.05},
        "group_size": 4,
        "minibatches": 2,
        "entropy_coef": 0.01,
    }
    return Learner(
        model,
        AlgorithmConfig.model_validate(preset_settings(settings)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)),
        rows=ROWS,
        length=LENGTH,
        mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **shape}, jax.devices(), "the trainer"),
        logp_chunk=16,
    )


def train(folder: Path, shape: dict[str, int]) -> dict[str, np.ndarray]:
    of = learner(shape)
    out: dict[str, np.ndarray] = {}
    state = of.init(of.model.init(0))
    for step in range(STEPS):
        state, metrics = of.update(state, of.prepare(state, read_batch(folder, step, of.own_rows)))
        out |= {f"{step}.{name}": np.asarray(value) for name, value in metrics.items()}
        out[f"digest.{step}"] = np.array(of.publish(state).digest)
    whole = jax.jit(lambda params: params, out_shardings=replicated(of.mesh))(state.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
        out[f"params{jax.tree_util.keystr(path, simple=True, separator='.')}"] = np.asarray(leaf)
    return out


def main(folder: Path, name: str, processes: int, index: int, port: int, meshes: list[str]) -> None:
    together = (
        joined(f"localhost:{port}", processes, index, deadline_s=300) if processes > 1 else nullcontext()
    )
    with together:
        for mesh in meshes:
            shape = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(",") if part)}
            np.savez(folder / f"{name}-{mesh}.npz", **train(folder, shape))


if __name__ == "__main__":
    folder_, name_, processes_, index_, port_, *meshes_ = sys.argv[1:]
    main(Path(folder_), name_, int(processes_), int(index_), int(port_), meshes_)
