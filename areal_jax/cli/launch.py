"""The command `launch`, which starts a run as several processes, on one machine or more."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from areal_jax.cli.shell import POINTER, print_json

SIGNALLED = 128
"""Statuses above it: the number of the signal that ended the run, added to it."""


def launch(
    launcher: Literal["local", "slurm", "gcloud", "gke"],
    words: Annotated[
        list[str],
        typer.Argument(
            help="CONFIG ... [section.key=value ...], or the folder of a run to resume; after -- options for "
            "the command that submits: sbatch, gcloud's create, or kubectl."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted; write and start nothing.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="With --dry-run: print files, settings and commands as one JSON object."),
    ] = False,
) -> None:
    """Start a run as several processes: on this machine, by Slurm, on Google Cloud's machines, or on GKE.

    Other settings of slurm, gcloud and gke are environment variables, which launchers/README.md lists.
    """
    from areal_jax.cluster.launched import read
    from areal_jax.cluster.node_agent import ONLY, describe, plan_of, run_node
    from areal_jax.cluster.placement import LaunchError
    from areal_jax.cluster.submission import prepare, submit

    if dry_run and not json:
        typer.echo(POINTER, err=True)
    end = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    asked, options = read(words[:end]), words[end:]
    if launcher == "local":
        if options:
            raise LaunchError(f"{options[0]}: a run on this machine needs no scheduler; leave the option out")
        if dry_run:
            commands = describe(plan_of(asked.config, ONLY), asked)
            print_json({"commands": commands.splitlines()}) if json else typer.echo(commands)
            return
        status = run_node(asked, ONLY, sys.stdout)
        if status:
            why = f"the run ended with status {status}; read {asked.folder}/logs for the cause"
            said = "stopped" if status > SIGNALLED else why
            typer.echo(f"{said}; `areal-jax launch local {asked.folder}` continues the run", err=True)
            raise typer.Exit(status)
        return
    submission = prepare(launcher, asked, options, os.environ)
    if not dry_run:
        typer.echo(submit(asked, submission), nl=False)
        typer.echo(f"{asked.folder} is submitted; to watch the run:\n{submission.after}")
    elif json:
        figures = {"commands": submission.commands, "env": submission.env, "files": submission.files}
        print_json({"folder": str(asked.folder), **figures})
    else:
        typer.echo(submission.text())
