"""A generation host: the one decode loop there is.

Between two jitted calls it takes commands, adopts a newer version if one is committed, refills free slots,
decodes a few tokens, and hands on the samples that ended. Weights change in the middle of a sample: what
becomes of its KV is `on_update`; every token keeps the version and log-prob it was sampled with.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from areal_jax.control.events import Event, HostAdopted, SampleFailed, SampleFinished
from areal_jax.generation.admission import Admission
from areal_jax.generation.commands import (
    Command,
    Give,
    Pause,
    Start,
    Statistics,
    Stop,
    Take,
    Tokens,
    Unpause,
    Work,
)
from areal_jax.generation.engine import Engine
from areal_jax.generation.records import Records
from areal_jax.generation.slots import ResultTokens
from areal_jax.observe.waits import REMEDY, Clock, Timeline, WaitTimeout, get
from areal_jax.types import PolicyVersion, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.store import ParamReader, load_newer

Emit = Callable[[Event, Trajectory | None], None]

POLL_S = 0.001


class Host:
    """`emit(event, trajectory)` hears what happens; `turn()` guards every use of parameters and device.

    `on_update` is what a newer version does to live samples. recompute: their KV is rebuilt under it. keep:
    they go on with the KV they have. pinned: they end under the version they began with, whose parameters
    stay until then, at most `versions` sets at once. drain: they end first, and whoever was sent here under
    their version.
    `on_tokens` hears what each decode call sampled for each sample, before it ends.
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
        stops: tuple[int, ...] | None = None,
        on_update: str = "recompute",
        versions: int = 2,
        on_tokens: Callable[[SampleId, Tokens], None] | None = None,
        is_server: bool = False,
        turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clock: Clock | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        """`stops`: ids that end a sample; the tokenizer's own end unless given. `is_server`: nobody owes it
        commands, so that it waits for them without a deadline.
        """
        self.name, self.inbox = name, queue.Queue[Command]()
        self._engine, self._store, self._emit, self._turn = engine, store, emit, turn
        self._seed, self._sampling, self._on_update = seed, sampling, on_update
        self._most_versions, self._on_tokens, self._is_server = versions, on_tokens, is_server
        self._clock = clock or Timeline(None).actor(name)
        self._deadline_s = deadline_s
        self._stops = (engine.get_tokenizer().eos_id,) if stops is None else stops
        self._state = engine.init_decode_state()
        self._records = Records(engine.slots, engine.length, engine.support_size)
        self._admission = Admission(engine, self._records, self._clock)
        self._live: dict[int, Work] = self._admission.live
        self._waiting: deque[Work] = self._admission.waiting
        self._held: dict[PolicyVersion, VersionedParams] = {}
        self._is_paused = False
        self._last_call_s: float | None = None
        self._stalled_since_s: float | None = None
        self.generated_tokens = 0
        self.tokens_per_s: float | None = None
        self._interruptions = self._recomputed_tokens = self._swaps = self._evictions = 0
        self._swap_s = 0.0
        self._statistics = Statistics()
        self.gaps_s: deque[float] = deque(maxlen=100_000)
        """Seconds between two decode calls' results while a sample was live through both."""

    # --- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to stop. Raises WaitTimeout when no command, or no version, comes for the deadline."""
        while self.take_commands(is_patient=not self.has_work):
            self.step()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._waiting) and not self._is_paused

    @property
    def live(self) -> int:
        """Slots that hold a sample."""
        return len(self._live)

    def statistics(self) -> Statistics:
        """As of the last step; for any thread."""
        return self._statistics

    def step(self) -> None:
        """Adopt, refill, decode once. Raises WaitTimeout when the waiting samples get no version in time."""
        results: list[ResultTokens] = []
        with self._turn():
            self._adopt_newer()
            self._refill()
            if self._live and not self._is_paused:
                with self._clock.doing("decode"):
                    results = self._decode()
        if results:
            self._collect(results)
            self._stalled_since_s = None
        elif self._waiting and not self._admission.is_prefilling and not self._is_paused:
            self._wait_for_version()
        self._statistics = self._count()

    def take_commands(self, is_patient: bool = False) -> bool:
        """Do what the inbox says, waiting for a first command when patient. False: the loop ends."""
        while is_patient or not self.inbox.empty():
            command = self._wait_for_command() if is_patient else self.inbox.get_nowait()
            is_patient = False
            if isinstance(command, Stop) and not command.samples:
                return False
            self._obey(command)
        return True

    def _wait_for_command(self) -> Command:
        if self._is_server:
            with self._clock.doing("wait: a request"):
                return self.inbox.get()
        return get(
            self.inbox,
            who=self.name,
            what="samples from the control plane",
            deadline_s=self._deadline_s,
            clock=self._clock,
        )

    def _obey(self, command: Command) -> None:
        match command:
            case Start():
                self._accept(command)
            case Stop(samples):
                self._cancel(set(samples))
            case Pause() | Unpause():
                self._is_paused = isinstance(command, Pause)
                self._last_call_s = None
            case Give(sample, to):
                to(self._give(sample))
            case Take(work, refused):
                if reason := self._reason_against(work):
                    refused(work, reason)
                else:
                    self._waiting.appendleft(work)
        self._statistics = self._count()

    # --- weights -------------------------------------------------------------------------------------------

    @property
    def _current(self) -> VersionedParams | None:
        return self._held[max(self._held)] if self._held else None

    def _adopt_newer(self) -> None:
        latest, former = self._store.latest(), self._current
        if latest is None or (former is not None and latest <= former.version):
            return
        if self._on_update == "drain" and former is not None and self._is_draining(former.version):
            return
        if self._on_update == "pinned" and len(self._in_use()) >= self._most_versions:
            return
        with self._clock.doing("swap"):
            started = time.perf_counter()
            than = former.version if former is not None else -1
            loaded = load_newer(self._store, self._engine.param_shardings, than)
            if loaded is None:
                return
            interrupted = self._put_in_force(self._engine.load_params(loaded), former)
            if former is not None:
                self._swaps += 1
                self._swap_s += time.perf_counter() - started
        self._emit(HostAdopted(self.name, loaded.version, loaded.digest, interrupted), None)

    def _is_draining(self, version: PolicyVersion) -> bool:
        """Whether samples of `version` are live, or were sent here when it was the newest.

        A server's requests name no version and never end: those that wait begin under the next one.
        """
        is_owed = bool(self._waiting) and self._waiting[0].min_version <= version
        return self._admission.has_begun or (is_owed and not self._is_server)

    def _put_in_force(self, value: VersionedParams, former: VersionedParams | None) -> int:
        """Samples under which the version changed, of those that have a token."""
        is_other = former is not None and former.digest != value.digest
        self._admission.forget_prompts()
        self._held[value.version] = value
        if self._on_update == "pinned":
            self._free_versions()
            return 0
        self._held = {value.version: value}
        if is_other and self._on_update == "recompute":
            self._state = self._admission.restart_unbegun(self._state)
        begun = self._admission.begun
        for work in begun:
            work.interruptions += 1
            work.version, work.digest = value.version, value.digest
            work.is_stale |= is_other and self._on_update == "recompute"
        for work in self._live.values():
            work.version, work.digest = value.version, value.digest
        self._rebuild()
        self._interruptions += len(begun)
        return len(begun)

    def _rebuild(self) -> None:
        """The KV of live samples whose parameters changed, under the current ones."""
        stale = [slot for slot, work in self._live.items() if work.is_stale]
        current = self._current
        if not stale or current is None:
            return
        only = np.isin(np.arange(self._engine.slots), stale)
        state = self._engine.recompute(current, self._state, only)
        self._state = jax.block_until_ready(state)
        for slot in stale:
            self._live[slot].is_stale = False
        self._recomputed_tokens += int((self._records.filled[stale] - 1).sum())

    def _in_use(self) -> set[PolicyVersion]:
        """Versions that a sample has to end under, and the newest."""
        begun = [*self._live.values(), *(work for work in self._waiting if work.so_far is not None)]
        return {work.version for work in begun} | ({max(self._held)} if self._held else set())

    def _free_versions(self) -> None:
        self._held = {version: self._held[version] for version in self._held if version in self._in_use()}

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

    def _accept(self, start: Start) -> None:
        """Put the samples in the queue, or say why they cannot be."""
        if reason := self._admission.reason_against(start):
            for sample in start.samples:
                self._emit(SampleFailed(sample, self.name, reason), None)
            return
        self._waiting.extend(
            Work(
                sample,
                start.prompt,
                start.min_version,
                start.sampling or self._sampling,
                self._seed if start.seed is None else start.seed,
                self._stops + start.stop_tokens,
                start.penalties,
                start.drawn_as,
            )
            for sample in start.samples
        )

    def _refill(self) -> None:
        current = self._current
        if current is None or self._is_paused:
            return
        is_held = self._is_server and self._on_update == "drain" and self._store.latest() != current.version
        self._state, failed = self._admission.refill(self._state, current, is_held)
        self._rebuild()
        for work, reason in failed:
            self._emit(SampleFailed(work.sample, self.name, reason), None)

    def _cancel(self, samples: set[SampleId]) -> None:
        self._state = self._admission.cancel(self._state, samples)
        if not self._live:
            self._last_call_s = None

    def _give(self, sample: SampleId) -> Work | None:
        slot = next((slot for slot, work in self._live.items() if work.sample == sample), None)
        if slot is not None:
            self._state = self._admission.evict(self._state, slot)
        found = next((work for work in self._waiting if work.sample == sample), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def _reason_against(self, work: Work) -> str:
        """Why this host cannot go on with a sample of another; empty where it can."""
        if work.so_far is None:
            return ""
        mine = self._held.get(work.version)
        if mine is None or mine.digest != work.digest:
            held = ", ".join(f"{v} ({p.digest})" for v, p in self._held.items()) or "none"
            return (
                f"its KV is of version {work.version} ({work.digest}), and {self.name} holds {held}; move it "
                "to a host of the same version, or start it again"
            )
        if not self._engine.is_own(work.so_far.kv):
            return f"its KV lies in other pages than those of {self.name}; give both the same generation.*"
        return ""

    # --- results -------------------------------------------------------------------------------------------

    def _decode(self) -> list[ResultTokens]:
        """One call for each version in use: its own slots step, the others keep still."""
        slots, results = np.arange(self._engine.slots), []
        for version in sorted({work.version for work in self._live.values()}):
            own = [slot for slot, work in self._live.items() if work.version == version]
            only = np.isin(slots, own)
            self._state, sampled = self._engine.generate(self._held[version], self._state, only)
            results.append(sampled.convert_to_numpy())
        return results

    def _collect(self, results: list[ResultTokens]) -> None:
        """Copy what was sampled into the slots' records; emit the samples that ended; evict who must be."""
        now = time.perf_counter()
        if self._last_call_s is not None:
            self.gaps_s.append(now - self._last_call_s)
        before = self._records.filled.copy()
        for sampled in results:
            self._records.add(sampled)
        is_live, self._admission.free_pages = results[-1].is_live, results[-1].free_pages
        for slot in list(self._live):
            self._advance(slot, int(before[slot]), bool(is_live[slot]))
        self.generated_tokens += int((self._records.filled - before).sum())
        if any(sampled.is_starved.any() for sampled in results) and len(self._live) > 1:
            youngest = max(self._live, key=lambda slot: self._live[slot].place)
            self._state = self._admission.evict(self._state, youngest)
            self._evictions += 1
        if self._on_update == "pinned":
            self._free_versions()
        self._last_call_s = now if self._live else None

    def _advance(self, slot: int, before: int, is_live: bool) -> None:
        """Tell of a slot's new tokens, and of its sample's end if this was it."""
        work = self._live[slot]
        is_stopped = self._admission.end_at_text(slot, before)
        if is_stopped and is_live:
            self._state = self._engine.free_resource(slot, self._state)
        if self._on_tokens is not None and self._records.filled[slot] > before:
            self._on_tokens(work.sample, self._records.since(slot, before))
        if is_live and not is_stopped:
            return
        del self._live[slot]
        is_stopped |= self._records.last(slot) in work.stops
        reason = "stop" if is_stopped else "length"
        trajectory = self._records.trajectory(slot, work, reason, self._on_update)
        finished = SampleFinished(work.sample, self.name, trajectory.spans, reason, work.interruptions)
        self._emit(finished, trajectory)

    def _count(self) -> Statistics:
        current = self._current
        return Statistics(
            version=current.version if current else -1,
            digest=current.digest if current else "",
            slots=self._engine.slots,
            live=len(self._live),
            waiting=len(self._waiting),
            is_paused=self._is_paused,
            free_pages=self._admission.free_pages if self._live else self._engine.pages,
            pages=self._engine.pages,
            held_versions=tuple(sorted(self._held)),
            generated_tokens=self.generated_tokens,
            interruptions=self._interruptions,
            recomputed_tokens=self._recomputed_tokens,
            swaps=self._swaps,
            swap_s=self._swap_s,
            evictions=self._evictions,
            prefills=self._admission.prefills,
        )
