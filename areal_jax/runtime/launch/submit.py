"""A launch from a config, or from the folder of a run that is to go on: what is written, and what is run."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_jax.config import Config, load_config, to_yaml
from areal_jax.runtime.launch import gcloud, gke, slurm
from areal_jax.runtime.launch.plan import SECRET_FILE, LaunchError, Plan, make_plan
from areal_jax.runtime.launch.shell import Submission

SUBMIT_DEADLINE_S = {"sbatch": 120, "kubectl": 300, "gcloud": 3600}
"""Longest that handing over takes; gcloud makes machines meanwhile."""

SECRET = "AREAL_JAX_SECRET"
"""The variable that every process finds the secret in; and here the password of a Redis that is not ours."""

LAUNCHERS: dict[str, Callable[[Plan], Submission]] = {
    "slurm": slurm.submission,
    "gcloud": gcloud.submission,
    "gke": gke.submission,
}


@dataclass(frozen=True)
class Launch:
    config: Config
    folder: Path
    overrides: dict[str, str]
    """Keys given to a run that goes on; a fresh run's stand in its config.yaml."""

    @property
    def goes_on(self) -> bool:
        return (self.folder / "config.yaml").exists()


def read(words: Sequence[str]) -> Launch:
    """The launch that words ask for: CONFIG ... [k=v ...], or RUN [k=v ...] to go on.

    Raises ConfigError, LaunchError for a folder that is in the way or keys that change the past.
    """
    first = Path(words[0]) if words else None
    if first is not None and (first / "config.yaml").is_file():
        _require_no_past(words[1:])
        config = launchable(load_config(first / "config.yaml", *words[1:]))
        given = dict(word.split("=", 1) for word in words[1:] if not word.startswith("launch."))
        return Launch(config, first.absolute(), given)
    config = launchable(load_config(*words))
    folder = config.run.folder
    if folder.exists():
        raise LaunchError(
            f"the run folder {folder} exists; choose another run.name or run.dir, or go on with it: name the "
            "folder in place of the config"
        )
    return Launch(config, folder.absolute(), {})


def _require_no_past(words: Sequence[str]) -> None:
    from areal_jax.runtime.jobs import CHANGES_NO_PAST

    for word in words:
        if not word.startswith(CHANGES_NO_PAST):
            raise LaunchError(
                f"{word}: a run that goes on takes only keys that change no past "
                f"({', '.join(CHANGES_NO_PAST)}); start a new run for anything else"
            )


def launchable(config: Config) -> Config:
    """The config, if processes can run it. Raises LaunchError."""
    if config.weights.backend == "memory":
        raise LaunchError(
            "weights.backend=memory: one process's memory reaches no other; leave it at auto, or use orbax"
        )
    return config


def prepare(launcher: str, launch: Launch) -> Submission:
    """What would be handed over. Raises LaunchError."""
    accelerator = launch.config.launch.accelerator
    kind = "gpu" if accelerator == "auto" else accelerator
    plan = make_plan(launch.config, launch.folder, kind, launch.overrides, goes_on=launch.goes_on)
    return LAUNCHERS[launcher](plan)


def write(launch: Launch, submission: Submission | None = None) -> None:
    """The run's folder with its config and secret, and the launcher's files."""
    files = launch.folder / "launch"
    files.mkdir(parents=True, exist_ok=True)
    (launch.folder / "logs").mkdir(exist_ok=True)
    if not launch.goes_on:
        (launch.folder / "config.yaml").write_text(to_yaml(launch.config))
    has_own_redis = launch.config.runtime.redis is None
    make_secret(launch.folder / SECRET_FILE, None if has_own_redis else os.environ.get(SECRET))
    for name, text in (submission.files if submission else {}).items():
        (files / name).write_text(text)


def make_secret(path: Path, given: str | None = None) -> str:
    """The run's secret, in a file that its owner alone may read: made once, unless one is given."""
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(given or secrets.token_hex(32))
    return path.read_text().strip()


def submit(launch: Launch, submission: Submission) -> str:
    """Hand it over; what the program printed. Raises LaunchError where that is missing, or refuses."""
    program = submission.program
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no {program} on this machine; install it, launch from a machine that has it, or see "
            "what would be submitted with --dry-run"
        )
    write(launch, submission)
    path = launch.folder / "launch" / submission.script
    try:
        done = subprocess.run(
            ["bash", str(path)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=SUBMIT_DEADLINE_S[program],
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{path} has not ended after {SUBMIT_DEADLINE_S[program]} s; see what {program} waits for"
        ) from None
    if done.returncode:
        raise LaunchError(f"{path} ended with {done.returncode}; {program} says why above")
    return done.stdout
