"""The inverse of packing, as tests compare it with what was packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from areal_jax.trajectories.plan import PER_TOKEN
from areal_jax.types import Batch, PreparedBatch


def places(batch: Batch | PreparedBatch) -> list[np.ndarray]:
    """Returns for each trajectory the indices of its tokens among all B T tokens, the first token first."""
    ids, previous = np.asarray(batch.segment_ids), np.asarray(batch.previous).tolist()
    length = ids.shape[1]
    order = np.argsort(ids, axis=None, kind="stable")
    last = order[np.searchsorted(ids.reshape(-1)[order], np.arange(len(batch.reward)) + 2) - 1]
    found = []
    for row, column in zip(*(x.tolist() for x in np.divmod(last, length)), strict=True):
        columns = []
        while column >= 0:
            columns.append(column)
            column = previous[row][column]
        found.append(row * length + np.array(columns[::-1]))
    return found


def unpack(batch: Batch | PreparedBatch) -> list[dict[str, Any]]:
    """Returns a dict for each trajectory, in segment order: name of a field of the batch -> its values."""
    added = [name for name in type(batch)._fields if name not in Batch._fields and name != "bootstrap"]
    names = [*PER_TOKEN, "positions", "support", *added]
    arrays = {name: np.asarray(x) for name in names if (x := getattr(batch, name)) is not None}
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    segments = []
    for number, where in enumerate(places(batch)):
        segments.append(
            {name: array[where] for name, array in flat.items()}
            | {
                "reward": float(batch.reward[number]),
                "group_id": int(batch.group_ids[number]),
                "temperature": float(batch.temperature[number]),
                "truncated": bool(batch.truncated[number]),
            }
        )
    return segments
