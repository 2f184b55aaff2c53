"""Admission: the samples of a host that have no slot, and which of them gets a free slot next.

A prompt is prefilled once for all samples of its group that start under the same version, and together with
the next waiting prompts that fit into the same calls. The prefill runs a few chunks at a time between two
decode calls, so that a long prompt does not stall live samples. When KV
pages run out, the sample that got its slot last is evicted: its KV moves to host memory, and its slot is
freed. Evicted samples resume before new ones start.

The KV of an episode's ended turns is kept in host memory: the next turn computes that of its new tokens only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from areal_jax.algorithms.sampling import Truncation
from areal_jax.generation.commands import HostSample, Start, Statistics
from areal_jax.generation.engine import Engine, Prefilling, reason_against_length
from areal_jax.generation.live_slots import LiveSlots
from areal_jax.generation.programs import DecodeState
from areal_jax.generation.slots import MAX_STOP_TOKENS, ExistingPrefix, Prefix
from areal_jax.observe.waits import Clock
from areal_jax.parallel.program_errors import OUT_OF_MEMORY
from areal_jax.types import PolicyVersion, SampleId, VersionedParams

CHUNKS = 4
"""Maximum number of prompt chunks computed between two decode calls, for each free slot."""

UNCOMPILED = "its decode program could not be compiled: "
"""How the reason of a sample begins that failed so; to ask again is of no use."""


def reason_against(engine: Engine, start: Start) -> str:
    """Returns why the engine cannot decode the samples of `start`; an empty string if it can."""
    if reason := reason_against_length(len(start.prompt), engine.length):
        return reason
    vocab = engine.tokenizer.vocab_size
    strange = next((token for token in start.prompt if not 0 <= token < vocab), None)
    if strange is not None:
        return f"token id {strange} is outside the vocabulary of {vocab} ids; give ids from 0 to {vocab - 1}"
    if start.penalties is not None and not engine.has_penalties:
        return "this host belongs to a training run and applies no penalties or logit_bias; leave them out"
    if len(start.stop_tokens) > (most := MAX_STOP_TOKENS - len(engine.tokenizer.end_ids)):
        return f"{len(start.stop_tokens)} stop tokens are too many; give at most {most}"
    return ""


def reason_against_kv(
    engine: Engine, work: HostSample, held: Mapping[PolicyVersion, VersionedParams], name: str
) -> str:
    """Returns why this host cannot continue `work`, a sample of another host; an empty string if it can.

    `engine`, `held` (version -> parameters) and `name` are this host's. It must hold the parameters that
    computed the sample's KV, and have the same layout of KV pages.
    """
    if work.so_far is None:
        return ""
    mine = held.get(work.version)
    if mine is None or mine.digest != work.digest:
        versions = ", ".join(f"{v} ({p.digest})" for v, p in held.items()) or "none"
        return (
            f"the sample's KV was computed under version {work.version} (digest {work.digest}), but {name} "
            f"holds {versions}; move the sample to a host with that version, or start it again"
        )
    support_size = work.so_far.rows["support"].shape[1]
    if not engine.is_own(work.so_far.kv) or support_size != engine.support_size:
        return (
            f"the sample's KV pages or records have another layout than those of {name}; start both hosts "
            "with the same generation.* settings"
        )
    return ""


def prompt_key(work: HostSample) -> tuple[Any, ...]:
    """Returns what the samples that share a prefilled prompt have in common."""
    sample, start = work.sample, work.start
    if start.turn is None:
        return sample.ordinal, sample.attempt
    # Workflows may add to the prompt before the first turn.
    own = (0, start.prompt) if start.turn == 0 else (start.turn, sample.member)
    return sample.ordinal, sample.attempt, *own


class KeptTurn(NamedTuple):
    kv: ExistingPrefix
    version: PolicyVersion
    """The version under which the KV can be continued."""


class Reused(NamedTuple):
    """The KV with which a turn begins."""

    turn: int
    """The turn at the end of which it was kept."""
    kv: ExistingPrefix


class KeptTurns:
    """The kept turns of a host's episodes."""

    def __init__(self, room: int | None = None) -> None:
        """`room`: maximum number of tokens of all turns, the shortest is dropped first; None: no maximum."""
        self._room = room
        self._turns: dict[tuple[SampleId, int], KeptTurn] = {}
        self.tokens = 0
        """Number of tokens of all kept turns."""
        self.episodes: dict[SampleId, PolicyVersion] = {}
        """The version of the last turn of each sample that had one here and is not forgotten."""

    def keep(self, work: HostSample, kv: ExistingPrefix) -> None:
        """Keeps the KV of a turn that ended, in place of the one that it goes on from."""
        turn = work.start.turn
        assert turn is not None
        if work.reused:
            former, reused = work.reused
            before = self._turns.get((work.sample, former))
            if before is not None and _length(before) == reused:
                self._drop((work.sample, former))
        self._drop((work.sample, turn))
        self._turns[work.sample, turn] = kept = KeptTurn(kv, work.version)
        self.tokens += _length(kept)
        self.episodes[work.sample] = work.version
        while self._room is not None and self.tokens > self._room:
            self._drop(min(self._turns, key=lambda one: _length(self._turns[one])))

    def longest(self, sample: SampleId, prompt: Sequence[int], version: PolicyVersion) -> Reused | None:
        """Returns the KV, of `version`, of the most tokens with which `prompt` begins; None if there is none.

        `prompt`: all tokens before the turn that is to be decoded. The last one is never among those.
        """
        tokens, found, most = np.asarray(prompt[:-1], np.int32), None, 0
        for (one, turn), kept in self._turns.items():
            if one == sample and kept.version == version:
                known = kept.kv.common_prefix_tokens[: len(tokens)]
                common = len(known) if (same := known == tokens[: len(known)]).all() else int(same.argmin())
                if common > most:
                    found, most = Reused(turn, ExistingPrefix(kept.kv.cache, known[:common])), common
        return found

    def first(self, sample: SampleId, turn: int, tokens: int) -> ExistingPrefix:
        """Returns the KV of the first `tokens` tokens of a kept turn; KeyError if it is not kept."""
        kv = self._turns[sample, turn].kv
        return ExistingPrefix(kv.cache, kv.common_prefix_tokens[:tokens])

    def forget(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        for one in [one for one in self._turns if one[0] in gone]:
            self._drop(one)
        self.episodes = {one: version for one, version in self.episodes.items() if one not in gone}

    def adopt(self, version: PolicyVersion, is_kv_kept: bool) -> None:
        """Goes on with another version: under it, KV of earlier versions is continued or dropped."""
        if not is_kv_kept:
            self._turns, self.tokens = {}, 0
        self._turns = {one: kept._replace(version=version) for one, kept in self._turns.items()}

    def _drop(self, one: tuple[SampleId, int]) -> None:
        if (kept := self._turns.pop(one, None)) is not None:
            self.tokens -= _length(kept)


def _length(kept: KeptTurn) -> int:
    return len(kept.kv.common_prefix_tokens)


class Prompts(NamedTuple):
    """Prompts that a queue prefills together."""

    keys: tuple[tuple[Any, ...] | None, ...]
    """The `prompt_key` of each; None: no waiting sample needs it any more."""
    prefilling: Prefilling


class SlotQueue:
    """The queue of samples that wait for a slot, and the slots in the range `slots` that they may get.

    It also keeps the KV of the first prompts, from which the waiting samples of each prompt's group start.
    """

    def __init__(
        self,
        live: LiveSlots,
        slots: range,
        clock: Clock,
        settle: Callable[[], None],
        *,
        kept: KeptTurns,
        totals: Statistics,
    ) -> None:
        """For the arguments see `Admission`."""
        self._kept, self._totals = kept, totals
        self._live, self._slots, self._clock, self._settle = live, slots, clock, settle
        self._engine = live.engine
        self.waiting: deque[HostSample] = deque()
        self.begun: Prompts | None = None
        """The prompts that are prefilled in part."""
        self.prefixes: dict[tuple[Any, ...], Prefix] = {}
        """The prefilled prompts that waiting samples need, by key."""

    @property
    def is_stalled(self) -> bool:
        """Whether samples wait, but none of this queue has a slot and no prompt is being prefilled."""
        return bool(self.waiting) and self.begun is None and not self._own

    # --- in ------------------------------------------------------------------------------------------------

    def refill(
        self,
        current: VersionedParams,
        held: Mapping[PolicyVersion, VersionedParams],
        is_held: bool = False,
    ) -> Iterator[tuple[HostSample, str]]:
        """Assign free slots to waiting samples in order, up to the first one that cannot start yet.

        That is one that needs a newer version, more free KV pages, or more of its prompt's prefill: a call
        computes at most CHUNKS chunks for each free slot, or as many as needed if no sample is live.
        `current`: the parameters under which new samples start; `held`: version -> parameters under which
        episodes go on that began with them. If `is_held`, evicted samples resume, but no new sample starts.
        Yields (sample, reason) for each sample removed because its prompt exceeds device memory.
        """
        if not self.waiting:
            return
        free = deque(slot for slot in self._slots if slot not in self._live.works)
        # If no sample is live, a prefill stalls nothing, and prompts may take all the chunks they need.
        chunks = CHUNKS * len(free) if self._live.works else self._engine.length
        while free and self.waiting and self.waiting[0].start.min_version <= current.version:
            # Strictly in order: a sample that lacks pages blocks the queue; long ones would starve otherwise.
            work = self.waiting[0]
            if work.so_far is not None:
                pages = self._engine.pages_for(len(work.so_far.rows))
                if not self._has_pages(free[0], pages + self._reserved_pages):
                    break
                self._live.resume(free.popleft(), self.waiting.popleft())
                continue
            if is_held:
                break
            params = held.get(self._kept.episodes.get(work.sample, -1), current)
            if prompt_key(work) not in self.prefixes:
                try:
                    chunks = self._prefill(self._starting(current, held), params, chunks)
                except jax.errors.JaxRuntimeError as error:
                    # Out of memory concerns this prompt alone; any other error of the device ends the host.
                    if OUT_OF_MEMORY not in str(error):
                        raise
                    yield from self._give_up(work, error)
                    continue
                if self.begun is not None:
                    break
            sibling = self._sibling(work, params)
            prompt = len(work.start.prompt), sibling is not None
            if not self._has_pages(free[0], self._engine.pages_for(*prompt)):
                break
            if not self._has_pages(free[0], self._live.pages_for(*prompt)):
                self._settle()  # the pages suffice only if the sibling is still live
                continue
            self._start(free.popleft(), self.waiting.popleft(), sibling, params)

    def _prefill(self, starting: Iterator[HostSample], params: VersionedParams, chunks: int) -> int:
        """Compute at most `chunks` more chunks of the first sample's prompt; returns how many remain.

        `starting`: the first sample, and other samples with prompts that may be prefilled together with it.
        """
        with self._clock.doing("prefill"):
            if self.begun is None or prompt_key(self.waiting[0]) not in self.begun.keys:
                self.begun = self._begin(starting, params.version)
            keys, prefilling = self.begun
            while not prefilling.is_complete and chunks > 0:
                prefilling, chunks = self._engine.prefill_next(params, prefilling), chunks - 1
            self.begun = Prompts(keys, prefilling)
            if prefilling.is_complete:
                found = dict(zip(keys, self._engine.prefixes(prefilling), strict=True))
                self.prefixes |= {key: prefix for key, prefix in found.items() if key is not None}
                self._totals.prefills += len(keys)
                self.begun = None
        return chunks

    def _starting(
        self, current: VersionedParams, held: Mapping[PolicyVersion, VersionedParams]
    ) -> Iterator[HostSample]:
        """Yields the first waiting sample, and a sample of each prompt behind it that is not prefilled.

        They can all start under the same version. For the arguments see `refill`.
        """
        keys, versions = {*self.prefixes}, self._kept.episodes
        wanted = held.get(versions.get(self.waiting[0].sample, -1), current)
        for work in self.waiting:
            if work.start.min_version > current.version:
                return
            key, own = prompt_key(work), held.get(versions.get(work.sample, -1), current)
            if work.so_far is None and key not in keys and own is wanted:
                keys.add(key)
                yield work

    def _begin(self, starting: Iterator[HostSample], version: PolicyVersion) -> Prompts:
        """Returns the first prompt, and those behind it that its calls have rows left for.

        Each has the KV that an earlier turn of its episode has for it.
        """
        engine, rows, pages, room = self._engine, 0, 0, 0
        works: list[HostSample] = []
        existing: list[ExistingPrefix | None] = []
        for work in starting:
            prompt = work.start.prompt
            found = self._kept.longest(work.sample, prompt, version) if work.start.turn else None
            reused = len(found.kv.common_prefix_tokens) if found is not None else 0
            rows += engine.prefill_rows_for(len(prompt), reused)
            pages += engine.pages_for(len(prompt))
            if not works:
                room = rows + -rows % engine.prefill_rows
            elif rows > room or pages > engine.prefill_pages:
                break
            work.reused = (found.turn, reused) if found is not None else ()
            self._totals.prefilled_tokens += len(prompt) - 1 - reused
            self._totals.reused_tokens += reused
            works.append(work)
            existing.append(found.kv if found is not None else None)
        prompts = [np.asarray(work.start.prompt, np.int32) for work in works]
        return Prompts(tuple(map(prompt_key, works)), engine.begin_prefill(prompts, existing))

    def _give_up(self, work: HostSample, error: Exception) -> Iterator[tuple[HostSample, str]]:
        """Remove the waiting samples of the group of `work`, because its prompt exceeds device memory.

        Yields (sample, reason) for each; `error` is XLA's and part of the reason.
        """
        self.begun = None
        reason = f"a prompt of {len(work.start.prompt)} tokens exceeds device memory; shorten it: {error}"
        key = prompt_key(work)
        for other in self._remove(lambda other: prompt_key(other) == key):
            yield other, reason

    def _sibling(self, work: HostSample, params: VersionedParams) -> int | None:
        """Returns the slot of a live sample of the same group that can share its prompt's pages; or None.

        That prompt was prefilled under `params`. Always None for a client's request if slots are reserved.
        """
        # If requests shared pages, `free_beside` would count one for every slot and reserve too few.
        if work.start.is_request and self._engine.reserved_slots:
            return None
        wanted = prompt_key(work), work.start.is_request, params.version
        # The youngest sample is the least likely to have ended in decode calls that are not read yet.
        for slot, other in reversed(self._live.works.items()):
            if other.sample.ordinal != work.sample.ordinal:
                continue
            if (prompt_key(other), other.start.is_request, other.prompt_version) == wanted:
                return slot
        return None

    def _has_pages(self, slot: int, pages: int) -> bool:
        """Whether so many KV pages are free for a sample in `slot`.

        Always True if the slot is reserved (it has its own pages) or if no sample of this queue has a slot
        (then one always fits).
        """
        if slot < self._engine.reserved_slots or not self._own:
            return True
        return pages <= self._live.free_pages

    @property
    def _reserved_pages(self) -> int:
        """How many KV pages must stay free for live samples' next call when an evicted sample resumes."""
        return -(-len(self._own) * self._engine.decode_steps // self._engine.page_tokens)

    @property
    def _own(self) -> list[int]:
        """The slots of this queue that hold a sample, in the order in which they got it."""
        return [slot for slot in self._live.works if slot in self._slots]

    def _start(self, slot: int, work: HostSample, sibling: int | None, params: VersionedParams) -> None:
        work.version, work.digest, work.prompt_version = params.version, params.digest, params.version
        key = prompt_key(work)
        self._live.insert(slot, work, self.prefixes[key], sibling)
        # Release the prompt's KV once no waiting sample of the group needs it.
        # Of thousands that wait, few have this ordinal, and comparing prompts takes longer.
        group = (other for other in self.waiting if other.sample.ordinal == work.sample.ordinal)
        if key not in map(prompt_key, group):
            del self.prefixes[key]

    # --- out -----------------------------------------------------------------------------------------------

    def adopt(self, is_restarting: bool) -> None:
        """Discard the prefilled prompts: their KV belongs to an earlier version than the one adopted now.

        If `is_restarting`, live samples without a sampled token go back to the queue's front, and their
        prompts are prefilled under the new version.
        """
        self.begun, self.prefixes = None, {}
        unbegun = [slot for slot in self._own if is_restarting and not self._live.has_begun(slot)]
        # Each one is put in front of the others, so the sample that was first is put there last.
        for slot in reversed(unbegun):
            self.waiting.appendleft(self._live.free(slot))

    def evict(self, slot: int) -> None:
        """Free the slot, and put its sample at the front of the queue, with its KV in host memory."""
        work = self._live.take_out(slot)
        work.move_to_host_memory()
        self.waiting.appendleft(work)

    def cancel(self, samples: set[SampleId]) -> None:
        """Drop these samples, waiting or live, and free their slots."""
        self._remove(lambda work: work.sample in samples)
        for slot in self._own:
            if self._live.works[slot].sample in samples:
                self._live.free(slot)

    def take(self, sample: SampleId) -> HostSample | None:
        """Remove the sample and return it with its tokens and KV; returns None if it is not in this queue.

        The KV of a live sample stays in device memory, from which another host can copy it directly.
        """
        for slot in self._own:
            if self._live.works[slot].sample == sample:
                return self._live.take_out(slot)
        found = self._remove(lambda work: work.sample == sample)
        return found[0] if found else None

    def _remove(self, is_gone: Callable[[HostSample], bool]) -> list[HostSample]:
        gone = [work for work in self.waiting if is_gone(work)]
        for work in gone:
            self.waiting.remove(work)
        if gone and (self.prefixes or self.begun is not None):
            needed = set(map(prompt_key, self.waiting))
            self.prefixes = {key: prefix for key, prefix in self.prefixes.items() if key in needed}
            if self.begun is not None:
                keys = tuple(key if key in needed else None for key in self.begun.keys)
                self.begun = self.begun._replace(keys=keys) if any(keys) else None
        return gone


class Preparing:
    """The samples that wait for their decode program; one program is compiled at a time.

    Each program also has the truncations of those before it, so that it serves the samples of all of them
    together; so there are at most three besides the first. `wake()` is called once a compilation has ended.
    """

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        self.waiting: list[HostSample] = []
        self._is_compiling = False
        self._failure: Exception | None = None

    def is_needed(self, work: HostSample) -> bool:
        """Whether the sample is a client's, and no program that is compiled can decode it."""
        needed = Truncation.of(work.sampling)
        return work.start.is_request and self._engine.jitted.compiled_for(needed) is None

    def cancel(self, samples: Sequence[SampleId]) -> None:
        self.waiting = [work for work in self.waiting if work.sample not in samples]

    def step(
        self, params: VersionedParams, state: DecodeState
    ) -> tuple[list[HostSample], list[tuple[HostSample, str]]]:
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
            needed = [Truncation.of(work.sampling) for work in self.waiting]
            program = Truncation.joined([*self._engine.jitted.compiled, *needed])
            compile_ = self._engine.jitted.compiler(program, params.params, params.version, state)
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


class Admission:
    """A host's samples that have no slot, and the choice of those that get one.

    There are two queues: one of rollouts, and one of clients' requests, which have the reserved slots.
    """

    def __init__(
        self,
        live: LiveSlots,
        clock: Clock,
        *,
        settle: Callable[[], None],
        wake: Callable[[], None],
        kept_tokens: int | None,
        totals: Statistics,
    ) -> None:
        """`settle()` reads and records the results of all decode calls so far; `wake()`: see `Preparing`.

        `kept_tokens`: as episode.kept_tokens. `totals`: the host's Statistics, in which prefills are counted.
        """
        self._live, self._clock = live, clock
        reserved, slots = live.engine.reserved_slots, live.engine.slots
        self.kept = KeptTurns(kept_tokens)
        queue = lambda slots: SlotQueue(live, slots, clock, settle, kept=self.kept, totals=totals)  # noqa: E731
        self.both = self.rollouts, self.requests = (
            queue(range(reserved, slots)),
            queue(range(reserved or slots)),
        )
        self.preparing = Preparing(live.engine, wake)
        self.expected: dict[SampleId, PolicyVersion] = {}
        """Each episode that begins here and has not asked for its first turn -> the turn's oldest version."""
        self._handed_over: dict[SampleId, HostSample] = {}
        """The samples that another host was offered, until the control plane says which host has them."""

    def refill(
        self, current: VersionedParams, held: Mapping[PolicyVersion, VersionedParams], is_draining: bool
    ) -> list[tuple[HostSample, str]]:
        """Assigns free slots to waiting samples, see `SlotQueue.refill`.

        While the host drains, new requests wait: they would keep slots live, and the drain would not end.
        Returns the samples that cannot be decoded, each with the reason.
        """
        ready, unprepared = self.preparing.step(current, self._live.state)
        for work in ready:
            self._add(work)
        rollouts = self.rollouts.refill(current, held)
        return [*unprepared, *rollouts, *self.requests.refill(current, {}, is_held=is_draining)]

    def queue_of(self, work: HostSample) -> SlotQueue:
        return self.requests if work.start.is_request else self.rollouts

    @property
    def evicted(self) -> list[HostSample]:
        """The half-decoded waiting samples: evicted on this host, or taken over from another one."""
        return [work for queue in self.both for work in queue.waiting if work.so_far is not None]

    @property
    def versions(self) -> set[PolicyVersion]:
        """The versions of half-decoded samples, live or not, and of open episodes that had a turn here."""
        # Samples that were handed over count, because the host may have to take them back.
        offered = [work for work in self._handed_over.values() if work.so_far is not None]
        works = [*self._live.works.values(), *self.evicted, *offered]
        return {work.version for work in works} | {*self.kept.episodes.values()}

    def owes(self, version: PolicyVersion) -> bool:
        """Whether samples must still end under `version` before on_update=drain adopts a newer one.

        True while a sample is live or evicted, while an episode that had a turn here is open, or if the first
        waiting rollout, or an episode's first turn that is still to come, may start under `version`.
        """
        next_ones = [work.start.min_version for work in list(self.rollouts.waiting)[:1]]
        is_owed = min([*next_ones, *self.expected.values()], default=version + 1) <= version
        return is_owed or bool(self._live.works or self.evicted or self.kept.episodes)

    # --- in and out ----------------------------------------------------------------------------------------

    def accept(self, works: Sequence[HostSample], is_decoding: bool) -> None:
        """Puts new samples in their queues, or lets them wait for their decode program.

        `is_decoding`: whether the host has a version; before, a compilation stops no other sample.
        """
        for work in works:
            if is_decoding and self.preparing.is_needed(work):
                self.preparing.waiting.append(work)
            else:
                self._add(work)

    def _add(self, work: HostSample) -> None:
        """Puts a sample behind the others of its queue; a later turn of an episode before all new samples.

        First turns come in any order, and go before new samples that need a newer version than they do.
        """
        waiting, start = self.queue_of(work).waiting, work.start
        self.expected.pop(work.sample, None)
        later = (
            place
            for place, other in enumerate(waiting)
            if other.so_far is None
            and not other.start.turn
            and (start.turn or other.start.min_version > start.min_version)
        )
        waiting.insert(next(later, len(waiting)), work)

    def _put_first(self, works: Sequence[HostSample]) -> None:
        for work in reversed(works):
            self.queue_of(work).waiting.appendleft(work)

    def cancel(self, samples: Sequence[SampleId]) -> None:
        """Drops these samples, wherever they are, and what is kept of their earlier turns."""
        for queue in self.both:
            queue.cancel(set(samples))
        self.preparing.cancel(samples)
        for sample in samples:
            self._handed_over.pop(sample, None)
        self.forget(samples)

    def forget(self, samples: Sequence[SampleId]) -> None:
        """Drops what is kept of these samples' earlier turns; their first turns are not expected any more."""
        self.kept.forget(samples)
        for sample in samples:
            self.expected.pop(sample, None)

    # --- to and from other hosts ---------------------------------------------------------------------------

    def hand_over(self, samples: Iterable[SampleId]) -> list[HostSample]:
        """Removes the samples from queues and slots; returns those found, with tokens and KV.

        The results of all decode calls must be recorded. Each sample is kept until `cancel` or `take_back`.
        """
        with self._clock.doing("move"):
            found = [queue.take(sample) for sample in samples for queue in self.both]
            works = [work for work in found if work is not None]
            self._handed_over |= {work.sample: work for work in works}
            # Copies: the other host changes what it takes over, and this one may have to take its own back.
            return [replace(work) for work in works]

    def take_back(self, samples: Iterable[SampleId]) -> None:
        """Puts samples that were handed over before all others in their queue."""
        kept = self._handed_over
        self._put_first([kept.pop(sample) for sample in samples if sample in kept])

    def take_over(
        self, works: Sequence[HostSample], held: Mapping[PolicyVersion, VersionedParams], name: str
    ) -> str:
        """Puts another host's samples before all others in their queue.

        Returns why they are refused, or "". `held` (version -> parameters) and `name` are this host's.
        """
        for work in works:
            if reason := reason_against_kv(self._live.engine, work, held, name):
                return reason
        with self._clock.doing("move"):
            # What finds no slot waits in host memory, as evicted samples do.
            for work in works[max(0, self._live.engine.slots - len(self._live.works)) :]:
                work.move_to_host_memory()
        self._put_first(works)
        return ""
