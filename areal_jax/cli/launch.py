"""The verb that starts a run as processes: launch."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from areal_jax.cli.shell import plain_errors, print_json


class Launcher(StrEnum):
    local = "local"
    slurm = "slurm"
    gcloud = "gcloud"
    gke = "gke"


def register(app: typer.Typer) -> None:
    app.command()(launch)


@plain_errors
def launch(
    launcher: Launcher,
    words: Annotated[
        list[str],
        typer.Argument(help="CONFIG ... [section.key=value ...], or the folder of a run that is to go on."),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted; write and start nothing.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: files and command as one object.")
    ] = False,
) -> None:
    """Start a run as processes: on this machine, by Slurm, on Google Cloud's machines, or on GKE."""
    from areal_jax.runtime.launch import local, submit

    asked = submit.read(words)
    if launcher is Launcher.local:
        if dry_run:
            commands = local.describe(local.local_plan(asked))
            print_json({"commands": commands.splitlines()}) if json else typer.echo(commands)
            return
        status = local.run_local(asked, sys.stdout)
        if status:
            typer.echo(f"`areal-jax launch local {asked.folder}` goes on", err=True)
            raise typer.Exit(status)
        return
    submission = submit.prepare(launcher.value, asked)
    if not dry_run:
        typer.echo(submit.submit(asked, submission), nl=False)
        typer.echo(f"{asked.folder}: to watch it:\n{submission.after}")
    elif json:
        print_json({"folder": str(asked.folder), "run": submission.script, "files": submission.files})
    else:
        for name, text in submission.files.items():
            typer.echo(f"# ---- {asked.folder}/launch/{name}\n{text}")
        typer.echo(f"# ---- is run: bash {asked.folder}/launch/{submission.script}")
