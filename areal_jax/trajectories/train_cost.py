"""What training a batch costs in tokens, packed or over prefix trees, for `trainer.compute: auto` to compare.

AREAL-DTA's form (leaves, tree tokens, tokens of single children, sums of prefix lengths and depths) describes
one call per leaf; here tails share calls, so the work is that of the calls that are really made, and the same
quantities describe a packed batch. All work is that of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.walk import POP, Call, calls_of

BACKWARD = 3
"""A token with gradients costs about as much as this many without: its own forward pass, and twice that."""


class Work(NamedTuple):
    """The work of one device for a batch; padding counts as tokens."""

    calls: float
    """Number of calls of programs that compute tokens."""
    backward_tokens: float
    """Tokens computed with gradients."""
    forward_tokens: float
    """Tokens computed without gradients: for scores, or pushed."""

    def tokens(self, call_tokens: int) -> float:
        """Returns the cost in tokens without gradients, of which a call costs as many as `call_tokens`."""
        return call_tokens * self.calls + BACKWARD * self.backward_tokens + self.forward_tokens


def packed_work(plan: BatchPlan, rows: int, shards: int, passes: int) -> Work:
    """Returns the work of a packed batch in micro-batches of `rows` rows, laid over `shards` devices.

    `passes`: how often the batch is scored before its update.
    """
    micro_batches = len(np.unique(plan.pieces.row // rows))
    tokens = micro_batches * rows * plan.length / shards
    return Work((1 + passes) * micro_batches, tokens, passes * tokens)


def tree_work(minibatches: Sequence[Sequence[Sampled]], walks: int, blocks: Blocks, passes: int) -> Work:
    """Returns the work of a batch over the prefix trees of its minibatches.

    `walks`: number of devices, over which the leaves are cut; `passes`: as in `packed_work`.
    """
    total = np.zeros(len(Work._fields))
    for sequences in minibatches:
        tree = depth_first(tree_of(sequences), blocks)
        for with_gradients, times in ((False, passes), (True, 1)):
            if times:
                calls = calls_of(tree, walks, blocks, with_gradients=with_gradients)
                total += times * np.array(work_of_calls(calls))
    return Work(*total.tolist())


def work_of_calls(calls: Sequence[Call]) -> Work:
    """Returns the work of the steps over one tree."""
    popped = sum(call.bucket for call in calls if call.kind == POP)
    return Work(len(calls), popped, sum(call.bucket for call in calls) - popped)
