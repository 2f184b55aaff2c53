"""Tool calls: what identifies a call, and what comes of it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

from areal_jax.control.events import ToolReturned, ToolStarted
from areal_jax.episodes.errors import EpisodeError, ToolError
from areal_jax.tasks.plain_json import readable

LONGEST_RESULT = 2**24
"""Maximum number of characters of a result, as JSON: it goes through the journal, and into a conversation."""

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


async def called(
    begun: ToolStarted, work: partial[Any], deadline_s: float, in_thread: InThread
) -> ToolReturned:
    """Calls the tool and returns how that ended; `in_thread(work)` calls what is no coroutine function."""
    sample, call = begun.sample, begun.call
    # A task of its own: its deadline holds even if it refuses to be cancelled.
    task = asyncio.ensure_future(work() if inspect.iscoroutinefunction(work.func) else in_thread(work))
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    finally:
        task.cancel()
    if not task.done():
        return ToolReturned(sample, call, "null", f"it took longer than {deadline_s:g} s")
    try:
        text = json.dumps(task.result())
        if len(text) > LONGEST_RESULT:
            raise ValueError(f"it returned {len(text)} characters of JSON; return at most {LONGEST_RESULT}")
        return ToolReturned(sample, call, text)
    except BaseException as error:  # noqa: BLE001 - the user's tool; the workflow gets the error as ToolError
        return ToolReturned(sample, call, "null", readable(f"{type(error).__name__}: {error}"))


def result(returned: ToolReturned, name: str) -> Any:
    """Returns what the tool returned; raises ToolError if it failed."""
    if returned.error:
        raise ToolError(f"the tool {name} failed: {returned.error}")
    return json.loads(returned.result)


def digest(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """Returns a hash of a call; raises EpisodeError if an argument is no value of JSON."""
    try:
        text = json.dumps([name, arguments, named], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"the arguments of {name} are no values of JSON ({error}); give numbers, texts, lists and dicts"
        ) from None
    return blake2b(text.encode(), digest_size=8).hexdigest()
