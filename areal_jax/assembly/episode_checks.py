"""Checks of a run's episodes, before anything starts: their config, their chat template, their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_jax.config.tree import Config
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.follow_up import follow_ups_of
from areal_jax.tasks.source import WeightedTask
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import ArealError, Prompt


def require_episodes_work(config: Config, tasks: Mapping[str, WeightedTask]) -> None:
    """Raises ArealError if a task has a workflow that the config's other settings cannot conduct."""
    named = list(workflows_of(config.episode.agent, tasks))
    if not named:
        return
    task = f"tasks.{named[0]} has a workflow"
    if config.algorithm.samples != "policy":
        raise ArealError(
            f"{task}, but algorithm.samples={config.algorithm.samples} samples nothing; set "
            "algorithm.samples=policy"
        )


def require_chats_go_on(config: Config, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
    """Raises ArealError if episode.history does not fit the chat template, or `prompts`.

    `prompts`: the first ones of the run that have a workflow.
    """
    agent, history = config.episode.agent, config.episode.history
    chats = [prompt for prompt in prompts if prompt.messages is not None]
    if history == "template" and prompts and not chats and agent is None:
        raise ArealError(
            f"episode.history=template: the prompts of tasks.{prompts[0].task} are texts, which no chat "
            "template renders; give messages as prompts, or leave episode.history out"
        )
    if history == "exact" and agent is not None:
        follow_ups_of(tokenizer)
    for prompt in chats if history == "exact" else ():
        follow_ups_of(tokenizer, prompt.tools)
