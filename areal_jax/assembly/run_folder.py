"""The names of files and folders in a run's folder, and how its config, journal and samples are found."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, SampleId

CONFIG = "config.yaml"
"""The resolved config; a run with this file as its config repeats the run."""
JOURNAL = "journal.sqlite"
BRANCH = "branch"
"""Key of the journal's header under which a branch records the run that it comes from."""
CONFIG_DIGEST = "config"
"""Key of the journal's header under which a run records the digest of its config.yaml."""
CHECKPOINTS, EXPORTS = "checkpoints", "exports"
"""Subfolders of the run's folder, each with one folder per version."""
SECRET_FILE = "launch/secret"
"""The secret that the processes of a launched run share; file mode 0600."""


def make_folders(folder: Path, *names: str) -> None:
    """Creates a run's folder and these subfolders. Raises ArealError if the file system refuses it."""
    for name in names:
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArealError(
                f"the run's folder {folder} cannot be made ({error.strerror}: {error.filename}); give "
                "run.dir=FOLDER, a folder that you may write to"
            ) from None


def config_digest(folder: Path) -> str:
    """Returns a hash of the bytes of a run's config.yaml."""
    return hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=8).hexdigest()


def run_config(folder: Path) -> Config:
    """Returns the config of the run in `folder`. Raises ArealError if it is not a run's folder."""
    if not (folder / CONFIG).is_file():
        raise ArealError(f"{folder} is not a run's folder: it has no {CONFIG}; give the folder of a run")
    return load_config(folder / CONFIG)


def open_journal(folder: Path) -> SqliteQueue:
    """Open a run's journal read-only; the run may still be running."""
    return SqliteQueue.open(folder / JOURNAL, readonly=True)


def sample_id(name: str) -> SampleId:
    """Return the sample named ORDINAL/MEMBER[/ATTEMPT]; ATTEMPT is 0 by default.

    Raises ArealError for a name of another form.
    """
    match = re.fullmatch(r"(\d+)[/.](\d+)(?:[/.](\d+))?", name)
    if not match:
        raise ArealError(
            f"{name!r} does not name a sample; write ORDINAL/MEMBER or ORDINAL/MEMBER/ATTEMPT, such as 12/3"
        )
    return SampleId(*(int(part or 0) for part in match.groups()))
