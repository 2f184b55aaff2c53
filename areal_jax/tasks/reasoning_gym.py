"""The procedural data sets of reasoning-gym (Stojanovski et al. 2025), by name, with their own scores."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from areal_jax.tasks.chat import Chat, check_split
from areal_jax.tasks.task import Task, TaskError
from areal_jax.types import Completion, Prompt, Reward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TEST_SEEDS = 2**30
"""Where the seeds of test's items begin."""

_NOTE_CHARS = 60


class ReasoningGym(Task):
    """One data set of reasoning-gym; the reward is what it gives the answer, 0 to 1 and often partial.

    The answer is the inside of the completion's last <answer>...</answer>, its last line where it has none.
    Item i is drawn with the seed `seed` + i, test's from another range of seeds; where a data set has few
    problems the same one may still come in both.
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
        """`settings` are the data set's own. `question` is what the user says, {problem} filled in.

        Raises TaskError for an unknown data set or setting, and for a data set that draws an item anew each
        time it is asked for.
        """
        check_split(split)
        if not 1 <= size <= _TEST_SEEDS - seed or seed < 0:
            raise TaskError(
                f"size={size} and seed={seed}: give 1 <= size, 0 <= seed, and at most 2**30 in all"
            )
        self._chat = Chat(question, system)
        self._name = dataset
        self._size = size
        self._settings = dict(settings or {})
        self._seeds = {"seed": seed if split == "train" else _TEST_SEEDS + seed, "size": size}
        self._data = self._make()
        if self._data[0] != self._make()[0]:
            raise TaskError(
                f"dataset={dataset} draws its items anew each time; a run that resumes needs the same"
            )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < self._size:
            raise IndexError(f"prompt {i} of {self._size}")
        entry = self._dataset()[i]
        return self._chat.prompt(entry["question"], entry)

    def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """What the data set's own score_answer says; what that raises is passed on. No answer is 0."""
        answer = find_answer(completion.text)
        if not answer:
            return Reward(0.0, note="found no answer")
        value = self._dataset().score_answer(answer, dict(prompt.info))
        wanted = prompt.info["answer"]
        says = "" if wanted is None else f", wanted {wanted!s:.{_NOTE_CHARS}}"
        return Reward(float(value), note=f"found {answer:.{_NOTE_CHARS}}{says}")

    def reference(self, prompt: Prompt) -> str:
        answer = prompt.info["answer"]
        if not isinstance(answer, str):
            raise TaskError(f"dataset={self._name} has no reference answers; set trainer.supervised_steps=0")
        return f"<answer>{answer}</answer>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}

    def _dataset(self) -> Any:
        """reasoning-gym's object; made again in another process."""
        if self._data is None:
            self._data = self._make()
        return self._data

    def _make(self) -> Any:
        library = _reasoning_gym()
        known = library.factory.DATASETS
        if self._name not in known:
            near = difflib.get_close_matches(self._name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known))}"
            raise TaskError(f"reasoning-gym has no dataset={self._name!r}; {hint}")
        fields = [field.name for field in dataclasses.fields(known[self._name][1])]
        for name in self._settings:
            if name not in fields or name in self._seeds:
                raise TaskError(self._unknown(name, fields))
        try:
            return library.create_dataset(self._name, **self._settings, **self._seeds)
        except (AssertionError, TypeError, ValueError) as error:
            raise TaskError(f"dataset={self._name} cannot be made with {self._settings}: {error}") from error

    def _unknown(self, name: str, fields: list[str]) -> str:
        if name in self._seeds:
            return f"settings.{name}: give it beside dataset, as tasks.reasoning_gym.{name}"
        near = difflib.get_close_matches(name, fields, n=1)
        own = ", ".join(field for field in fields if field not in self._seeds) or "none"
        hint = f"did you mean {near[0]}?" if near else f"its settings are: {own}"
        return f"dataset={self._name} has no setting {name!r}; {hint}"


def find_answer(text: str) -> str:
    """The inside of the last <answer>...</answer>, stripped; without one the last line that is not blank."""
    tagged = _ANSWER.findall(text)
    if tagged:
        return tagged[-1].strip()
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _reasoning_gym() -> ModuleType:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ModuleNotFoundError as error:
        raise TaskError(
            f"the task reasoning_gym needs reasoning-gym, which lacks here ({error.name}): "
            "pip install 'areal-jax[reasoning-gym]'"
        ) from error
    return reasoning_gym
