"""A batch taken apart: the loss tokens of each sequence as 1-D float64 arrays, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from areal_jax.types import PolicyOutputs, PreparedBatch


def places(batch: PreparedBatch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and columns of each sequence's loss tokens, in its order."""
    for segment in range(1, len(batch.group_ids) + 1):
        yield np.nonzero((batch.segment_ids == segment) & batch.loss_mask)


def each(batch: PreparedBatch, of_sequence: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """(B, T) of what `of_sequence(*1-D arrays)` says of each sequence; 0 off the loss mask."""
    out = np.zeros(batch.tokens.shape)
    for at in places(batch):
        if at[0].size:
            out[at] = of_sequence(*(np.asarray(x, np.float64)[at] for x in arrays))
    return out


def slopes(batch: PreparedBatch, of_sequence: Callable[..., Any], theta: Any, *arrays: Any) -> np.ndarray:
    """(B, T): d/d theta of sum weights * of_sequence(theta, held, *arrays), by central differences."""

    def slope(weights: np.ndarray, theta: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        step, out = 1e-6, np.zeros(len(theta))
        for i in range(len(theta)):
            moved = np.eye(len(theta))[i] * step
            up, down = (of_sequence(theta + sign * moved, theta, *rest) for sign in (1, -1))
            out[i] = (weights * (up - down)).sum() / (2 * step)
        return out

    return each(batch, slope, batch.loss_weights, theta, *arrays)


def wide(batch: PreparedBatch) -> PreparedBatch:
    """The batch with float64 arrays."""
    return PreparedBatch(
        *(x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in batch)
    )


def wide_outputs(now: PolicyOutputs) -> PolicyOutputs:
    return PolicyOutputs(*(None if x is None else x.astype(np.float64) for x in now))
