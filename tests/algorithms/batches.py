"""Small packed batches of random values, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.types import PolicyOutputs, PreparedBatch

ROWS = ((5, 4), (3, 6), (9,), (2, 2, 4))
"""Segment lengths, a row each; rows are as long as the longest, and one more."""


def segments_of(rows: Sequence[Sequence[int]] = ROWS, length: int | None = None) -> np.ndarray:
    length = length or max(map(sum, rows)) + 1
    ids = np.zeros((len(rows), length), np.int32)
    number = 0
    for row, lengths in enumerate(rows):
        column = 0
        for size in lengths:
            number += 1
            ids[row, column : column + size] = number
            column += size
    return ids


def positions_of(segments: np.ndarray) -> np.ndarray:
    out = np.zeros_like(segments)
    for row, column in np.argwhere(segments > 0):
        out[row, column] = column - np.argmax(segments[row] == segments[row, column])
    return out


def prepared(
    seed: int, rows: Sequence[Sequence[int]] = ROWS, length: int | None = None
) -> tuple[PolicyOutputs, PreparedBatch]:
    """What a loss is given: policy outputs and a prepared batch; no segment's first token is trained."""
    rng = np.random.default_rng(seed)
    segments = segments_of(rows, length)
    positions = positions_of(segments)
    mask = (segments > 0) & (positions > 0)
    sequences = int(segments.max())

    def per_token(scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
        return np.where(mask, rng.normal(shift, scale, segments.shape), 0).astype(np.float32)

    behavior = per_token(0.7, -2)
    batch = PreparedBatch(
        tokens=rng.integers(0, 9, segments.shape).astype(np.int32),
        positions=positions,
        segment_ids=segments,
        loss_mask=mask,
        behavior_logp=behavior,
        versions=np.where(mask, rng.integers(0, 3, segments.shape), -1).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        previous=np.where(positions > 0, np.arange(segments.shape[1]) - 1, -1).astype(np.int32),
        ages=np.where(mask, rng.integers(0, 3, segments.shape), 0).astype(np.int32),
        reward=rng.integers(0, 3, sequences).astype(np.float32),
        group_ids=(np.arange(sequences) // 2).astype(np.int32),
        temperature=np.ones(sequences, np.float32),
        truncated=np.zeros(sequences, bool),
        proximal_logp=behavior + per_token(0.3),
        advantages=per_token(),
        loss_weights=np.where(mask, rng.uniform(0.1, 1, segments.shape), 0).astype(np.float32),
        off_policy_weight=np.where(mask, rng.uniform(0.5, 2, segments.shape), 1).astype(np.float32),
        ref_logp=behavior + per_token(0.3),
    )
    now = PolicyOutputs(behavior + per_token(0.3), np.abs(per_token()), per_token())
    return now, batch._replace(
        teacher_logp=behavior + per_token(0.5),
        token_rewards=per_token(0.2),
        values=per_token(),
        returns=per_token(),
        bootstrap=rng.normal(size=sequences).astype(np.float32),
    )
