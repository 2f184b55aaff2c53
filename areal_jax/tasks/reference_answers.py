"""Makes trajectories from a task's reference answers, for supervised training."""

from __future__ import annotations

import numpy as np

from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import Tokenizer
from areal_jax.types import NOT_SAMPLED, Prompt, SampleId, Sampling, Trajectory


def reference_trajectory(sample: SampleId, prompt: Prompt, task: Task, tokenizer: Tokenizer) -> Trajectory:
    """Returns prompt, reference answer and EOS as a trajectory; its loss mask selects answer and EOS.

    No policy sampled the answer, so the version of every token is NOT_SAMPLED, and the behaviour log-probs
    are 0. Raises TaskError for a task without reference answers.
    """
    asked = tokenizer.render(prompt)
    tokens = np.array([*asked, *tokenizer.encode(task.reference(prompt)), tokenizer.eos_id], np.int32)
    is_answer = np.arange(len(tokens)) >= len(asked)
    return Trajectory(
        sample=sample,
        tokens=tokens,
        loss_mask=is_answer,
        behavior_logp=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), NOT_SAMPLED, np.int32),
        turn_ids=np.where(is_answer, 0, -1).astype(np.int32),
        sampling=Sampling(),
        stop_reason="stop",
    )
