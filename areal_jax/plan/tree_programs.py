"""The programs of an update over prefix trees with abstract arguments, as fields of `recipe.RecipeProgram`.

The trees are those of samples of full length: each group shares its prompt, and nothing else is shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.config.tree import Config
from areal_jax.models.attention import BLOCK
from areal_jax.plan.costs import Assumed
from areal_jax.trajectories.leaf_order import depth_first
from areal_jax.trajectories.prefix_tree import prefix_tree
from areal_jax.trajectories.train_cost import Work, work_of_calls
from areal_jax.trajectories.walk import POP, PUSH, Call, calls_of
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import PreparedBatch

TREE_PROGRAMS = ("push", "pop", "push with scores", "tree score")
"""Names of the programs that `tree_programs` returns."""


def full_length_calls(config: Config, learner: TreeLearner, *, with_gradients: bool) -> list[Call]:
    """Returns the steps over the prefix tree of a minibatch of samples of full length."""
    a, g = config.algorithm, config.generation
    prompt = g.length - g.max_tokens
    keys = []
    for group in range(config.trainer.batch_size // a.minibatches):
        for member in range(a.group_size):
            key = np.full(g.length, group)
            key[prompt:] = 1_000_000 + group * a.group_size + member
            keys.append(key)
    blocks, shape = learner.tree_blocks, learner.mesh.shape
    tree = depth_first(prefix_tree(keys), blocks)
    return calls_of(tree, shape["data"] * shape["fsdp"], blocks, with_gradients=with_gradients)


def tree_programs(
    config: Config, learner: TreeLearner, batch: PreparedBatch, state: Any
) -> list[dict[str, Any]]:
    """Returns the programs over prefix trees; their calls count each step as one of a full block.

    `batch`, `state`: abstract, as `TreeUpdate.abstract_calls` needs them.
    """
    minibatches, most = config.algorithm.minibatches, learner.tree_blocks.most
    training = full_length_calls(config, learner, with_gradients=True)
    scoring = full_length_calls(config, learner, with_gradients=False)
    times = {
        "push": _blocks(training, PUSH, most),
        "pop": _blocks(training, POP, most),
        "push with scores": _blocks(scoring, PUSH, most),
        "tree score": _blocks(scoring, PUSH, most),
    }
    trips = {
        "head_chunks": math.ceil(most / learner.objective.forward.chunk),
        "key_blocks": math.ceil((config.generation.length / BLOCK + 1) / 2),
    }
    assumed = Assumed(trips, keys=config.generation.length / 2)
    walks = learner.mesh.shape["data"] * learner.mesh.shape["fsdp"]
    found = []
    for name, (function, arguments) in learner.tree.abstract_calls(state, batch, minibatches).items():
        # What is in memory only during prepare or update: path, gradients and scores.
        beyond = arguments[1:3] if name == "pop" else arguments[2:4]
        found.append(
            dict(
                name=name,
                function=function,
                arguments=arguments,
                calls=minibatches * times[name],
                tokens=most * walks,
                beyond=beyond,
                assumed=assumed,
            )
        )
    return found


def _blocks(calls: Sequence[Call], kind: int, most: int) -> float:
    """Returns how many steps of `most` tokens compute as many as the steps of this kind."""
    return sum(call.bucket for call in calls if call.kind == kind) / most


def full_length_work(config: Config, learner: TreeLearner, passes: int) -> Work:
    """Returns the work of a batch of samples of full length over its prefix trees, scored `passes` times."""
    parts = [
        (passes, full_length_calls(config, learner, with_gradients=False)),
        (1, full_length_calls(config, learner, with_gradients=True)),
    ]
    total = np.sum([times * np.array(work_of_calls(calls)) for times, calls in parts], axis=0)
    return Work(*(config.algorithm.minibatches * total).tolist())
