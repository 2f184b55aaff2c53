"""Makes what conducts the episodes of a process: workflows and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from areal_jax.config.tree import Config
from areal_jax.control.events import Event
from areal_jax.episodes.limits import limits_of
from areal_jax.episodes.workflow_runner import Gateway, WorkflowRunner
from areal_jax.tasks.task import Workflow
from areal_jax.tasks.tokenizers import Tokenizer


def make_runner(
    config: Config,
    workflows: Mapping[str, Workflow],
    tokenizer: Tokenizer,
    emit: Callable[[Event], None],
    fail: Callable[[BaseException], None],
    note: Callable[[str], None],
    *,
    make_gateway: Callable[[], Gateway],
) -> WorkflowRunner:
    """Returns the runner of a run's workflows; the functions are as in `WorkflowRunner`."""
    limits = limits_of(config.episode, config.generation.length, config.generation.max_tokens)
    return WorkflowRunner(
        workflows,
        tokenizer,
        limits,
        emit,
        config.run.seed,
        make_gateway=make_gateway,
        fail=fail,
        note=note,
    )
