"""The reward role: workers that score whatever groups are asked for. No jax here."""

from __future__ import annotations

import threading

from areal_jax.config import Config
from areal_jax.control.events import Event
from areal_jax.runtime.meeting import connect
from areal_jax.runtime.member import Post
from areal_jax.runtime.messages import REWARD, Begin, Judge, Ready
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.source import PromptStream, load_tasks


def reward(config: Config, name: str) -> None:
    """Score groups until told to end. What this process has when it dies, the controller asks others for."""
    c = config.runtime
    tasks = load_tasks(config.tasks)
    prompts = PromptStream(tasks, config.run.seed)
    own = {key: weighted.task for key, weighted in tasks.items()}
    free = threading.Semaphore(2 * c.reward_workers)
    with (
        connect(config) as broker,
        Post(broker, "reward", name, c.deadline_s, dict) as post,
        RewardPool(own, c.reward_workers, c.reward_timeout_s) as pool,
    ):

        def scored(outcome: Event) -> None:
            post.tell(outcome)
            free.release()

        for command in post.commands(REWARD):
            match command:
                case Begin(epoch):
                    post.say(Ready(name, post.incarnation, epoch))
                case Judge(_, ordinal, attempt, completions):
                    free.acquire(timeout=c.deadline_s)
                    pool.submit(ordinal, attempt, prompts.prompt(ordinal), completions, scored)
