"""What the drawn tasks with sub-answers share: the split, and prompts in few symbols or as chats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax.tasks.blocks import ANSWER, THINK
from areal_jax.tasks.chat import PLACE, Chat, check_split
from areal_jax.tasks.datasets.drawn import Drawn, Draws, T, first_drawn, is_in_split
from areal_jax.tasks.datasets.instructions import INSTRUCTIONS, system_message
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.interleaved import Interleaved
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Prompt

TAGS = tuple(f"<{slash}{kind}>" for kind in (THINK, ANSWER) for slash in ("", "/"))
"""The symbols of compact responses: one token for each tag."""

SEPARATOR = ";"
"""Stands between the lines of a compact response, which has no newlines."""


class Procedural(Drawn, Interleaved, ABC):
    """Drawn problems with sub-answers.

    A digest of a problem's content decides whether it is in the test split, as about one in ten is; so no
    test problem is ever trained on. If `size` exceeds the number of distinct problems, prompts repeat.
    """

    def __init__(
        self,
        *,
        split: str,
        size: int,
        template: str,
        reward: Mapping[str, Any] | None,
        system: str | None,
        alphabet: str = "",
    ) -> None:
        """`alphabet`: the characters of prompts and responses in few symbols; "": prompts are chats.

        Raises TaskError for a setting out of range.
        """
        Interleaved.__init__(self, template=template, reward=reward)
        check_split(split)
        Drawn.__init__(self, size)
        if alphabet and system not in (None, INSTRUCTIONS):
            raise TaskError(f"system={system!r:.60} has no effect if compact=true; leave out one of the two")
        self._split = split
        self._is_compact = bool(alphabet)
        self._chat = Chat(PLACE, system_message(system, template))
        self.tokenizer = CharTokenizer(alphabet, TAGS) if alphabet else None

    def _prompt(self, i: int) -> Prompt:
        return self._drawn(Draws.of(i))

    def thinking(self, thoughts: Sequence[str], answers: Sequence[str]) -> str:
        lines = super().thinking(thoughts, answers)
        return lines.replace("\n", SEPARATOR) if self._is_compact else lines

    @abstractmethod
    def _drawn(self, draws: Draws) -> Prompt:
        """Returns a drawn prompt of this task's split."""

    def _asked(self, problem: str, info: Mapping[str, Any]) -> Prompt:
        return Prompt(problem, info=info) if self._is_compact else self._chat.prompt(problem, info)

    def _is_own(self, content: str) -> bool:
        """Returns whether the problem with this content is in this task's split."""
        return is_in_split(content, self._split)

    def _first(self, draw: Callable[[], T | None]) -> T:
        return first_drawn(draw, self._split)


def numbers_up_to(name: str, most: int, least: int | None, bounds: range) -> range:
    """Returns the numbers from setting min_`name` to setting `name`; without min_`name`, the latter alone.

    Raises TaskError unless both are in `bounds` and in order.
    """
    least = most if least is None else least
    if not bounds[0] <= least <= most <= bounds[-1]:
        raise TaskError(
            f"min_{name}={least} and {name}={most} violate "
            f"{bounds[0]} <= min_{name} <= {name} <= {bounds[-1]}"
        )
    return range(least, most + 1)
