"""What the procedural tasks with sub-answers share: draws, the split, prompts in few symbols or as chats."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from areal_jax.tasks.blocks import ANSWER, THINK
from areal_jax.tasks.chat import PLACE, Chat, check_split
from areal_jax.tasks.datasets.instructions import INSTRUCTIONS, system_message
from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.interleaved import Interleaved
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Prompt

TAGS = tuple(f"<{slash}{kind}>" for kind in (THINK, ANSWER) for slash in ("", "/"))
"""The symbols of compact responses: one token for each tag."""

SEPARATOR = ";"
"""Stands between the lines of a compact response, which has no newlines."""

_TEST_ONE_IN = 10
_MAX_DRAWS = 20_000
"""Number of draws after which the settings are declared to have no suitable problem."""

T = TypeVar("T")


class Draws:
    """Random choices, made of a bit generator's raw 64 bits, which are the same in every release of numpy."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        self._bits = bits

    def below(self, bound: int) -> int:
        """Returns a number in 0..bound-1; all are equally likely."""
        # Scales instead of taking a remainder: each number's probability is exact to 2**-64.
        return int(self._bits.random_raw()) * bound >> 64

    def one(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def some(self, items: Iterable[T], count: int) -> list[T]:
        """Returns `count` of the items, each at most once, in random order."""
        pool = list(items)
        for place in range(count):
            other = place + self.below(len(pool) - place)
            pool[place], pool[other] = pool[other], pool[place]
        return pool[:count]


class Procedural(Interleaved, ABC):
    """Problems made without files: prompt i depends on i and the settings alone.

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
        super().__init__(template=template, reward=reward)
        check_split(split)
        if size < 1:
            raise TaskError(f"size={size} is not positive; give at least 1")
        if alphabet and system not in (None, INSTRUCTIONS):
            raise TaskError(f"system={system!r:.60} has no effect if compact=true; leave out one of the two")
        self._split = split
        self._size = size
        self._is_compact = bool(alphabet)
        self._chat = Chat(PLACE, system_message(system, template))
        self.tokenizer = CharTokenizer(alphabet, TAGS) if alphabet else None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < self._size:
            raise IndexError(f"there is no prompt {i}: the task has {self._size}, numbered from 0")
        return self._drawn(Draws(np.random.Philox(key=i)))

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


def is_in_split(content: str, split: str) -> bool:
    """Returns whether the problem with this content is in `split`; about one problem in ten is in test."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    is_test = int.from_bytes(digest, "little") % _TEST_ONE_IN == 0
    return is_test == (split == "test")


def first_drawn(draw: Callable[[], T | None], split: str) -> T:
    """Returns the first result of `draw` that is not None; raises TaskError after _MAX_DRAWS calls."""
    for _ in range(_MAX_DRAWS):
        drawn = draw()
        if drawn is not None:
            return drawn
    raise TaskError(
        f"none of {_MAX_DRAWS} problems drawn with these settings belongs to split={split}; choose "
        "settings with more distinct problems"
    )


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
