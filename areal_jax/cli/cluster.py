"""The command `role`: `role node` starts a machine's processes of a run; every other role is one of them."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_jax.cli.shell import guarded_by, reading_configs, written

if TYPE_CHECKING:
    from areal_jax.cluster.watchdog import Beat
    from areal_jax.config.tree import Config

ConfigFile = Annotated[
    Path, typer.Option("--config", help="The run's config file, such as RUN/launch/config.yaml.")
]
RunDir = Annotated[
    Path, typer.Option("--run", help="The run's folder, on a file system that all machines share.")
]
AsName = Annotated[str, typer.Option(help="The process's name, with its index, such as generate-0.")]
Keys = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides section.key=value, such as runtime.redis=redis://head:7600/0."),
]

roles = typer.Typer(
    help="Run a machine's node agent, or one process of a run.",
    no_args_is_help=True,
    add_completion=False,
)


@roles.command()
@reading_configs
def node(
    config: Annotated[Path, typer.Option(help="A config file, or the folder of a run to resume.")],
    run: Annotated[
        Path | None, typer.Option(help="The run's folder; by default the folder that the config names.")
    ] = None,
    *,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, help="This machine's rank; by default the rank from Slurm or an indexed Kubernetes Job."
        ),
    ] = None,
    first_rank: Annotated[
        int, typer.Option(min=0, help="Number to add to the scheduler's rank; unused with --rank.")
    ] = 0,
    machines: Annotated[
        int | None, typer.Option(min=1, help="Number of machines; by default the number from Slurm.")
    ] = None,
    address: Annotated[
        str, typer.Option(help="Address at which other machines reach this one; by default it is detected.")
    ] = "",
    words: Keys = None,
) -> None:
    """Run the node agent: start this machine's processes of a run, and restart them until the run ends."""
    from areal_jax.cluster.launched import read
    from areal_jax.cluster.node_agent import run_node
    from areal_jax.cluster.rendezvous import place

    launch = read([str(config), *(words or ())], run)
    status = run_node(launch, place(rank, first_rank, machines, address), sys.stdout)
    raise typer.Exit(status)


@roles.command()
@reading_configs
def controller(config: ConfigFile, run: RunDir, name: AsName = "controller", words: Keys = None) -> None:
    """Run the controller: command hosts and trainer, and record every event in the run's journal."""
    settings = _begin(config, run, words)
    import jax

    jax.config.update("jax_platforms", "cpu")  # leaves accelerators to the other processes
    from areal_jax.cluster.controller_role import control

    for warning in control(settings, run).warnings:
        typer.echo(f"warning: {warning}")


@roles.command()
@reading_configs
def reward(config: ConfigFile, run: RunDir, name: AsName = "reward-0", words: Keys = None) -> None:
    """Run a reward process: score completions."""
    settings = _begin(config, run, words)
    from areal_jax.cluster.reward_role import reward

    reward(settings, name)


@roles.command()
@reading_configs
def generate(config: ConfigFile, run: RunDir, name: AsName = "generate-0", words: Keys = None) -> None:
    """Run a generation host: decode samples on this process's devices."""
    settings = _begin(config, run, words)
    from areal_jax.cluster.roles import generate

    generate(settings, run, name)


@roles.command()
@reading_configs
def evaluate(config: ConfigFile, run: RunDir, name: AsName = "evaluate-0", words: Keys = None) -> None:
    """Run the evaluation process: measure accuracy at checkpoints, export them as Hugging Face folders."""
    settings = _begin(config, run, words)
    from areal_jax.cluster.roles import evaluate

    evaluate(settings, run, name)


@roles.command()
@reading_configs
def trainer(
    config: ConfigFile,
    run: RunDir,
    name: AsName = "trainer-0",
    coordinator: Annotated[
        str, typer.Option(help="HOST:PORT of trainer-0; needed if there are several trainer processes.")
    ] = "",
    words: Keys = None,
) -> None:
    """Run one of the trainer's processes: train the policy, and publish its versions to the hosts."""
    from areal_jax.cluster.watchdog import Deadlines, watched

    work = partial(_train, config, run, words, name, coordinator)
    deadlines = Deadlines.beside(_read(config, run, words).runtime.deadline_s)
    raise typer.Exit(watched(work, name, run / "logs", deadlines))


def _train(config: Path, run: Path, words: list[str] | None, name: str, coordinator: str, beat: Beat) -> None:
    """Runs trainer process `name` (trainer-INDEX) of a run, in the child process that `watched` starts.

    `coordinator`: HOST:PORT of trainer-0; "" if there is no other trainer process. `beat`: called with the
    name of each activity that begins, so that the parent process can detect an activity that hangs.
    """
    settings = _begin(config, run, words)
    from areal_jax.cluster.roles import train

    with guarded_by(written(config, run, words)):  # this process is not the command's
        train(settings, run, name, coordinator, beat)


def _begin(config: Path, run: Path, words: list[str] | None) -> Config:
    """Returns the run's config; makes the first SIGTERM act like Ctrl-C, and ignores every later SIGTERM.

    A process may get one SIGTERM from Slurm and another from its node agent. The second would interrupt the
    checkpoint that the process writes after the first.
    """

    def once(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, once)
    return _read(config, run, words)


def _read(config: Path, run: Path, words: list[str] | None) -> Config:
    from areal_jax.config.loading import load_config

    return load_config(config, *(words or ()), f"run.dir={run}")
