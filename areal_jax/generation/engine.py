"""The decode engine: JetStream's members over static slots and a pool of KV pages.

A slot holds one sample. `prefill` computes a prompt's KV but for its last token; `insert` copies it into a
slot's pages, or shares those of a sibling; `generate` feeds each live slot's last token and samples the next
one, several times a call. `recompute` rebuilds the live slots' KV under other parameters; `extract` takes a
half-decoded sample out, KV and all. The shape of every call is fixed by the constructor or by the one sample
it serves, never by what the other slots hold, so a sample's tokens do not depend on its neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool

from areal_jax.generation.canary import canary
from areal_jax.generation.layout import is_laid_out, pages_dtype, serving_layout
from areal_jax.generation.programs import Programs
from areal_jax.generation.sampling import require_counted_randomness
from areal_jax.generation.slots import (
    MAX_STOP_TOKENS,
    DecodeState,
    Prefix,
    Request,
    RequestPenalty,
    ResultTokens,
)
from areal_jax.models.attention import KVPages
from areal_jax.models.model import Model
from areal_jax.models.paged_kernels import choose_for
from areal_jax.parallel.mesh import make_mesh, param_shardings, replicated
from areal_jax.types import ArealError, Penalties, SampleId, Sampling, VersionedParams
from areal_jax.weights.store import dtype_in


class Prefilling(NamedTuple):
    """A prompt on its way through the chunks; `done` of its tokens have been computed."""

    cache: KVPages
    tokens: np.ndarray  # (length + a chunk,) int32
    count: int
    done: int


class Engine:
    """`slots` samples at once, each at most `length` tokens with its prompt; `decode_steps` tokens a call.

    `kv_tokens`: tokens that the pool of pages holds, all slots together; slots * length unless given.
    `has_penalties`: requests may bring penalties and biases, which a server's do.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        length: int,
        decode_steps: int = 4,
        page_tokens: int | None = None,
        kv_tokens: int | None = None,
        kv_dtype: str = "auto",
        prefill_chunk: int = 32,
        support_size: int = 0,
        has_penalties: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        require_counted_randomness()
        self.model, self.slots, self.length = model, slots, length
        self.decode_steps, self.support_size = decode_steps, support_size
        self.page_tokens = page_tokens or length
        if length % self.page_tokens:
            raise ArealError(f"page_tokens={page_tokens} does not divide length={length}; choose a divisor")
        self.pages_per_slot = length // self.page_tokens
        self.pages = (kv_tokens or slots * length) // self.page_tokens
        if self.pages < self.pages_per_slot:
            raise ArealError(
                f"kv_tokens={kv_tokens} holds no sample of length={length}; give at least that many"
            )
        self.has_penalties = has_penalties
        self._mesh = mesh or make_mesh({"tensor": 1}, jax.devices(), "a generation host")
        self.param_shardings = param_shardings(model.logical_axes, model.abstract_params, self._mesh)
        self._platform = self._mesh.devices.flat[0].platform
        kv_dtype = pages_dtype(model.config.dtype, self._platform) if kv_dtype == "auto" else kv_dtype
        self.attention, kernel = choose_for(model.config, self._mesh, kv_dtype, self.page_tokens, self.pages)
        """What computes the attention of decode steps: the path, and why not those before it."""
        self._programs = programs = Programs(
            model,
            slots,
            length,
            decode_steps,
            self.page_tokens,
            self.pages,
            kv_dtype,
            min(prefill_chunk, length),
            support_size,
            has_penalties,
            kernel,
        )
        # Results lie where arguments do, or a program would be compiled again for its own results.
        self._cache = cache = self._cache_sharding()
        whole = replicated(self._mesh)
        state = jax.tree.map(lambda _: whole, jax.eval_shape(programs.empty_state)).replace(cache=cache)
        prefix = Prefix(cache, whole, whole)  # type: ignore[arg-type]
        self._empty_prefix = jax.jit(programs.kv_pages, static_argnums=0, out_shardings=cache)
        self._empty_state = jax.jit(programs.empty_state, out_shardings=state)
        self._prefill_chunk = jax.jit(programs.prefill, donate_argnums=1, out_shardings=cache)
        self._insert = jax.jit(programs.insert, donate_argnums=0, out_shardings=state)
        self._generate = jax.jit(programs.generate, donate_argnums=2, out_shardings=(state, whole))
        self._recompute = jax.jit(programs.recompute, donate_argnums=1, out_shardings=state)
        self._release = jax.jit(programs.release, donate_argnums=0, out_shardings=state)
        self._extract = jax.jit(programs.extract, static_argnums=2, out_shardings=prefix)
        self._everybody = np.ones(slots, bool)
        self.canary = canary(model)

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
        """The value with its parameters on this engine's mesh, as decoding reads them fastest; one that is so
        already as it is.
        """
        if is_laid_out(value.params):
            return value
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
        prompt = self.begin_prefill(padded_tokens, true_length)
        while self.is_prefilling(prompt):
            prompt = self.prefill_next(params, prompt)
        return self.end_prefill(prompt)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        *,
        request: Request | None = None,
        sibling: int | None = None,
    ) -> DecodeState:
        """Go on from the prefix in `slot`; without a request: temperature 1, up to the length.

        `sibling`: a live slot that began with the same prefix, whose KV is of the same parameters; its full
        pages are shared, only the last one is copied. Where pages do not last, the slot is not live.
        """
        if request is None:
            request = self.request(SampleId(0, 0), 0, Sampling(), 0)
        prefix = prefix.replace(cache=jax.device_put(prefix.cache, self._cache))
        return self._insert(decode_state, prefix, slot, request, -1 if sibling is None else sibling)

    def generate(
        self,
        params: VersionedParams,
        decode_state: DecodeState,
        only: Bool[np.ndarray, " N"] | None = None,
    ) -> tuple[DecodeState, ResultTokens]:
        """`decode_steps` tokens for every live slot; the version of `params` is stamped on each.

        `only`: the slots that step; others keep still. A slot that gets no page for all of its steps keeps
        still too, and is reported as starved.
        """
        only = self._everybody if only is None else only
        state, data = self._generate(params.params, params.version, decode_state, only)
        return state, ResultTokens(data, self.decode_steps, self.support_size)

    # --- extensions ----------------------------------------------------------------------------------------

    def request(
        self,
        sample: SampleId,
        seed: int,
        sampling: Sampling,
        prompt_tokens: int,
        stop_tokens: tuple[int, ...] = (),
        penalties: Penalties | None = None,
    ) -> Request:
        """The request of one sample; with `prompt_tokens` 0 only the engine's length limits it.

        Raises ArealError for more stop tokens than there is room for, and for penalties on an engine
        without them.
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
            self._request_penalty(penalties),
        )

    def begin_prefill(self, tokens: np.ndarray, count: int) -> Prefilling:
        """Before the first chunk of the prompt `tokens[:count]`. Raises ArealError where it does not fit."""
        if not 1 <= count < self.length:
            raise ArealError(
                f"a prompt of {count} tokens does not fit generation.length={self.length}, which holds "
                "prompt and completion; raise generation.length or shorten the prompt"
            )
        padded = np.zeros(self.length + self._programs.prefill_chunk, np.int32)
        padded[:count] = tokens[:count]
        return Prefilling(self._empty_prefix(self._bucket(count)), padded, count, 0)

    @staticmethod
    def is_prefilling(prompt: Prefilling) -> bool:
        return prompt.done < prompt.count - 1

    def prefill_next(self, params: VersionedParams, prompt: Prefilling) -> Prefilling:
        """One more chunk; the cache of `prompt` is donated."""
        start, end = prompt.done, prompt.done + self._programs.prefill_chunk
        chunk = prompt.tokens[None, start:end]
        cache = self._prefill_chunk(params.params, prompt.cache, chunk, start, prompt.count - 1)
        return prompt._replace(cache=cache, done=end)

    def end_prefill(self, prompt: Prefilling) -> Prefix:
        return Prefix(prompt.cache, prompt.tokens[: self.length], np.asarray(prompt.count, np.int32))

    def recompute(
        self,
        params: VersionedParams,
        decode_state: DecodeState,
        only: Bool[np.ndarray, " N"] | None = None,
    ) -> DecodeState:
        """Live slots' KV rebuilt under `params`: one pass of N rows, in fixed chunks from position 0."""
        return self._recompute(params.params, decode_state, self._everybody if only is None else only)

    def free_resource(self, slot: int, decode_state: DecodeState) -> DecodeState:
        """The slot stops decoding; its pages are free unless shared."""
        return self._release(decode_state, slot)

    def extract(self, slot: int, decode_state: DecodeState, filled: int) -> Prefix:
        """The sample in `slot`, of which `filled` tokens are known, with its KV; `insert` goes on with it."""
        return self._extract(decode_state, slot, self._bucket(filled))

    def is_own(self, prefix: Prefix) -> bool:
        """Whether the prefix lies as one of this engine's own, so that `insert` can go on with it."""
        own = jax.eval_shape(partial(self._programs.kv_pages, self._bucket(int(prefix.true_length))))
        of = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]  # noqa: E731
        return of(own) == of(prefix.cache) and prefix.tokens.shape == (self.length,)

    def pages_for(self, count: int, has_sibling: bool = False) -> int:
        """Pages that `insert` takes for a prefix of `count` tokens."""
        used = (count - 1) // self.page_tokens
        return 1 if has_sibling else used + 1

    def blank(self, dtype: str) -> VersionedParams:
        """Zeros in place of a version that comes in `dtype`: for `warm`, before there is one."""
        zeros = lambda like, on: jnp.zeros(like.shape, dtype_in(like.dtype, dtype), device=on)  # noqa: E731
        params = jax.tree.map(zeros, self.model.abstract_params, self.param_shardings)
        return VersionedParams(-1, params, "")

    def warm(self, params: VersionedParams) -> None:
        """Compile, or load from the cache, every program of a host; nothing is computed that takes long."""
        state = self.init_decode_state()
        for count in {self._bucket(count): count for count in range(self.length - 1, 0, -1)}.values():
            prompt = self.begin_prefill(np.zeros(count, np.int32), count)
            prefix = self.end_prefill(self.prefill_next(params, prompt))
            request = self.request(SampleId(0, 0), 0, Sampling(max_tokens=1), count)
            state = self.insert(prefix, state, 0, request=request)
            self.extract(0, state, count)
        state = self.recompute(params, self.free_resource(0, state))  # no slot is live: no chunk is computed
        jax.block_until_ready(self.generate(params, state)[0])

    # --- inside --------------------------------------------------------------------------------------------

    def _bucket(self, count: int) -> int:
        """Pages of a prefix's cache: a power of four that holds `count` tokens, or a slot's places."""
        pages, used = 1, (count - 1) // self.page_tokens + 1
        while pages < used:
            pages *= 4
        return min(pages, self.pages_per_slot)

    def _request_penalty(self, penalties: Penalties | None) -> RequestPenalty | None:
        if not self.has_penalties:
            if penalties is not None and penalties != Penalties():
                raise ArealError("this engine serves no penalties: they would bias what is trained on")
            return None
        penalties = penalties or Penalties()
        bias = np.zeros(self.model.config.vocab_size, np.float32)
        bias[list(penalties.bias)] = list(penalties.bias.values())
        return RequestPenalty(
            np.asarray(penalties.repetition, np.float32), np.asarray(penalties.presence, np.float32), bias
        )

    def _cache_sharding(self) -> Any:
        axis = "tensor" if self.model.config.kv_heads % self._mesh.shape["tensor"] == 0 else None
        by_head = NamedSharding(self._mesh, PartitionSpec(None, None, axis, None, None))
        return jax.tree.map(lambda _: by_head, jax.eval_shape(partial(self._programs.kv_pages, 1)))
