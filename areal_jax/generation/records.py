"""What each slot's sample consists of so far: tokens, log-probs, versions and supports, on the host."""

from __future__ import annotations

import numpy as np

from areal_jax.generation.commands import SoFar, Tokens, Work
from areal_jax.generation.slots import Prefix, ResultTokens
from areal_jax.types import NOT_SAMPLED, Trajectory


class Records:
    """N slots of up to `length` tokens; K ids of a support where there are any."""

    def __init__(self, slots: int, length: int, support_size: int) -> None:
        shape = (slots, length)
        self.tokens = np.zeros(shape, np.int32)
        self.logp = np.zeros(shape, np.float32)
        self.versions = np.full(shape, NOT_SAMPLED, np.int32)
        self.support = np.full((*shape, support_size), -1, np.int32) if support_size else None
        self.filled = np.ones(slots, np.int64)

    def begin(self, slot: int, work: Work) -> None:
        """The slot's record is the prompt, or what the sample had so far."""
        so_far = work.so_far
        tokens = np.asarray(work.prompt) if so_far is None else so_far.tokens
        count = len(tokens)
        self.filled[slot] = count
        self.tokens[slot, :count] = tokens
        if so_far is not None:
            self.logp[slot, :count], self.versions[slot, :count] = so_far.logp, so_far.versions
            if self.support is not None and so_far.support is not None:
                self.support[slot, :count] = so_far.support

    def add(self, results: ResultTokens) -> None:
        """Append what a decode call sampled; a slot's valid steps are its first ones."""
        valid = results.valid
        slots, steps = np.nonzero(valid)
        at = self.filled[slots] + steps
        self.tokens[slots, at] = results.tokens[slots, steps]
        self.logp[slots, at] = results.logp[slots, steps]
        self.versions[slots, at] = results.version[slots]
        if self.support is not None:
            self.support[slots, at] = results.support[slots, steps]
        self.filled += valid.sum(axis=1)

    def last(self, slot: int) -> int:
        """The newest token."""
        return int(self.tokens[slot, self.filled[slot] - 1])

    def since(self, slot: int, start: int) -> Tokens:
        """The tokens from place `start` on, all of one decode call."""
        own = slice(start, int(self.filled[slot]))
        return Tokens(
            tuple(self.tokens[slot, own].tolist()),
            tuple(self.logp[slot, own].tolist()),
            int(self.versions[slot, start]),
        )

    def so_far(self, slot: int, kv: Prefix) -> SoFar:
        own = slice(0, int(self.filled[slot]))
        return SoFar(
            self.tokens[slot, own].copy(),
            self.logp[slot, own].copy(),
            self.versions[slot, own].copy(),
            None if self.support is None else self.support[slot, own].copy(),
            kv,
        )

    def trajectory(self, slot: int, work: Work, stop_reason: str, on_update: str) -> Trajectory:
        end = int(self.filled[slot])
        loss_mask = np.arange(end) >= len(work.prompt)
        support = None
        if self.support is not None:
            support = np.where(loss_mask[:, None], self.support[slot, :end], -1)
        return Trajectory(
            sample=work.sample,
            tokens=self.tokens[slot, :end].copy(),
            loss_mask=loss_mask,
            behavior_logp=np.where(loss_mask, self.logp[slot, :end], 0).astype(np.float32),
            versions=np.where(loss_mask, self.versions[slot, :end], NOT_SAMPLED).astype(np.int32),
            turn_ids=np.where(loss_mask, 0, -1).astype(np.int32),
            sampling=work.sampling,
            stop_reason=stop_reason,
            support=support,
            interruptions=work.interruptions,
            on_update=on_update,
        )
