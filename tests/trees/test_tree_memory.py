"""Memory of an update over prefix trees follows the longest path and the block, not the tree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trees.tree_arrays import Gradients, Sequences, WalkStep
from areal_jax.trees.tree_passes import TreePasses
from tests.trainer.conftest import MakeLearner
from tests.trainer.prefix_trees import prepared, rows_of, trie


def pop_bytes(of: Learner, leaves: int, tokens: int, block: int) -> int:
    """Bytes of a walk's path, of the gradients with respect to it, and of all that its pops compute.

    The walk is over `leaves` samples of at most `tokens` tokens. The program is compiled, not run.
    """
    passes = TreePasses(of.objective, of.mesh, 1, tokens, Blocks(block))
    number: Any = lambda *size: jax.ShapeDtypeStruct(size, np.int32)  # noqa: E731
    columns = (number(1, block),) * 4
    step = WalkStep(number(leaves, 2), *(number(1),) * 4, *columns)
    batch = prepared(rows_of(trie(0, leaves, tokens), tokens), 0)
    sequences = Sequences(batch.tokens, None, batch.loss_mask, batch.advantages)
    path, slopes = jax.eval_shape(passes.empty_path), jax.eval_shape(passes.no_slopes)
    gradients = Gradients(of.programs.abstract_sums(), slopes)
    pop = jax.jit(passes.pop, donate_argnums=1)
    lowered = pop.lower(of.abstract_state(), gradients, path, batch, sequences, step)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes + sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((path, slopes))
    )


@pytest.mark.slow
def test_memory_follows_the_longest_path_and_the_block(learner: MakeLearner):
    of = learner(preset="decoupled_ppo", minibatches=2)
    base = pop_bytes(of, leaves=8, tokens=512, block=128)
    assert pop_bytes(of, leaves=16, tokens=512, block=128) == pytest.approx(base, rel=0.1)
    assert pop_bytes(of, leaves=8, tokens=512, block=64) < 0.9 * base
    longer = [pop_bytes(of, leaves=8, tokens=tokens, block=128) for tokens in (1024, 1536)]
    first, second = np.diff([base, *longer])
    assert first > 0 and second == pytest.approx(first, rel=0.1)
