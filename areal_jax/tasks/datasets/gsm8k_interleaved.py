"""GSM8K with think and answer blocks; the data set has no right sub-answers, so none are paid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from areal_jax.tasks.datasets.arithmetic import last_number
from areal_jax.tasks.datasets.drawn import Draws
from areal_jax.tasks.datasets.instructions import INSTRUCTIONS, system_message, with_parts
from areal_jax.tasks.datasets.math_data import Gsm8k
from areal_jax.tasks.datasets.verify import verify_math
from areal_jax.tasks.interleaved import Interleaved
from areal_jax.types import Prompt

_THOUGHTS = ("I begin with the first part of the problem.", "I go on to the next part.", "I put it together.")
_GUESSES_BELOW = 100


class Gsm8kInterleaved(Interleaved):
    """GSM8K in think and answer blocks, with final answers verified by math-verify.

    The problems are those of the task gsm8k (Cobbe et al. 2021). They have no right sub-answers: a response
    is paid for its format and its final answer alone.
    """

    def __init__(
        self,
        *,
        data_dir: str | None = None,
        split: str = "train",
        template: str = "interleave",
        reward: Mapping[str, Any] | None = None,
        system: str | None = INSTRUCTIONS,
    ) -> None:
        """`data_dir`: a folder with files <split>*.jsonl; None: the problems are downloaded.

        `split`: train or test. `template` and `reward`: as of Interleaved. `system`: the system message, null
        for none; {instructions} stands for the explanation of the template. Raises TaskError if a file is
        missing or cannot be converted.
        """
        super().__init__(template=template, reward=reward)
        question = with_parts(
            template,
            "{problem}\nThe final answer is a number alone.",
            "A partial answer is the result of one step.",
        )
        system = system_message(system, template)
        self._problems = Gsm8k(data_dir=data_dir, split=split, question=question, system=system)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, i: int) -> Prompt:
        prompt = self._problems[i]
        return replace(prompt, info={"steps": (), "answer": prompt.info["answer"]})

    def guess(self, prompt: Prompt, rng: np.random.Generator) -> tuple[list[str], list[str]]:
        """Returns one to three neutral thoughts, the same for all problems, with drawn numbers as answers."""
        draws = Draws(rng.bit_generator)
        count = 1 + draws.below(len(_THOUGHTS))
        return list(_THOUGHTS[:count]), [str(draws.below(_GUESSES_BELOW)) for _ in range(count)]

    def parsed_answer(self, prompt: Prompt, text: str) -> str | None:
        """Returns the right answer if the text's answer equals it, else the text; None if it has no number.

        `verify.verify_math` finds and compares the answer; see there for its errors.
        """
        right = prompt.info["answer"]
        if text == right:
            return right
        if last_number(text) is None:
            return None
        is_right, _ = verify_math(text, right)
        # A wrong text is never the right one: that has been returned above.
        return right if is_right else text
