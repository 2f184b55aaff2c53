"""Processes of one jax.distributed world do something together: all did it, or it is said who did not.

They meet at the coordination service and not on the devices, so every wait has a deadline, and a thread that
writes may wait while the devices compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src import distributed

from areal_jax.types import ArealError


class DisagreementError(ArealError):
    """What this process did well, another one did not; the message holds its reason."""


def leads() -> bool:
    """Whether this process does what only one may: the first of its world, or one that is alone."""
    return jax.process_index() == 0


@contextmanager
def together(what: str, deadline_s: float) -> Iterator[None]:
    """Run the block, then go on once every process of the world has run it under the same name `what`.

    What the block raises is raised here once the others have heard of it. Raises DisagreementError where
    another process's block raised, ArealError where one has not come by the deadline, which begins when this
    one's block has ended.
    """
    failure = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again below
        failure = error
    if jax.process_count() > 1:
        _meet(what, deadline_s, failure)
    if failure is not None:
        raise failure


_rounds: Counter[str] = Counter()


def _meet(what: str, deadline_s: float, failure: Exception | None) -> None:
    client = distributed.global_state.client
    assert client is not None  # there is more than one process
    # Of this round alone: who is past the barrier may be in the next one before others have read this one.
    _rounds[what] += 1
    place, before = f"{what}/{_rounds[what]}/", f"{what}/{_rounds[what] - 1}/"
    reason = "" if failure is None else (str(failure) or type(failure).__name__)
    try:
        client.key_value_set(f"{place}{jax.process_index()}", reason)
        client.wait_at_barrier(what, round(1000 * deadline_s))
        said = client.key_value_dir_get(place)
        client.key_value_delete(f"{before}{jax.process_index()}")  # which all have read by now
    except RuntimeError as error:
        raise ArealError(
            f"process {jax.process_index()} of {jax.process_count()} waited {deadline_s:g} s for the others: "
            f"{what}. {_brief(error)}. logs/ says what they did last; where they are only slow, raise "
            "runtime.deadline_s"
        ) from failure or error
    reasons = [f"process {key.rpartition('/')[2]}: {reason}" for key, reason in said if reason]
    if failure is None and reasons:
        raise DisagreementError(f"{what}: {'; '.join(reasons)}")


def _brief(error: RuntimeError) -> str:
    """Who came and who did not, from the coordination service's account of several lines."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("RPC:"))[:400].rstrip(".")
