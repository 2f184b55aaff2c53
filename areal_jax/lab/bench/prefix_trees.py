"""Compares training over prefix trees with packed training of the same samples."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.lab.bench.measure import bench_learner, in_turn, random_trajectory, timed_s
from areal_jax.models.model import Params
from areal_jax.models.transformer import Remat
from areal_jax.trainer.learner import TrainsBatches
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.leaf_order import depth_first
from areal_jax.trajectories.packing import pack, plan_batch
from areal_jax.trajectories.plan import BatchLayout
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.train_cost import packed_work, tree_work
from areal_jax.trajectories.walk import POP, PUSH, plan_walk
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import ArealError, Batch, Group, Prompt, SampleId, Trajectory


def tree(
    *,
    shape: str = "5m",
    workload: str = "turns",
    length: int = 768,
    rows: int = 4,
    block: int | None = None,
    scale: float = 1.0,
    leaves: int = 1,
    repeats: int = 5,
    remat: Remat = "layer",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Measures the seconds in which a batch is prepared and trained: packed in two ways, and over its tree.

    `workload`: turns (one sample per turn of conversations that begin with the same rules), groups (16
    answers to a prompt of half their length) or apart (nothing shared); `scale` multiplies its lengths, and
    `leaves` the number of samples that share a prompt or a task. `rows` x `length` tokens are a micro-batch;
    `block` is trainer.tree_block. In the result, `token_ratio` is the analytic ratio of tokens over
    `repeated`, a forward pass counted as 1 and a backward pass as 2; `auto` is the way that
    trainer.compute=auto chooses, and `auto_speedup` the seconds of the faster way / those of this one.
    """
    learner, state = bench_learner(shape, rows, length, dtype, remat, block)
    groups = _groups(workload, scale, leaves, learner.model.config.vocab_size)
    arms = _arms(learner, groups)
    states = [state]
    took = in_turn(
        {name: partial(timed_s, partial(arm.train, states)) for name, arm in arms.items()}, repeats
    )
    seconds = {name: statistics.median(each) for name, each in took.items()}
    found = tree_of([Sampled.of(trajectory) for group in groups for trajectory in group.trajectories])
    blocks = learner.tree_blocks
    order = depth_first(found, blocks)
    forward, walk = (plan_walk(order, 1, blocks, with_gradients=is_trained) for is_trained in (False, True))
    computed = forward.tokens(PUSH) + walk.tokens(PUSH) + 3 * walk.tokens(POP)
    auto = _chosen(learner, groups)
    return machine(shape, dtype, took["tree"]) | {
        "workload": workload,
        "samples": len(found.lengths),
        "sequence_tokens": found.sequence_tokens,
        "tree_tokens": found.tokens,
        "compression": found.sequence_tokens / found.tokens,
        "row_tokens": {name: arm.tokens for name, arm in arms.items() if name != "tree"},
        "seconds_by_arm": seconds,
        "speedup": {arm: seconds[arm] / seconds["tree"] for arm in seconds if arm != "tree"},
        "auto": auto,
        "auto_speedup": min(seconds["shared"], seconds["tree"]) / seconds[auto],
        "token_ratio": 4 * found.sequence_tokens / computed,
        "calls": len(walk.kinds),
        "pushed_tokens": walk.tokens(PUSH),
        "computed_tokens": walk.computed_tokens,
    }


class _Arm(NamedTuple):
    """One way to train the batch."""

    trains: TrainsBatches
    batch: Batch

    @property
    def tokens(self) -> int:
        """Tokens in the batch's rows, without padding."""
        return int((self.batch.segment_ids > 0).sum())

    def train(self, states: list[TrainState]) -> Params:
        """Replaces the only state in `states` by the one after an update; returns its parameters."""
        prepared = self.trains.prepare(states[0], self.batch)
        states.append(self.trains.update(states.pop(), prepared)[0])
        return states[0].params


def _arms(learner: TreeLearner, groups: list[Group]) -> dict[str, _Arm]:
    """Returns the packed ways to train the groups, and the walk over their tree."""
    layouts: dict[str, BatchLayout] = {"repeated": "repeated", "shared": "shared", "tree": "apart"}
    return {
        name: _Arm(
            learner.over_trees() if layout == "apart" else learner,
            pack(groups, learner.rows, learner.length, layout=layout),
        )
        for name, layout in layouts.items()
    }


def _chosen(learner: TreeLearner, groups: list[Group]) -> str:
    """Returns the arm, shared or tree, that trainer.compute=auto chooses."""
    blocks, sequences = learner.tree_blocks, [Sampled.of(one) for each in groups for one in each.trajectories]
    work = {
        "shared": packed_work(plan_batch(groups, learner.rows, learner.length), learner.rows, 1, 1),
        "tree": tree_work([sequences], 1, blocks, 1),
    }
    return min(work, key=lambda arm: work[arm].tokens(blocks.call_tokens))


def _groups(workload: str, scale: float, leaves: int, vocab_size: int) -> list[Group]:
    """Returns groups of random samples with the shared prefixes that `tree` describes."""
    numbers = np.random.default_rng(0)
    size = lambda tokens: max(2, round(tokens * scale))  # noqa: E731
    text = lambda tokens: numbers.integers(0, vocab_size, size(tokens)).astype(np.int32)  # noqa: E731
    if workload == "turns":
        rules, found = text(512), []
        for _ in range(2):
            task = np.concatenate([rules, text(64)])
            for _ in range(4 * leaves):
                turns = list(accumulate((text(48) for _ in range(4)), lambda x, y: np.concatenate([x, y])))
                found.append([(np.concatenate([task, turn]), size(32)) for turn in turns])
    elif workload == "groups":
        prompts = [text(64) for _ in range(4)]
        found = [[(np.concatenate([p, text(128)]), size(128)) for _ in range(16 * leaves)] for p in prompts]
    elif workload == "apart":
        found = [[(text(192), size(128)) for _ in range(16 * leaves)] for _ in range(4)]
    else:
        raise ArealError(f"unknown workload {workload}; choose turns, groups or apart")
    return [
        Group(
            ordinal,
            Prompt(tokens=[0]),
            tuple(
                _sample(SampleId(ordinal, member), tokens, trained, numbers, vocab_size)
                for member, (tokens, trained) in enumerate(members)
            ),
        )
        for ordinal, members in enumerate(found)
    ]


def _sample(
    sample: SampleId, tokens: np.ndarray, trained: int, numbers: np.random.Generator, vocab_size: int
) -> Trajectory:
    """Returns a trajectory of these tokens, of which the last `trained` ones were sampled."""
    drawn = random_trajectory(sample, len(tokens), numbers, vocab_size)
    is_sampled = np.arange(len(tokens)) >= len(tokens) - trained
    return replace(
        drawn,
        tokens=tokens,
        loss_mask=is_sampled,
        behavior_logp=np.where(is_sampled, drawn.behavior_logp, 0).astype(np.float32),
        versions=np.where(is_sampled, 0, -1).astype(np.int32),
        turn_ids=np.where(is_sampled, 0, -1).astype(np.int32),
    )
