"""What an engine compiles: pure functions of parameters and decode state, of fixed shapes.

What is in the other slots changes no bit of a slot: rows are computed side by side, masks decide which of
them count, and KV is visited in fixed blocks in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.generation.pages import PageTable
from areal_jax.generation.sampling import draw, penalized, sample_key, uniforms
from areal_jax.generation.slots import MAX_STOP_TOKENS, DecodeState, Prefix, Request, SlotPenalties
from areal_jax.models.attention import KVPages, PagedKernel
from areal_jax.models.exact import paged_attention
from areal_jax.models.model import Model, Params


class _Sampled(NamedTuple):
    """Of one step, a slot each; scanned, so with k in front."""

    tokens: Array
    is_valid: Array
    logp: Array
    support: Array | None


@dataclass(frozen=True)
class Programs:
    """The sizes that fix every shape, and the functions over them."""

    model: Model
    slots: int
    length: int
    decode_steps: int
    page_tokens: int
    pages: int
    """In the pool."""
    kv_dtype: str
    prefill_chunk: int
    support_size: int
    has_penalties: bool
    kernel: PagedKernel | None = None
    """Of decode steps; blocks without one, as in prefill and recomputation."""

    @property
    def pages_per_slot(self) -> int:
        return self.length // self.page_tokens

    def kv_pages(self, count: int) -> KVPages:
        return self.model.kv_pages(count, self.page_tokens, self.kv_dtype)

    def empty_state(self) -> DecodeState:
        n, vocab = self.slots, self.model.config.vocab_size
        bias, counts = jnp.zeros((n, vocab)), jnp.zeros((n, vocab), jnp.int32)
        return DecodeState(
            cache=self.kv_pages(self.pages),
            pages=PageTable.empty(n, self.pages_per_slot, self.pages),
            tokens=jnp.zeros((n, self.length), jnp.int32),
            filled=jnp.ones(n, jnp.int32),
            is_live=jnp.zeros(n, bool),
            key=jnp.zeros((n, 2), jnp.uint32),
            temperature=jnp.ones(n),
            top_k=jnp.zeros(n, jnp.int32),
            top_p=jnp.ones(n),
            min_p=jnp.zeros(n),
            limit=jnp.full(n, self.length, jnp.int32),
            stop_tokens=jnp.full((n, MAX_STOP_TOKENS), -1, jnp.int32),
            penalties=SlotPenalties(jnp.ones(n), jnp.zeros(n), bias, counts) if self.has_penalties else None,
        )

    def release(self, state: DecodeState, slot: Array) -> DecodeState:
        pages = state.pages.released(jnp.arange(self.slots) == slot)
        return state.replace(pages=pages, is_live=state.is_live.at[slot].set(False))

    def prefill(self, params: Params, cache: KVPages, tokens: Array, start: Array, count: Array) -> KVPages:
        positions = start + jnp.arange(self.prefill_chunk)[None]
        table = 1 + jnp.arange(cache.k.shape[1] - 1)[None]
        room = table.shape[1] * self.page_tokens
        attend = paged_attention(
            self.model.config, table, jnp.minimum(positions, room - 1), positions < count
        )
        return self.model.hidden(params, tokens, positions, attend, cache)[1]

    def insert(
        self, state: DecodeState, prefix: Prefix, slot: Array, r: Request, sibling: Array
    ) -> DecodeState:
        last = (jnp.asarray(prefix.true_length) - 1) // self.page_tokens  # the page of the last token
        shared = jnp.where(sibling >= 0, last, 0)
        is_mine = jnp.arange(self.slots) == slot
        pages = state.pages.released(is_mine).sharing(slot, jnp.maximum(sibling, 0), shared)
        places = jnp.arange(self.pages_per_slot)
        pages, is_served = pages.with_pages(is_mine[:, None] & (places <= last))
        held = prefix.cache.k.shape[1] - 1
        own = jnp.where(places[:held] >= shared, pages.table[slot, :held], 0)
        state = state.replace(
            cache=jax.tree.map(lambda to, of: to.at[:, own].set(of[:, 1:]), state.cache, prefix.cache),
            pages=pages,
            tokens=state.tokens.at[slot].set(prefix.tokens),
            filled=state.filled.at[slot].set(prefix.true_length),
            is_live=state.is_live.at[slot].set((prefix.true_length < r.limit) & is_served[slot]),
            key=state.key.at[slot].set(sample_key(*r.numbers)),
            temperature=state.temperature.at[slot].set(r.temperature),
            top_k=state.top_k.at[slot].set(r.top_k),
            top_p=state.top_p.at[slot].set(r.top_p),
            min_p=state.min_p.at[slot].set(r.min_p),
            limit=state.limit.at[slot].set(r.limit),
            stop_tokens=state.stop_tokens.at[slot].set(r.stop_tokens),
        )
        return (
            state if r.penalty is None else state.replace(penalties=_penalized_slot(state, slot, prefix, r))
        )

    def extract(self, state: DecodeState, slot: Array, pages: int) -> Prefix:
        table = jnp.concatenate([jnp.zeros(1, jnp.int32), state.pages.table[slot, :pages]])
        cache = jax.tree.map(lambda leaf: leaf[:, table], state.cache)
        return Prefix(cache, state.tokens[slot], state.filled[slot])

    def generate(
        self, params: Params, version: Array, state: DecodeState, only: Array
    ) -> tuple[DecodeState, Int[Array, "N columns"]]:
        was_live = state.is_live
        last = jnp.minimum(state.filled + self.decode_steps, state.limit) - 2  # written in this call
        reached = jnp.arange(self.pages_per_slot) <= last[:, None] // self.page_tokens
        pages, is_served = state.pages.with_pages(reached & (was_live & only)[:, None])
        state = state.replace(pages=pages)
        one_step = partial(self._one_step, params, only & is_served)
        state, sampled = jax.lax.scan(one_step, state, None, self.decode_steps)
        state = state.replace(pages=state.pages.released(was_live & ~state.is_live))

        def column(values: Array) -> Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), self.slots)[:, None]

        columns = [
            sampled.tokens.T,
            sampled.is_valid.T.astype(jnp.int32),
            state.filled[:, None],
            jax.lax.bitcast_convert_type(sampled.logp.T, jnp.int32),
            column(version),
            column(state.is_live),
            column(was_live & only & ~is_served),
            column(state.pages.free_count),
        ]
        if sampled.support is not None:
            columns.append(jnp.moveaxis(sampled.support, 0, 1).reshape(self.slots, -1))
        return state, jnp.concatenate(columns, axis=1)

    def _one_step(
        self, params: Params, steps: Bool[Array, " N"], state: DecodeState, _: None
    ) -> tuple[DecodeState, _Sampled]:
        going, slots = state.is_live & steps, jnp.arange(self.slots)
        at = state.filled - 1
        fed = jnp.take_along_axis(state.tokens, at[:, None], axis=1)
        attend = paged_attention(
            self.model.config, state.pages.table, at[:, None], going[:, None], self.kernel
        )
        hidden, cache = self.model.hidden(params, fed, at[:, None], attend, state.cache)
        logits = self.model.logits(params, hidden[:, 0])
        penalties = state.penalties
        if penalties is not None:
            logits = penalized(
                logits, penalties.counts, penalties.repetition, penalties.presence, penalties.bias
            )
        tokens, support = draw(
            logits,
            uniforms(state.key, state.filled),
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            self.support_size,
        )
        logp = self.model.in_rows(token_stats)(logits, tokens, state.temperature, support).logp
        if penalties is not None:
            penalties = penalties.replace(counts=penalties.counts.at[slots, tokens].add(going))
        written = state.tokens.at[slots, jnp.minimum(state.filled, self.length - 1)].set(tokens)
        filled = state.filled + going
        is_ended = going & ((tokens[:, None] == state.stop_tokens).any(-1) | (filled >= state.limit))
        state = state.replace(
            cache=cache,
            tokens=jnp.where(going[:, None], written, state.tokens),
            filled=filled,
            is_live=state.is_live & ~is_ended,
            penalties=penalties,
        )
        return state, _Sampled(tokens, going, logp, support)

    def recompute(self, params: Params, state: DecodeState, only: Array) -> DecodeState:
        known = jnp.where(state.is_live & only, state.filled - 1, 0)
        padded = jnp.pad(state.tokens, ((0, 0), (0, self.prefill_chunk)))

        def one_chunk(i: Array, cache: KVPages) -> KVPages:
            start = i * self.prefill_chunk
            positions = jnp.broadcast_to(
                start + jnp.arange(self.prefill_chunk), (self.slots, self.prefill_chunk)
            )
            tokens = jax.lax.dynamic_slice_in_dim(padded, start, self.prefill_chunk, axis=1)
            attend = paged_attention(
                self.model.config,
                state.pages.table,
                jnp.minimum(positions, self.length - 1),
                positions < known[:, None],
            )
            return self.model.hidden(params, tokens, positions, attend, cache)[1]

        chunks = -(-known.max() // self.prefill_chunk)
        return state.replace(cache=jax.lax.fori_loop(0, chunks, one_chunk, state.cache))


def _penalized_slot(state: DecodeState, slot: Array, prefix: Prefix, r: Request) -> SlotPenalties:
    """The penalties of all slots once `slot` holds the prefix."""
    assert state.penalties is not None and r.penalty is not None
    is_known = jnp.arange(prefix.tokens.shape[0]) < prefix.true_length
    counts = jnp.zeros_like(state.penalties.counts[0]).at[prefix.tokens].add(is_known.astype(jnp.int32))
    return SlotPenalties(
        state.penalties.repetition.at[slot].set(r.penalty.repetition),
        state.penalties.presence.at[slot].set(r.penalty.presence),
        state.penalties.bias.at[slot].set(r.penalty.bias),
        state.penalties.counts.at[slot].set(counts),
    )
