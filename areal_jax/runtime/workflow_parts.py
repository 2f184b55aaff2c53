"""Makes what conducts the episodes of a process: workflows, their limits, and the address for agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from areal_jax.config.tree import Config
from areal_jax.control.events import Event
from areal_jax.episodes.limits import limits_of
from areal_jax.episodes.workflow_runner import Gateway, WorkflowRunner
from areal_jax.plugin import needing
from areal_jax.tasks.task import Workflow
from areal_jax.tasks.tokenizers import Tokenizer


def make_runner(
    config: Config,
    workflows: Mapping[str, Workflow],
    tokenizer: Tokenizer,
    emit: Callable[[Event], None],
    fail: Callable[[BaseException], None],
    note: Callable[[str], None],
) -> WorkflowRunner:
    """Returns the runner of a run's workflows; `emit`, `fail` and `note` as in `WorkflowRunner`."""
    limits = limits_of(config.episode, config.generation.length, config.generation.max_tokens)
    own = workflows, tokenizer, limits, emit, config.run.seed
    return WorkflowRunner(*own, make_gateway=make_gateway, fail=fail, note=note)


def make_gateway() -> Gateway:
    """Returns what serves the chats of agents; called in the event loop of their workflows."""
    with needing("episode.base_url", "serve"):
        from areal_jax.serving.episode_gateway import EpisodeGateway
    return EpisodeGateway()
