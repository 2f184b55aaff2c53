"""The supervised steps before RL: maximum likelihood on reference answers, as RL updates with advantage 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import optax
from jax.sharding import Mesh

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig, TrainerConfig
from areal_jax.models.model import Model, Params
from areal_jax.tasks.reference_answers import reference_trajectory
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
    """Returns `params` after `c.supervised.steps` supervised updates; with 0 steps unchanged.

    `length`: tokens of a row. `seed`: the run's seed; the prompts are drawn by another, derived seed.
    Raises TaskError if a task has no reference answers, PackingError if a prompt and its answer are longer
    than a row.
    """
    if not c.supervised.steps:
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
    # Not the seed of the run's own prompts.
    prompts = PromptStream(tasks, seed=seed + 2**31)
    for step in range(c.supervised.steps):
        ordinals = range(step * c.supervised.batch, (step + 1) * c.supervised.batch)
        groups = [_answered(o, prompts.prompt(o), tasks, model.tokenizer) for o in ordinals]
        batch = learner.prepare(state, pack(groups, c.rows, length, own_rows=learner.own_rows))
        state, _ = learner.update(state, batch)
    return state.params


def _answered(ordinal: int, prompt: Prompt, tasks: Mapping[str, WeightedTask], tokenizer: Tokenizer) -> Group:
    """Returns group `ordinal`, with one sample: prompt and reference answer. The reward, 1, has no effect."""
    answer = reference_trajectory(SampleId(ordinal, 0), prompt, tasks[prompt.task].task, tokenizer)
    return Group(ordinal, prompt, (replace(answer, reward=1.0),))
