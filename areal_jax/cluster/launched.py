"""A launched run's config and folder: read from command-line words, written before the first process starts.

Submitting the same words again resumes the run, since the run's folder then exists. A resumed run accepts
only changes of settings that do not affect the steps already trained (`RESUMABLE_KEYS`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_jax.assembly.run_folder import CONFIG, SECRET_FILE, make_folders
from areal_jax.cluster.placement import LaunchError
from areal_jax.config.loading import load_config, resolved, to_yaml
from areal_jax.config.tree import Config
from areal_jax.file_errors import writing
from areal_jax.secret import VARIABLE

EFFECTIVE = "launch/config.yaml"
"""The config file that the run's processes read: the run's config with the changes of the last launch."""


@dataclass(frozen=True)
class Launch:
    config: Config
    folder: Path
    """The absolute path of the run's folder."""
    is_resumed: bool

    @property
    def effective(self) -> Path:
        return self.folder / EFFECTIVE


def read(words: Sequence[str], folder: Path | None = None) -> Launch:
    """Returns the config and folder of the run that command-line words describe, and whether it is resumed.

    `words`: CONFIG_FILE ... [section.key=value ...] or, to resume, RUN_FOLDER [section.key=value ...].
    `folder`: replaces the run folder of the config; None keeps it. Unless run.steps is given, and is another
    number than at the run's start, it stays that of the last resume. Raises ConfigError if the config is
    invalid, and LaunchError if weights.backend=memory, if the run's folder has files but no run's config, or
    if a changed setting can only be set on a new run.
    """
    given = Path(words[0]) if words else None
    if given is not None and (given / CONFIG).is_file():
        folder = folder or given
        words = [str(given / CONFIG), *words[1:]]
    config = load_config(*words)
    if config.weights.backend == "memory":
        raise LaunchError(
            "weights.backend=memory works within one process only, but a launched run has several processes; "
            "set weights.backend=auto or weights.backend=orbax"
        )
    folder = (folder or config.run.folder).absolute()
    is_resumed = (folder / CONFIG).is_file()
    if is_resumed:
        before = load_config(folder / CONFIG)
        _require_resumable(before, config, folder)
        is_given = any(word.startswith("run.steps=") for word in words)
        if config.run.steps == before.run.steps and not is_given:
            from areal_jax.runtime.resuming import with_steps_asked

            config = with_steps_asked(config, folder)
    elif folder.is_dir() and {path.name for path in folder.iterdir()} - {"launch", "logs"}:
        raise LaunchError(
            f"the run folder {folder} contains files, but no {CONFIG}, so it is not the folder of a run; "
            "choose another run.name or run.dir"
        )
    return Launch(config, folder, is_resumed)


def write(launch: Launch) -> str:
    """Creates the run's folders, config files and secret, and returns the secret; called on rank 0 only.

    The secret is the password with which the run's processes connect to Redis and to each other; a resumed
    run keeps its secret.
    """
    make_folders(launch.folder, "launch", "logs")
    text = to_yaml(launch.config)
    # Processes on every machine read the second file, so the head writes it before it publishes its address.
    for path in (launch.effective,) if launch.is_resumed else (launch.folder / CONFIG, launch.effective):
        with writing(path):
            path.write_text(text)
    # The variable holds the password of a Redis that the config names; without one it may be another run's.
    password = os.environ.get(VARIABLE) if launch.config.runtime.redis else None
    return make_secret(launch.folder / SECRET_FILE, password)


def make_secret(path: Path, given: str | None = None) -> str:
    """Returns a run's secret (see `write`) from the file `path`, which only the file's owner may read.

    If the file is missing, creates it with the secret `given` or, if that is None, with a random secret.
    """
    if not path.exists():
        # With this mode from the start: until a later chmod, other users could read the secret.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with writing(path), os.fdopen(descriptor, "w") as file:
            file.write(given or secrets.token_hex(32))
    return path.read_text().strip()


# Resolved values are compared, not words: the same config may be given by other words or in another file.
def _require_resumable(before: Config, now: Config, folder: Path) -> None:
    from areal_jax.runtime.resuming import RESUMABLE_KEYS

    then = dict(_leaves(resolved(before)))
    changed = [
        f"{key}={value}"
        for key, value in _leaves(resolved(now))
        if then.get(key) != value and not key.startswith((*RESUMABLE_KEYS, "run.dir"))
    ]
    if changed:
        raise LaunchError(
            f"the run in {folder} was started without {', '.join(changed)}, which can only be set on a new "
            f"run. To resume this run, change only {', '.join(RESUMABLE_KEYS)}; for a new run, "
            "choose another run.name or run.dir"
        )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
