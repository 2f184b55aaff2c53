"""Prefetching of weights: a thread loads, checks and lays out a newer version while the host decodes.

The host then adopts that version without a copy: it only replaces a reference. On several devices the
thread only moves bytes, and the host's thread checks the version when it adopts it: collectives of two
threads could wait for each other, if one device begins with those of one thread and one with the other's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from areal_jax.types import PolicyVersion, VersionedParams
from areal_jax.weights.errors import VersionGoneError, WeightsError
from areal_jax.weights.store import Fetched, FetchingReader, fetch_newer, load_newer, spans_devices

LOOK_S = 0.01
"""Seconds between two queries for a newer version while there is none."""
AGAIN_S = 0.2
"""Seconds to wait after a failed load before loading again."""


class Prefetcher:
    """A host's source of weights: a thread loads the newest version before the host asks for that version.

    `reader` loads the version onto `shardings`; then `lay_out` converts it to the form that the host decodes
    with. If `shardings` have several devices, the thread only fetches the version, and `load` checks and
    converts it. At most one version is ready at a time; once `load` has returned that version, the thread
    loads the newest version again. Only the Prefetcher may call `reader.load` and `reader.fetch`. It keeps no
    reference to a version that `load` has returned, so that the host can free that version.
    """

    def __init__(
        self, reader: FetchingReader, shardings: Any, lay_out: Callable[[VersionedParams], VersionedParams]
    ) -> None:
        self._reader, self._shardings, self._lay_out = reader, shardings, lay_out
        self._is_split = spans_devices(shardings)
        self._changed = threading.Condition()
        self._here: tuple[PolicyVersion, Fetched] | None = None
        """The version that is ready, and what returns it laid out."""
        self._taken: PolicyVersion = -1
        self._moves = 0
        self._error: Exception | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="loading weights ahead", daemon=True)
        self._thread.start()

    def latest(self) -> PolicyVersion | None:
        """Returns the version that is ready, else the version that `load` returned last, else None.

        Raises the error that ended the loading thread, such as WeightsError if this host gets other log-probs
        than the publisher from the same parameters.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._here is not None:
                return self._here[0]
            # Not None between two versions: the host would take that for an empty store.
            return self._taken if self._taken >= 0 else None

    def load(self, version: PolicyVersion, shardings: Any) -> VersionedParams:
        """Returns the version that is ready, converted by `lay_out`.

        Raises VersionGoneError if `version` is not the version that is ready, WeightsError if `shardings` are
        not the shardings given to the constructor. On several devices also raises as `ParamReader.load` does
        for a version that is not the published one; `latest` then no longer returns it.
        """
        if shardings != self._shardings:
            raise WeightsError(
                "the Prefetcher can load only with the shardings that it was given; pass the constructor's "
                "shardings to load()"
            )
        with self._changed:
            here = self._here
            if here is None or here[0] != version:
                raise VersionGoneError(
                    f"version {version} is not prefetched; load the version that latest() returns"
                )
        try:
            value = here[1]()
            self._taken = version
            return value
        finally:
            # Not earlier: the thread would fetch the same version again, or the next one during the check.
            with self._changed:
                if self._here is here:
                    self._here = None
                self._changed.notify_all()

    def forget(self) -> None:
        """Discards the version that is ready or being loaded; called when `reader` gets another publisher."""
        with self._changed:
            self._here = None
            self._moves += 1

    def close(self, deadline_s: float) -> None:
        """Stops loading; waits at most `deadline_s` seconds until a load in progress has ended.

        The wait is needed because a process must not exit while its devices compute.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while self._is_wanted():
            try:
                wait_s = LOOK_S if self._load_next() else AGAIN_S
            except Exception as error:  # noqa: BLE001 - raised by `latest`
                self._error = error
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, wait_s)

    def _is_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._here is None)
            return not self._is_closed

    def _load_next(self) -> bool:
        """Loads the newest version, unless `load` has returned it already; returns False if loading fails."""
        taken, moves, latest = self._taken, self._moves, self._reader.latest()
        if latest is None or latest <= taken:
            return True
        try:
            here = self._next(taken)
        except VersionGoneError as error:
            logging.getLogger(__name__).warning("the host keeps its weights and tries again: %s", error)
            return False
        if here is None:
            return False
        with self._changed:
            # After `forget` this version is the former publisher's, and may never have been committed.
            if moves == self._moves:
                self._here = here
        return True

    def _next(self, taken: PolicyVersion) -> tuple[PolicyVersion, Fetched] | None:
        """Returns a version above `taken`, and what returns it laid out; None if there is none."""
        if self._is_split:
            found = fetch_newer(self._reader, self._shardings, taken)
            return found and (found[0], lambda: self._lay_out(found[1]()))
        value = load_newer(self._reader, self._shardings, taken)
        if value is None:
            return None
        value = self._lay_out(value)
        # Wait here: the host's loop would otherwise stall until everything is computed.
        jax.block_until_ready(value.params)
        return value.version, lambda: value
