"""The jitted programs of an engine: pure functions of parameters and decode state, of fixed shapes.

The contents of other slots change no bit of a slot's results: each row is computed by itself, masks select
the rows to update, and KV is read in fixed blocks in ascending order.

Shapes: N slots, M pages per slot, K ids of a support (the ids that truncation left to draw a token from), V
vocabulary, k steps per call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int, UInt8, UInt32

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.algorithms.sampling import (
    IN_COMPLETION,
    IN_PROMPT,
    Settings,
    Truncation,
    draw,
    penalized,
    sample_key,
    uniforms,
)
from areal_jax.generation import jetstream
from areal_jax.generation.slots import Prefix, Request
from areal_jax.models.kv_pages import KVPages, PagedKernel
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Execution

NONE = 0
"""Entry of a page table without a page: KV written through it goes to the scratch page, 0."""


class PageTable(struct.PyTreeNode):
    """The KV pages in use: `table` lists the pages of each slot, `users` counts each page's table entries.

    A page may be in several slots' rows, since the samples of one prompt share its pages; a page in no row is
    free. Shapes: N slots, M entries per slot. Page 0 takes KV that is not kept and is never free; entry 0 in
    the table means no page.
    """

    table: Int[Array, "N M"]
    users: Int[Array, " pages"]
    """For each page, the number of table entries that contain it; always 1 for page 0."""

    @classmethod
    def empty(cls, slots: int, places: int, pages: int) -> PageTable:
        return cls(jnp.full((slots, places), NONE, jnp.int32), jnp.zeros(pages + 1, jnp.int32).at[0].set(1))

    def released(self, slots: Bool[Array, " N"]) -> PageTable:
        """Returns the table with these slots' entries cleared; pages that no other slot uses become free."""
        gone = slots[:, None] & (self.table != NONE)
        users = self.users.at[jnp.where(gone, self.table, 0)].add(-gone.astype(jnp.int32))
        return PageTable(jnp.where(slots[:, None], NONE, self.table), users)

    def sharing(self, slot: Int[Array, ""], sibling: Int[Array, ""], count: Int[Array, ""]) -> PageTable:
        """Returns the table with the first `count` pages of slot `sibling` used by the empty `slot` too."""
        is_shared = jnp.arange(self.table.shape[1]) < count
        shared = jnp.where(is_shared, self.table[sibling], NONE)
        table = self.table.at[slot].set(jnp.where(is_shared, shared, self.table[slot]))
        return PageTable(table, self.users.at[shared].add((shared != NONE).astype(jnp.int32)))

    def free_beside(self, reserved: int) -> Int[Array, ""]:
        """Returns the number of free pages, without those that the first `reserved` slots may still take."""
        taken = (self.table[:reserved] != NONE).sum()
        return (self.users == 0).sum() - (reserved * self.table.shape[1] - taken)

    def with_pages(
        self, wanted: Bool[Array, "N M"], reserved: int = 0
    ) -> tuple[PageTable, Bool[Array, " N"]]:
        """Returns the table with free pages in the entries that `wanted` marks, and a mask of slots served.

        A marked entry that has a page keeps it. A slot gets all the pages that it lacks, or none. Slots are
        served in order, up to the first one for which too few pages are free; the first `reserved` slots,
        which share no pages, are always served.
        """
        wanted = wanted & (self.table == NONE)
        # The k-th wanted place gets the k-th free page, so a page is found without a loop over slots.
        order = jnp.cumsum(wanted.ravel()).reshape(wanted.shape)
        free = jnp.cumsum(self.users == 0)
        is_served = order[:, -1] <= free[-1]
        if reserved:
            # Reserved slots come first in the order, and their pages are outside of what the others may use.
            others = order[:, -1] - order[reserved - 1, -1]
            is_served = (others <= self.free_beside(reserved)) | (jnp.arange(len(wanted)) < reserved)
        given = wanted & is_served[:, None]
        page = jnp.where(given, jnp.searchsorted(free, order), NONE)
        users = self.users.at[page].add(given.astype(jnp.int32))
        return PageTable(jnp.where(given, page, self.table), users), is_served


