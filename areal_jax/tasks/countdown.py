"""The quickstart's task: count down from a letter. Answers vary in length, and a tiny model learns it."""

from __future__ import annotations

import math
from statistics import NormalDist
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from areal_jax.tasks.task import Task, TaskError
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Completion, Prompt, Reward

LETTERS = ascii_lowercase + ascii_uppercase + "".join(map(chr, range(0x100, 0x180)))
"""The Latin alphabet, then the letters of Unicode's Latin Extended-A: for answers of up to 179."""
ASK = ">"
"""Ends the prompt: the answer begins."""


class Countdown(Task):
    """The prompt names a letter; the answer is every letter below it, down to the first: "f>" -> "edcba".

    Lengths are lognormal, so a few answers take much longer than most; prompt i depends on i alone.
    """

    def __init__(
        self, *, size: int = 100_000, letters: int = 16, median: float = 4.0, sigma: float = 0.8
    ) -> None:
        """`size` prompts over `letters` letters; answers of `median` letters, log spread `sigma`."""
        if not 2 <= letters <= len(LETTERS):
            raise TaskError(f"letters={letters} is none of 2..{len(LETTERS)}")
        if size < 1 or median <= 0 or sigma < 0:
            raise TaskError(f"size={size} and median={median} must be positive, sigma={sigma} not negative")
        self._size = size
        self._letters = letters
        self._median = median
        self._sigma = sigma
        self.tokenizer = self._chars = CharTokenizer(LETTERS[:letters] + ASK)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < self._size:
            raise IndexError(f"prompt {i} of {self._size}")
        below = self._below(i)
        return Prompt(LETTERS[below] + ASK, info={"answer": LETTERS[:below][::-1]})

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Length of the correct prefix over that of the longer of answer and completion, EOS counted in all.

        Dividing by the longer of the two is what teaches the policy to stop.
        """
        right = [*self._chars.encode(prompt.info["answer"]), self._chars.eos_id]
        agree = [one == other for one, other in zip(right, completion.tokens, strict=False)]
        prefix = agree.index(False) if False in agree else len(agree)
        return Reward(prefix / max(len(right), len(completion.tokens)))

    def reference(self, prompt: Prompt) -> str:
        return prompt.info["answer"]

    def _below(self, i: int) -> int:
        """How many letters stand below prompt i's: clip(round(lognormal)).

        Made of raw bits, which no release of numpy alters.
        """
        bits = int(np.random.Philox(key=i).random_raw())
        normal = NormalDist().inv_cdf(((bits >> 11) + 0.5) * 2.0**-53)
        drawn = self._median * math.exp(self._sigma * normal)
        return min(max(round(drawn), 1), self._letters - 1)
