"""Publishing off the trainer's path: the copy starts at once, and a thread commits it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from areal_jax.types import VersionedParams
from areal_jax.weights.staged import OnFailure, Writer
from areal_jax.weights.store import BeforeCommit, Probe, refuse_old, start_copy

Commit = Callable[[VersionedParams, jax.Array, jax.Array, BeforeCommit | None], None]
"""`commit(wire, sums, canary, before_commit)`, in the thread: sums and canary may be on their way still."""


class Publishing:
    """One version is committed and one more may wait; the next publish waits for room, at most `deadline_s`.

    Every program is started in the caller's thread, so that processes which publish together start them in
    one order.
    """

    def __init__(
        self,
        what: str,
        probe: Probe,
        dtype: str,
        commit: Commit,
        deadline_s: float,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._probe, self._dtype, self._commit, self._deadline_s = probe, dtype, commit, deadline_s
        self._lock = threading.Lock()
        self._writer = Writer(what, 1, on_failure)
        self._published: VersionedParams | None = None  # without its parameters
        self._committed: VersionedParams | None = None

    def publish(self, value: VersionedParams, before_commit: BeforeCommit | None = None) -> VersionedParams:
        """As ParamStore says. Raises what kept an earlier version from being committed."""
        with self._lock:
            (wire, sums), known = start_copy(value, self._dtype), self._published
            if known is not None and value.version <= known.version:
                if (wire.version, wire.digest) == (known.version, known.digest):
                    return wire
                refuse_old(wire, known)
            canary = self._probe(wire.params)
            with self._heard():
                self._writer.submit(lambda: self._run(wire, sums, canary, before_commit), self._deadline_s)
            self._published = wire._replace(params=None)
            return wire

    def wait(self, deadline_s: float) -> None:
        with self._lock, self._heard():
            self._writer.wait(deadline_s)

    def close(self, deadline_s: float) -> None:
        with self._lock, self._heard():
            self._writer.close(deadline_s)

    def _run(self, wire: VersionedParams, *rest: Any) -> None:
        self._commit(wire, *rest)
        self._committed = wire._replace(params=None)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """A version that could not be committed may be published again, once nothing newer is on its way."""
        try:
            yield
        except BaseException:
            if self._writer.is_idle:
                self._published = self._committed
            raise
