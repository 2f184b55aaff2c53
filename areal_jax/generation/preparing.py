"""Clients' samples that have no decode program yet: a thread compiles it while the host decodes others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from areal_jax.generation.commands import Work
from areal_jax.generation.engine import Engine
from areal_jax.generation.sampling import Truncation
from areal_jax.generation.slots import DecodeState
from areal_jax.types import SampleId, VersionedParams

UNCOMPILED = "its decode program could not be compiled: "
"""How the reason of a sample begins that failed so; to ask again is of no use."""


class Preparing:
    """The samples that wait for their decode program; one program is compiled at a time.

    Each program also has the truncations of those before it, so that it serves the samples of all of them
    together; so there are at most three besides the first. `wake()` is called once a compilation has ended.
    """

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        self.waiting: list[Work] = []
        self._is_compiling = False
        self._failure: Exception | None = None

    def is_needed(self, work: Work) -> bool:
        """Whether the sample is a client's, and no program that is compiled can decode it."""
        return work.start.is_request and self._engine.program_for(work.truncation) is None

    def cancel(self, samples: Sequence[SampleId]) -> None:
        self.waiting = [work for work in self.waiting if work.sample not in samples]

    def step(self, params: VersionedParams, state: DecodeState) -> tuple[list[Work], list[tuple[Work, str]]]:
        """Returns the samples that can be decoded now, and those that cannot, each with the reason.

        Begins to compile what the others need, unless a compilation is under way. `params`, `state`: those of
        the next decode call.
        """
        if not self.waiting or self._is_compiling:
            return [], []
        failure, self._failure = self._failure, None
        ready = [work for work in self.waiting if not self.is_needed(work)]
        self.waiting = [work for work in self.waiting if self.is_needed(work)]
        if failure is not None:
            failed = [(work, f"{UNCOMPILED}{failure}") for work in self.waiting]
            self.waiting = []
            return ready, failed
        if self.waiting:
            needed = [work.truncation for work in self.waiting]
            program = Truncation.joined([*self._engine.programs, *needed])
            compile_ = self._engine.compiler(program, params, state)
            self._is_compiling = True
            # Not a daemon: the interpreter must not end while XLA compiles.
            threading.Thread(target=self._run, args=(compile_,), name="compile").start()
        return ready, []

    def _run(self, compile_: Callable[[], None]) -> None:
        try:
            compile_()
        except Exception as error:  # noqa: BLE001 - the requests that need the program get it as their reason
            self._failure = error
        self._is_compiling = False  # before the host, which looks once, is woken
        self._wake()
