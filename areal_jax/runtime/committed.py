"""The newest committed version of a run's folder, read beside the run that may still be writing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from areal_jax.config import Config
from areal_jax.models.model import Model
from areal_jax.trainer.checkpoint import CheckpointError, committed, restore_params
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest

CHECKPOINTS = "checkpoints"

ATTEMPTS = 20
"""How often in a row the newest version may be pruned while it is read."""


class Committed(NamedTuple):
    value: VersionedParams
    refused: tuple[str, ...]
    """Newer versions that could not be used, and why."""


def committed_params(folder: Path, config: Config, model: Model, shardings: Any) -> Committed:
    """The newest whole version, its float32 parameters laid out by a tree of shardings.

    Nothing is written, no lock taken: a version pruned while it is read gives way to the next newest. Raises
    ArealError for a run without any.
    """
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract_params,
        shardings,
    )
    refused: dict[int, str] = {}
    for _ in range(ATTEMPTS):
        left = [version for version in committed(folder / CHECKPOINTS) if version not in refused]
        if not left:
            break
        version, path = left[-1], folder / CHECKPOINTS / str(left[-1])
        try:
            params = restore_params(path, like)
        except CheckpointError as error:
            if path.exists():
                refused[version] = str(error)
            continue
        return Committed(VersionedParams(version, params, digest(params)), tuple(refused.values()))
    if refused:
        raise ArealError(f"no version of {folder} can be read: {'; '.join(refused.values())}")
    raise ArealError(
        f"{folder} has no committed version yet; its first checkpoint comes after step "
        f"{min(config.trainer.checkpoint_every, config.run.steps)} (trainer.checkpoint_every) or when it is "
        "stopped"
    )
