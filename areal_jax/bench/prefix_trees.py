"""Compares training over prefix trees with packed training of the same samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.bench.measure import bench_learner, in_turn, random_trajectory, timed_s
from areal_jax.models.model import Params
from areal_jax.models.transformer import Remat
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.tree_update import TreeUpdate
from areal_jax.trajectories.leaf_order import depth_first
from areal_jax.trajectories.packing import pack
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.walk import POP, PUSH, plan_walk
from areal_jax.types import ArealError, Batch, Group, Prompt, SampleId, Trajectory


def tree(
    *,
    shape: str = "5m",
    workload: str = "turns",
    length: int = 768,
    rows: int = 4,
    block: int | None = None,
    scale: float = 1.0,
    ladder: bool = False,
    repeats: int = 5,
    remat: Remat = "layer",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Measures the seconds in which a batch is prepared and trained: packed in two ways, and over its tree.

    `workload`: turns (one sample per turn of conversations that begin with the same rules), groups (16
    answers to a prompt of half their length) or apart (nothing shared); `scale` multiplies its lengths.
    `rows` x `length` tokens are a micro-batch; `block` is trainer.tree_block. `ladder` also measures the tree
    without cut tails, joined tails and order of leaves. In the result, `token_ratio` is the analytic ratio of
    tokens over `repeated`, a forward pass counted as 1 and a backward pass as 2.
    """
    learner, state = bench_learner(shape, rows, length, dtype, remat, block)
    groups = _groups(workload, scale, learner.model.config.vocab_size)
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    blocks = learner.tree_blocks
    plans = {"tree": blocks}
    if ladder:
        plain = replace(blocks, cuts_tail=False, joins_tails=False, sorts_leaves=False)
        cut = replace(plain, cuts_tail=True)
        joined = replace(cut, joins_tails=True)
        plans = {"tree_plain": plain, "tree_cut_tail": cut, "tree_joined": joined, "tree": blocks}
    states = [state]
    arms: dict[str, Callable[[], Params]] = {
        layout: partial(_packed, learner, states, pack(groups, rows, length, layout=layout))
        for layout in ("repeated", "shared")
    }
    apart = pack(groups, rows, length, layout="apart")
    for name, of in plans.items():
        update = TreeUpdate(learner.objective, learner.programs, learner.mesh, length, of)
        arms[name] = partial(_over_tree, update, states, apart)
    took = in_turn({arm: partial(timed_s, once) for arm, once in arms.items()}, repeats)
    seconds = {arm: statistics.median(each) for arm, each in took.items()}
    found = tree_of(list(map(Sampled.of, flat)))
    walks = {name: plan_walk(depth_first(found, of), 1, of) for name, of in plans.items()}
    forward = plan_walk(depth_first(found, blocks), 1, blocks, with_gradients=False)
    computed = forward.tokens(PUSH) + walks["tree"].tokens(PUSH) + 3 * walks["tree"].tokens(POP)
    return machine(shape, dtype, took["tree"]) | {
        "workload": workload,
        "samples": len(flat),
        "sequence_tokens": found.sequence_tokens,
        "tree_tokens": found.tokens,
        "compression": found.sequence_tokens / found.tokens,
        "seconds_by_arm": seconds,
        "speedup": {arm: seconds[arm] / seconds["tree"] for arm in seconds if arm != "tree"},
        "token_ratio": 4 * found.sequence_tokens / computed,
        "calls": {name: len(walk.kinds) for name, walk in walks.items()},
        "pushed_tokens": {name: walk.tokens(PUSH) for name, walk in walks.items()},
        "computed_tokens": {name: walk.computed_tokens for name, walk in walks.items()},
    }


def _packed(learner: Learner, states: list[TrainState], batch: Batch) -> Params:
    prepared = learner.prepare(states[0], batch)
    states.append(learner.update(states.pop(), prepared)[0])
    return states[0].params


def _over_tree(update: TreeUpdate, states: list[TrainState], batch: Batch) -> Params:
    prepared = update.prepare(states[0], batch, 1, {}, None)
    states.append(update.update(states.pop(), prepared, None)[0])
    return states[0].params


def _groups(workload: str, scale: float, vocab_size: int) -> list[Group]:
    """Returns groups of random samples with the shared prefixes that `tree` describes."""
    numbers = np.random.default_rng(0)
    size = lambda tokens: max(2, round(tokens * scale))  # noqa: E731
    text = lambda tokens: numbers.integers(0, vocab_size, size(tokens)).astype(np.int32)  # noqa: E731
    if workload == "turns":
        rules, found = text(512), []
        for _ in range(2):
            task = np.concatenate([rules, text(64)])
            for _ in range(4):
                turns = list(accumulate((text(48) for _ in range(4)), lambda x, y: np.concatenate([x, y])))
                found.append([(np.concatenate([task, turn]), size(32)) for turn in turns])
    elif workload == "groups":
        prompts = [text(64) for _ in range(4)]
        found = [[(np.concatenate([p, text(128)]), size(128)) for _ in range(16)] for p in prompts]
    elif workload == "apart":
        found = [[(text(192), size(128)) for _ in range(16)] for _ in range(4)]
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
