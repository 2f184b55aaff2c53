"""Steps that all processes of one jax.distributed world take together: all succeed, or all raise an error.

The error names the processes that failed. Processes wait for each other through jax's coordination service
instead of a device collective, so every wait has a deadline, and a thread that writes files can wait while
the devices compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from areal_jax.parallel.private_jax import coordination_client
from areal_jax.types import ArealError


class DisagreementError(ArealError):
    """A step of `together` failed in other processes; the message gives these processes and the reasons."""


def leads() -> bool:
    """Whether this process is number 0 of its jax.distributed world: number 0 does what only one may do."""
    return jax.process_index() == 0


@contextmanager
def together(what: str, deadline_s: float) -> Iterator[None]:
    """Run the `with` block, then wait until every process of the world has run its block named `what`.

    An exception of the block is raised again once the other processes have received its text. Raises
    DisagreementError if the block succeeded here but raised in another process, ArealError if another process
    has not finished its block `deadline_s` seconds after this one.
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
    """Publish this process's outcome of the step `what`, and wait for the outcomes of all others.

    `failure`: the exception that the step raised here; None if the step succeeded. Raises DisagreementError
    if the step failed only in other processes, ArealError if a process has not published its outcome within
    `deadline_s` seconds.
    """
    client = coordination_client()
    assert client is not None  # there is more than one process
    # Keys are per round: a process past the barrier may begin the next round before others read this one.
    _rounds[what] += 1
    place, before = f"{what}/{_rounds[what]}/", f"{what}/{_rounds[what] - 1}/"
    reason = "" if failure is None else (str(failure) or type(failure).__name__)
    try:
        client.key_value_set(f"{place}{jax.process_index()}", reason)
        client.wait_at_barrier(what, round(1000 * deadline_s))
        said = client.key_value_dir_get(place)
        client.key_value_delete(f"{before}{jax.process_index()}")  # all have read it by now
    except RuntimeError as error:
        raise ArealError(
            f"process {jax.process_index()} of {jax.process_count()} ends, because it waited {deadline_s:g} "
            f"s for the others at the step '{what}'. {_brief(error)}. See in the run's logs/ what those did "
            "last; if they were only slow, raise runtime.deadline_s"
        ) from failure or error
    reasons = [f"process {key.rpartition('/')[2]}: {reason}" for key, reason in said if reason]
    if failure is None and reasons:
        raise DisagreementError(f"the step '{what}' failed in {'; '.join(reasons)}")


def _brief(error: RuntimeError) -> str:
    """Returns in one line the coordination service's message, which names the processes that arrived."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("RPC:"))[:400].rstrip(".")
