"""Workflows by name of their task; and agents, which know nothing but the address of OpenAI's interface.

An agent is a function or coroutine function `agent(base_url, messages)`. It has its chats sampled at
base_url, with OpenAI's client or any other. What it returns, or the text of its last turn if it returns None,
is the completion that the task scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.episodes.episode import Episode
from areal_jax.episodes.errors import EpisodeError
from areal_jax.plugin import load_object
from areal_jax.tasks.source import WeightedTask
from areal_jax.tasks.task import Task, Workflow
from areal_jax.types import Completion, Prompt, Reward


def workflows_of(agent: str | None, tasks: Mapping[str, WeightedTask]) -> dict[str, Workflow]:
    """Returns task name -> workflow: the task's own or, if it has none, `agent`, the value of episode.agent.

    Without an agent, tasks without a workflow are left out. Raises ArealError if `agent` is not found.
    """
    own = {name: one.task.workflow for name, one in tasks.items() if one.task.workflow is not None}
    if agent is None:
        return own
    function = load_object(agent, {}, "agent")
    return {name: own.get(name) or _by_agent(function, one.task) for name, one in tasks.items()}


def _by_agent(agent: Callable[[str, list[Any]], Any], task: Task) -> Workflow:
    async def conduct(prompt: Prompt, episode: Episode) -> Reward | float:
        messages = [dict(message) for message in prompt.messages or ()]
        if prompt.messages is None:
            text = prompt.text if prompt.text is not None else episode.tokenizer.decode(prompt.tokens or ())
            messages = [{"role": "user", "content": text}]
        if inspect.iscoroutinefunction(agent):
            said = await agent(episode.base_url, messages)
        else:
            said = await episode.in_thread(agent, episode.base_url, messages)
        last = episode.last
        if last is None:
            raise EpisodeError("the agent ended without a chat at its base_url")
        text = last.text if said is None else str(said)
        completion = Completion(text, tuple(last.tokens.tolist()), last.stop_reason)
        return await episode.in_thread(task.score, prompt, completion)

    return conduct
