"""The folder of a run's weight versions: RUN/weights, or a folder of this run below `weights.dir` if set."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from areal_jax.config.tree import Config
from areal_jax.types import ArealError

BEYOND_KEPT = 2
"""Number of versions on disk in addition to weights.keep_versions: the version that is being written, and the
version that it replaces.
"""


def weights_folder(config: Config, run: Path) -> Path:
    """Returns the folder in which the run in folder `run` writes each version, as `<version>/`.

    If `weights.dir` is set, the folder's name contains a hash of the run's path, so that two runs do not
    write to the same folder.
    """
    if config.weights.dir is None:
        return run / "weights"
    path = os.path.abspath(run)
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return Path(config.weights.dir) / f"{Path(path).name}-{digest}"


@contextmanager
def cleaned_weights(config: Config, run: Path) -> Iterator[None]:
    """Removes the run's folder below `weights.dir`, with all versions, before and after the `with` block.

    The removal before the block cleans up after a killed run. Without `weights.dir` nothing is removed. Only
    one process of a run may use this function, and all processes that use the folder must run within the
    block.
    """
    with ExitStack() as cleaning:
        if config.weights.dir is not None:
            folder = weights_folder(config, run)
            shutil.rmtree(folder, ignore_errors=True)
            cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        yield


def require_room(config: Config, run: Path, version_bytes: int) -> None:
    """Raises ArealError if `weights.dir` is set and has too little free space for the run's versions.

    `version_bytes`: size of one version, in bytes.
    """
    if config.weights.dir is None:
        return
    folder, keep = weights_folder(config, run), config.weights.keep_versions
    there = next(path for path in (folder, *folder.parents) if path.exists())
    # The versions that this run left there will be replaced: their bytes count as free.
    own = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free, needed = shutil.disk_usage(there).free + own, (keep + BEYOND_KEPT) * version_bytes
    if free < needed:
        raise ArealError(
            f"weights.dir={config.weights.dir} has {free / 1e9:.3g} GB free, and the run needs "
            f"{needed / 1e9:.3g} GB there: {keep + BEYOND_KEPT} versions of {version_bytes / 1e9:.3g} GB "
            f"(weights.keep_versions={keep}, and {BEYOND_KEPT} more while one is replaced). Lower "
            "weights.keep_versions, set weights.dir to a folder with more free space, or leave "
            "weights.dir out: versions are then written to the run's folder"
        )
