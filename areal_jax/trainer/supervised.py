"""The supervised start: maximum likelihood on reference answers, by the same update with advantage 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import optax
from jax.sharding import Mesh

from areal_jax.config import AlgorithmConfig, TrainerConfig
from areal_jax.models.model import Model, Params
from areal_jax.presets import preset_settings
from areal_jax.tasks.reference import reference_trajectory
from areal_jax.tasks.source import PromptStream, WeightedTask
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.packing import pack
from areal_jax.types import Group, Prompt, SampleId


def supervised_start(
    model: Model,
    params: Params,
    optimizer: optax.GradientTransformation,
    tasks: Mapping[str, WeightedTask],
    c: TrainerConfig,
    *,
    length: int,
    seed: int,
    mesh: Mesh | None = None,
) -> Params:
    """Parameters after `c.supervised_steps` updates, on prompts from a stream of their own.

    Raises TaskError for a task without reference answers, PackingError for an answer longer than a row.
    """
    if not c.supervised_steps:
        return params
    algorithm = AlgorithmConfig.model_validate(preset_settings({"preset": "sft"}))
    learner = Learner(
        model,
        algorithm,
        optimizer,
        rows=c.rows,
        length=length,
        mesh=mesh,
        remat=c.remat,
        optimizer_memory=c.optimizer_memory,
    )
    state = learner.init(params)
    for groups in _batches(tasks, model.tokenizer, c, seed):
        batch = learner.prepare(state, pack(groups, c.rows, length, own_rows=learner.own_rows))
        state, _ = learner.update(state, batch)
    return state.params


def _batches(
    tasks: Mapping[str, WeightedTask], tokenizer: Tokenizer, c: TrainerConfig, seed: int
) -> Iterator[list[Group]]:
    prompts = PromptStream(tasks, seed=seed + 2**31)
    for step in range(c.supervised_steps):
        ordinals = range(step * c.supervised_batch, (step + 1) * c.supervised_batch)
        yield [_answered(o, prompts.prompt(o), tasks, tokenizer) for o in ordinals]


def _answered(ordinal: int, prompt: Prompt, tasks: Mapping[str, WeightedTask], tokenizer: Tokenizer) -> Group:
    """A group of one: the prompt and its reference answer, with a reward that supervision does not read."""
    answer = reference_trajectory(SampleId(ordinal, 0), prompt, tasks[prompt.task].task, tokenizer)
    return Group(ordinal, prompt, (replace(answer, reward=1.0),))
