"""areal_jax's update and log-prob pass as `areal-jax bench` runs them, with CPU seconds, one JSON line.

python tests/peers/our_update.py {update,logprob,skewed} SHAPE REPEATS

skewed: packed rows, with the trainer's default trainer.remat=layer.
"""

from __future__ import annotations

import sys

import jax
from shapes import LENGTH, MICRO_ROWS, SEQUENCES, SHAPES
from timing import report

from areal_jax.lab.bench.measure import bench_learner, skewed_groups
from areal_jax.trajectories.packing import pack

SHORTEST = {"update": LENGTH, "logprob": LENGTH, "skewed": 16}
"""Tokens of the shortest sequence; LENGTH makes full rows."""


def main(what: str, name: str, repeats: int) -> None:
    rows = MICRO_ROWS if what == "skewed" else SHAPES[name]["rows"]
    remat = "layer" if what == "skewed" else "none"
    learner, state = bench_learner(name, rows, LENGTH, "float32", remat)
    vocab = SHAPES[name]["vocab"]
    groups = skewed_groups(SEQUENCES if what == "skewed" else rows, LENGTH, 64, 0.8, SHORTEST[what], vocab)
    raw = pack(groups, rows, LENGTH)
    batch = learner.prepare(state, raw)
    states = [state]

    def update() -> None:
        state, _ = learner.update(states.pop(), batch)
        states.append(state)
        jax.block_until_ready(state.params)

    def logprob() -> None:
        jax.block_until_ready(learner.prepare(states[0], raw))

    report({"update": update, "logprob": logprob, "skewed": update}[what], repeats)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
