"""The samples in an engine's slots: decode state on the device, and their tokens in host memory.

A step of a host calls `LiveSlots.decode`, then `LiveSlots.collect`, which may read an earlier call's results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from areal_jax.algorithms.sampling import Truncation
from areal_jax.generation.commands import HostSample, SoFar, Tokens
from areal_jax.generation.engine import Engine
from areal_jax.generation.programs import DecodeState, ResultTokens
from areal_jax.generation.slots import ExistingPrefix, Prefix
from areal_jax.observe.waits import Clock
from areal_jax.types import NOT_SAMPLED, PolicyVersion, Trajectory, VersionedParams


class DecodeCall(NamedTuple):
    """A decode call with results that the host has not read; the device may still be computing them."""

    results: list[ResultTokens]
    """One for each version that live samples had, in ascending order of versions."""
    works: dict[int, HostSample]
    """The samples in the slots when the call was made."""
    changes: int
    """How often a slot had got or lost its sample before the call."""
    inserted_pages: int
    """Number of KV pages that samples took at their insertion, in all inserts before the call."""


class SampleProgress(NamedTuple):
    """The result of a decode call for one sample.

    `stop_reason`: "stop" (a stop token or text) or "length" if the sample ended, so its slot is free; empty
    if it continues.
    """

    slot: int
    work: HostSample
    before: int
    """Number of the sample's tokens before the call, prompt included."""
    after: int
    """Number of its tokens after the call."""
    stop_reason: str
    kv: ExistingPrefix | None = None
    """If a turn of an episode ended, the KV of all tokens up to there but the last one, in host memory."""
    experts: np.ndarray | None = None
    """If the sample ended on an engine that keeps routes, `Trajectory.experts`."""


class Collected(NamedTuple):
    """The results of a decode call."""

    tokens: int
    """Number of tokens that it added to live samples."""
    progress: list[SampleProgress]
    is_starved: bool
    """Whether a live sample did not step for want of KV pages."""


