"""areal_jax's update and log-prob pass as `areal-jax bench` runs them, with CPU seconds, one JSON line.

python tests/peers/our_update.py {update,logprob,skewed} SHAPE REPEATS

skewed: packed rows, with the trainer's default trainer.remat=layer.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import jax
from shapes import LENGTH, MICRO_ROWS, SEQUENCES, SHAPES

from areal_jax.runtime import bench, bench_packed
from areal_jax.trajectories.packing import pack


def main(what: str, name: str, repeats: int) -> None:
    rows = MICRO_ROWS if what == "skewed" else SHAPES[name]["rows"]
    remat = "layer" if what == "skewed" else "none"
    learner, state, raw = bench._trainer(name, rows, LENGTH, "float32", remat)
    if what == "skewed":
        vocab = SHAPES[name]["vocab"]
        raw = pack(bench_packed.skewed_groups(SEQUENCES, LENGTH, 64, 0.8, 16, vocab), rows, LENGTH)
    batch = learner.prepare(state, raw)
    states = [state]

    def update() -> None:
        state, _ = learner.update(states.pop(), batch)
        states.append(state)
        jax.block_until_ready(state.params)

    def logprob() -> None:
        jax.block_until_ready(learner.prepare(states[0], raw))

    call = {"update": update, "logprob": logprob, "skewed": update}[what]
    call()
    seconds, cpu = [], []
    for _ in range(repeats):
        started, cpu_started = time.perf_counter(), time.process_time()
        call()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_bytes": [peak]}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
