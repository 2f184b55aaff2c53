"""Versions loaded ahead: a thread reads, checks and lays out the next one while the host decodes, so that
adopting it is an exchange of pointers.

Whatever the store: from device to device, or from files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.store import ParamReader, VersionGoneError, WeightsError, load_newer

LOOK_S = 0.01
"""How often the store is asked for its latest version, while none waits here."""
AGAIN_S = 0.2
"""How long to wait after a version that could not be loaded."""


class Prefetcher:
    """One host's ParamReader of what `reader` loads onto `shardings` and `lay_out` makes of it.

    At most one version waits here; the next to be loaded is the newest once it was taken. Nobody else may
    load from `reader`. It holds on to no version that was taken: the host may drop it.
    """

    def __init__(
        self, reader: ParamReader, shardings: Any, lay_out: Callable[[VersionedParams], VersionedParams]
    ) -> None:
        self._reader, self._shardings, self._lay_out = reader, shardings, lay_out
        self._changed = threading.Condition()
        self._here: VersionedParams | None = None
        self._taken: PolicyVersion = -1
        self._moves = 0
        self._error: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="loading weights ahead", daemon=True)
        self._thread.start()

    def latest(self) -> PolicyVersion | None:
        """The version that waits here, or the one taken last; None before the first.

        Raises what ended the loading: WeightsError where this host computes something else than the
        publisher.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._here is not None:
                return self._here.version
            return self._taken if self._taken >= 0 else None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Hand over the version that waits here, laid out. Raises VersionGoneError for any other."""
        if shardings != self._shardings:
            raise WeightsError("versions are loaded ahead for another mesh than they are asked for")
        with self._changed:
            here = self._here
            if here is None or here.version != version:
                raise VersionGoneError(f"version {version} does not wait here; load latest()")
            self._here, self._taken = None, version
            self._changed.notify_all()
            return here

    def forget(self) -> None:
        """`reader` has another publisher now: what the one before published, and nobody took, is dropped."""
        with self._changed:
            self._here = None
            self._moves += 1

    def close(self, deadline_s: float) -> None:
        """Load no more. A load that is under way ends first: a process may not end while it computes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while self._is_wanted():
            try:
                wait_s = LOOK_S if self._load_next() else AGAIN_S
            except Exception as error:  # noqa: BLE001 - raised where the host asks
                self._error = error
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, wait_s)

    def _is_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._here is None)
            return not self._is_closed

    def _load_next(self) -> bool:
        """False where there is a newer version, and it could not be loaded."""
        taken, moves, latest = self._taken, self._moves, self._reader.latest()
        if latest is None or latest <= taken:
            return True
        try:
            value = load_newer(self._reader, self._shardings, taken)
        except VersionGoneError as error:
            logging.getLogger(__name__).warning("not adopted: %s", error)
            return False
        if value is None:
            return False
        value = self._lay_out(value)
        jax.block_until_ready(value.params)
        with self._changed:
            if moves == self._moves:
                self._here = value
        return True
