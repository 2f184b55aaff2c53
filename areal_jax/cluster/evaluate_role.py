"""The evaluate role: a process that evaluates a run's checkpoints on held-out prompts, and exports them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from areal_jax.assembly.devices import host_mesh, use_compilation_cache
from areal_jax.assembly.parts import open_inputs
from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.messages import Begin
from areal_jax.config.tree import Config
from areal_jax.evaluation.follower import Follower
from areal_jax.serving.run_services import make_gateway


def evaluate(config: Config, folder: Path, name: str) -> None:
    """Runs evaluation process `name` until the controller sends End.

    While the run trains, the process evaluates checkpoints (if observe.evaluate is set) and exports them in
    Hugging Face format (if observe.exports is set). After End it evaluates and exports the last checkpoint.
    Raises ArealError if evaluation fails, if End contains an error, or if the controller has shown no
    heartbeat for runtime.deadline_s seconds.
    """
    use_compilation_cache()
    inputs, deadline_s = open_inputs(config), config.runtime.deadline_s
    mesh = host_mesh(config, name) if config.observe.evaluate else None
    with ControllerLink(config, "evaluate", name) as link, ExitStack() as running:
        work = Follower(inputs, folder, mesh, link.note, link.fail, make_gateway=make_gateway)
        link.figures = lambda: {"steps": work.steps}
        running.callback(work.stop, deadline_s)
        for message in link.commands():
            if isinstance(message, Begin):
                work.start()
                link.ready()
        work.finish(deadline_s)
