"""The newest committed version of a run's folder, read beside the run that may still be writing it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from areal_jax.config import Config
from areal_jax.models.model import Model
from areal_jax.observe.evals import read_evals
from areal_jax.trainer.checkpoint import restore_params
from areal_jax.types import ArealError, PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.staged import StagedError, committed, read
from areal_jax.weights.store import dtype_in

CHECKPOINTS, WEIGHTS, EXPORTS = "checkpoints", "weights", "exports"
"""Folders of a run, each with one a version."""

ATTEMPTS = 20
"""How often in a row the newest version may be pruned while it is read."""


def is_dealt_with(folder: Path, version: PolicyVersion, config: Config) -> bool:
    """Whether checkpoint `version` was evaluated and exported, as far as `config` asks for it."""
    o = config.observe
    is_evaluated = not o.evaluate or version in {line["version"] for line in read_evals(folder)}
    return is_evaluated and (not o.exports or (folder / EXPORTS / str(version)).is_dir())


class Committed(NamedTuple):
    value: VersionedParams
    """In `dtype` where it lay in `weights/`, in float32 where it is a checkpoint's."""
    refused: tuple[str, ...]
    """Newer versions that could not be used, and why."""


def committed_params(
    folder: Path, config: Config, model: Model, shardings: Any, dtype: str = "float32"
) -> Committed:
    """The newest whole version, its parameters laid out by a tree of shardings.

    Taken from `weights/` where the run publishes there in `dtype`, or from `checkpoints/`, whichever is
    newer; `config` is the run's own. Nothing is written, no lock taken: a version pruned while it is read
    gives way to the next newest. Raises ArealError for a run without any.
    """
    like = {CHECKPOINTS: _like(model, shardings, "float32")}
    if config.weights.wire_dtype == dtype:
        like[WEIGHTS] = _like(model, shardings, dtype)
    refused: dict[Path, str] = {}
    for _ in range(ATTEMPTS):
        left = [path for path in _newest_first(folder, like) if path not in refused]
        if not left:
            break
        path, kind = left[0], left[0].parent.name
        try:
            params = restore_params(path, like[kind]) if kind == CHECKPOINTS else read(path, like[kind])
        except StagedError as error:
            if path.exists():
                refused[path] = str(error)
            continue
        value = VersionedParams(int(path.name), params, digest(params))
        return Committed(value, tuple(refused.values()))
    if refused:
        raise ArealError(f"no version of {folder} can be read: {'; '.join(refused.values())}")
    raise ArealError(
        f"{folder} has no committed version yet; its first checkpoint comes after step "
        f"{min(config.trainer.checkpoint_every, config.run.steps)} (trainer.checkpoint_every) or when it is "
        "stopped"
    )


def checkpoint_params(folder: Path, version: PolicyVersion, model: Model, shardings: Any) -> VersionedParams:
    """The float32 parameters of one checkpoint of a run, laid out by a tree of shardings.

    Raises CheckpointError for one that is damaged, or pruned meanwhile.
    """
    params = restore_params(folder / CHECKPOINTS / str(version), _like(model, shardings, "float32"))
    return VersionedParams(version, params, digest(params))


def _newest_first(folder: Path, kinds: Iterable[str]) -> list[Path]:
    """Folders of committed versions; of one version the published one before the checkpoint."""
    found = [(version, kind) for kind in kinds for version in committed(folder / kind)]
    return [folder / kind / str(version) for version, kind in sorted(found, reverse=True)]


def _like(model: Model, shardings: Any, dtype: str) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, dtype_in(leaf.dtype, dtype), sharding=sharding
        ),
        model.abstract_params,
        shardings,
    )
