"""A generation host: the one decode loop there is.

Between two jitted calls it takes commands, adopts a newer version if one is committed, refills free slots,
decodes a few tokens, and hands on the samples that ended. Weights change in the middle of a sample: its KV is
rebuilt under the new version and it goes on; every token keeps the version and log-prob it was sampled with.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_jax.control.events import Event, HostAdopted, SampleFinished
from areal_jax.generation.engine import Engine, Prefix, ResultTokens
from areal_jax.observe.waits import REMEDY, Clock, Timeline, WaitTimeout, get
from areal_jax.types import NOT_SAMPLED, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.store import ParamReader, load_newer

Emit = Callable[[Event, Trajectory | None], None]

POLL_S = 0.001


@dataclass(frozen=True)
class Start:
    """Decode these samples of one prompt, under `min_version` or newer."""

    samples: tuple[SampleId, ...]
    prompt: tuple[int, ...]
    min_version: int


@dataclass(frozen=True)
class Stop:
    """Decode no further for these samples; without any, the host ends its loop."""

    samples: tuple[SampleId, ...] = ()


@dataclass
class _Live:
    """The sample in a slot, as far as it has come."""

    sample: SampleId
    prompt_tokens: int
    interruptions: int = 0


@dataclass
class _Waiting:
    sample: SampleId
    prompt: tuple[int, ...]
    min_version: int


def _group(sample: SampleId) -> tuple[int, int]:
    return sample.ordinal, sample.attempt


class Host:
    """`emit(event, trajectory)` hears what happens; `turn()` guards every use of parameters and device.

    `on_update` is what a newer version does to live samples: `recompute` rebuilds their KV under it, `drain`
    lets them end first and admits nobody meanwhile.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        store: ParamReader,
        emit: Emit,
        *,
        seed: int,
        sampling: Sampling,
        on_update: str = "recompute",
        turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clock: Clock | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        self.name, self.inbox = name, queue.Queue[Start | Stop]()
        self._engine, self._store, self._emit, self._turn = engine, store, emit, turn
        self._seed, self._sampling, self._on_update = seed, sampling, on_update
        self._clock = clock or Timeline(None).actor(name)
        self._deadline_s = deadline_s
        self._stops = (engine.get_tokenizer().eos_id,)
        self._waiting: deque[_Waiting] = deque()
        self._live: dict[int, _Live] = {}
        self._prefixes: dict[tuple[int, int], Prefix] = {}
        self._params: VersionedParams | None = None
        self._state = engine.init_decode_state()
        shape = (engine.slots, engine.length)
        self._tokens = np.zeros(shape, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._versions = np.full(shape, NOT_SAMPLED, np.int32)
        self._support = np.full((*shape, engine.support_size), -1, np.int32) if engine.support_size else None
        self._filled = np.ones(engine.slots, np.int64)
        self._last_call_s: float | None = None
        self._stalled_since_s: float | None = None
        self.generated_tokens = 0
        self.gaps_s: deque[float] = deque(maxlen=100_000)
        """Seconds between two decode calls' results while a sample was live through both."""

    # --- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to stop. Raises WaitTimeout when no command, or no version, comes for the deadline."""
        while self.take_commands(is_patient=not self.has_work):
            self.step()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._waiting)

    @property
    def live(self) -> int:
        """Slots that hold a sample."""
        return len(self._live)

    def step(self) -> None:
        """Adopt, refill, decode once. Raises WaitTimeout when the waiting samples get no version in time."""
        results = None
        with self._turn():
            self._adopt_newer()
            self._refill()
            if self._live:
                with self._clock.doing("decode"):
                    self._state, results = self._engine.generate(self._current(), self._state)
                    results = results.convert_to_numpy()
        if results is not None:
            self._collect(results)
            self._stalled_since_s = None
        elif self._waiting:
            self._wait_for_version()

    def take_commands(self, is_patient: bool = False) -> bool:
        """Do what the inbox says, waiting for a first command when patient. False: the loop ends."""
        while is_patient or not self.inbox.empty():
            if is_patient:
                command = get(
                    self.inbox,
                    who=self.name,
                    what="samples from the control plane",
                    deadline_s=self._deadline_s,
                    clock=self._clock,
                )
            else:
                command = self.inbox.get_nowait()
            is_patient = False
            if isinstance(command, Start):
                self._waiting.extend(
                    _Waiting(s, command.prompt, command.min_version) for s in command.samples
                )
            elif command.samples:
                self._cancel(set(command.samples))
            else:
                return False
        return True

    # --- weights -------------------------------------------------------------------------------------------

    def _current(self) -> VersionedParams:
        assert self._params is not None, "a host decodes only after it has adopted a version"
        return self._params

    def _adopt_newer(self) -> None:
        latest = self._store.latest()
        if latest is None or (self._params is not None and latest <= self._params.version):
            return
        if self._live and self._on_update == "drain":
            return
        with self._clock.doing("swap"):
            former = self._params
            loaded = load_newer(
                self._store, self._engine.param_shardings, former.version if former is not None else -1
            )
            if loaded is None:
                return
            self._params = self._engine.load_params(loaded)
            interrupted = [
                live for slot, live in self._live.items() if self._filled[slot] > live.prompt_tokens
            ]
            if self._live and former is not None and former.digest != self._params.digest:
                self._state = self._engine.recompute(self._params, self._state)
            for live in interrupted:
                live.interruptions += 1
            self._prefixes.clear()
        adopted = HostAdopted(self.name, self._params.version, self._params.digest, len(interrupted))
        self._emit(adopted, None)

    def _wait_for_version(self) -> None:
        """Nothing is live and nobody may start: the version that the next sample needs is on its way."""
        needed = self._waiting[0].min_version
        now = time.monotonic()
        if self._stalled_since_s is None:
            self._stalled_since_s = now
        if now > self._stalled_since_s + self._deadline_s:
            raise WaitTimeout(
                f"{self.name} waited {self._deadline_s:g} s for version {needed} from the trainer, while the "
                f"store's latest is {self._store.latest()}; {REMEDY}"
            )
        with self._clock.doing("wait: a version from the trainer"):
            time.sleep(POLL_S)

    # --- slots ---------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        is_draining = self._params is None or self._store.latest() != self._params.version
        if is_draining or not self._waiting:
            return
        for slot in range(self._engine.slots):
            if slot in self._live or not self._waiting:
                continue
            if self._waiting[0].min_version > self._current().version:
                break
            self._insert(slot, self._waiting.popleft())

    def _insert(self, slot: int, waiting: _Waiting) -> None:
        with self._clock.doing("prefill"):
            prefix = self._prefix(waiting)
            count = len(waiting.prompt)
            request = self._engine.request(waiting.sample, self._seed, self._sampling, count, self._stops)
            self._state = self._engine.insert(prefix, self._state, slot, request=request)
        self._live[slot] = _Live(waiting.sample, count)
        self._filled[slot] = count
        self._tokens[slot, :count] = waiting.prompt

    def _prefix(self, waiting: _Waiting) -> Prefix:
        """One prefill for the samples of a group, as long as they start under one version."""
        group = _group(waiting.sample)
        if group not in self._prefixes:
            self._prefixes[group] = self._engine.prefill(
                params=self._current(),
                padded_tokens=np.asarray(waiting.prompt),
                true_length=len(waiting.prompt),
            )
        is_shared = any(_group(w.sample) == group for w in self._waiting)
        return self._prefixes[group] if is_shared else self._prefixes.pop(group)

    def _cancel(self, samples: set[SampleId]) -> None:
        self._waiting = deque(w for w in self._waiting if w.sample not in samples)
        waiting = {_group(w.sample) for w in self._waiting}
        self._prefixes = {group: prefix for group, prefix in self._prefixes.items() if group in waiting}
        for slot in [slot for slot, live in self._live.items() if live.sample in samples]:
            self._state = self._engine.free_resource(slot, self._state)
            del self._live[slot]
        if not self._live:
            self._last_call_s = None

    # --- results -------------------------------------------------------------------------------------------

    def _collect(self, results: ResultTokens) -> None:
        """Copy what was sampled into the slots' records; emit the samples that ended."""
        now = time.perf_counter()
        if self._last_call_s is not None:
            self.gaps_s.append(now - self._last_call_s)
        valid = results.valid
        slots, steps = np.nonzero(valid)
        at = self._filled[slots] + steps  # a slot's valid steps are its first ones
        self._tokens[slots, at] = results.tokens[slots, steps]
        self._logp[slots, at] = results.logp[slots, steps]
        self._versions[slots, at] = results.version[slots]
        if self._support is not None:
            self._support[slots, at] = results.support[slots, steps]
        self._filled += valid.sum(axis=1)
        self.generated_tokens += len(slots)
        is_live = results.is_live
        for slot in [slot for slot in self._live if not is_live[slot]]:
            trajectory = self._trajectory(slot, self._live.pop(slot))
            finished = SampleFinished(
                trajectory.sample,
                self.name,
                trajectory.spans,
                trajectory.stop_reason,
                trajectory.interruptions,
            )
            self._emit(finished, trajectory)
        self._last_call_s = now if self._live else None

    def _trajectory(self, slot: int, live: _Live) -> Trajectory:
        end = int(self._filled[slot])
        loss_mask = np.arange(end) >= live.prompt_tokens
        tokens = self._tokens[slot, :end].copy()
        return Trajectory(
            sample=live.sample,
            tokens=tokens,
            loss_mask=loss_mask,
            behavior_logp=np.where(loss_mask, self._logp[slot, :end], 0).astype(np.float32),
            versions=np.where(loss_mask, self._versions[slot, :end], NOT_SAMPLED).astype(np.int32),
            turn_ids=np.where(loss_mask, 0, -1).astype(np.int32),
            sampling=self._sampling,
            stop_reason="stop" if int(tokens[-1]) in self._stops else "length",
            support=None if self._support is None else self._masked_support(slot, loss_mask),
            interruptions=live.interruptions,
        )

    def _masked_support(self, slot: int, loss_mask: np.ndarray) -> np.ndarray:
        assert self._support is not None
        return np.where(loss_mask[:, None], self._support[slot, : len(loss_mask)], -1)
