"""Chat prompts: an optional system message, and a user message that contains the problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_jax.tasks.errors import TaskError
from areal_jax.types import Prompt

PLACE = "{problem}"
"""The placeholder in `Chat.question`; each prompt has the text of its problem there instead."""

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Chat:
    """Makes chat prompts: the user's message is `question` with the problem's text in place of {problem}.

    `system`: the system message before the user's; None: the prompt has no system message.
    """

    question: str
    system: str | None

    def __post_init__(self) -> None:
        if PLACE not in self.question:
            raise TaskError(
                f"question={self.question!r} does not contain {PLACE}; write it where the problem belongs"
            )

    def prompt(self, problem: str, info: Mapping[str, Any]) -> Prompt:
        user = {"role": "user", "content": self.question.replace(PLACE, problem)}
        if self.system is None:
            return Prompt(messages=(user,), info=info)
        return Prompt(messages=({"role": "system", "content": self.system}, user), info=info)


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise TaskError(f"split={split!r} is unknown; use one of {', '.join(SPLITS)}")
