"""Reads the newest committed (complete) version of a run's weights, even while the run writes others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from areal_jax.assembly.run_folder import CHECKPOINTS, EXPORTS
from areal_jax.config.tree import Config
from areal_jax.models.model import Model
from areal_jax.observe.evals import read_evals
from areal_jax.trainer.checkpoint import restore_params
from areal_jax.types import ArealError, PolicyVersion, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import StagedError
from areal_jax.weights.folder import weights_folder
from areal_jax.weights.manifest import committed
from areal_jax.weights.staged import read
from areal_jax.weights.store import abstract_in

ATTEMPTS = 20
"""Maximum number of versions that `committed_params` tries to read before it gives up; a run may delete a
version while it is read.
"""


def is_dealt_with(folder: Path, version: PolicyVersion, config: Config) -> bool:
    """Returns whether checkpoint `version` has the evaluation and the export that `config` asks for."""
    o = config.observe
    is_evaluated = not o.evaluate or version in {line["version"] for line in read_evals(folder)}
    return is_evaluated and (not o.exports or (folder / EXPORTS / str(version)).is_dir())


class Committed(NamedTuple):
    value: VersionedParams
    """The parameters: in the requested `dtype` from a published version, in float32 from a checkpoint."""
    refused: tuple[str, ...]
    """One message for each version newer than `value` that exists but could not be read."""


def committed_params(
    folder: Path, config: Config, model: Model, shardings: Any, dtype: str = "float32"
) -> Committed:
    """Loads the newest committed version of the run in `folder`, laid out by `shardings`, one for each leaf.

    Reads the newest checkpoint, in float32, or the newest version published to the hosts, if this is at least
    as new and stored in `dtype`. `config`: the config of that run. If the run deletes the version during the
    read, the newest remaining version is read. The result also says why any newer version could not be read.
    Raises ArealError if the run has no version, or none that can be read.
    """
    checkpoints = folder / CHECKPOINTS
    like = {checkpoints: abstract_in("float32", model.abstract_params, shardings)}
    if config.wire_dtype == dtype:
        like[weights_folder(config, folder)] = abstract_in(dtype, model.abstract_params, shardings)
    refused: dict[Path, str] = {}
    for _ in range(ATTEMPTS):
        left = [path for path in _newest_first(like) if path not in refused]
        if not left:
            break
        path, wanted = left[0], like[left[0].parent]
        try:
            params = restore_params(path, wanted) if path.parent == checkpoints else read(path, wanted)
        except StagedError as error:
            if path.exists():
                refused[path] = str(error)
            continue
        value = VersionedParams(int(path.name), params, digest(params))
        return Committed(value, tuple(refused.values()))
    if refused:
        raise ArealError(
            f"none of the committed versions in {folder} can be read: {'; '.join(refused.values())}"
        )
    raise ArealError(
        f"{folder} has no committed version yet; the run writes its first checkpoint after step "
        f"{min(config.trainer.checkpoint_every, config.run.steps)} (trainer.checkpoint_every), or when the "
        "run is stopped; repeat this command then"
    )


def checkpoint_params(folder: Path, version: PolicyVersion, model: Model, shardings: Any) -> VersionedParams:
    """Loads the float32 parameters of checkpoint `version` of the run in `folder`.

    The parameters are laid out by `shardings`, one for each leaf. Raises StagedError if the checkpoint is
    damaged, or if the run deletes the checkpoint during the read.
    """
    like = abstract_in("float32", model.abstract_params, shardings)
    try:
        params = restore_params(folder / CHECKPOINTS / str(version), like)
    except StagedError as error:  # its message begins with the folder
        raise StagedError(f"checkpoint {error}") from None
    return VersionedParams(version, params, digest(params))


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    """Returns the paths of all committed versions in `folders`, newest first.

    A folder contains either checkpoints or published versions. Of a version that is in two folders, the
    published copy comes first.
    """
    found = [
        (version, folder.name != CHECKPOINTS, folder) for folder in folders for version in committed(folder)
    ]
    return [folder / str(version) for version, _, folder in sorted(found, reverse=True)]
