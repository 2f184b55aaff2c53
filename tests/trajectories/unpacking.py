"""The inverse of packing, as tests compare it with what was packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from areal_jax.trajectories.plan import PER_TOKEN
from areal_jax.types import Batch

PREPARED = (
    "ages", "proximal_logp", "proximal_mix", "advantages", "weights", "off_policy_weight",
    "off_policy_cut", "ref_logp", "teacher_logp", "token_rewards", "values", "returns",
)  # fmt: skip
"""Names of the batch's arrays that the learner's `prepare` adds."""


def places(batch: Batch) -> list[np.ndarray]:
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


def unpack(batch: Batch) -> list[dict[str, Any]]:
    """Returns a dict for each trajectory, in segment order: name of a field of Batch -> its values."""
    present = [*PER_TOKEN, "positions", *(n for n in ("support", *PREPARED) if getattr(batch, n) is not None)]
    arrays = {name: np.asarray(getattr(batch, name)) for name in present}
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
