"""The program `areal-jax` and its commands; a command imports the code that it needs only when called."""

from __future__ import annotations

from typing import Annotated

import typer

from areal_jax.cli import (
    ablate,
    cluster,
    convert,
    explain,
    launch,
    measure,
    plan,
    read,
    replay,
    serve,
    train,
)
from areal_jax.cli.shell import Verbs, reading_configs, reading_files
from areal_jax.plugin import version_of

VERBS = {
    "quickstart": reading_configs(train.quickstart),
    "run": reading_configs(train.run),
    "resume": reading_configs(train.resume),
    "plan": reading_configs(plan.plan),
    "launch": reading_configs(launch.launch),
    "audit": reading_files(read.audit),
    "inspect": reading_files(read.inspect),
    "report": reading_files(read.report),
    "replay": reading_files(replay.replay),
    "bundle": reading_files(replay.bundle),
    "eval": reading_files(measure.evaluate),
    "serve": reading_files(serve.serve),
    "convert": reading_files(convert.convert),
    "bench": measure.bench,
    "ablate": reading_configs(ablate.ablate),
    "simtest": measure.simtest,
    "parity": reading_files(measure.parity),
    "config": explain.config,
    "algorithms": explain.algorithms,
    "tasks": explain.tasks,
    "doctor": explain.doctor,
}
"""Name -> function of each command, in the order in which --help lists them."""

app = typer.Typer(
    name="areal-jax",
    cls=Verbs,
    help="Asynchronous reinforcement learning for language-model reasoning, in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"areal-jax {version_of('areal-jax')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options beside the commands."""
    from areal_jax.lab.demonstrations import register

    register()


for name, verb in VERBS.items():
    app.command(name)(verb)
app.add_typer(cluster.roles, name="role")

if __name__ == "__main__":
    app()