class DecodeState(struct.PyTreeNode):
    """The state of all slots on the device; a program takes a state, reuses its memory, returns the next."""

    cache: KVPages
    pages: PageTable
    tokens: Int[Array, "N length"]
    filled: Int[Array, " N"]  # tokens known; the KV holds all but the last of them
    is_live: Bool[Array, " N"]
    key: UInt32[Array, "N 2"]  # `sampling.sample_key` of each request's numbers
    requests: Request
    inserted: Int[Array, ""]  # samples so far: the ordinal of the next one without a request
    occurs: Int[Array, "N V"] | None = None
    """Where each id occurs in the sample so far: 0, IN_PROMPT (there alone) or IN_COMPLETION; None on engines
    without penalties.
    """

    @classmethod
    def empty(cls, cache: KVPages, slots: int, length: int, r: Request) -> DecodeState:
        """Returns the state of `slots` slots without samples, each with space for `length` tokens.

        `cache`: the pool of pages. `r`: settings of the empty slots, under which no id is cut.
        """
        requests = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots, *leaf.shape)), r)
        return cls(
            cache=cache,
            pages=PageTable.empty(slots, length // cache.page_tokens, cache.k.shape[1] - 1),
            tokens=jnp.zeros((slots, length), jnp.int32),
            filled=jnp.ones(slots, jnp.int32),  # not 0: every slot feeds its token at `filled - 1`
            is_live=jnp.zeros(slots, bool),
            key=jnp.zeros((slots, 2), jnp.uint32),
            requests=requests,
            inserted=jnp.zeros((), jnp.int32),
            occurs=None if r.penalty is None else jnp.zeros_like(requests.penalty.bias, jnp.int32),
        )

    @property
    def slots(self) -> Int[Array, " N"]:
        return jnp.arange(len(self.is_live))


@struct.dataclass
class SlotData(jetstream.SlotData):
    """JetStream's results of one slot, extended by the tokens' log-probs and their policy version."""

    logp: Any  # (1, k) float32
    version: Any  # (1,) int32


@struct.dataclass
class ResultTokens(jetstream.ResultTokens):
    """The results of one `generate` call in one int32 array, so that one device-to-host copy suffices.

    One row per slot; `rows` names its columns. JetStream reads the first three. `length` is the number of
    tokens in the completion so far, `is_starved` is 1 for a live slot that sampled nothing because too few
    pages were free, and `free_pages` counts those that are not reserved.
    """

    support_size: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, data: Any, steps: int, support_size: int) -> ResultTokens:
        columns = (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1)
        return cls(data, *columns, samples_per_slot=1, support_size=support_size)

    def convert_to_numpy(self) -> ResultTokens:
        return self.replace(data=np.asarray(self.data))  # type: ignore[attr-defined]

    def get_result_at_slot(self, slot: int) -> SlotData:
        own = self.rows[slot : slot + 1]
        return SlotData(own["tokens"], own["valid"], own["length"], own["logp"], own["version"])

    @property
    def rows(self) -> np.ndarray:
        """(N,): a structured view of `data` in host memory, with the columns by name."""
        columns = _columns(self.tokens_idx[1], self.support_size)
        return np.ascontiguousarray(self.data).view(columns)[:, 0]


@cache
def _columns(steps: int, support_size: int) -> np.dtype:
    """Returns the dtype of a row of `ResultTokens`; it is made once, because making it takes longer than
    reading a row.
    """
    each = (steps,)
    columns = [
        ("tokens", np.int32, each),
        ("valid", np.int32, each),
        ("length", np.int32),
        ("logp", np.float32, each),
        ("version", np.int32),
        ("is_live", np.int32),
        ("is_starved", np.int32),
        ("free_pages", np.int32),
        ("support", np.int32, (*each, support_size)),
    ]
    return np.dtype(columns)


