"""Random prefix trees of sequences, prepared for an update with values of their own at every shared token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from areal_jax.algorithms.shapes import AXES
from areal_jax.trajectories.plan import BatchPlan, Pieces, fill
from areal_jax.types import Batch, Group, PreparedBatch, Prompt, SampleId, Sampling, Trajectory
from tests.trainer.conftest import VOCAB


def trie(seed: int, count: int, length: int, temperatures: tuple[float, ...] = (1.0,)) -> list[Trajectory]:
    """`count` sequences of up to `length` tokens; most begin like an earlier one, some are one's prefix."""
    rng = np.random.default_rng(seed)
    found, texts = [], [rng.integers(0, VOCAB - 2, length)]
    for member in range(count):
        size = 1 if member == 0 else int(rng.integers(2, length + 1))
        text = texts[rng.integers(len(texts))].copy()
        text[int(rng.integers(0, length + 1)) :] = rng.integers(0, VOCAB - 2)
        texts.append(text)
        mask = rng.random(size) < 0.6
        mask[0] = False
        found.append(
            Trajectory(
                sample=SampleId(0, member),
                tokens=text[:size].astype(np.int32),
                loss_mask=mask,
                behavior_logp=np.where(mask, -2 - rng.random(size), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int32),
                sampling=Sampling(temperature=float(rng.choice(temperatures))),
                stop_reason="stop",
                reward=float(rng.normal()),
            )
        )
    return found


def tree_groups(seed: int, length: int, count: int = 4, size: int = 4) -> list[Group]:
    """Groups of sequences that share prefixes within and across groups, at two temperatures."""
    flat = trie(seed, count * size, length, temperatures=(1.0, 0.7))
    rng = np.random.default_rng(seed)
    groups = []
    for ordinal in range(count):
        members = tuple(
            replace(
                flat[ordinal * size + member],
                sample=SampleId(ordinal, member),
                versions=np.where(flat[ordinal * size + member].loss_mask, rng.integers(0, 3), -1).astype(
                    np.int32
                ),
                stop_reason="length" if member == 1 else "stop",
            )
            for member in range(size)
        )
        groups.append(Group(ordinal, Prompt("?"), members))
    return groups


def rows_of(sequences: list[Trajectory], length: int) -> Batch:
    """A batch with each sequence in a row of its own."""
    count = len(sequences)
    each, zero = np.arange(count), np.zeros(count, np.int64)
    sizes = np.array([len(one.tokens) for one in sequences])
    plan = BatchPlan(
        rows=count,
        length=length,
        layout="apart",
        support=0 if sequences[0].support is None else sequences[0].support.shape[1],
        samples=np.array([one.sample for one in sequences]),
        tokens=sizes,
        reward=np.array([one.reward for one in sequences], np.float32),
        group_ids=zero.astype(np.int32),
        temperature=np.array([one.sampling.temperature for one in sequences], np.float32),
        truncated=zero.astype(bool),
        pieces=Pieces(each, zero, sizes, each, zero, sizes, each + 1, zero - 1),
    )
    return fill(plan, each, dict(enumerate(sequences)))


def prepared(packed: Batch, seed: int, dtype: Any = np.float32) -> PreparedBatch:
    """The batch with random advantages, weights and proximal log-probs, which differ on shared tokens."""
    rng, shape = np.random.default_rng(seed), packed.tokens.shape
    mask = packed.loss_mask
    batch = PreparedBatch(*packed)._replace(
        ages=np.zeros(shape, np.int32),
        proximal_logp=np.where(mask, packed.behavior_logp + 0.3 * rng.normal(size=shape), 0),
        advantages=np.where(mask, rng.normal(size=shape), 0),
        loss_weights=np.where(mask, rng.random(shape) / mask.sum(), 0),
        off_policy_weight=np.where(mask, 0.5 + rng.random(shape), 1),
        off_policy_cut=np.zeros(shape, bool),
        values=np.where(mask, rng.normal(size=shape), 0),
        returns=np.where(mask, rng.normal(size=shape), 0),
    )
    given = {name: x for name, x in batch._asdict().items() if x is not None}
    kinds = {name: x.astype(dtype) for name, x in given.items() if AXES[name][1] is float}
    return batch._replace(**kinds)
