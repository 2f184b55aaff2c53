"""Problems that are drawn, without files: their number, the random draws, and the split by their content."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from areal_jax.tasks.errors import TaskError
from areal_jax.tasks.task import Task
from areal_jax.types import Prompt

_TEST_ONE_IN = 10
_MAX_DRAWS = 20_000
"""Number of draws after which the settings are declared to have no suitable problem."""

T = TypeVar("T")


class Drawn(Task):
    """A task of `size` prompts; prompt i depends on i and the settings alone."""

    def __init__(self, size: int) -> None:
        """Raises TaskError unless `size` is positive."""
        if size < 1:
            raise TaskError(f"size={size} is not positive; give at least 1")
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Prompt:
        if not 0 <= i < self._size:
            raise IndexError(f"there is no prompt {i}: the task has {self._size}, numbered from 0")
        return self._prompt(i)

    @abstractmethod
    def _prompt(self, i: int) -> Prompt:
        """Returns prompt i, a number from 0 to size - 1."""


class Draws:
    """Random choices, made of a bit generator's raw 64 bits, which are the same in every release of numpy."""

    def __init__(self, bits: np.random.BitGenerator) -> None:
        self._bits = bits

    @classmethod
    def of(cls, number: int) -> Draws:
        """Returns the draws that depend on this number alone."""
        return cls(np.random.Philox(key=number))

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


def check_operations(operations: str | Sequence[str], known: Iterable[str]) -> None:
    known = tuple(known)
    if not operations or any(operation not in known for operation in operations):
        raise TaskError(
            f"operations={operations!r}: give one or more of {''.join(known)}, in quotes as in '\"+-\"'"
        )


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
