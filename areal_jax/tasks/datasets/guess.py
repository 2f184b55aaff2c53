"""Guess a number in several turns: after each wrong guess the policy reads whether the number is higher."""

from __future__ import annotations

from typing import Any

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import CharTokenizer, Tokenizer
from areal_jax.types import Prompt, Reward

NUMBERS = 10


class Guess(Task):
    """Numbers of one digit, guessed a token at a time: `?5>8<7`, if 7 was to be guessed.

    The reward is 1 for a correct first guess, and falls by 1 / turns with each further one. A token that is
    no digit ends the episode with a reward of 0.
    """

    tokenizer: Tokenizer | None = CharTokenizer("0123456789<>?")

    def __init__(self, turns: int = 8) -> None:
        if not 1 <= turns <= 32:
            raise TaskError(f"tasks.guess.turns={turns}; give 1 to 32 guesses")
        self._turns = turns

    def __len__(self) -> int:
        return NUMBERS

    def __getitem__(self, i: int) -> Prompt:
        return Prompt("?", info={"number": range(NUMBERS)[i]})

    async def workflow(self, prompt: Prompt, episode: Any) -> Reward:
        number = prompt.info["number"]
        for turn in range(self._turns):
            guess = (await episode.generate(max_tokens=1)).text
            if not guess.isdecimal():  # "²" is a digit, and no number
                return Reward(0.0, {"correct": 0.0, "guesses": turn + 1.0}, f"{guess!r} is no digit")
            if int(guess) == number:
                return Reward(1 - turn / self._turns, {"correct": 1.0, "guesses": turn + 1.0})
            episode.add("user", ">" if number > int(guess) else "<")
        return Reward(0.0, {"correct": 0.0, "guesses": float(self._turns)})
