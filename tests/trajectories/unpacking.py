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


def unpack(batch: Batch) -> list[dict[str, Any]]:
    """Returns a dict for each trajectory, in segment order: name of a field of Batch -> its values."""
    present = [*PER_TOKEN, "positions", *(n for n in ("support", *PREPARED) if getattr(batch, n) is not None)]
    arrays = {name: np.asarray(getattr(batch, name)) for name in present}
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
    ids = np.asarray(batch.segment_ids).reshape(-1)
    contexts = None if batch.context_ids is None else np.asarray(batch.context_ids).reshape(-1)
    count = len(np.asarray(batch.reward))
    order = np.argsort(ids, kind="stable")  # stable: a segment's tokens keep their order
    edges = np.searchsorted(ids[order], np.arange(ids.max() + 2))
    segments = []
    for number in range(count):
        where = order[edges[number + 1] : edges[number + 2]]
        context = 0 if contexts is None else int(contexts[where[0]])
        if context:
            where = np.concatenate([order[edges[context] : edges[context + 1]], where])
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
