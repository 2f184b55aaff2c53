"""What training a batch costs, packed or over its prefix trees: forecasts by costs fitted to measured times.

The seconds of a batch are a combination of its `Work` with coefficients of at least 0 (`TrainCosts`).
AReaL-DTA's form (leaves, tree tokens, tokens of single children, sums of prefix lengths and depths) describes
one call per leaf; here tails share calls, so the work is that of the calls that are really made, and the same
quantities describe a packed batch. All work is that of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.trajectories.leaf_order import Blocks, depth_first
from areal_jax.trajectories.leaf_ranges import LeafCosts
from areal_jax.trajectories.plan import BatchPlan
from areal_jax.trajectories.prefix_tree import Sampled, tree_of
from areal_jax.trajectories.walk import POP, Call, Op, calls_of

BACKWARD = 3
"""A token with gradients costs about as much as this many without: its own forward pass, and twice that."""

PRIOR = 0.05
"""How little the defaults weigh in a fit: measured seconds are taken to be off by this share of their mean,
and what a default accounts for by as much as their mean.
"""


class Work(NamedTuple):
    """The work of one device for a batch; padding counts as tokens."""

    calls: float
    """Number of calls of programs that compute tokens."""
    backward_tokens: float
    """Tokens computed with gradients."""
    forward_tokens: float
    """Tokens computed without gradients: for scores, or pushed."""
    pairs: float
    """Sum over tokens, without padding, of the keys that each sees; those of a backward token count BACKWARD
    times."""


class TrainCosts(NamedTuple):
    """Seconds for each unit of `Work`."""

    call: float
    backward_token: float
    forward_token: float
    pair: float

    def seconds(self, work: Work) -> float:
        return float(np.dot(self, work))

    def of_leaves(self, passes: int) -> LeafCosts:
        """Returns the costs of a tree's leaves, which are scored `passes` times and trained once."""
        token = self.backward_token + passes * self.forward_token
        return LeafCosts((1 + passes) * self.call, token, (BACKWARD + passes) * self.pair)


class MeasuredBatch(NamedTuple):
    work: Work
    seconds: float


def default_costs(call_tokens: int, measured: Sequence[MeasuredBatch]) -> TrainCosts:
    """Returns costs in tokens: `call_tokens` for a call, BACKWARD for a token with gradients, else 1.

    They are scaled by the mean ratio of seconds to these tokens in `measured`; without any, a token without
    gradients costs 1.
    """
    tokens = TrainCosts(call_tokens, BACKWARD, 1, 0)
    if not measured:
        return tokens
    scale = np.mean([one.seconds / tokens.seconds(one.work) for one in measured])
    return TrainCosts(*(np.array(tokens) * scale).tolist())


def fitted_costs(measured: Sequence[MeasuredBatch], defaults: TrainCosts) -> TrainCosts:
    """Returns the costs, all at least 0, with the least squares of differences to the measured seconds.

    What `measured` does not determine, because a quantity is 0 in all of it or two quantities are always
    proportional, stays near `defaults`.
    """
    from scipy.optimize import nnls  # takes most of a second to import, and few processes fit costs

    work = np.array([one.work for one in measured], np.float64)
    seconds = np.array([one.seconds for one in measured], np.float64)
    mean = seconds.mean()
    size = np.sqrt((work**2).mean(axis=0))
    size[size == 0] = 1.0
    # In these units a coefficient is the share of the seconds for which its quantity accounts.
    known = np.array(defaults) * size / mean
    shares, _ = nnls(
        np.concatenate([work / size, PRIOR * np.eye(len(size))]),
        np.concatenate([seconds / mean, PRIOR * known]),
    )
    return TrainCosts(*(shares * mean / size).tolist())


# --- the work of a batch ------------------------------------------------------------------------------------


def packed_work(plan: BatchPlan, rows: int, shards: int, passes: int) -> Work:
    """Returns the work of a packed batch in micro-batches of `rows` rows, laid over `shards` devices.

    `passes`: how often the batch is scored before its update.
    """
    pieces = plan.pieces
    micro_batches = len(np.unique(pieces.row // rows))
    tokens = micro_batches * rows * plan.length / shards
    # A token sees all tokens before it in its sample, in whichever piece they lie.
    pairs = float((pieces.size * (pieces.start + (pieces.size + 1) / 2)).sum()) / shards
    return Work((1 + passes) * micro_batches, tokens, passes * tokens, (BACKWARD + passes) * pairs)


def tree_work(
    minibatches: Sequence[Sequence[Sampled]], walks: int, blocks: Blocks, costs: LeafCosts, passes: int
) -> Work:
    """Returns the work of a batch over the prefix trees of its minibatches.

    `walks`: number of devices, over which the leaves are cut by `costs`; `passes`: as in `packed_work`.
    """
    total = np.zeros(len(Work._fields))
    for sequences in minibatches:
        tree = depth_first(tree_of(sequences), blocks)
        for with_gradients, times in ((False, passes), (True, 1)):
            if times:
                calls = calls_of(tree, walks, blocks, costs, with_gradients=with_gradients)
                total += times * np.array(work_of_calls(calls))
    return Work(*total.tolist())


def work_of_calls(calls: Sequence[Call]) -> Work:
    """Returns the work of the steps over one tree."""
    return Work(*np.array([(0, 0, 0, 0), *map(_work_of_call, calls)]).sum(axis=0).tolist())


def _work_of_call(call: Call) -> Work:
    """Returns the work of the device on which the call takes longest."""
    pairs = max(_pairs_of_op(op) for op in call.ops if op is not None)
    if call.kind == POP:
        return Work(1, call.bucket, 0, BACKWARD * pairs)
    return Work(1, 0, call.bucket, pairs)


def _pairs_of_op(op: Op) -> float:
    return sum(piece.length * (piece.start + (piece.length + 1) / 2) for piece in op.pieces)
