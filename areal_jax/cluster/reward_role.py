"""The reward role: a process that scores groups with a pool of worker processes, without jax."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

from areal_jax.cluster.conducting import ConductedWorkflows
from areal_jax.cluster.member import ControllerLink
from areal_jax.cluster.messages import Begin, Command
from areal_jax.config.tree import Config
from areal_jax.control.events import Answer, Call, Drop, Rerun, Score
from areal_jax.episodes.agent import workflows_of
from areal_jax.tasks.errors import PromptError
from areal_jax.tasks.pool import RewardPool
from areal_jax.tasks.scoring import GROUP, failed
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.types import Completion, Reward


def reward(config: Config, name: str) -> None:
    """Runs reward process `name`: scores groups and conducts workflows until the controller sends End.

    If this process dies, the controller sends its groups and workflows to another reward process. Raises
    ArealError if End contains an error as its reason, or if the controller has shown no heartbeat for
    runtime.deadline_s seconds.
    """
    c = config.runtime
    tasks = load_tasks(config.tasks)
    prompts = PromptStream(tasks, config.run.seed)
    own = {key: weighted.task for key, weighted in tasks.items()}
    with (
        ControllerLink(config, "reward", name) as link,
        RewardPool(own, c.reward_workers, c.reward_timeout_s) as pool,
        ExitStack() as open_workflows,
    ):
        workflows = None
        if workflows_of(config.episode.agent, tasks):
            workflows = open_workflows.enter_context(
                closing(ConductedWorkflows(config, tasks, prompts, link))
            )
        for message in link.commands():
            match message:
                case Begin():
                    if workflows is not None:
                        workflows.begin()
                    link.ready()
                case Command(_, (Rerun() | Answer() | Call() | Drop()) as action, payload):
                    assert workflows is not None
                    workflows.command(action, payload)
                case Command(_, Score(ordinal, attempt), payload):
                    completions = [
                        Completion(text, tuple(ids), why, tuple(pieces), _reward(reward))
                        for text, ids, why, pieces, reward in payload
                    ]
                    try:
                        prompt = prompts.prompt(ordinal)
                    except PromptError as error:  # the controller, perhaps on another machine, could read it
                        link.report(failed(ordinal, attempt, GROUP, str(error)))
                    else:
                        pool.submit(ordinal, attempt, prompt, completions, link.report)


def _reward(plain: Any) -> Reward | None:
    if plain is None:
        return None
    value, parts, note = plain
    return Reward(value, dict(parts), note)
