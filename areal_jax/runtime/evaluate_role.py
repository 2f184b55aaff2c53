"""The evaluate role: a generation host that answers held-out prompts alone, and writes exports."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import jax

from areal_jax.config import Config
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.assembly import open_inputs
from areal_jax.runtime.devices import use_virtual_cpus
from areal_jax.runtime.follower import Follower
from areal_jax.runtime.meeting import connect
from areal_jax.runtime.member import Post
from areal_jax.runtime.messages import Begin, Ready


def evaluate(config: Config, folder: Path, name: str) -> None:
    """Deal with each finished checkpoint until told to end, and then with the last one. Raises ArealError."""
    inputs, deadline_s, mesh = open_inputs(config), config.runtime.deadline_s, None
    if config.observe.evaluate:
        use_virtual_cpus(config.runtime.host_tensor)
        mesh = make_mesh({"tensor": config.runtime.host_tensor}, jax.devices(), name)
    work: Follower | None = None
    beat = lambda: {"steps": work.steps if work is not None else 0}  # noqa: E731
    with (
        connect(config) as broker,
        Post(broker, "evaluate", name, deadline_s, beat) as post,
        ExitStack() as running,
    ):
        work = Follower(inputs, folder, mesh, post.note, post.fail)
        running.callback(work.stop, deadline_s)
        for command in post.commands():
            if isinstance(command, Begin):
                work.start()
                post.say(Ready(name, post.incarnation, post.epoch))
        work.finish(deadline_s)
