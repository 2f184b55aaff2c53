"""A Trainer in one of the processes that make up its mesh, or in one that is alone; for test_hosts.

`python -m tests.trainer.hosts FOLDER JSON` with the fields of Asked: goes on from the newest checkpoint of
FOLDER/run, trains steps that lie in FOLDER, and leaves FOLDER/<name>-<index>.json: versions and digests, and
the events that it reported. If there is no checkpoint, FOLDER/<name>-<index>.npz has the parameters that the
model's source gives, and those of version 0, after the supervised step. It is watched, as a trainer process
is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgpack

from areal_jax.cluster.watchdog import Beat, Deadlines, watched
from areal_jax.types import SampleId, Trajectory

WORDS = (
    "model.tokenizer=byte",
    "algorithm.minibatches=2",
    "algorithm.kl={coef: 0.05}",
    "trainer.rows=4",
    "trainer.compute=auto",
    "trainer.tree_block=24",
    "trainer.supervised.steps=1",
    "runtime.placement=shared",
    "runtime.deadline_s=300",
)
ROWS, LENGTH, STEPS = 4, 24, 4


class Asked(NamedTuple):
    name: str
    processes: int
    index: int
    port: int
    mesh: str
    last: int
    """Train up to this version."""
    run: str = "run"
    plans: str = "plan"
    """Name of the files with the plans of the steps' batches."""
    stops_at: int = -1
    """Send itself a signal while it packs this step."""
    by: int = signal.SIGSTOP
    later_s: float = 60.0
    heartbeat_s: int = 30


def read(folder: Path, step: int, asked: Asked, places: Mapping[int, SampleId]) -> dict[int, Trajectory]:
    """Those trajectories and no others."""
    from areal_jax.trajectories.codec import decode

    if step == asked.stops_at:
        (folder / f"{asked.name}-{asked.index}.stopped").touch()
        os.kill(os.getpid(), asked.by)
    return {place: decode((folder / f"{step}-{place}").read_bytes()) for place in places}


def train(folder: Path, asked: Asked, beat: Beat) -> dict[str, Any]:
    from areal_jax.assembly.parts import assemble
    from areal_jax.control.events import BatchTrained
    from areal_jax.observe.waits import Timeline
    from areal_jax.runtime.trainer_loop import TrainBatch, Trainer
    from areal_jax.trainer.checkpoint import Checkpointer, restore
    from areal_jax.trajectories.plan import BatchPlan
    from areal_jax.weights.orbax import OrbaxStore
    from areal_jax.weights.publishing import PublisherSettings
    from tests.small_run import small

    run = folder / asked.run
    parts = assemble(small(run, *WORDS, f"trainer.mesh={asked.mesh}"))
    found = restore(run / "checkpoints", parts.learner.abstract_state())
    state = found.state or parts.first_state()
    if found.state is None:
        keep_first_params(folder / f"{asked.name}-{asked.index}.npz", parts, state.params)
    first = parts.learner.versioned(state)
    store = OrbaxStore(run / "weights", PublisherSettings(probe(parts.model), deadline_s=300))
    store.publish(first)
    store.wait(300)
    restored = first.version if found.state else None
    reported: list[Any] = []
    clock = Timeline(None).clock("trainer")
    trainer = Trainer(
        parts,
        state,
        store,
        Checkpointer(run / "checkpoints", restored),
        reported.append,
        clock=clock,
        note=reported.append,
    )
    clock.follow(beat)
    for step in range(first.version, asked.last):
        plan = BatchPlan.from_wire(msgpack.unpackb((folder / f"{asked.plans}-{step}").read_bytes()))
        source = partial(read, folder, step, asked)
        trainer.inbox.put(TrainBatch(step, (step,), plan, source))
    trainer.inbox.put(None)
    trainer.run()
    return {
        "restored": restored,
        "digests": {first.version: first.digest, asked.last: parts.learner.versioned(trainer.state).digest},
        "reported": [type(one).__name__ for one in reported],
        "trained": {
            one.step: {"digest": one.digest, **one.metrics}
            for one in reported
            if isinstance(one, BatchTrained)
        },
    }


def keep_first_params(path: Path, parts: Any, first: Any) -> None:
    """Write the parameters of the model's source as `drawn.<leaf>`, and `first` as `first.<leaf>`, whole."""
    import jax
    import numpy as np

    from areal_jax.parallel.mesh import param_shardings, replicated
    from areal_jax.weights.digest import to_plain

    base, mesh = parts.model.base, parts.devices.trainer
    drawn = parts.source.load(param_shardings(base.logical_axes, base.abstract_params, mesh))
    both = {"drawn": drawn, "first": first}
    whole = jax.jit(lambda trees: trees, out_shardings=replicated(mesh))(both)
    np.savez(path, allow_pickle=False, **{name: np.asarray(leaf) for name, leaf in to_plain(whole).items()})


def probe(model: Any) -> Any:
    """Log-probs of a fixed sequence."""
    import jax
    import jax.numpy as jnp

    from areal_jax.models.attention import PackedAttention
    from areal_jax.weights.store import Probe

    def log_probs(params: Any) -> Any:
        tokens = jnp.arange(16)[None]
        found = model.hidden(params, tokens, tokens, PackedAttention(jnp.ones_like(tokens)))[0]
        return jax.nn.log_softmax(model.logits(params, found[0]))[:, 0]

    return Probe(jax.jit(log_probs))


def keep_own_programs() -> None:
    """Let this process keep what it compiles, whatever its index: tests start the same processes many times.

    jax writes compiled programs from process 0 alone, but its key for them differs between processes, so
    that the others would compile everything again at each start.
    """
    from jax._src import compiler

    vars(compiler)["distributed"] = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))


def body(folder: Path, asked: Asked, watcher: int, beat: Beat) -> None:
    from areal_jax.cluster.trainer_group import joined

    keep_own_programs()
    (folder / f"{asked.name}-{asked.index}.pids").write_text(f"{watcher} {os.getpid()}")
    with joined(f"localhost:{asked.port}", asked.processes, asked.index, 300, asked.heartbeat_s):
        out = train(folder, asked, beat)
        (folder / f"{asked.name}-{asked.index}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    folder_, asked_ = Path(sys.argv[1]), Asked(**json.loads(sys.argv[2]))
    deadlines = Deadlines(first_s=400, later_s=asked_.later_s, grace_s=3)
    work = partial(body, folder_, asked_, os.getpid())
    sys.exit(watched(work, f"{asked_.name}-{asked_.index}", folder_ / "logs", deadlines))
