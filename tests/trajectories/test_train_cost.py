"""The work of batches, counted one token at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.packing import plan_batch
from areal_jax.trajectories.prefix_tree import Sampled
from areal_jax.trajectories.train_cost import Work, packed_work, tree_work
from areal_jax.types import Group, Prompt, SampleId, Sampling
from tests.trajectories.samples import trajectory


def test_a_call_costs_some_tokens_and_a_token_with_gradients_three_without():
    assert Work(calls=2, backward_tokens=100, forward_tokens=72).tokens(64) == 2 * 64 + 3 * 100 + 72


def groups_of(prompt: int, answers: list[int]) -> list[Group]:
    """One group whose members share a prompt of this many tokens, with answers of these lengths."""
    members = []
    for member, size in enumerate(answers):
        one = trajectory(SampleId(0, member), prompt + size)
        one.tokens[:prompt] = np.arange(prompt)
        one.loss_mask[:] = np.arange(prompt + size) >= prompt
        members.append(one)
    return [Group(0, Prompt("?"), tuple(members))]


def test_the_work_of_a_packed_batch():
    """Rows of 16 tokens, two to a micro-batch; a prompt of 4 tokens is computed once in each row."""
    groups = groups_of(4, [6, 6, 6, 6])
    repeated = packed_work(plan_batch(groups, 2, 16, layout="repeated"), 2, shards=1, passes=2)
    assert repeated == (3 * 2, 2 * 32, 2 * 2 * 32)
    shared = packed_work(plan_batch(groups, 2, 16, layout="shared"), 2, shards=1, passes=0)
    assert shared == (1, 32, 0)
    assert packed_work(plan_batch(groups, 2, 16), 2, shards=2, passes=0) == Work(1, 16, 0)


def test_the_work_over_a_tree():
    """A prompt of 4 tokens is pushed; two answers share a call, the last one is popped with the prompt."""
    (group,) = groups_of(4, [6, 6, 6])
    sequences = [[Sampled.of(one) for one in group.trajectories]]
    blocks = Blocks(16, 4, call_tokens=8)
    trained = tree_work(sequences, 1, blocks, passes=0)
    assert trained == Work(3, 12 + 12, 4)
    scored = tree_work(sequences, 1, blocks, passes=1)
    # The same calls in reverse: one answer with the prompt, and two.
    assert scored.backward_tokens == trained.backward_tokens
    assert scored.forward_tokens - trained.forward_tokens == 12 + 12
    assert scored.calls - trained.calls == 2


def test_devices_take_as_long_as_the_longest_of_them():
    texts = [np.arange(n) + 100 * n for n in (8, 16)]
    sequences = [Sampled(text.astype(np.int32), np.ones(len(text), bool), 1.0, None) for text in texts]
    found = tree_work([sequences], 2, Blocks(16, 4, call_tokens=0), passes=0)
    assert found == Work(1, 16, 0)


def test_conversations_cost_less_over_the_tree_and_texts_apart_less_packed():
    """At a compression of 4 and of 1."""
    rng = np.random.default_rng(0)
    blocks = Blocks(256)

    def tokens(texts: list[np.ndarray]) -> tuple[float, float]:
        members = []
        for member, text in enumerate(texts):
            one = replace(trajectory(SampleId(0, member), len(text)), sampling=Sampling())
            one.tokens[:] = text
            members.append(one)
        plan = plan_batch([Group(0, Prompt("?"), tuple(members))], 2, 128)
        of_tree = tree_work([[Sampled.of(one) for one in members]], 1, blocks, passes=1)
        return packed_work(plan, 2, 1, 1).tokens(64), of_tree.tokens(64)

    turns = [list(accumulate(rng.integers(0, 999, (8, 12)), lambda a, b: np.append(a, b))) for _ in range(4)]
    packed, tree = tokens([text for turn in turns for text in turn])
    assert tree < 0.5 * packed
    packed, tree = tokens([rng.integers(0, 999, 64) for _ in range(32)])
    assert packed <= tree
