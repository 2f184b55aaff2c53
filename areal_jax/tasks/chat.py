"""How a problem becomes a chat prompt: a question around it, and a system message before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_jax.tasks.task import TaskError
from areal_jax.types import Prompt

PLACE = "{problem}"
"""Where the problem goes in a question."""

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Chat:
    """`question` is what the user says, PLACE filled in; `system` the system message, none if None."""

    question: str
    system: str | None

    def __post_init__(self) -> None:
        if PLACE not in self.question:
            raise TaskError(f"question={self.question!r} does not say where the {PLACE} goes")

    def prompt(self, problem: str, info: Mapping[str, Any]) -> Prompt:
        user = {"role": "user", "content": self.question.replace(PLACE, problem)}
        if self.system is None:
            return Prompt(messages=(user,), info=info)
        return Prompt(messages=({"role": "system", "content": self.system}, user), info=info)


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise TaskError(f"split={split!r} is none of {', '.join(SPLITS)}")
