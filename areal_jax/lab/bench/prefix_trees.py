"""Compares training over prefix trees with packed training of the same samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.lab.bench.measure import bench_learner, in_turn, random_trajectory, timed_s
from areal_jax.models.model import Params
from areal_jax.models.transformer import Remat
from areal_jax.trainer.compiled import Forecast, bytes_on_one_device
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.leaf_ranges import TOKENS
from areal_jax.trajectories.packing import pack, plan_batch
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.train_cost import default_costs, packed_work, tree_work
from areal_jax.trajectories.walk import POP, PUSH, plan_walk
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.trees.tree_update import TreeBatch, TreeUpdate
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
    ladder: bool = False,
    memory: bool = False,
    repeats: int = 5,
    remat: Remat = "layer",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Measures the seconds in which a batch is prepared and trained: packed in two ways, and over its tree.

    `workload`: turns (one sample per turn of conversations that begin with the same rules), groups (16
    answers to a prompt of half their length) or apart (nothing shared); `scale` multiplies its lengths, and
    `leaves` the number of samples that share a prompt or a task. `rows` x `length` tokens are a micro-batch;
    `block` is trainer.tree_block. `ladder` also measures the tree without cut tails, order of leaves, whole
    subtrees and the full block. `memory`: whether to forecast each arm's memory. In the result, `token_ratio`
    is the analytic ratio of tokens over `repeated`, a forward pass counted as 1 and a backward pass as 2;
    `auto` is the way that trainer.compute=auto chooses before it has measured a batch, and `auto_speedup` the
    seconds of the faster way / those of this one.
    """
    learner, state = bench_learner(shape, rows, length, dtype, remat, block)
    groups = _groups(workload, scale, leaves, learner.model.config.vocab_size)
    plans = _ladder(learner.tree_blocks) if ladder else {"tree": learner.tree_blocks}
    arms = _arms(learner, groups, rows, length, plans)
    states = [state]
    took = in_turn(
        {name: partial(timed_s, partial(arm.train, states)) for name, arm in arms.items()}, repeats
    )
    seconds = {name: statistics.median(each) for name, each in took.items()}
    found = tree_of([Sampled.of(trajectory) for group in groups for trajectory in group.trajectories])
    walks = {name: plan_walk(depth_first(found, of), 1, of) for name, of in plans.items()}
    blocks = learner.tree_blocks
    forward = plan_walk(depth_first(found, blocks), 1, blocks, with_gradients=False)
    computed = forward.tokens(PUSH) + walks["tree"].tokens(PUSH) + 3 * walks["tree"].tokens(POP)
    auto = _chosen(learner, groups, rows, length)
    return machine(shape, dtype, took["tree"]) | {
        "workload": workload,
        "samples": len(found.lengths),
        "sequence_tokens": found.sequence_tokens,
        "tree_tokens": found.tokens,
        "compression": found.sequence_tokens / found.tokens,
        "row_tokens": {name: arm.tokens for name, arm in arms.items() if name not in plans},
        "seconds_by_arm": seconds,
        "speedup": {arm: seconds[arm] / seconds["tree"] for arm in seconds if arm != "tree"},
        "auto": auto,
        "auto_speedup": min(seconds["shared"], seconds["tree"]) / seconds[auto],
        "token_ratio": 4 * found.sequence_tokens / computed,
        "calls": {name: len(walk.kinds) for name, walk in walks.items()},
        "pushed_tokens": {name: walk.tokens(PUSH) for name, walk in walks.items()},
        "computed_tokens": {name: walk.computed_tokens for name, walk in walks.items()},
        "memory_bytes": {name: arm.memory(states[0]) for name, arm in arms.items()} if memory else None,
    }


def _ladder(blocks: Blocks) -> dict[str, Blocks]:
    """Returns the ways to walk over a tree, by name: without any saving, then with one more each."""
    plain = replace(
        blocks, most=-(-blocks.most // 2), cuts_tail=False, joins_subtrees=False, sorts_leaves=False
    )
    cut = replace(plain, cuts_tail=True)
    ordered = replace(cut, sorts_leaves=True)
    whole = replace(ordered, joins_subtrees=True)
    names = ("tree_plain", "tree_cut_tail", "tree_ordered", "tree_whole_subtrees", "tree")
    return dict(zip(names, (plain, cut, ordered, whole, blocks), strict=True))


class _Arm(NamedTuple):
    """One way to train the batch."""

    prepare: Callable[[TrainState], Any]
    update: Callable[[TrainState, Any], TrainState]
    forecast: Callable[[TrainState, Any], Forecast]
    batch: Batch

    @property
    def tokens(self) -> int:
        """Tokens in the batch's rows, without padding."""
        return int((self.batch.segment_ids > 0).sum())

    def train(self, states: list[TrainState]) -> Params:
        """Replaces the only state in `states` by the one after an update; returns its parameters."""
        prepared = self.prepare(states[0])
        states.append(self.update(states.pop(), prepared))
        return states[0].params

    def memory(self, state: TrainState) -> dict[str, int]:
        """Returns the bytes of the largest program's arrays: the state and batch, and all else (`live`)."""
        prepared = self.prepare(state)
        batch = (prepared.batch, prepared.sequences) if isinstance(prepared, TreeBatch) else prepared
        peak = self.forecast(state, prepared).peak
        return {"peak": peak, "live": peak - bytes_on_one_device((state, batch))}


def _arms(
    learner: TreeLearner, groups: list[Group], rows: int, length: int, plans: Mapping[str, Blocks]
) -> dict[str, _Arm]:
    """Returns the packed ways to train the groups, and the walks over their tree that `plans` names."""
    arms = {}
    for layout in ("repeated", "shared"):
        batch = pack(groups, rows, length, layout=layout)
        arms[layout] = _Arm(
            partial(learner.prepare, batch=batch),
            lambda state, prepared: learner.update(state, prepared)[0],
            learner.forecast,
            batch,
        )
    apart = pack(groups, rows, length, layout="apart")
    for name, blocks in plans.items():
        tree = TreeUpdate(learner.objective, learner.programs, learner.mesh, length, blocks)
        arms[name] = _Arm(
            partial(tree.prepare, batch=apart, minibatches=1, others={}, between=None),
            lambda state, prepared, tree=tree: tree.update(state, prepared, None)[0],
            tree.forecast,
            apart,
        )
    return arms


def _chosen(learner: TreeLearner, groups: list[Group], rows: int, length: int) -> str:
    """Returns the arm, shared or tree, that the default costs forecast to be faster."""
    blocks, sequences = learner.tree_blocks, [Sampled.of(one) for each in groups for one in each.trajectories]
    work = {
        "shared": packed_work(plan_batch(groups, rows, length), rows, 1, 1),
        "tree": tree_work([sequences], 1, blocks, TOKENS, 1),
    }
    costs = default_costs(blocks.call_tokens, ())
    return min(work, key=lambda arm: costs.seconds(work[arm]))


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
