"""The procedural data sets of reasoning-gym (Stojanovski et al. 2025), by name, with their own scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from areal_jax.plugin import check_settings, did_you_mean
from areal_jax.tasks.chat import Chat, check_split
from areal_jax.tasks.datasets.drawn import Drawn
from areal_jax.tasks.errors import TaskError, import_extra
from areal_jax.types import Completion, Prompt, Reward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TEST_SEEDS = 2**30
"""Added to the seed of the training split's item i to get the seed of the test split's item i."""

_NOTE_CHARS = 60


class ReasoningGym(Drawn):
    """One of reasoning-gym's procedural data sets, by name (dataset=chain_sum), with its own score.

    The reward is the data set's score of the answer, from 0 to 1. The answer is the content of the
    completion's last <answer>...</answer>, or the last line if there is no such tag. Item i is generated with
    the seed `seed` + i; the test split uses other seeds than the training split. A data set with few distinct
    problems may still have the same problem in both splits.
    """

    def __init__(
        self,
        *,
        dataset: str,
        settings: Mapping[str, Any] | None = None,
        size: int = 10_000,
        seed: int = 0,
        split: str = "train",
        question: str = "{problem}",
        system: str | None = "Give the final answer between <answer> and </answer>.",
    ) -> None:
        """`dataset`: name in reasoning-gym; `settings`: the data set's settings; `size`: number of prompts.

        `seed`: seed of the training split's first prompt; `split`: train or test. `question` is the user's
        message and must contain {problem}; `system` is the system message, null for none. Raises ArealError
        for an unknown data set or setting, and for a data set that generates different items each time it is
        made.
        """
        check_split(split)
        if not 1 <= size <= _TEST_SEEDS - seed or seed < 0:
            raise TaskError(f"size={size} and seed={seed} violate 1 <= size, 0 <= seed, size + seed <= 2**30")
        self._chat = Chat(question, system)
        self._name = dataset
        super().__init__(size)
        self._settings = dict(settings or {})
        self._seeds = {"seed": seed if split == "train" else _TEST_SEEDS + seed, "size": size}
        self._data = self._make()
        # A resumed run and the reward workers make the data set again and need equal items.
        if self._data[0] != self._make()[0]:
            raise TaskError(
                f"dataset={dataset} generates different items at every start, so a resumed run could not "
                "repeat its prompts; choose another dataset"
            )

    def _prompt(self, i: int) -> Prompt:
        entry = self._dataset()[i]
        return self._chat.prompt(entry["question"], entry)

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Returns the data set's score of the answer, 0 to 1; 0 if the completion has no answer.

        An answer at which the data set's `score_answer` raises an exception is wrong. If it also raises one
        at the data set's own answer, the exception is the task's.
        """
        answer = find_answer(completion.text)
        if not answer:
            return Reward(0.0, note="found no answer")
        wanted, data = prompt.info["answer"], self._dataset()
        try:
            value = float(data.score_answer(answer, dict(prompt.info)))
        except Exception as error:  # noqa: BLE001 - the data sets parse answers in many ways
            if isinstance(wanted, str):
                data.score_answer(wanted, dict(prompt.info))
            return Reward(0.0, note=f"found {answer:.{_NOTE_CHARS}}, which raises {type(error).__name__}")
        says = "" if wanted is None else f", wanted {wanted!s:.{_NOTE_CHARS}}"
        return Reward(value if math.isfinite(value) else 0.0, note=f"found {answer:.{_NOTE_CHARS}}{says}")

    def reference(self, prompt: Prompt) -> str:
        answer = prompt.info["answer"]
        if not isinstance(answer, str):
            raise TaskError(f"dataset={self._name} has no reference answers; set trainer.supervised.steps=0")
        return f"<answer>{answer}</answer>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}

    def _dataset(self) -> Any:
        """Returns reasoning-gym's data set, which an unpickled task makes again at the first call."""
        if self._data is None:
            self._data = self._make()
        return self._data

    def _make(self) -> Any:
        library = import_extra("reasoning_gym", "the task reasoning_gym needs reasoning-gym", "reasoning-gym")
        known = library.factory.DATASETS
        if self._name not in known:
            hint = did_you_mean(self._name, known, f"choose one of {', '.join(sorted(known))}")
            raise TaskError(f"reasoning-gym has no dataset={self._name!r}; {hint}")
        for name in self._seeds:
            if name in self._settings:
                raise TaskError(f"settings.{name} is not allowed; set tasks.reasoning_gym.{name} instead")
        check_settings(known[self._name][1], self._settings, "tasks.reasoning_gym.settings")
        try:
            return library.create_dataset(self._name, **self._settings, **self._seeds)
        except (AssertionError, TypeError, ValueError) as error:
            raise TaskError(
                f"dataset={self._name} cannot be made with {self._settings}: {error}; correct the settings"
            ) from error


def find_answer(text: str) -> str:
    """Returns the stripped content of the last <answer>...</answer>, else the last non-blank line, or ""."""
    tagged = _ANSWER.findall(text)
    if tagged:
        return tagged[-1].strip()
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
