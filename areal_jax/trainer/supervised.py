"""The supervised start: maximum likelihood on reference answers, by the same update with advantage 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import optax
from jax.sharding import Mesh

from areal_jax.config import AlgorithmConfig, TrainerConfig
from areal_jax.models.model import Model, Params
from areal_jax.presets import preset_settings
from areal_jax.tasks.source import PromptStream, WeightedTask
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.packing import pack
from areal_jax.types import NOT_SAMPLED, Group, Prompt, SampleId, Sampling, Trajectory


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
    learner = Learner(model, algorithm, optimizer, rows=c.rows, length=length, mesh=mesh, remat=c.remat)
    state = learner.init(params)
    for groups in _batches(tasks, model.tokenizer, c, seed):
        batch = learner.prepare(state, pack(groups, c.rows, length))
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
    """A group of one: the prompt and its reference answer, end of text included."""
    asked = tokenizer.render(prompt)
    answer = [*tokenizer.encode(tasks[prompt.task].task.reference(prompt)), tokenizer.eos_id]
    tokens = np.array([*asked, *answer], np.int32)
    is_answer = np.arange(len(tokens)) >= len(asked)
    trajectory = Trajectory(
        sample=SampleId(ordinal, 0),
        tokens=tokens,
        loss_mask=is_answer,
        behavior_logp=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), NOT_SAMPLED, np.int32),
        turn_ids=np.where(is_answer, 0, -1).astype(np.int32),
        sampling=Sampling(),
        stop_reason="stop",
        reward=1.0,
    )
    return Group(ordinal, prompt, (trajectory,))
