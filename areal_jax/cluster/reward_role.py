"""The reward role: a process that scores groups with a pool of worker processes, without jax."""

from __future__ import annotations

from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.messages import Begin, Command
from areal_jax.config.tree import Config
from areal_jax.control.events import Score
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.types import Completion


def reward(config: Config, name: str) -> None:
    """Runs reward process `name`: scores groups until the controller sends End.

    If this process dies, the controller sends its groups to another reward process. Raises ArealError if End
    contains an error as its reason, or if the controller has shown no heartbeat for runtime.deadline_s
    seconds.
    """
    c = config.runtime
    tasks = load_tasks(config.tasks)
    prompts = PromptStream(tasks, config.run.seed)
    own = {key: weighted.task for key, weighted in tasks.items()}
    with (
        ControllerLink(config, "reward", name) as link,
        RewardPool(own, c.reward_workers, c.reward_timeout_s) as pool,
    ):
        for message in link.commands():
            match message:
                case Begin():
                    link.ready()
                case Command(_, Score(ordinal, attempt), payload):
                    completions = [
                        Completion(text, tuple(ids), why, tuple(pieces)) for text, ids, why, pieces in payload
                    ]
                    pool.submit(ordinal, attempt, prompts.prompt(ordinal), completions, link.report)
