"""The game of guessing a number, played by texts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from areal_jax.tasks.datasets.guess import Guess
from areal_jax.types import Reward


@pytest.mark.parametrize(("guess", "value"), [("3", 1.0), ("３", 1.0), ("²", 0.0), ("½", 0.0), ("x", 0.0)])
def test_whatever_the_policy_guesses_has_a_reward(guess: str, value: float):
    """² is a digit to Python, and no number: it raised an error, with which the whole group failed."""

    async def generate(**_: object) -> SimpleNamespace:
        return SimpleNamespace(text=guess)

    task = Guess()
    reward = asyncio.run(task.workflow(task[3], SimpleNamespace(generate=generate, add=print)))
    assert isinstance(reward, Reward) and reward.value == value
