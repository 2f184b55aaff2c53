"""Work on a large text beside the event loop, in which the workflows of a process take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from areal_jax.tasks.tokenizers import LARGE

T = TypeVar("T")


async def apart(work: Callable[[], T], size: int) -> T:
    """Returns `work()`; it is called in a thread if it works on a text of more than LARGE characters."""
    return await asyncio.to_thread(work) if size > LARGE else work()


def size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of characters of the messages' contents."""
    return sum(len(str(message.get("content"))) for message in messages)
