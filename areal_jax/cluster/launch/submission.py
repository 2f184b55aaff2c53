"""The commands that submit a run to a scheduler: they use launchers/* with sizes from the config."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path, PurePosixPath

from areal_jax.cluster.launched import Launch, write
from areal_jax.cluster.placement import LaunchError, Plan
from areal_jax.file_errors import writing

SUBMIT_DEADLINE_S = {"sbatch": 120, "kubectl": 300, "gcloud": 3600}
"""Program -> time limit of each of its commands, in seconds; gcloud's includes the creation of machines."""

MOUNT = PurePosixPath("/mnt/areal-jax")
"""Mount point of the shared file system on the machines and pods of gcloud and gke."""


@dataclass(frozen=True)
class Submission:
    program: str
    """The scheduler's command, which must be installed: sbatch, gcloud or kubectl."""
    commands: list[list[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the launcher's script reads."""
    files: Mapping[str, str] = field(default_factory=dict)
    """File name -> text; `submit` writes these files to launch/ in the run's folder."""
    after: str = ""
    """Shell commands to watch the run, which are shown after the submission."""

    def text(self) -> str:
        """Returns the output of --dry-run: the files, then each command with its environment variables."""
        settings = "".join(f"{key}={shlex.quote(value)} \\\n" for key, value in self.env.items())
        written = "".join(f"# ---- {name}\n{text}" for name, text in self.files.items())
        return written + "\n".join(settings + shlex.join(words) for words in self.commands)


def launcher_file(name: str) -> Path:
    """Returns the path of the file `name` of launchers/, in a checkout or in an installed wheel."""
    return Path(str(files("areal_jax") / "launchers" / name))


def settings_from(
    environment: Mapping[str, str], needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, str]:
    """Returns those of the variables `needed` and `optional` that are set; a needed one must be."""
    for name in needed:
        if not environment.get(name):
            raise LaunchError(f"the environment variable {name} is not set; set it as in launchers/README.md")
    return {name: environment[name] for name in (*needed, *optional) if environment.get(name)}


def folder_on_volume(plan: Plan) -> PurePosixPath:
    """Returns the absolute path of the run's folder on the file system that all machines mount at MOUNT.

    Raises LaunchError if run.dir is outside of MOUNT, /mnt/areal-jax.
    """
    folder = MOUNT / PurePosixPath(plan.config.run.folder)
    if not folder.is_relative_to(MOUNT) or ".." in folder.parts:
        raise LaunchError(
            f"run.dir={plan.config.run.dir} is not on the volume that all machines mount at {MOUNT}; set "
            f"run.dir to a folder relative to {MOUNT}"
        )
    return folder


def submit(launch: Launch, submission: Submission) -> str:
    """Writes the run's config and the submission's files, runs its commands, and returns their stdout.

    Raises LaunchError if `submission.program` is not installed, or if a command fails or takes longer than
    SUBMIT_DEADLINE_S allows.
    """
    program = submission.program
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no {program} on this machine; install it, or launch from a machine that has it "
            "(--dry-run works without it)"
        )
    write(launch)
    for name, text in submission.files.items():
        path = launch.folder / "launch" / name
        with writing(path):
            path.write_text(text)
    return "".join(_run(words, submission) for words in submission.commands)


def _run(words: list[str], submission: Submission) -> str:
    deadline_s, shown = SUBMIT_DEADLINE_S[submission.program], shlex.join(words)
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **submission.env},
            stdout=subprocess.PIPE,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{shown}` was stopped after {deadline_s} s; run this command by hand to see what it waits for"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"`{shown}` failed with status {done.returncode}; correct the cause, which the command printed "
            "above, and launch again"
        )
    return done.stdout
