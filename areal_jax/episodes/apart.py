"""Work on a large text beside the event loop, in which the workflows of a process take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LARGE = 2**16
"""Number of characters from which a text is worked on in a thread; a smaller one is done in milliseconds."""


async def apart(work: Callable[[], T], size: int) -> T:
    """Returns `work()`; it is called in a thread if it works on a text of more than LARGE characters."""
    return await asyncio.to_thread(work) if size > LARGE else work()


def size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of characters of the messages' contents."""
    return sum(len(str(message.get("content"))) for message in messages)
