"""Admission: which waiting sample gets a free slot next, and the prefill of its prompt.

A prompt is prefilled once for all samples of its group that start under the same version. The prefill runs a
few chunks at a time between two decode calls, so that a long prompt does not stall live samples. When KV
pages run out, the sample that got its slot last is evicted: its KV moves to host memory, and its slot is
freed. Evicted samples resume before new ones start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from areal_jax.generation.commands import Start, Statistics, Work
from areal_jax.generation.engine import Engine, Prefilling
from areal_jax.generation.kept_turns import KeptTurns
from areal_jax.generation.live_slots import LiveSlots
from areal_jax.generation.slots import MAX_STOP_TOKENS
from areal_jax.observe.waits import Clock
from areal_jax.parallel.program_errors import OUT_OF_MEMORY
from areal_jax.types import PolicyVersion, SampleId, VersionedParams

Group = tuple[int, ...]

CHUNKS = 4
"""Maximum number of prompt chunks computed between two decode calls, for each free slot."""


def reason_against(engine: Engine, start: Start) -> str:
    """Returns why the engine cannot decode the samples of `start`; an empty string if it can."""
    count, vocab = len(start.prompt), engine.tokenizer.vocab_size
    if not 1 <= count < engine.length:
        return (
            f"a prompt of {count} tokens does not fit generation.length={engine.length}, which holds "
            "prompt and completion; raise generation.length or shorten the prompt"
        )
    strange = next((token for token in start.prompt if not 0 <= token < vocab), None)
    if strange is not None:
        return f"token id {strange} is outside the vocabulary of {vocab} ids; give ids from 0 to {vocab - 1}"
    if start.penalties is not None and not engine.has_penalties:
        return "this host belongs to a training run and applies no penalties or logit_bias; leave them out"
    if len(start.stop_tokens) > (most := MAX_STOP_TOKENS - len(engine.tokenizer.end_ids)):
        return f"{len(start.stop_tokens)} stop tokens are too many; give at most {most}"
    return ""


def reason_against_kv(
    engine: Engine, work: Work, held: Mapping[PolicyVersion, VersionedParams], name: str
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


class Admission:
    """The queue of samples that wait for a slot, and the slots in the range `slots` that they may get.

    It also keeps the KV of one prefilled prompt, from which all waiting samples of the prompt's group start.
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
        """`settle()` reads and records the results of all decode calls so far; for the rest see `Queues`."""
        self._kept, self._totals = kept, totals
        self._live, self._slots, self._clock, self._settle = live, slots, clock, settle
        self._engine = live.engine
        self.waiting: deque[Work] = deque()
        self._prompt: tuple[Group, Prefilling] | None = None
        """The prompt prefilled last, or in part; None once no waiting sample of its group needs it."""

    @property
    def _is_prefilling(self) -> bool:
        return self._prompt is not None and not self._prompt[1].is_complete

    @property
    def is_stalled(self) -> bool:
        """Whether samples wait, but none of this queue has a slot and no prompt is being prefilled."""
        return bool(self.waiting) and not self._is_prefilling and not self._own

    # --- in ------------------------------------------------------------------------------------------------

    def refill(
        self,
        current: VersionedParams,
        held: Mapping[PolicyVersion, VersionedParams],
        is_held: bool = False,
    ) -> Iterator[tuple[Work, str]]:
        """Assign free slots to waiting samples in order, up to the first one that cannot start yet.

        That is one that needs a newer version, more free KV pages, or more of its prompt's prefill: a call
        computes at most CHUNKS chunks for each free slot, or as many as needed if no sample is live.
        `current`: the parameters under which new samples start; `held`: version -> parameters under which
        episodes go on that began with them. If `is_held`, evicted samples resume, but no new sample starts.
        Yields (sample, reason) for each sample removed because its prompt exceeds device
        memory.
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
            if self._prompt is None or self._prompt[0] != work.group or self._is_prefilling:
                try:
                    chunks = self._prefill(work, params, chunks)
                except jax.errors.JaxRuntimeError as error:
                    # Out of memory concerns this prompt alone; any other error of the device ends the host.
                    if OUT_OF_MEMORY not in str(error):
                        raise
                    yield from self._give_up(work, error)
                    continue
                if self._is_prefilling:
                    break
            sibling = self._sibling(work, params)
            prompt = len(work.start.prompt), sibling is not None
            if not self._has_pages(free[0], self._engine.pages_for(*prompt)):
                break
            if not self._has_pages(free[0], self._live.pages_for(*prompt)):
                self._settle()  # the pages suffice only if the sibling is still live
                continue
            self._start(free.popleft(), self.waiting.popleft(), sibling, params)

    def _prefill(self, work: Work, params: VersionedParams, chunks: int) -> int:
        """Compute at most `chunks` more chunks of the prompt of `work`; returns how many remain."""
        with self._clock.doing("prefill"):
            if self._prompt is None or self._prompt[0] != work.group:
                self._prompt = work.group, self._begun(work, params.version)
            prompt = self._prompt[1]
            while not prompt.is_complete and chunks > 0:
                prompt, chunks = self._engine.prefill_next(params, prompt), chunks - 1
            self._prompt = work.group, prompt
            self._totals.prefills += not self._is_prefilling
        return chunks

    def _begun(self, work: Work, version: PolicyVersion) -> Prefilling:
        """Returns the prompt of `work` with the KV that an earlier turn of its episode has for it."""
        tokens = np.asarray(work.start.prompt, np.int32)
        found = self._kept.longest(work.sample, work.start.prompt, version) if work.start.turn else None
        reused = len(found.kv.common_prefix_tokens) if found is not None else 0
        work.reused = (found.turn, reused) if found is not None else ()
        self._totals.prefilled_tokens += len(tokens) - 1 - reused
        self._totals.reused_tokens += reused
        return self._engine.begin_prefill(tokens, len(tokens), found.kv if found is not None else None)

    def _give_up(self, work: Work, error: Exception) -> Iterator[tuple[Work, str]]:
        """Remove the waiting samples of the group of `work`, because its prompt exceeds device memory.

        Yields (sample, reason) for each; `error` is XLA's and part of the reason.
        """
        self._prompt = None
        reason = f"a prompt of {len(work.start.prompt)} tokens exceeds device memory; shorten it: {error}"
        for other in self._remove(lambda other: other.group == work.group):
            yield other, reason

    def _sibling(self, work: Work, params: VersionedParams) -> int | None:
        """Returns the slot of a live sample of the same group that can share its prompt's pages; or None.

        That prompt was prefilled under `params`. Always None for a client's request if slots are reserved.
        """
        # If requests shared pages, `free_beside` would count one for every slot and reserve too few.
        if work.start.is_request and self._engine.reserved_slots:
            return None
        wanted = work.group, work.start.is_request, params.version
        # The youngest sample is the least likely to have ended in decode calls that are not read yet.
        for slot, other in reversed(self._live.works.items()):
            if (other.group, other.start.is_request, other.prompt_version) == wanted:
                return slot
        return None

    def _has_pages(self, slot: int, pages: int) -> bool:
        """Whether so many KV pages are free for a sample in `slot`.

        Always True if the slot is reserved (it has its own pages) or if no sample of this queue has a slot
        (then one always fits).
        """
        # If no sample of this queue is live, all unreserved pages are free, and one sample always fits.
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

    def _start(self, slot: int, work: Work, sibling: int | None, params: VersionedParams) -> None:
        assert self._prompt is not None
        work.version, work.digest, work.prompt_version = params.version, params.digest, params.version
        self._live.insert(slot, work, self._prompt[1].prefix, sibling)
        # Release the prompt's KV once no waiting sample of the group needs it.
        if not any(other.group == work.group for other in self.waiting):
            self._prompt = None

    # --- out -----------------------------------------------------------------------------------------------

    def forget_prompt(self) -> None:
        """Discard the prefilled prompt: a newer version is adopted, and its KV belongs to an earlier one."""
        self._prompt = None

    def restart_unbegun(self) -> None:
        """Put live samples that have no sampled token yet back to the queue's front, and free their slots.

        Called when a newer version is adopted: their prompts are prefilled again, under that version.
        """
        unbegun = [slot for slot in self._own if not self._live.has_begun(slot)]
        # Each one is put in front of the others, so the sample that was first is put there last.
        for slot in reversed(unbegun):
            self.waiting.appendleft(self._live.free(slot))

    def evict(self, slot: int) -> None:
        """Free the slot, and put its sample, with its tokens and KV, at the front of the queue.

        The KV moves to host memory.
        """
        work = self._live.take_out(slot)
        work.move_to_host_memory()
        self.waiting.appendleft(work)

    def cancel(self, samples: set[SampleId]) -> None:
        """Drop these samples, waiting or live, and free their slots."""
        self._remove(lambda work: work.sample in samples)
        if self._prompt is not None and self._prompt[0] not in {work.group for work in self.waiting}:
            self._prompt = None
        for slot in self._own:
            if self._live.works[slot].sample in samples:
                self._live.free(slot)

    def take(self, sample: SampleId) -> Work | None:
        """Remove the sample and return it with its tokens and KV; returns None if it is not in this queue.

        The KV of a live sample stays in device memory, from which another host can copy it directly.
        """
        for slot in self._own:
            if self._live.works[slot].sample == sample:
                return self._live.take_out(slot)
        found = self._remove(lambda work: work.sample == sample)
        return found[0] if found else None

    def _remove(self, is_gone: Callable[[Work], bool]) -> list[Work]:
        gone = [work for work in self.waiting if is_gone(work)]
        for work in gone:
            self.waiting.remove(work)
        return gone
