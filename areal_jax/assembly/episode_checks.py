"""Fits a run's config to its episodes before anything starts, and checks their chat template and prompts."""

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


def with_episode_budget(config: Config, tasks: Mapping[str, WeightedTask]) -> Config:
    """Returns the config with algorithm.reduction_constant for episodes, if only its default is set.

    The default, generation.max_tokens, is the limit of a turn. An episode may have generation.length tokens
    in all its turns, so that is its budget, and the constant of all samples of a run with a workflow.
    """
    a = config.algorithm
    is_given = a.reduction != "constant" or a.reduction_constant is not None
    if is_given or not workflows_of(config.episode.agent, tasks):
        return config
    budget = a.model_copy(update={"reduction_constant": float(config.generation.length)})
    return config.model_copy(update={"algorithm": budget})


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