# --- programs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Programs:
    """An engine's programs; Engine's methods document what they do."""

    model: Model
    decode_steps: int
    recompute_chunk: int
    """Tokens of each slot that a recompute call computes."""
    support_size: int
    reserved_slots: int
    """Number of slots, from slot 0 on, with pages reserved for them."""
    execution: Execution
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

    def prefill(
        self, params: Params, cache: KVPages, table: Array, tokens: Array, start: Array, known: Array
    ) -> KVPages:
        """Returns the cache with KV added: of each row's `tokens`, at positions from `start` on.

        Positions from `known` on are padding, with KV that is not kept. `table` lists each row's pages; rows
        may be parts of one sample, since each layer writes the KV of all rows before it reads any.
        """
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        at = jnp.minimum(positions, table.shape[1] * cache.page_tokens - 1)
        attend = self.model.paged_attention(table, at, positions < known, self.kernel, self.ends_early)
        return self.model.hidden(params, tokens, positions, attend, cache, self.execution)[1]

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
            cache=self.put(state.cache, own, prefix.cache),
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
        cache = self.take(state.cache, state.pages.table[slot, :pages])
        return Prefix(cache, state.tokens[slot], state.filled[slot])

    def routes(self, state: DecodeState, slot: Array) -> UInt8[Array, "length E"]:
        """Returns the experts of the tokens in a slot's pages, those of each layer in turn."""
        k = self.model.config.experts_per_token
        found = state.cache.experts_of(state.pages.table[slot], k)
        return found.reshape(len(found), -1)

    def take(self, cache: KVPages, pages: Array) -> KVPages:
        """Returns a copy of these pages of the cache, numbered from 1 on, as a prefix has them."""
        pages = jnp.concatenate([jnp.zeros(1, jnp.int32), pages])
        return jax.tree.map(lambda leaf: leaf[:, pages], cache)

    def put(self, cache: KVPages, pages: Array, kept: KVPages) -> KVPages:
        """Returns the cache with the pages of `kept`, from its page 1 on, copied to the pages `pages`."""
        return jax.tree.map(lambda to, of: to.at[:, pages].set(of[:, 1:]), cache, kept)

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
        attend = self.model.paged_attention(state.pages.table, at[:, None], going[:, None], self.kernel)
        hidden, cache = self.model.hidden(params, fed, at[:, None], attend, state.cache, self.execution)
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
        padded = jnp.pad(state.tokens, ((0, 0), (0, self.recompute_chunk)))
        tokens = jax.lax.dynamic_slice_in_dim(padded, start, self.recompute_chunk, axis=1)
        table = state.pages.table[:, :pages]
        return state.replace(cache=self.prefill(params, state.cache, table, tokens, start, known[:, None]))


class Jitted:
    """An engine's programs as jitted functions, and the decode programs that are compiled.

    Donated arguments, the cache of a prefill or a decode state, must not be used again.
    """

    def __init__(
        self,
        programs: Programs,
        kv_pages: Callable[[int], KVPages],
        empty: Callable[[Request], DecodeState],
        neutral: Request,
        cache: NamedSharding,
        whole: NamedSharding,
    ) -> None:
        """`kv_pages(n)` makes n empty pages, and `empty(neutral)` a state without samples.

        `cache`, `whole`: the shardings of KV pages, and of all else in a state.
        """
        # Results have the shardings of arguments; a program would otherwise compile again for its results.
        state = jax.tree.map(lambda _: whole, jax.eval_shape(empty, neutral)).replace(cache=cache)
        prefix = Prefix(cache, whole, whole)  # type: ignore[arg-type]
        self.empty_prefix = jax.jit(kv_pages, static_argnums=0, out_shardings=cache)
        self.empty_state = jax.jit(empty, out_shardings=state)
        self.prefill = jax.jit(programs.prefill, donate_argnums=1, out_shardings=cache)
        self.take = jax.jit(programs.take, out_shardings=cache)
        self.put = jax.jit(programs.put, donate_argnums=0, out_shardings=cache)
        self.insert = jax.jit(programs.insert, donate_argnums=0, out_shardings=state)
        self.generate = jax.jit(
            programs.generate, static_argnums=4, donate_argnums=2, out_shardings=(state, whole)
        )
        self.recompute = jax.jit(programs.recompute, static_argnums=4, donate_argnums=1, out_shardings=state)
        self.release = jax.jit(programs.release, donate_argnums=0, out_shardings=state)
        self.routes = jax.jit(programs.routes, out_shardings=whole)
        self.extract = jax.jit(programs.extract, static_argnums=2, out_shardings=prefix)
        self.compiled: dict[Truncation, Any] = {}
        """Truncations of a compiled decode program -> the program; None: the one in the cache of jit."""

    def decode(self, truncation: Truncation, *arguments: Any) -> tuple[DecodeState, Array]:
        """Returns the result of `Programs.generate`, of which `arguments` are the others."""
        compiled = self.compiled.setdefault(truncation)
        return compiled(*arguments) if compiled else self.generate(*arguments, truncation)

    def compiled_for(self, truncation: Truncation) -> Truncation | None:
        """Returns the compiled decode program with the fewest truncations beyond these; None if none has all.

        More truncations change no bit of a sample (`sampling.draw`).
        """
        return min((one for one in list(self.compiled) if truncation.is_within(one)), key=sum, default=None)

    def compiler(
        self, truncation: Truncation, params: Params, version: int, state: DecodeState
    ) -> Callable[[], None]:
        """Returns a function that compiles a decode program for calls like the one with these arguments.

        It may run in a thread, while the engine decodes with other programs; `decode` has the program once it
        is compiled.
        """
        # Only shapes: the next call donates the state itself.
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        every_slot = np.ones(len(state.is_live), bool)

        def compile_() -> None:
            lowered = self.generate.lower(params, version, like, every_slot, truncation)
            self.compiled[truncation] = lowered.compile()

        return compile_
