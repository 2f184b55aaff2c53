"""A generation host: the project's only decode loop.

Between two decode calls a host takes commands, adopts newer weights if a version is committed, and gives free
slots to waiting samples; it decodes a few tokens, then reports the samples that ended. Weights may change in
the middle of a sample: `on_update` (see Host) decides what happens to its KV, and every token keeps the
version and log-prob it was sampled with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Queue
from threading import TIMEOUT_MAX
from typing import Any, Literal

from areal_jax.control import events as e
from areal_jax.generation import commands as c
from areal_jax.generation.admission import Admission, reason_against
from areal_jax.generation.commands import InboxCommand, Statistics
from areal_jax.generation.engine import Engine
from areal_jax.generation.live_slots import LiveSlots, SampleProgress
from areal_jax.observe.waits import REMEDY, Clock, Timeline, WaitTimeout, get
from areal_jax.parallel.mesh import platform_of
from areal_jax.types import PolicyVersion, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.store import ParamReader, load_newer

Emit = Callable[[e.Event, Trajectory | None], None]

POLL_S = 0.001


def next_command(inbox: Queue[InboxCommand], waiter: str, deadline_s: float, clock: Clock) -> InboxCommand:
    """Returns the next command of an idle host, `waiter`; raises WaitTimeout after `deadline_s` seconds."""
    what = "samples from the control plane"
    return get(inbox, waiter=waiter, what=what, deadline_s=deadline_s, clock=clock)


class Host:
    """Decodes samples on one engine; reports each event by `emit(event, trajectory)`.

    `trajectory` is None except for SampleFinished and TurnFinished. `store` supplies the weights versions.
    Every use of parameters and device is inside `with turn():`, which waits while the trainer uses a shared
    device. `on_update` selects what happens to live samples when a newer version is committed. recompute:
    their KV is rebuilt under the new version. keep: they continue with their old KV. pinned: each ends under
    the version that it began with; the host keeps the parameters of at most `versions` versions for that.
    drain: the host adopts the new version only once the live samples, and those that may start under the old
    one, have ended.
    `on_tokens(sample, tokens)` is called after each decode call with the sample's new tokens, before the
    sample's end is reported; if the engine has reserved slots, only for samples of clients' requests.
    `calls_ahead`: as generation.calls_ahead. `adopts_on_command`: whether the host adopts a version only on a
    Serve command; it then also reports KVShort.
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
        adopts_on_command: bool = False,
        on_tokens: Callable[[SampleId, c.Tokens], None] | None = None,
        turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
        calls_ahead: int | Literal["auto"] = "auto",
        kept_tokens: int | None = None,
        clock: Clock | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        """`seed`, `sampling`: for samples of a Start without them. `deadline_s`: longest wait, see `run`.

        `stops`: ids that end a sample; None: the tokenizer's end ids. `kept_tokens`: as episode.kept_tokens.
        """
        self.name, self.inbox = name, Queue[InboxCommand]()
        self._engine, self._store, self._emit, self._turn = engine, store, emit, turn
        self._seed, self._sampling, self._on_update = seed, sampling, on_update
        self._most_versions, self._on_tokens = versions, on_tokens
        self._clock, self._deadline_s = clock or Timeline(None).clock(name), deadline_s
        self._stops = engine.tokenizer.end_ids if stops is None else stops
        self._slots = LiveSlots(engine, self._clock)
        is_alone = turn is nullcontext and platform_of(engine.mesh) != "cpu"
        self._calls_ahead = int(is_alone) if calls_ahead == "auto" else calls_ahead
        self._totals, self._statistics = Statistics(slots=engine.slots, pages=engine.pages), Statistics()
        self._admission = Admission(
            self._slots,
            self._clock,
            settle=self._collect,
            wake=lambda: self.inbox.put(c.Wake()),
            kept_tokens=kept_tokens,
            totals=self._totals,
        )
        self._held: dict[PolicyVersion, VersionedParams] = {}
        self._to_serve: PolicyVersion | None = -1 if adopts_on_command else None
        """The newest version that a Serve command named, -1 before; None: the host adopts every version."""
        self._is_paused = False
        self._last_call_s: float | None = None
        self._stalled_since_s: float | None = None
        self.generated_tokens = 0
        self.tokens_per_s: float | None = None
        self.gaps_s: deque[float] = deque(maxlen=100_000)
        """Seconds between the results of two successive decode calls, if samples were live in between."""

    # --- the loop ------------------------------------------------------------------------------------------

    def run(self, is_idle_bounded: bool = True) -> None:
        """Decode until a Stop without samples arrives.

        Raises WaitTimeout if a version that samples wait for, or a command for an idle host, does not arrive
        within the constructor's `deadline_s`. If `is_idle_bounded` is False, an idle host waits for a command
        without a deadline, because the process that receives the commands has one.
        """
        deadline_s = self._deadline_s if is_idle_bounded else TIMEOUT_MAX
        while self.take_commands(
            None if self.has_work else next_command(self.inbox, self.name, deadline_s, self._clock)
        ):
            self.step()

    @property
    def has_work(self) -> bool:
        has_samples = bool(self._slots.works) or any(queue.waiting for queue in self._admission.both)
        return has_samples and not self._is_paused

    def statistics(self) -> Statistics:
        """Returns the statistics as of the last step or command; callable from any thread."""
        return self._statistics

    def step(self) -> None:
        """Adopt a newer version if there is one, give free slots to waiting samples, and decode a few tokens.

        Raises WaitTimeout if the version that waiting samples need is not committed within `deadline_s`.
        """
        with self._turn():
            self._adopt_newer()
            # After the adoption: samples would otherwise start under a version that is replaced at once.
            self._refill()
            is_idle = self._is_paused or not self._slots.works
            if not is_idle:
                self._slots.decode(self._held, self._calls_ahead)
        self._collect(self._calls_ahead)
        self._wait_for_version(is_idle)
        self._statistics = self._count()

    def take_commands(self, first: InboxCommand | None = None) -> bool:
        """Execute `first`, if not None, then all commands in the inbox.

        Returns False at once for a Stop without samples, which ends the loop; else True.
        """
        while first is not None or not self.inbox.empty():
            command, first = first or self.inbox.get_nowait(), None
            if isinstance(command, c.Stop) and not command.samples:
                self._collect()
                return False
            self._obey(command)
        return True

    def _obey(self, command: InboxCommand) -> None:
        match command:
            case c.Start():
                self._accept(command)
            case c.Expect(samples, min_version):
                self._admission.expected |= dict.fromkeys(samples, min_version)
            case c.Stop(samples):
                self._admission.cancel(samples)
                if not self._slots.works:
                    self._last_call_s = None
            case c.Pause() | c.Unpause():
                self._collect()
                self._is_paused = isinstance(command, c.Pause)
                # `gaps_s` measures decoding: a pause does not count as a gap.
                self._last_call_s = None
            case e.Serve(_, version):
                self._to_serve = version
            case c.HandOver(samples, to):
                self._collect()
                to(self._admission.hand_over(samples))
            case c.TakeOver(works, answer):
                answer(self._admission.take_over(works, self._held, self.name))
            case e.TakeBack(samples):
                self._admission.take_back(samples)
        self._statistics = self._count()

    # --- weights -------------------------------------------------------------------------------------------

    @property
    def _current(self) -> VersionedParams | None:
        return self._held[max(self._held)] if self._held else None

    def _adopt_newer(self) -> None:
        latest, former = self._store.latest(), self._current
        if latest is None or (former is not None and latest <= former.version):
            return
        if self._to_serve is not None and self._to_serve <= (former.version if former is not None else -1):
            return
        if self._on_update == "drain" and former is not None and self._admission.owes(former.version):
            return
        # At the bound no version is adopted; the newest one follows once an older set of parameters is freed.
        if self._on_update == "pinned" and len(self._in_use()) >= self._most_versions:
            return
        self._collect()
        with self._clock.doing("swap"):
            started = time.perf_counter()
            than = former.version if former is not None else -1
            loaded = load_newer(self._store, self._engine.param_shardings, than)
            if loaded is None:
                return
            interrupted = self._put_in_force(self._engine.load_params(loaded), former)
            if former is not None:
                self._totals.swaps += 1
                self._totals.swap_s += time.perf_counter() - started
        self._emit(e.HostAdopted(self.name, loaded.version, loaded.digest, interrupted), None)

    def _put_in_force(self, value: VersionedParams, former: VersionedParams | None) -> int:
        """Make `value` the version under which new samples start; `former` is the one before, None at first.

        Returns the number of half-decoded training samples that continue under `value`.
        """
        is_changed = former is not None and former.digest != value.digest
        is_rebuilt = is_changed and self._on_update == "recompute"
        for queue in self._admission.both:
            # A sample without a token has nothing to keep, and a fresh prefill costs as much as a rebuild.
            queue.adopt(is_restarting=is_changed and self._on_update != "pinned")
        self._held[value.version] = value
        if self._on_update == "pinned":
            self._free_versions()
            return 0
        self._held = {value.version: value}
        self._admission.kept.adopt(value.version, not is_changed or self._on_update == "keep")
        evicted = self._admission.evicted
        begun = [work for slot, work in self._slots.works.items() if self._slots.has_begun(slot)] + evicted
        for work in begun:
            work.interruptions += 1
            work.is_stale |= is_rebuilt
        for work in [*self._slots.works.values(), *evicted]:
            work.version, work.digest = value.version, value.digest
        self._totals.recomputed_tokens += self._slots.rebuild(self._held)
        self._totals.interruptions += len(begun)
        # Clients' requests make no control events, so they do not count as interrupted rollouts.
        return sum(not work.start.is_request for work in begun)

    def _in_use(self) -> set[PolicyVersion]:
        """Returns the versions to keep: those of samples that it decodes or keeps, and the newest one."""
        return self._admission.versions | ({max(self._held)} if self._held else set())

    def _free_versions(self) -> None:
        self._held = {version: self._held[version] for version in self._held if version in self._in_use()}

    def _wait_for_version(self, is_idle: bool) -> None:
        """If waiting samples need a newer version and the step decoded nothing (`is_idle`), sleep POLL_S s.

        Raises WaitTimeout if they have waited longer than `deadline_s`.
        """
        stalled = [] if self._is_paused else [q.waiting[0] for q in self._admission.both if q.is_stalled]
        if not stalled:
            self._stalled_since_s = None
            return
        self._stalled_since_s = self._stalled_since_s or time.monotonic()
        if time.monotonic() > self._stalled_since_s + self._deadline_s:
            raise WaitTimeout(
                f"{self.name} ends, because it waited {self._deadline_s:g} s for version "
                f"{stalled[0].start.min_version} from the trainer, while the store's latest is "
                f"{self._store.latest()}; {REMEDY}"
            )
        if is_idle:
            with self._clock.doing("wait: a version from the trainer"):
                time.sleep(POLL_S)

    # --- slots and results ---------------------------------------------------------------------------------

    def _accept(self, start: c.Start) -> None:
        """Queue the samples of `start`; if they cannot be decoded, emit SampleFailed for each."""
        if reason := reason_against(self._engine, start):
            for sample in start.samples:
                self._fail(sample, reason)
            return
        works = start.works(self._sampling, self._seed, self._stops)
        self._admission.accept(works, is_decoding=self._current is not None)

    def _refill(self) -> None:
        current = self._current
        if current is None or self._is_paused:
            return
        is_draining = self._on_update == "drain" and self._store.latest() != current.version
        held = self._held if self._on_update == "pinned" else {}
        failed = self._admission.refill(current, held, is_draining)
        self._totals.recomputed_tokens += self._slots.rebuild(self._held)
        for work, reason in failed:
            self._fail(work.sample, reason)

    def _fail(self, sample: SampleId, reason: str) -> None:
        # The sample's group starts again or is dropped, so no turn follows. The Cancel says so, too, but is
        # lost if the controller ends now.
        self._admission.forget((sample,))
        self._emit(e.SampleFailed(sample, self.name, reason), None)

    def _collect(self, ahead: int = 0) -> None:
        """Record and report the results of all decode calls but the newest `ahead`; of all if none is live.

        If KV pages ran out, evict the youngest sample in unreserved slots.
        """
        is_starved = False
        # Only after the last call are the tokens of the sample to evict known.
        while len(self._slots.calls) > (ahead if self._slots.works and not is_starved else 0):
            tokens, progress, is_starved = self._slots.collect(with_all=self._on_tokens is not None)
            now = time.perf_counter()
            if self._last_call_s is not None:
                self.gaps_s.append(now - self._last_call_s)
            self.generated_tokens += tokens
            for each in progress:
                self._report(each)
            self._last_call_s = now if self._slots.works else None
        if is_starved and (youngest := self._slots.evictable) is not None:
            self._admission.queue_of(self._slots.works[youngest]).evict(youngest)
            self._totals.evictions += 1
            if self._to_serve is not None:
                self._emit(e.KVShort(self.name), None)
        # The samples that ended may have been the last ones of their version.
        if self._on_update == "pinned":
            self._free_versions()

    def _report(self, progress: SampleProgress) -> None:
        """Call `on_tokens` with a sample's new tokens; if it ended, emit SampleFinished or TurnFinished."""
        records, (slot, work, before, after, reason, kv, _) = self._slots.records, progress
        is_heard = work.start.is_request or not self._engine.reserved_slots
        if self._on_tokens is not None and is_heard and after > before:
            self._on_tokens(work.sample, records.since(slot, before))
        if reason:
            trajectory = records.trajectory(progress, self._on_update)
            if kv is not None:
                self._admission.kept.keep(work, kv)
            self._emit(self._ended(work, trajectory), trajectory)

    def _ended(self, work: c.HostSample, trajectory: Trajectory) -> e.Event:
        """Returns the event of a sample's end, or of the end of its turn."""
        start = work.start
        of_both = dict[str, Any](
            sample=work.sample,
            host=self.name,
            spans=trajectory.spans,
            stop_reason=trajectory.stop_reason,
            interruptions=work.interruptions,
            rebuilds=work.rebuilds,
        )
        if start.turn is None:
            return e.SampleFinished(**of_both)
        return e.TurnFinished(**of_both, segment=start.segment, turn=start.turn, reused=work.reused)

    def _count(self) -> Statistics:
        current = self._current
        # Once per call: `dataclasses.replace` would take several times as long.
        counts: dict[str, Any] = vars(self._totals) | dict[str, Any](
            version=current.version if current else -1,
            digest=current.digest if current else "",
            live=len(self._slots.works),
            waiting=sum(len(queue.waiting) for queue in (*self._admission.both, self._admission.preparing)),
            is_paused=self._is_paused,
            free_pages=self._slots.free_pages if self._slots.works else self._engine.shared_pages,
            held_versions=tuple(sorted(self._held)),
            generated_tokens=self.generated_tokens,
            kept_tokens=self._admission.kept.tokens,
        )
        return Statistics(**counts)
