"""The quickstart's task: count down from a letter. Answers vary in length; a tiny model learns the task."""

from __future__ import annotations

import math
from statistics import NormalDist
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from areal_jax.tasks.datasets.drawn import Drawn
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Completion, Prompt, Reward

LETTERS = ascii_lowercase + ascii_uppercase + "".join(map(chr, range(0x100, 0x180)))
"""The Latin alphabet, then Unicode's Latin Extended-A: enough for answers of up to 179 letters."""
ASK = ">"
"""The last character of a prompt."""


class Countdown(Drawn):
    """Count down from a letter: procedural, no files, learnt within a minute.

    A prompt asks for all letters before a given one, from the last to the first: "f>" -> "edcba". The
    answers' lengths are lognormal, so that a few answers take much longer than most. Prompt i depends on i
    and the settings alone.
    """

    def __init__(
        self, *, size: int = 100_000, letters: int = 16, median: float = 4.0, sigma: float = 0.8
    ) -> None:
        """Makes `size` prompts over an alphabet of `letters` letters.

        The answers' lengths in letters are lognormal: `median` is their median, `sigma` the standard
        deviation of their natural logarithm.
        """
        if not 2 <= letters <= len(LETTERS):
            raise TaskError(f"letters={letters} is out of range; give 2 to {len(LETTERS)}")
        if size < 1 or median <= 0 or sigma < 0:
            raise TaskError(
                f"size={size} and median={median} must be positive, and sigma={sigma} must not be negative"
            )
        super().__init__(size)
        self._letters = letters
        self._median = median
        self._sigma = sigma
        self.tokenizer = self._chars = CharTokenizer(LETTERS[:letters] + ASK)

    def _prompt(self, i: int) -> Prompt:
        below = self._below(i)
        return Prompt(LETTERS[below] + ASK, info={"answer": LETTERS[:below][::-1]})

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Returns (length of the completion's correct prefix) / max(completion's length, answer's length).

        Lengths are in tokens, EOS included. A completion that is too long gets less reward, so the policy
        learns to stop.
        """
        right = [*self._chars.encode(prompt.info["answer"]), self._chars.eos_id]
        agree = [one == other for one, other in zip(right, completion.tokens, strict=False)]
        prefix = agree.index(False) if False in agree else len(agree)
        return Reward(prefix / max(len(right), len(completion.tokens)))

    def reference(self, prompt: Prompt) -> str:
        return prompt.info["answer"]

    def _below(self, i: int) -> int:
        """Returns the length of prompt i's answer: a lognormal number, rounded and clipped to 1..letters-1.

        The length is computed from raw random bits, which are the same in every release of numpy.
        """
        bits = int(np.random.Philox(key=i).random_raw())
        # 53 bits choose the middle of one of 2**53 intervals: `inv_cdf` accepts neither 0 nor 1.
        normal = NormalDist().inv_cdf(((bits >> 11) + 0.5) * 2.0**-53)
        drawn = self._median * math.exp(self._sigma * normal)
        return min(max(round(drawn), 1), self._letters - 1)
