"""Verbs of a cluster's processes: role."""

from __future__ import annotations

import signal
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_jax.cli.shell import plain_errors

if TYPE_CHECKING:
    from areal_jax.config import Config
    from areal_jax.runtime.watchdog import Beat


class Role(StrEnum):
    CONTROLLER = "controller"
    TRAINER = "trainer"
    GENERATE = "generate"
    REWARD = "reward"
    EVALUATE = "evaluate"


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
    words: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, such as runtime.redis=redis://head:7600/0.")
    ] = None,
) -> None:
    """Be one process of a cluster, until its controller says that the run is over."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if role == Role.REWARD:
        from areal_jax.runtime.reward_role import reward

        reward(_read(config, run, words), name or "reward-0")
        return
    if role == Role.CONTROLLER:
        import jax

        jax.config.update("jax_platforms", "cpu")  # accelerators are for the others
        from areal_jax.runtime.cluster_job import control

        control(_read(config, run, words), run)
        return
    if role == Role.TRAINER:
        from areal_jax.runtime.watchdog import Deadlines, watched

        work = partial(_train, config, run, words, index, processes, coordinator)
        deadlines = Deadlines.beside(_read(config, run, words).runtime.deadline_s)
        raise typer.Exit(watched(work, f"trainer-{index}", run / "logs", deadlines))
    from areal_jax.runtime import roles
    from areal_jax.runtime.jobs import use_compilation_cache

    use_compilation_cache()
    if role == Role.EVALUATE:
        from areal_jax.runtime.evaluate_role import evaluate

        evaluate(_read(config, run, words), run, name or "evaluate-0")
        return
    roles.generate(_read(config, run, words), run, name or "host-0")


def _train(
    config: Path, run: Path, words: list[str] | None, index: int, processes: int, coordinator: str, beat: Beat
) -> None:
    """In the process that is watched."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from areal_jax.runtime import roles
    from areal_jax.runtime.jobs import use_compilation_cache

    use_compilation_cache()
    roles.train(_read(config, run, words), run, index, processes, coordinator, beat)


def _read(config: Path, run: Path, words: list[str] | None) -> Config:
    from areal_jax.config import load_config

    return load_config(config, *(words or ()), f"run.dir={run}")
