"""The task of a run with sleeping executors: empty prompts, and rewards that take a modelled time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from areal_jax.tasks.task import Task
from areal_jax.types import Completion, Prompt, Reward

PROMPTS = 256


class SleepingTask(Task):
    """Scores each group in `reward_s` seconds of sleep; the members' rewards alternate between 0 and 1."""

    def __init__(self, reward_s: float) -> None:
        self._reward_s = reward_s

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> Prompt:
        return Prompt("?")

    def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[Reward | float]:
        time.sleep(self._reward_s)
        return [float(member % 2) for member in range(len(completions))]