class LiveSlots:
    """The live samples: `works` maps each occupied slot to its sample, the youngest assignment last.

    Slots below `engine.reserved_slots` serve clients' requests. `calls` are the decode calls whose results
    are not read yet, the oldest first; in these calls, samples of `works` may have ended on the device.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self._clock = engine, clock
        self.works: dict[int, HostSample] = {}
        self.records = Records(engine.slots, engine.length, engine.decode_steps, engine.support_size)
        self.calls: deque[DecodeCall] = deque()
        self._free_pages, self._inserted_pages, self._changes = engine.shared_pages, 0, 0
        self._truncations = [Truncation()] * engine.slots
        """What each slot's newest sample needs."""
        self._needed: tuple[int, Truncation, frozenset[int]] = 0, Truncation(), frozenset()
        self.state: DecodeState = engine.init_decode_state()

    def has_begun(self, slot: int) -> bool:
        """Whether the slot's sample has sampled a token."""
        return self.records.filled[slot] > len(self.works[slot].start.prompt)

    @property
    def free_pages(self) -> int:
        """Number of unreserved KV pages that are free, at least, once the device has finished all calls."""
        if not self.calls:
            return self._free_pages - self._inserted_pages
        # A sample's last token has no KV yet, so its KV ends at position `filled - 2`.
        shared = [slot for slot in self.works if slot >= self.engine.reserved_slots]
        last, page = self.records.filled[shared] - 2, self.engine.page_tokens
        reached = last + len(self.calls) * self.engine.decode_steps
        taken = int((reached // page - last // page).sum())
        return self._free_pages - self._inserted_pages - taken

    def pages_for(self, count: int, has_sibling: bool = False) -> int:
        """Returns how many free pages `insert` takes, at most, for `count` tokens."""
        # In a call that is not read yet the sibling may have ended; then all pages are copied.
        return self.engine.pages_for(count, has_sibling and not self.calls)

    @property
    def evictable(self) -> int | None:
        """The unreserved slot that got its sample last; None if fewer than two unreserved ones are used."""
        # Reserved slots have pages of their own: evicting one would free none for the others.
        shared = [slot for slot in self.works if slot >= self.engine.reserved_slots]
        return shared[-1] if len(shared) > 1 else None

    # --- in ------------------------------------------------------------------------------------------------

    def insert(self, slot: int, work: HostSample, prefix: Prefix, sibling: int | None = None) -> None:
        with self._clock.doing("prefill"):
            engine, count = self.engine, int(prefix.true_length)
            start, sample = work.start, work.sample
            request = engine.request(
                sample=sample if start.drawn_as is None else sample._replace(ordinal=start.drawn_as),
                seed=work.seed,
                sampling=work.sampling,
                prompt_tokens=len(start.prompt),
                stop_tokens=work.stops,
                penalties=start.penalties,
                segment=start.segment,
                keeps_pages=start.turn is not None or engine.keeps_routes,
            )
            self.state = engine.insert(prefix, self.state, slot, request=request, sibling=sibling)
        # Reserved slots take pages that were never counted as free.
        if slot >= engine.reserved_slots:
            self._inserted_pages += self.pages_for(count, sibling is not None)
        self.records.begin(slot, work)
        self.works[slot], self._truncations[slot] = work, Truncation.of(work.sampling)
        self._changes += 1

    def resume(self, slot: int, work: HostSample) -> None:
        """Put a half-decoded sample, with its tokens and KV, into the free slot.

        If its KV is of an older version (`work.is_stale`), call `rebuild` before the next decode call.
        """
        assert work.so_far is not None
        self.insert(slot, work, work.so_far.kv)
        # Its pages may differ from the prefilled prompt's, so no sibling may share them.
        work.so_far, work.prompt_version = None, -1

    # --- out -----------------------------------------------------------------------------------------------

    def free(self, slot: int) -> HostSample:
        """Free the slot and return its sample; drops the tokens sampled in the slot."""
        self.state = self.engine.free_resource(slot, self.state)
        self._changes += 1
        return self.works.pop(slot)

    def take_out(self, slot: int) -> HostSample:
        """Free the slot and return its sample; its `so_far` has the tokens, and the KV on the device.

        If the sample has no sampled token yet, `so_far` stays None: it starts again from its prompt.
        """
        work, filled = self.works[slot], int(self.records.filled[slot])
        # A sample without a sampled token has only its prompt's KV, and the prompt is prefilled again.
        if self.has_begun(slot):
            kv = self.engine.extract(slot, self.state, filled)
            kv = Prefix(kv.cache, np.asarray(kv.tokens), np.asarray(kv.true_length))
            work.so_far = SoFar(self.records.of(slot).copy(), kv)
        return self.free(slot)

    # --- a step --------------------------------------------------------------------------------------------

    def rebuild(self, params: Mapping[PolicyVersion, VersionedParams]) -> int:
        """Rebuild the KV of live samples that is missing or of an older version than theirs (`is_stale`).

        `params`: the parameters by version. Returns the number of tokens rebuilt.
        """
        stale = [slot for slot, work in self.works.items() if work.is_stale]
        for version in sorted({self.works[slot].version for slot in stale}):
            own = [slot for slot in stale if self.works[slot].version == version]
            only = np.isin(np.arange(self.engine.slots), own)
            self.state = jax.block_until_ready(self.engine.recompute(params[version], self.state, only))
        for slot in stale:
            work = self.works[slot]
            work.is_stale, work.rebuilds = False, (*work.rebuilds, int(self.records.filled[slot]))
        return int((self.records.filled[stale] - 1).sum())

    def decode(self, params: Mapping[PolicyVersion, VersionedParams], ahead: int = 0) -> None:
        """Make a decode call, and wait until the device has finished all calls but the newest `ahead`.

        For each version that live samples have, it runs the program once, which steps only these samples'
        slots. `params`: the parameters by version.
        """
        with self._clock.doing("decode"):
            results = self._generate(params)
            call = DecodeCall(results, dict(self.works), self._changes, self._inserted_pages)
            self.calls.append(call)
            if len(self.calls) > ahead:
                self.calls[-1 - ahead].results[-1].data.block_until_ready()

    def _generate(self, params: Mapping[PolicyVersion, VersionedParams]) -> list[ResultTokens]:
        works, results = self.works, []
        truncation, _ = self._needs()
        versions = sorted({work.version for work in works.values()})
        for version in versions:
            only = None
            if len(versions) > 1:
                # Calls of other versions do not change these slots, so the order of versions changes no bit.
                only = np.zeros(self.engine.slots, bool)
                only[[slot for slot, work in works.items() if work.version == version]] = True
            self.state, sampled = self.engine.generate(params[version], self.state, only, truncation)
            results.append(sampled)
        return results

    def _needs(self) -> tuple[Truncation, frozenset[int]]:
        """Returns the truncations that live samples need, and the slots of those with stop texts."""
        if self._needed[0] != self._changes:  # else they are those of the last call
            truncation = Truncation.joined({self._truncations[slot] for slot in self.works})
            with_stop_texts = frozenset(slot for slot, work in self.works.items() if work.sampling.stop)
            self._needed = self._changes, truncation, with_stop_texts
        return self._needed[1:]

    def collect(self, with_all: bool) -> Collected:
        """Read and record the results of the oldest of `calls`, and free the slots of samples that ended.

        The result has the Progress of each sample that was live then and ended; if `with_all`, also of those
        that continue.
        """
        call = self.calls.popleft()
        results = [sampled.rows for sampled in call.results]
        works, slots, before = self.works, slice(None), self.records.filled.copy()
        if call.changes != self._changes:
            # A slot that was freed since may have another sample, which these results do not concern.
            works = {slot: work for slot, work in works.items() if call.works.get(slot) is work}
            slots = list(works)
        for rows in results:
            self.records.add(rows, slots)
        # Every program returns the state of all slots, so the last one has the final state of each.
        is_live = results[-1]["is_live"]
        self._free_pages = int(results[-1]["free_pages"][0]) + call.inserted_pages
        is_starved = any(np.count_nonzero(rows["is_starved"][slots]) for rows in results)
        # A loop over all slots would be most of the time that a call takes in Python; few samples end in it.
        _, with_stop_texts = self._needs()
        chosen = with_stop_texts.union((is_live == 0).nonzero()[0].tolist())
        own = [slot for slot in works if with_all or slot in chosen] if with_all or chosen else []
        progress = [self._advance(slot, int(before[slot]), bool(is_live[slot])) for slot in own]
        return Collected(int((self.records.filled - before).sum()), progress, is_starved)

    def _advance(self, slot: int, before: int, is_live: bool) -> SampleProgress:
        """Returns the Progress of a sample; if it ended, also at a stop text, frees its slot."""
        work, kv, experts = self.works[slot], None, None
        is_stopped = self._end_at_text(slot, before)
        filled = int(self.records.filled[slot])
        is_over = is_stopped or not is_live
        if work.start.turn is not None and is_over:
            kv = self.engine.extract_existing(slot, self.state, self.records.of(slot)["tokens"])
        if self.engine.keeps_routes and is_over:
            experts = self.engine.routes(slot, self.state, filled)
        # Only the host matches stop texts.
        if kv is not None or experts is not None or (is_live and is_stopped):
            self.free(slot)
        elif not is_live:
            del self.works[slot]  # `generate` has released its pages
            self._changes += 1
        if not is_live:
            is_stopped |= int(self.records.of(slot)["tokens"][-1]) in work.stops
        reason = "stop" if is_stopped else "" if is_live else "length"
        return SampleProgress(slot, work, before, filled, reason, kv, experts)

    def _end_at_text(self, slot: int, before: int) -> bool:
        """Cut the slot's record after the first token that completes a stop text; returns whether one did.

        Tokens from position `before` on are of the last decode call. A stop text may begin in earlier tokens:
        as many of these are therefore searched too as the longest stop text has bytes, and 8 more for tokens
        without text.
        """
        work, end = self.works[slot], int(self.records.filled[slot])
        texts = work.sampling.stop
        if not texts or end == before:
            return False
        reach = max(len(text.encode()) for text in texts) + 8  # bytes, and room for tokens without text
        decode, own = self.engine.tokenizer.decode, self.records.of(slot)["tokens"]
        for now in range(before + 1, end + 1):
            said = decode(own[max(len(work.start.prompt), now - reach) : now].tolist())
            if any(text in said for text in texts):
                self.records.filled[slot] = now
                return True
        return False


def record_dtype(support_size: int) -> np.dtype:
    """Returns the dtype of a token's record, which has the token's support of up to `support_size` ids."""
    return np.dtype(
        [("tokens", "i4"), ("logp", "f4"), ("versions", "i4"), ("support", "i4", (support_size,))]
    )


class Records:
    """The tokens of the sample in each slot, with log-probs, versions and supports, in host memory.

    A token's support is the ids that truncation left to draw from. `rows` is (slots, length + steps), a
    structured array with an entry per token; slot i uses the first `filled[i]` of its entries, prompt
    included, and what the others hold has no meaning. `steps`: tokens that a decode call samples per slot.
    """

    def __init__(self, slots: int, length: int, steps: int, support_size: int) -> None:
        # What is not sampled, such as the prompt, has no version, log-prob or support.
        blank = np.array((0, 0.0, NOT_SAMPLED, np.full(support_size, -1)), record_dtype(support_size))
        self.rows = np.full((slots, length + steps), blank)
        self._blank, self._has_support = self.rows[0].copy(), support_size > 0
        self.filled = np.ones(slots, np.int64)
        # An entry that is copied as bytes takes a tenth of the time of one that is copied column by column.
        self._call = np.full((slots, steps), blank)
        as_bytes = f"V{blank.itemsize}"
        self._rows_as_bytes = self.rows.reshape(-1).view(as_bytes)
        self._call_as_bytes = self._call.view(as_bytes)
        self._first = np.arange(slots)[:, None] * (length + steps) + np.arange(steps)
        self._ones = np.ones(steps, np.int32)

    def begin(self, slot: int, work: HostSample) -> None:
        """Start the slot's record with the prompt, or with the tokens of a half-decoded sample."""
        self.filled[slot] = count = len(work.start.prompt if work.so_far is None else work.so_far.rows)
        self.rows[slot, :count] = self._blank[:count]
        if work.so_far is None:
            self.rows["tokens"][slot, :count] = work.start.prompt
        else:
            self.rows[slot, :count] = work.so_far.rows

    def add(self, results: np.ndarray, taken: list[int] | slice) -> None:
        """Append the valid tokens of a decode call, `ResultTokens.rows`, to the records of the slots `taken`.

        In each slot, valid tokens come before invalid ones.
        """
        # All slots are written at once: entries that are not valid lie beyond `filled`, and the slot's next
        # valid ones replace them.
        call = self._call
        call["tokens"], call["logp"] = results["tokens"], results["logp"]
        call["versions"] = results["version"][:, None]
        if self._has_support:
            call["support"] = results["support"]
        self._rows_as_bytes[self._first + self.filled[:, None]] = self._call_as_bytes
        self.filled[taken] += (results["valid"] @ self._ones)[taken]

    def of(self, slot: int, start: int = 0) -> np.ndarray:
        """Returns a view of the slot's entries of `rows` that are in use, from token `start` on."""
        return self.rows[slot, start : self.filled[slot]]

    def since(self, slot: int, start: int) -> Tokens:
        """Returns the slot's tokens from position `start` on; they must be of one decode call."""
        own = self.of(slot, start)
        tokens, logp = own["tokens"].tolist(), own["logp"].tolist()
        return Tokens(tuple(tokens), tuple(logp), int(own["versions"][0]))

    def trajectory(self, ended: SampleProgress, on_update: str) -> Trajectory:
        """Returns the trajectory of a sample that ended. `on_update`: as generation.on_update."""
        work, own = ended.work, self.of(ended.slot)
        # The prompt was not sampled: it has no turn, and no loss.
        loss_mask = np.arange(len(own)) >= len(work.start.prompt)
        return Trajectory(
            sample=work.sample,
            tokens=own["tokens"].copy(),
            loss_mask=loss_mask,
            behavior_logp=own["logp"].copy(),
            versions=own["versions"].copy(),
            turn_ids=np.where(loss_mask, 0, -1).astype(np.int32),
            sampling=work.sampling,
            stop_reason=ended.stop_reason,
            experts=ended.experts,
            support=own["support"].copy() if own["support"].size else None,
            interruptions=work.interruptions,
            on_update=on_update,
        )
