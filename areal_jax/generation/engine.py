"""The decode engine: JetStream's members over static slots and paged KV.

A slot holds one sample. `prefill` computes a prompt's KV but for its last token; `insert` copies it into a
slot; `generate` feeds each live slot's last token and samples the next one, several times a call. `recompute`
rebuilds the live slots' KV under other parameters. The shape of every call is fixed by the constructor, never
by what the slots hold, so a sample's tokens do not depend on its neighbours. Extensions beyond JetStream's
members: log-probs, versions, supports, `recompute`, `free_resource`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.generation.layout import pages_dtype, serving_layout
from areal_jax.generation.sampling import draw, require_counted_randomness, sample_key, uniforms
from areal_jax.generation.slots import MAX_STOP_TOKENS, DecodeState, Prefix, Request, ResultTokens
from areal_jax.models.attention import KVPages, PackedAttention, PagedAttention
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import make_mesh, param_shardings, replicated
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams

CANARY_TOKENS = 16


class _Sampled(NamedTuple):
    """Of one step, a slot each; scanned, so with k in front."""

    tokens: Array
    is_valid: Array
    logp: Array
    support: Array | None


class Engine:
    """`slots` samples at once, each at most `length` tokens with its prompt; `decode_steps` tokens a call."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        length: int,
        decode_steps: int = 4,
        page_tokens: int | None = None,
        prefill_chunk: int = 32,
        support_size: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        require_counted_randomness()
        self.model, self.slots, self.length = model, slots, length
        self.decode_steps, self.support_size = decode_steps, support_size
        self.page_tokens = page_tokens or length
        if length % self.page_tokens:
            raise ArealError(f"page_tokens={page_tokens} does not divide length={length}; choose a divisor")
        self.pages_per_slot = length // self.page_tokens
        self._chunk = min(prefill_chunk, length)
        self._mesh = mesh or make_mesh({"tensor": 1}, jax.devices(), "a generation host")
        self.param_shardings = param_shardings(model.logical_axes, model.abstract_params, self._mesh)
        self._platform = self._mesh.devices.flat[0].platform
        # Results lie where arguments do, or a program would be compiled again for its own results.
        cache, whole = self._cache_sharding(), replicated(self._mesh)
        state = jax.tree.map(lambda _: whole, jax.eval_shape(self._make_state)).replace(cache=cache)
        empty = partial(self._pages, self.pages_per_slot)
        self._empty_prefix = jax.jit(empty, out_shardings=cache)
        self._empty_state = jax.jit(self._make_state, out_shardings=state)
        self._prefill_chunk = jax.jit(self._prefill_one_chunk, donate_argnums=1, out_shardings=cache)
        self._insert = jax.jit(self._insert_prefix, donate_argnums=0, out_shardings=state)
        self._generate = jax.jit(self._generate_steps, donate_argnums=2, out_shardings=(state, whole))
        self._recompute = jax.jit(self._recompute_live, donate_argnums=1, out_shardings=state)
        self._release = jax.jit(self._end_sample, donate_argnums=0, out_shardings=state)
        self.canary = jax.jit(self._canary_logp)
        """`canary(params) -> (n,)`: log-probs of a fixed sequence, compared at each adoption."""

    # --- JetStream's members -------------------------------------------------------------------------------

    @property
    def max_concurrent_decodes(self) -> int:
        return self.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.length

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    colocated_cpus = None

    def get_tokenizer(self) -> Any:
        return self.model.tokenizer

    def get_prefix_destination_sharding(self) -> NamedSharding:
        return replicated(self._mesh)

    def load_params(self, value: VersionedParams) -> VersionedParams:
        """The value with its parameters on this engine's mesh, as decoding reads them fastest."""
        params = jax.device_put(value.params, self.param_shardings)
        return value._replace(params=serving_layout(self.model, params, self._platform))

    def init_decode_state(self) -> DecodeState:
        return self._empty_state()

    def prefill(
        self,
        *,
        params: VersionedParams,
        padded_tokens: np.ndarray,
        true_length: int,
        existing_prefix: Any = None,
    ) -> Prefix:
        """KV of the prompt `padded_tokens[:true_length]` but for its last token, in chunks from position 0.

        Raises ArealError for a prompt that leaves no room for a completion.
        """
        if existing_prefix is not None:
            raise ArealError("prefill does not continue an existing prefix; give the whole prompt")
        if not 1 <= true_length < self.length:
            raise ArealError(
                f"a prompt of {true_length} tokens does not fit generation.length={self.length}, which holds "
                "prompt and completion; raise generation.length or shorten the prompt"
            )
        tokens = np.zeros(self.length + self._chunk, np.int32)
        tokens[:true_length] = padded_tokens[:true_length]
        cache = self._empty_prefix()
        for start in range(0, true_length - 1, self._chunk):
            chunk = tokens[None, start : start + self._chunk]
            cache = self._prefill_chunk(params.params, cache, chunk, start, true_length - 1)
        return Prefix(cache, tokens[: self.length], np.asarray(true_length, np.int32))

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int, *, request: Request | None = None
    ) -> DecodeState:
        """Start a sample of the prompt in `slot`; without a request: temperature 1, up to the length."""
        return self._insert(
            decode_state, prefix, slot, request or self.request(SampleId(0, 0), 0, Sampling(), 0)
        )

    def generate(
        self, params: VersionedParams, decode_state: DecodeState
    ) -> tuple[DecodeState, ResultTokens]:
        """`decode_steps` tokens for every live slot; the version of `params` is stamped on each."""
        state, data = self._generate(params.params, params.version, decode_state)
        return state, ResultTokens(data, self.decode_steps, self.support_size)

    # --- extensions ----------------------------------------------------------------------------------------

    def request(
        self,
        sample: SampleId,
        seed: int,
        sampling: Sampling,
        prompt_tokens: int,
        stop_tokens: tuple[int, ...] = (),
    ) -> Request:
        """The request of one sample; with `prompt_tokens` 0 only the engine's length limits it.

        Raises ArealError for more stop tokens than there is room for.
        """
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ArealError(f"{len(stop_tokens)} stop tokens; a request has room for {MAX_STOP_TOKENS}")
        stops = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stops[: len(stop_tokens)] = stop_tokens
        room = sampling.max_tokens + prompt_tokens if prompt_tokens else self.length
        return Request(
            np.array([seed, *sample], np.int32),
            np.asarray(sampling.temperature, np.float32),
            np.asarray(sampling.top_k, np.int32),
            np.asarray(sampling.top_p, np.float32),
            np.asarray(sampling.min_p, np.float32),
            np.asarray(min(room, self.length), np.int32),
            stops,
        )

    def recompute(self, params: VersionedParams, decode_state: DecodeState) -> DecodeState:
        """Live slots' KV rebuilt under `params`: one pass of N rows, in fixed chunks from position 0."""
        return self._recompute(params.params, decode_state)

    def free_resource(self, slot: int, decode_state: DecodeState) -> DecodeState:
        """The slot stops decoding."""
        return self._release(decode_state, slot)

    # --- jitted --------------------------------------------------------------------------------------------

    def _cache_sharding(self) -> KVPages:
        axis = "tensor" if self.model.config.kv_heads % self._mesh.shape["tensor"] == 0 else None
        by_head = NamedSharding(self._mesh, PartitionSpec(None, None, None, axis, None))
        return KVPages(by_head, by_head)  # type: ignore[arg-type]

    def _pages(self, count: int) -> KVPages:
        dtype = pages_dtype(self.model.config.dtype, self._platform)
        return self.model.kv_pages(count, self.page_tokens, dtype)

    def _make_state(self) -> DecodeState:
        n, pages = self.slots, self.pages_per_slot
        return DecodeState(
            cache=self._pages(n * pages),
            table=1 + jnp.arange(n * pages, dtype=jnp.int32).reshape(n, pages),
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
        )

    def _end_sample(self, state: DecodeState, slot: Array) -> DecodeState:
        return state.replace(is_live=state.is_live.at[slot].set(False))

    def _canary_logp(self, params: Params) -> Float[Array, " n"]:
        tokens = (jnp.arange(CANARY_TOKENS) * 7 % self.model.tokenizer.vocab_size)[None]
        positions = jnp.arange(CANARY_TOKENS)[None]
        hidden, _ = self.model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        logits = self.model.logits(params, hidden[0, :-1])
        return token_stats(logits, tokens[0, 1:], jnp.ones(CANARY_TOKENS - 1)).logp

    def _prefill_one_chunk(
        self, params: Params, cache: KVPages, tokens: Array, start: Array, count: Array
    ) -> KVPages:
        positions = start + jnp.arange(self._chunk)[None]
        table = 1 + jnp.arange(self.pages_per_slot)[None]
        attend = PagedAttention(table, jnp.minimum(positions, self.length - 1), positions < count)
        return self.model.hidden(params, tokens, positions, attend, cache)[1]

    def _insert_prefix(self, state: DecodeState, prefix: Prefix, slot: Array, r: Request) -> DecodeState:
        pages = state.table[slot]
        return state.replace(
            cache=KVPages(
                state.cache.k.at[:, pages].set(prefix.cache.k[:, 1:]),
                state.cache.v.at[:, pages].set(prefix.cache.v[:, 1:]),
            ),
            tokens=state.tokens.at[slot].set(prefix.tokens),
            filled=state.filled.at[slot].set(prefix.true_length),
            is_live=state.is_live.at[slot].set(prefix.true_length < r.limit),
            key=state.key.at[slot].set(sample_key(*r.numbers)),
            temperature=state.temperature.at[slot].set(r.temperature),
            top_k=state.top_k.at[slot].set(r.top_k),
            top_p=state.top_p.at[slot].set(r.top_p),
            min_p=state.min_p.at[slot].set(r.min_p),
            limit=state.limit.at[slot].set(r.limit),
            stop_tokens=state.stop_tokens.at[slot].set(r.stop_tokens),
        )

    def _generate_steps(
        self, params: Params, version: Array, state: DecodeState
    ) -> tuple[DecodeState, Int[Array, "N columns"]]:
        one_step = partial(self._sample_token, params)
        state, sampled = jax.lax.scan(one_step, state, None, self.decode_steps)
        columns = [
            sampled.tokens.T,
            sampled.is_valid.T.astype(jnp.int32),
            state.filled[:, None],
            jax.lax.bitcast_convert_type(sampled.logp.T, jnp.int32),
            jnp.broadcast_to(jnp.asarray(version, jnp.int32), (self.slots, 1)),
            state.is_live[:, None].astype(jnp.int32),
        ]
        if sampled.support is not None:
            columns.append(jnp.moveaxis(sampled.support, 0, 1).reshape(self.slots, -1))
        return state, jnp.concatenate(columns, axis=1)

    def _sample_token(self, params: Params, state: DecodeState, _: None) -> tuple[DecodeState, _Sampled]:
        at = state.filled - 1
        fed = jnp.take_along_axis(state.tokens, at[:, None], axis=1)
        attend = PagedAttention(state.table, at[:, None], state.is_live[:, None])
        hidden, cache = self.model.hidden(params, fed, at[:, None], attend, state.cache)
        logits = self.model.logits(params, hidden[:, 0])
        tokens, support = draw(
            logits,
            uniforms(state.key, state.filled),
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            self.support_size,
        )
        logp = token_stats(logits, tokens, state.temperature, support).logp
        live, slots = state.is_live, jnp.arange(self.slots)
        written = state.tokens.at[slots, jnp.minimum(state.filled, self.length - 1)].set(tokens)
        filled = state.filled + live
        is_stop = (tokens[:, None] == state.stop_tokens).any(-1)
        state = state.replace(
            cache=cache,
            tokens=jnp.where(live[:, None], written, state.tokens),
            filled=filled,
            is_live=live & ~is_stop & (filled < state.limit),
        )
        return state, _Sampled(tokens, live, logp, support)

    def _recompute_live(self, params: Params, state: DecodeState) -> DecodeState:
        known = jnp.where(state.is_live, state.filled - 1, 0)
        padded = jnp.pad(state.tokens, ((0, 0), (0, self._chunk)))

        def one_chunk(i: Array, cache: KVPages) -> KVPages:
            start = i * self._chunk
            positions = jnp.broadcast_to(start + jnp.arange(self._chunk), (self.slots, self._chunk))
            tokens = jax.lax.dynamic_slice_in_dim(padded, start, self._chunk, axis=1)
            attend = PagedAttention(
                state.table, jnp.minimum(positions, self.length - 1), positions < known[:, None]
            )
            return self.model.hidden(params, tokens, positions, attend, cache)[1]

        chunks = -(-known.max() // self._chunk)
        return state.replace(cache=jax.lax.fori_loop(0, chunks, one_chunk, state.cache))
