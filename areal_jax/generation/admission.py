"""Who gets a slot next: prompts in chunks, siblings on shared pages, samples that come back.

A prompt is prefilled once for all of its group's samples that start under one version, a few chunks between
two decode calls, so that a long one does not stall the others.
When pages run out the youngest sample leaves its slot with its KV, and comes back before anybody new.
"""

from __future__ import annotations

from collections import deque

import jax
import numpy as np

from areal_jax.generation.commands import Start, Work
from areal_jax.generation.engine import Engine, Prefilling
from areal_jax.generation.records import Records
from areal_jax.generation.slots import MAX_STOP_TOKENS, DecodeState, Prefix
from areal_jax.observe.waits import Clock
from areal_jax.types import SampleId, VersionedParams

Failed = list[tuple[Work, str]]

CHUNKS = 4
"""Of prompts, between two decode calls, for each slot that is free."""

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""What XLA calls an allocation that fails."""


class Admission:
    """The samples of a host, `live` by slot and `waiting` in order, and the prompts that they share."""

    def __init__(self, engine: Engine, records: Records, clock: Clock) -> None:
        self._engine, self._records, self._clock = engine, records, clock
        self.live: dict[int, Work] = {}
        self.waiting: deque[Work] = deque()
        self.free_pages = engine.pages
        self.prefills = 0
        self._prefix: tuple[tuple[int, int], Prefix] | None = None
        self._prefilling: tuple[tuple[int, int], Prefilling] | None = None
        self._epoch = 0
        self._places = 0

    @property
    def is_prefilling(self) -> bool:
        return self._prefilling is not None

    @property
    def begun(self) -> list[Work]:
        """Samples that have a token of their own, in a slot or out of it."""
        live = [w for slot, w in self.live.items() if self._records.filled[slot] > len(w.prompt)]
        return live + [work for work in self.waiting if work.so_far is not None]

    @property
    def has_begun(self) -> bool:
        return bool(self.live) or any(work.so_far is not None for work in self.waiting)

    # --- in ------------------------------------------------------------------------------------------------

    def reason_against(self, start: Start) -> str:
        """Why these samples cannot be served; empty where they can."""
        engine, count = self._engine, len(start.prompt)
        if not 1 <= count < engine.length:
            return (
                f"a prompt of {count} tokens does not fit generation.length={engine.length}, which holds "
                "prompt and completion; raise generation.length or shorten the prompt"
            )
        vocab = engine.get_tokenizer().vocab_size
        strange = next((token for token in start.prompt if not 0 <= token < vocab), None)
        if strange is not None:
            return f"token id {strange} is outside of the vocabulary of {vocab} ids; give ids from 0 on"
        if start.penalties is not None and not engine.has_penalties:
            return "this host serves no penalties: they would bias what is trained on"
        if len(start.stop_tokens) >= MAX_STOP_TOKENS:
            return f"{len(start.stop_tokens)} stop tokens; a request has room for {MAX_STOP_TOKENS - 1}"
        return ""

    def refill(
        self, state: DecodeState, current: VersionedParams, is_held: bool
    ) -> tuple[DecodeState, Failed]:
        """Samples into free slots, as far as slots, pages and chunks go; and those that failed on the way.

        Held, only those that have begun.
        """
        free = deque(slot for slot in range(self._engine.slots) if slot not in self.live)
        chunks = CHUNKS * len(free) if self.live else self._engine.length
        failed: Failed = []
        while free and self.waiting and self.waiting[0].min_version <= current.version:
            work = self.waiting[0]
            if work.so_far is not None:
                if not self._has_pages(len(work.so_far.tokens), spare=self._soon):
                    break
                state = self._resume(state, free.popleft(), self.waiting.popleft())
                continue
            if is_held:
                break
            if self._prefix is None or self._prefix[0] != work.group:
                try:
                    chunks = self._prefill(work, current, chunks)
                except jax.errors.JaxRuntimeError as error:
                    if OUT_OF_MEMORY not in str(error):
                        raise
                    failed += self._give_up(work, error)
                    continue
                if self._prefilling is not None:
                    break
            sibling = self._sibling(work, current)
            if not self._has_pages(len(work.prompt), sibling is not None):
                break
            state = self._start(state, free.popleft(), self.waiting.popleft(), sibling, current)
        return state, failed

    def _prefill(self, work: Work, params: VersionedParams, chunks: int) -> int:
        """Chunks left after the prompt of `work` was computed as far as they go."""
        with self._clock.doing("prefill"):
            if self._prefilling is None or self._prefilling[0] != work.group:
                tokens = np.asarray(work.prompt, np.int32)
                self._prefilling = work.group, self._engine.begin_prefill(tokens, len(tokens))
            prompt = self._prefilling[1]
            while self._engine.is_prefilling(prompt) and chunks > 0:
                prompt, chunks = self._engine.prefill_next(params, prompt), chunks - 1
            if self._engine.is_prefilling(prompt):
                self._prefilling = work.group, prompt
            else:
                self._prefix, self._prefilling = (work.group, self._engine.end_prefill(prompt)), None
                self.prefills += 1
        return chunks

    def _give_up(self, work: Work, error: Exception) -> Failed:
        """The group whose prompt the device could not compute; others go on."""
        self._prefilling = None
        reason = f"its prompt of {len(work.prompt)} tokens could not be computed: {error}"
        gone = [other for other in self.waiting if other.group == work.group]
        for other in gone:
            self.waiting.remove(other)
        return [(other, reason) for other in gone]

    def _sibling(self, work: Work, current: VersionedParams) -> int | None:
        """A live slot whose full prompt pages are those of the prefix, to the bit."""
        wanted = work.group, self._epoch, current.version
        found = (s for s, other in self.live.items() if (other.group, other.epoch, other.version) == wanted)
        return next(found, None)

    def _has_pages(self, count: int, has_sibling: bool = False, spare: int = 0) -> bool:
        return not self.live or self._engine.pages_for(count, has_sibling) + spare <= self.free_pages

    @property
    def _soon(self) -> int:
        """Pages that the live ones may ask for in a call: who left for want of one comes back beside them."""
        return -(-len(self.live) * self._engine.decode_steps // self._engine.page_tokens)

    def _start(
        self, state: DecodeState, slot: int, work: Work, sibling: int | None, current: VersionedParams
    ) -> DecodeState:
        assert self._prefix is not None
        work.epoch, work.version, work.digest = self._epoch, current.version, current.digest
        state = self._insert(state, slot, work, self._prefix[1], sibling)
        if not any(other.group == work.group for other in self.waiting):
            self._prefix = None
        return state

    def _resume(self, state: DecodeState, slot: int, work: Work) -> DecodeState:
        """Back into a slot, with the KV it left with; where that is stale, the caller rebuilds it."""
        assert work.so_far is not None
        state = self._insert(state, slot, work, work.so_far.kv, None)
        work.so_far, work.epoch = None, -1
        return state

    def _insert(
        self, state: DecodeState, slot: int, work: Work, prefix: Prefix, sibling: int | None
    ) -> DecodeState:
        with self._clock.doing("prefill"):
            engine, count = self._engine, int(prefix.true_length)
            request = engine.request(
                work.key, work.seed, work.sampling, len(work.prompt), work.stops, work.penalties
            )
            state = engine.insert(prefix, state, slot, request=request, sibling=sibling)
        self.free_pages -= engine.pages_for(count, sibling is not None)
        self._places += 1
        work.place = self._places
        self._records.begin(slot, work)
        self.live[slot] = work
        return state

    # --- out -----------------------------------------------------------------------------------------------

    def forget_prompts(self) -> None:
        """What was prefilled is of a former version: nobody starts from it any more."""
        self._prefix = self._prefilling = None
        self._epoch += 1

    def restart_unbegun(self, state: DecodeState) -> DecodeState:
        """Live samples without a token wait again, first in line: they start under the new version."""
        unbegun = [s for s, work in self.live.items() if self._records.filled[s] == len(work.prompt)]
        for slot in sorted(unbegun, key=lambda slot: -self.live[slot].place):
            state = self._engine.free_resource(slot, state)
            self.waiting.appendleft(self.live.pop(slot))
        return state

    def evict(self, state: DecodeState, slot: int) -> DecodeState:
        """Out of its slot with all it has, into the host's memory, and first in line."""
        work, filled = self.live.pop(slot), int(self._records.filled[slot])
        if filled > len(work.prompt):
            kv = self._engine.extract(slot, state, filled)
            work.so_far = self._records.so_far(slot, jax.device_get(kv))
        self.waiting.appendleft(work)
        return self._engine.free_resource(slot, state)

    def cancel(self, state: DecodeState, samples: set[SampleId]) -> DecodeState:
        """Forget these samples, wherever they are; their slots are free."""
        kept = [work for work in self.waiting if work.sample not in samples]
        self.waiting.clear()
        self.waiting.extend(kept)
        groups = {work.group for work in kept}
        if self._prefix is not None and self._prefix[0] not in groups:
            self._prefix = None
        if self._prefilling is not None and self._prefilling[0] not in groups:
            self._prefilling = None
        for slot in [slot for slot, work in self.live.items() if work.sample in samples]:
            state = self._engine.free_resource(slot, state)
            del self.live[slot]
        return state

    # --- ends ----------------------------------------------------------------------------------------------

    def end_at_text(self, slot: int, before: int) -> bool:
        """Cut the slot's record behind the token that completes a stop text, if one of the new ones does.

        A text may begin in earlier tokens; every token holds at least a byte of text, or none at all.
        """
        work, end = self.live[slot], int(self._records.filled[slot])
        texts = work.sampling.stop
        if not texts or end == before:
            return False
        reach = max(len(text.encode()) for text in texts) + 8  # room for tokens without text
        decode, own = self._engine.get_tokenizer().decode, self._records.tokens[slot]
        for now in range(before + 1, end + 1):
            said = decode(own[max(len(work.prompt), now - reach) : now].tolist())
            if any(text in said for text in texts):
                self._records.filled[slot] = now
                return True
        return False
