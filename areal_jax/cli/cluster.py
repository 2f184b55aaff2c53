"""Verbs of a cluster's processes: role."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_jax.cli.shell import plain_errors

if TYPE_CHECKING:
    from areal_jax.config import Config


class Role(StrEnum):
    CONTROLLER = "controller"
    TRAINER = "trainer"
    GENERATE = "generate"
    REWARD = "reward"


def register(app: typer.Typer) -> None:
    app.command()(role)


@plain_errors
def role(
    role: Annotated[Role, typer.Argument(help="What this process does.")],
    config: Annotated[Path, typer.Option(help="The run's config, one file.")],
    run: Annotated[Path, typer.Option(help="The run's folder, which controller and trainer share.")],
    name: Annotated[str, typer.Option(help="Among the processes of this role; host-0, ...")] = "",
    index: Annotated[int, typer.Option(min=0, help="Of this trainer process.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="That the trainer's mesh is spread over.")] = 1,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of trainer process 0.")] = "",
) -> None:
    """Be one process of a cluster, until its controller says that the run is over."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if role == Role.REWARD:
        from areal_jax.runtime.reward_role import reward

        reward(_read(config, run), name or "reward-0")
        return
    if role == Role.CONTROLLER:
        import jax

        jax.config.update("jax_platforms", "cpu")  # accelerators are for the others
        from areal_jax.runtime.cluster_job import control

        control(_read(config, run), run)
        return
    from areal_jax.runtime import roles
    from areal_jax.runtime.jobs import use_compilation_cache

    use_compilation_cache()
    if role == Role.GENERATE:
        roles.generate(_read(config, run), run, name or "host-0")
    else:
        roles.train(_read(config, run), run, index, processes, coordinator)


def _read(config: Path, run: Path) -> Config:
    from areal_jax.config import load_config

    return load_config(config, f"run.dir={run}")
