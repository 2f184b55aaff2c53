"""The jitted programs of an engine: pure functions of parameters and decode state, of fixed shapes.

The contents of other slots change no bit of a slot's results: each row is computed by itself, masks select
the rows to update, and KV is read in fixed blocks in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.generation.sampling import Settings, Truncation, draw, penalized, sample_key, uniforms
from areal_jax.generation.slots import IN_COMPLETION, IN_PROMPT, DecodeState, Prefix, Request
from areal_jax.models.exact import paged_attention
from areal_jax.models.kv_pages import KVPages, PagedKernel
from areal_jax.models.model import Model, Params


@dataclass(frozen=True)
class Programs:
    """An engine's programs; Engine's methods document what they do."""

    model: Model
    decode_steps: int
    prefill_chunk: int
    support_size: int
    reserved_slots: int
    """Number of slots, from slot 0 on, with pages reserved for them."""
    kernel: PagedKernel | None
    """Attention kernel of decode steps, prefill and recompute; None: attention over blocks."""
    ends_early: bool
    """Whether searches, and attention over blocks in prefill and recompute, end as soon as values allow it. A
    GPU would copy the condition to the host at each of their steps; there, False: the number of steps is
    fixed. Attention over blocks in decode steps, for which a GPU has kernels, always ends early.
    """

    def release(self, state: DecodeState, slot: Array) -> DecodeState:
        pages = state.pages.released(state.slots == slot)
        return state.replace(pages=pages, is_live=state.is_live.at[slot].set(False))

    def prefill(self, params: Params, cache: KVPages, tokens: Array, start: Array, count: Array) -> KVPages:
        # A prefix's pages are numbered from 1 on; page 0 takes the KV of padding tokens.
        table = 1 + jnp.arange(cache.k.shape[1] - 1)[None]
        return self._next_chunk(params, cache, table, tokens, start, count)

    def _next_chunk(
        self, params: Params, cache: KVPages, table: Array, tokens: Array, start: Array, known: Array
    ) -> KVPages:
        """Returns the cache with the KV of a chunk added: each row's `tokens`, at positions from `start` on.

        Positions from `known` on are padding, with KV that is not kept. `table` lists each row's pages.
        """
        positions = jnp.broadcast_to(start + jnp.arange(self.prefill_chunk), tokens.shape)
        at = jnp.minimum(positions, table.shape[1] * cache.page_tokens - 1)
        attend = paged_attention(
            self.model.config, table, at, positions < known, self.kernel, self.ends_early
        )
        return self.model.hidden(params, tokens, positions, attend, cache)[1]

    def insert(
        self, state: DecodeState, prefix: Prefix, slot: Array, r: Request, sibling: Array
    ) -> DecodeState:
        last = (jnp.asarray(prefix.true_length) - 1) // state.cache.page_tokens  # the page of the last token
        is_shared = (sibling >= 0) & state.is_live[jnp.maximum(sibling, 0)]
        shared = jnp.where(is_shared, last, 0)
        is_mine = state.slots == slot
        pages = state.pages.released(is_mine).sharing(slot, jnp.maximum(sibling, 0), shared)
        places = jnp.arange(state.pages.table.shape[1])
        pages, is_served = pages.with_pages(is_mine[:, None] & (places <= last), self.reserved_slots)
        held = prefix.cache.k.shape[1] - 1
        # Shared pages are not written: the copies of pages that are a sibling's go to the scratch page.
        own = jnp.where(places[:held] >= shared, pages.table[slot, :held], 0)
        state = state.replace(
            cache=jax.tree.map(lambda to, of: to.at[:, own].set(of[:, 1:]), state.cache, prefix.cache),
            pages=pages,
            tokens=state.tokens.at[slot].set(prefix.tokens),
            filled=state.filled.at[slot].set(prefix.true_length),
            is_live=state.is_live.at[slot].set((prefix.true_length < r.limit) & is_served[slot]),
            key=state.key.at[slot].set(sample_key(*r.numbers)),
            requests=jax.tree.map(lambda to, of: to.at[slot].set(of), state.requests, r),
            inserted=state.inserted + 1,
        )
        if state.occurs is None:
            return state
        places = jnp.arange(len(prefix.tokens))
        part = jnp.where(places < r.prompt_tokens, IN_PROMPT, IN_COMPLETION)
        part = jnp.where(places < prefix.true_length, part, 0)
        occurs = jnp.zeros_like(state.occurs[0]).at[prefix.tokens].max(part)
        return state.replace(occurs=state.occurs.at[slot].set(occurs))

    def extract(self, state: DecodeState, slot: Array, pages: int) -> Prefix:
        table = jnp.concatenate([jnp.zeros(1, jnp.int32), state.pages.table[slot, :pages]])
        cache = jax.tree.map(lambda leaf: leaf[:, table], state.cache)
        return Prefix(cache, state.tokens[slot], state.filled[slot])

    def generate(
        self, params: Params, version: Array, state: DecodeState, only: Array, truncation: Truncation
    ) -> tuple[DecodeState, Int[Array, "N columns"]]:
        was_live = state.is_live
        # Pages are allocated before the steps: a slot without pages for all of them samples nothing, so that
        # no token depends on how many pages were free.
        last = jnp.minimum(state.filled + self.decode_steps, state.requests.limit) - 2  # written in this call
        places = jnp.arange(state.pages.table.shape[1])
        reached = places <= last[:, None] // state.cache.page_tokens
        pages, is_served = state.pages.with_pages(reached & (was_live & only)[:, None], self.reserved_slots)
        state = state.replace(pages=pages)
        one_step = partial(self._one_step, params, only & is_served, truncation)
        # The outputs have the steps on their first axis.
        state, (tokens, is_valid, logp, support) = jax.lax.scan(one_step, state, None, self.decode_steps)
        is_over = was_live & ~state.is_live
        state = state.replace(pages=state.pages.released(is_over & ~state.requests.keeps_pages))

        def column(values: Array) -> Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), only.shape)[:, None]

        # In the order of `ResultTokens.rows`; floats go as their bits.
        columns = [
            tokens.T,
            is_valid.T.astype(jnp.int32),
            (state.filled - state.requests.prompt_tokens)[:, None],
            jax.lax.bitcast_convert_type(logp.T, jnp.int32),
            column(version),
            column(state.is_live),
            column(was_live & only & ~is_served),
            column(state.pages.free_beside(self.reserved_slots)),
        ]
        if support is not None:
            columns.append(jnp.moveaxis(support, 0, 1).reshape(len(only), -1))
        return state, jnp.concatenate(columns, axis=1)

    def _one_step(
        self, params: Params, steps: Bool[Array, " N"], truncation: Truncation, state: DecodeState, _: None
    ) -> tuple[DecodeState, tuple[Array, Array, Array, Array | None]]:
        """Returns the next state and each slot's token, whether it is valid, its log-prob and support."""
        going, slots, r = state.is_live & steps, state.slots, state.requests
        at = state.filled - 1
        fed = jnp.take_along_axis(state.tokens, at[:, None], axis=1)
        attend = paged_attention(
            self.model.config, state.pages.table, at[:, None], going[:, None], self.kernel
        )
        hidden, cache = self.model.hidden(params, fed, at[:, None], attend, state.cache)
        logits = self.model.logits(params, hidden[:, 0])
        occurs = state.occurs
        if r.penalty is not None and occurs is not None:
            logits = penalized(logits, occurs, r.penalty)
        randoms = uniforms(state.key, state.filled)
        settings = Settings(r.temperature, r.top_k, r.top_p, r.min_p)
        tokens, support = draw(logits, randoms, settings, self.support_size, truncation, self.ends_early)
        logp = self.model.in_rows(token_stats)(logits, tokens, r.temperature, support).logp
        if occurs is not None:
            occurs = occurs.at[slots, tokens].max(jnp.where(going, IN_COMPLETION, 0))
        # Slots that do not step are computed too, in the same rows, and their results are dropped.
        written = state.tokens.at[slots, jnp.minimum(state.filled, state.tokens.shape[1] - 1)].set(tokens)
        filled = state.filled + going
        is_ended = going & ((tokens[:, None] == r.stop_tokens).any(-1) | (filled >= r.limit))
        state = state.replace(
            cache=cache,
            tokens=jnp.where(going[:, None], written, state.tokens),
            filled=filled,
            is_live=state.is_live & ~is_ended,
            occurs=occurs,
        )
        return state, (tokens, going, logp, support)

    def recompute(
        self, params: Params, state: DecodeState, only: Array, start: Array, pages: int
    ) -> DecodeState:
        """Returns the state with a chunk of live slots' KV rebuilt: the tokens from position `start` on.

        `pages`: how many pages of a slot it reads at most.
        """
        # Without the last token, whose KV is written when the next decode step feeds it.
        known = jnp.where(state.is_live & only, state.filled - 1, 0)
        padded = jnp.pad(state.tokens, ((0, 0), (0, self.prefill_chunk)))
        tokens = jax.lax.dynamic_slice_in_dim(padded, start, self.prefill_chunk, axis=1)
        table = state.pages.table[:, :pages]
        cache = self._next_chunk(params, state.cache, table, tokens, start, known[:, None])
        return state.replace(cache=cache)
