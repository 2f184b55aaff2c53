"""The decode engine: implements JetStream's engine API over a fixed number of slots and a pool of KV pages.

A slot holds one sample. `prefill` computes the KV of a prompt except its last token; `insert` copies it into
a slot's pages, or shares the pages of a live sample with the same prompt (its sibling); `generate` feeds each
live slot's last token and samples the next one, several times per call. `recompute` rebuilds the KV of live
slots under other parameters; `extract` takes out a half-decoded sample with its KV. The shape of every call
is fixed by the constructor or by the one sample it serves, never by the contents of other slots, so a
sample's tokens do not depend on its neighbours.

JetStream's callers pass the arguments of its API alone and get the default sampling; a host also passes
arguments that JetStream does not have (`request`, `sibling`, `only`). Arguments of later versions of the API
are accepted and ignored, except `sampler`, which is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool

from areal_jax.algorithms.sampling import (
    RequestPenalty,
    Truncation,
    require_counted_randomness,
    require_support_fits,
)
from areal_jax.generation import jetstream
from areal_jax.generation.canary import canary
from areal_jax.generation.programs import NONE, DecodeState, Jitted, Programs, ResultTokens
from areal_jax.generation.slots import (
    MAX_STOP_TOKENS,
    ExistingPrefix,
    Penalties,
    Prefix,
    Request,
)
from areal_jax.models.device_layout import (
    WeightLayout,
    abstractly_laid_out,
    is_laid_out,
    laid_out,
    layout_on,
)
from areal_jax.models.experts import NO_EXPERT
from areal_jax.models.kernels import expert_products
from areal_jax.models.kernels.paged_attention import choose_for
from areal_jax.models.kv_pages import KVPages
from areal_jax.models.model import Model, Params
from areal_jax.models.quantize import has_codes, quantize_tree
from areal_jax.models.transformer import Execution
from areal_jax.parallel.mesh import has_fp8, make_mesh, param_shardings, platform_of, replicated
from areal_jax.parallel.program_errors import Running
from areal_jax.types import ArealError, SampleId, Sampling, VersionedParams
from areal_jax.weights.store import abstract_in

LOW = 2**32 - 1
"""Mask of the lower 32 bits of a seed."""


PREFILL_ROW = 64
"""Tokens of one prompt that a prefill call computes in a row; it has several rows if its chunk is larger."""
CPU_CHUNK, ACCELERATOR_CHUNK = 32, 512
"""Tokens that a prefill call computes if no number is given. A single short prompt takes as long as all of
them; on an accelerator, fewer tokens would take as long, because each call reads the weights.
"""
TPU_RECOMPUTE = 256
"""Tokens of a slot that a recompute call computes on a TPU, at most."""


class PrefillingPrompt(NamedTuple):
    """One of the prompts of a `Prefilling`."""

    tokens: np.ndarray  # (length,) int32
    count: int
    first_page: int
    """The first of the prompt's pages, which follow each other."""
    done: int = 0
    """The KV of so many tokens, from the first one on, is computed."""

    @property
    def is_complete(self) -> bool:
        return self.done >= self.count - 1


class Prefilling(NamedTuple):
    """Prompts in chunked prefill; `cache` has the pages of all of them."""

    cache: KVPages
    prompts: tuple[PrefillingPrompt, ...]

    @property
    def is_complete(self) -> bool:
        return all(prompt.is_complete for prompt in self.prompts)


def _served_by(model: Model, quantize: str, mesh: Mesh) -> Model:
    """Returns the model with which a host decodes: `model`, or with codes in place of its matrices.

    Raises ArealError if the mesh's devices cannot compute with these codes.
    """
    if quantize == "fp8" and not has_fp8(mesh):
        raise ArealError(
            f"generation.quantize=fp8 on {mesh.devices.flat[0].device_kind}: fp8 needs an NVIDIA GPU of "
            "compute capability 8.9 or newer (Ada, Hopper, Blackwell); use int8"
        )
    return model.with_codes(quantize)


def reason_against_length(count: int, length: int) -> str:
    """Returns why a prompt of `count` tokens cannot be decoded in slots of `length`; empty if it can."""
    if 1 <= count < length:
        return ""
    return (
        f"a prompt of {count} tokens does not fit generation.length={length}, which holds prompt and "
        "completion; raise generation.length or shorten the prompt"
    )


class Engine(jetstream.Engine):
    """Decodes up to `slots` samples at once, each of at most `length` tokens, prompt included.

    `decode_steps`: tokens that a `generate` call samples per slot.
    `page_tokens`: tokens per KV page, a divisor of `length`; None: `length`, one page per slot.
    `kv_tokens`: capacity of the page pool in tokens, over all slots; None: slots * length.
    `kv_dtype`: dtype of the KV; auto: the model's dtype.
    `prefill_chunk`: tokens that a `prefill_next` call computes, in rows of about `prefill_row` tokens; None:
    by the platform.
    `support_size`: a token's support, the ids that truncation left to draw from, is recorded up to this many
    ids; 0: not at all.
    `reserved_slots`: number of slots, from slot 0 on, reserved with all their pages for clients' requests.
    `weight_layout`: the layout of the weights (`device_layout`); auto: the one for the mesh's platform.
    `quantize`: how projections are stored, none, int8 or fp8: `load_params` quantises each version.
    `has_penalties`: whether requests may have penalties and logit biases, as on a server.
    `sampling`, `seed`: used for samples that are inserted without a request.
    `mesh`: the devices to decode on; None: the first device.
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
        prefill_chunk: int | None = None,
        prefill_row: int = PREFILL_ROW,
        support_size: int = 0,
        keeps_routes: bool = False,
        weight_layout: WeightLayout | Literal["auto"] = "auto",
        quantize: str = "none",
        has_penalties: bool = False,
        reserved_slots: int = 0,
        sampling: Sampling | None = None,
        seed: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        require_counted_randomness()
        self.model, self.tokenizer = model, model.tokenizer
        self.slots, self.length, self.reserved_slots = slots, length, reserved_slots
        self.decode_steps, self.support_size = decode_steps, support_size
        self.keeps_routes = keeps_routes
        if len(ends := self.tokenizer.end_ids) > MAX_STOP_TOKENS:
            raise ArealError(
                f"the model's files name {len(ends)} end tokens (eos_token_id), but a sample has room for "
                f"{MAX_STOP_TOKENS} stop tokens; shorten the list in generation_config.json"
            )
        require_support_fits(support_size, model.config.vocab_size)
        self.page_tokens = page_tokens or length
        if length % self.page_tokens:
            raise ArealError(f"page_tokens={page_tokens} does not divide length={length}; change one")
        self.pages_per_slot = length // self.page_tokens
        self.pages = (kv_tokens or slots * length) // self.page_tokens
        self.shared_pages = self.pages - reserved_slots * self.pages_per_slot
        """Number of pages in the pool that are not reserved."""
        if self.shared_pages < self.pages_per_slot:
            raise ArealError(
                f"kv_tokens={kv_tokens} is too small for a sample of length={length} and {reserved_slots} "
                f"reserved slots; give the Engine kv_tokens of at least {(reserved_slots + 1) * length}"
            )
        self.has_penalties = has_penalties
        self._sampling, self._seed = sampling or Sampling(max_tokens=length), seed
        self._mesh = mesh or make_mesh({"tensor": 1}, jax.devices(), "a generation host")
        self.param_shardings = param_shardings(model.logical_axes, model.abstract_params, self._mesh)
        self.quantize, self._served = quantize, _served_by(model, quantize, self._mesh)
        self._platform = platform_of(self._mesh)
        self.weight_layout: WeightLayout = layout_on(self._mesh, model, weight_layout)
        kv_dtype = model.config.dtype if kv_dtype == "auto" else kv_dtype
        self.attention, kernel = choose_for(model.config, self._mesh, kv_dtype, self.page_tokens)
        """The attention path, and the reasons against each path that was preferred to it."""
        self.products, expert_kernels = expert_products.choose_for(self._served.config, self._mesh)
        """The same of the experts' products."""
        self._kv_pages = partial(
            model.kv_pages,
            page_tokens=self.page_tokens,
            dtype=kv_dtype,
            platform=self._platform,
            keeps_experts=keeps_routes,
        )
        chunk = prefill_chunk or (CPU_CHUNK if self._platform == "cpu" else ACCELERATOR_CHUNK)
        self.prefill_rows = max(1, chunk // prefill_row)
        """Number of rows of a prefill call, each of `prefill_width` tokens of one prompt."""
        self.prefill_width = min(chunk // self.prefill_rows, length)
        # XLA copies a TPU's whole pool where a call writes KV, so there its calls are few.
        self.recompute_chunk = (
            min(chunk, TPU_RECOMPUTE, length) if self._platform == "tpu" else self.prefill_width
        )
        """Number of tokens of each slot that a recompute call computes."""
        of_row = min(self.pages_for(self.prefill_width + 1), self.pages_per_slot)
        self.prefill_pages = max(self.pages_per_slot, self.prefill_rows * of_row)
        """Number of KV pages of the prompts of a prefill, together."""
        ends_early = self._platform not in ("gpu", "cuda")
        programs = Programs(
            self._served,
            decode_steps,
            self.recompute_chunk,
            support_size,
            reserved_slots,
            Execution(mesh=self._mesh, expert_kernels=expert_kernels),
            kernel,
            ends_early,
        )
        self._truncation = Truncation.of(self._sampling)
        self._compile(programs)
        self._every_slot = np.ones(slots, bool)
        self._freed: set[int] = set()
        self.canary = canary(model)

    def _compile(self, programs: Programs) -> None:
        self._programs, self.kv_sharding = programs, self._kv_sharding()
        """`kv_sharding`: how KV pages are laid out on the mesh, those of a prefix too."""
        self._neutral = self.request(SampleId(0, 0), 0, Sampling(max_tokens=self.length), 1)
        pages, slots, length = partial(self._kv_pages, self.pages), self.slots, self.length
        empty = lambda request: DecodeState.empty(pages(), slots, length, request)  # noqa: E731
        whole = replicated(self._mesh)
        self.jitted = Jitted(programs, self._kv_pages, empty, self._neutral, self.kv_sharding, whole)

    # --- JetStream's members -------------------------------------------------------------------------------

    @property
    def max_concurrent_decodes(self) -> int:
        return self.slots

    samples_per_slot = 1

    @property
    def max_prefill_length(self) -> int:
        return self.length

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    colocated_cpus = None

    def get_tokenizer(self) -> Any:
        """Returns an empty TokenizerParameters, as JetStream's API requires; `build_tokenizer` ignores it.

        Raises ArealError if JetStream is not installed.
        """
        return jetstream.engine_api().tokenizer_pb2.TokenizerParameters(path="")

    def build_tokenizer(self, metadata: Any) -> jetstream.TokenizerAdapter:
        return jetstream.TokenizerAdapter(self.tokenizer)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        return replicated(self._mesh)

    def load_params(self, value: VersionedParams) -> VersionedParams:
        """Returns `value` with its parameters on this engine's mesh, in the layout `weight_layout`.

        An engine with `quantize` quantises them first, anew from each version's published parameters; the
        digest stays that of the published ones. A value that is already converted is returned unchanged.
        """
        if is_laid_out(value.params) or (self.quantize != "none" and has_codes(value.params)):
            return value
        params = jax.device_put(value.params, self.param_shardings)
        if self.quantize != "none":
            params = jax.device_put(quantize_tree(params, self.quantize), self._served_shardings)
        return value._replace(params=laid_out(self._served, params, self.weight_layout, self._platform))

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        return self.jitted.empty_state(self._neutral)

    def prefill(
        self,
        *,
        params: VersionedParams,
        padded_tokens: np.ndarray,
        true_length: int,
        existing_prefix: ExistingPrefix | None = None,
        sampler: Any = None,
        **later: Any,
    ) -> Prefix:
        """Returns the prefix `padded_tokens[:true_length]`: these tokens, and the KV of all but the last.

        `existing_prefix`: an ExistingPrefix with the KV of the first n tokens, n < `true_length`; that of the
        others is computed. Raises ArealError if the prompt leaves no space for a completion, if `true_length`
        exceeds the number of tokens (then the caller has cut the prompt), if the prompt does not begin with
        the tokens of `existing_prefix`, or if `sampler` is not None.
        """
        self._refuse(sampler)
        if true_length > len(padded_tokens):
            raise ArealError(
                f"true_length={true_length} exceeds the {len(padded_tokens)} given tokens, so the caller "
                f"cut the prompt; give a prompt of at most max_prefill_length={self.max_prefill_length} "
                "tokens"
            )
        prefilling = self.begin_prefill([np.asarray(padded_tokens)[:true_length]], [existing_prefix])
        while not prefilling.is_complete:
            prefilling = self.prefill_next(params, prefilling)
        return self.prefixes(prefilling)[0]

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        *,
        request: Request | None = None,
        sibling: int | None = None,
        **later: Any,
    ) -> DecodeState:
        """Returns the state with the prefix in `slot`; if `request` is None, the engine's `sampling` applies.

        `sibling`: a live slot that began with an equal prefix under equal parameters. `slot` then shares the
        sibling's full pages, and only the last page is copied; None, or if the sibling has ended: all pages
        are copied. If the pool has too few free pages, `slot` does not become live.
        """
        if request is None:
            # The ordinal is the number of inserts so far: a fresh decode state draws the same samples again.
            sample, stops = SampleId(int(decode_state.inserted), 0), self.tokenizer.end_ids
            request = self.request(sample, self._seed, self._sampling, int(prefix.true_length), stops)
        self._truncation = Truncation.joined([self._truncation, Truncation.of(request)])
        self._freed.discard(slot)  # that call freed the slot's former sample, not this one
        # A sample that was evicted, or that comes from another host, is elsewhere. `device_put` takes longer
        # than all else that Python does here, also if it has nothing to do.
        if any(getattr(leaf, "sharding", None) != self.kv_sharding for leaf in jax.tree.leaves(prefix.cache)):
            prefix = prefix.replace(cache=jax.device_put(prefix.cache, self.kv_sharding))
        with Running("insert"):
            return self.jitted.insert(decode_state, prefix, slot, request, -1 if sibling is None else sibling)

    def generate(
        self,
        params: VersionedParams,
        decode_state: DecodeState,
        only: Bool[np.ndarray, " N"] | None = None,
        truncation: Truncation | None = None,
        sampler: Any = None,
        **later: Any,
    ) -> tuple[DecodeState, ResultTokens]:
        """Sample up to `decode_steps` tokens in every live slot; returns the next state and the results.

        `only`: mask of the slots to step (None: all); the others do not change. A slot for which the pool has
        too few free pages does not change either, and is marked `is_starved` in the results. These also
        contain the version of `params`. `truncation`: what the live slots' requests need; None: what all
        requests so far needed. Another value compiles another program, at its first call; an engine that
        serves clients uses a compiled one with further truncations instead, if there is one.
        """
        self._refuse(sampler)
        # Later versions of the API free slots without a decode state: the pages are released here instead.
        while self._freed:
            decode_state = self.jitted.release(decode_state, self._freed.pop())
        only = self._every_slot if only is None else only
        truncation = self._truncation if truncation is None else truncation
        if self.has_penalties or self.reserved_slots:
            truncation = self.jitted.compiled_for(truncation) or truncation
        with Running("decode"):
            state, data = self.jitted.decode(truncation, params.params, params.version, decode_state, only)
        return state, ResultTokens.of(data, self.decode_steps, self.support_size)

    # --- extensions ----------------------------------------------------------------------------------------

    def request(
        self,
        sample: SampleId,
        seed: int,
        sampling: Sampling,
        prompt_tokens: int,
        stop_tokens: tuple[int, ...] = (),
        penalties: Penalties | None = None,
        *,
        segment: int = 0,
        keeps_pages: bool = False,
    ) -> Request:
        """Returns one sample's settings as arrays, for `insert`; its prompt has `prompt_tokens` tokens.

        `sample`, `seed` (any integer of 64 bits) and `segment` (number of an episode's branch) determine its
        random draws.
        `keeps_pages`: whether the sample, once ended, has its pages until `free_resource`, so that `extract`
        can take out its KV. Raises ArealError for more than MAX_STOP_TOKENS stop tokens, and for penalties if
        the engine was made without `has_penalties`.
        """
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ArealError(f"{len(stop_tokens)} stop_tokens are too many; give at most {MAX_STOP_TOKENS}")
        stops = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stops[: len(stop_tokens)] = stop_tokens
        return Request(
            # Through int64, because a half of a seed may exceed int32: its bits count.
            np.array([seed & LOW, *sample, segment, seed >> 32 & LOW], np.int64).astype(np.int32),
            np.asarray(prompt_tokens, np.int32),
            np.asarray(sampling.temperature, np.float32),
            np.asarray(sampling.top_k, np.int32),
            np.asarray(sampling.top_p, np.float32),
            np.asarray(sampling.min_p, np.float32),
            np.asarray(min(sampling.max_tokens + prompt_tokens, self.length), np.int32),
            stops,
            np.asarray(keeps_pages),
            self._request_penalty(penalties),
        )

    def routes(self, slot: int, state: DecodeState, tokens: int) -> np.ndarray:
        """Returns the experts of a slot's first `tokens` tokens, (tokens, E) uint8, as in `Batch.experts`.

        They are those with which a token's KV was last computed; the last token, which has no KV, has
        NO_EXPERT.
        """
        found = np.asarray(self.jitted.routes(state, slot))[:tokens].copy()
        found[tokens - 1 :] = NO_EXPERT
        return found

    def blank_prefix(self, tokens: np.ndarray) -> Prefix:
        """Returns a prefix of these tokens with pages of zeros, as many as their KV needs.

        Raises ArealError if they leave no space for a completion.
        """
        cache = self.jitted.empty_prefix(self._bucket(len(tokens)))
        return Prefix(cache, self._padded(tokens), np.asarray(len(tokens), np.int32))

    def begin_prefill(
        self, prompts: Sequence[np.ndarray], existing: Sequence[ExistingPrefix | None] = ()
    ) -> Prefilling:
        """Returns the record of a prefill of `prompts`, of which no chunk is computed yet.

        Each prompt goes on after the tokens of its entry of `existing` (empty: none has one), fewer than its
        own. Raises ArealError if these are not its first ones, if a prompt is empty or leaves no space for a
        completion, and if the prompts together need more pages than `prefill_pages`.
        """
        first, found = 1, []
        cache = self.jitted.empty_prefix(self.prefill_pages)
        for tokens, kept in zip(prompts, existing or [None] * len(prompts), strict=True):
            count, known = len(tokens), 0 if kept is None else len(kept.common_prefix_tokens)
            prompt = PrefillingPrompt(self._padded(tokens), count, first, known)
            first += self.pages_for(count)
            if first > self.prefill_pages + 1:
                raise ArealError(
                    f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens need more than the "
                    f"{self.prefill_pages} KV pages, of {self.page_tokens} tokens, of a prefill; prefill "
                    "fewer at once"
                )
            if kept is not None:
                if known >= count or not np.array_equal(kept.common_prefix_tokens, tokens[:known]):
                    raise ArealError(
                        f"the prompt of {count} tokens does not begin with the {known} tokens of "
                        "existing_prefix; give an existing_prefix of fewer tokens, the prompt's first ones"
                    )
                numbers = self._numbers(prompt, self._bucket(known))
                cache = self.jitted.put(cache, numbers, self._with_pages(kept.cache, len(numbers)))
            found.append(prompt)
        return Prefilling(cache, tuple(found))

    def prefill_next(self, params: VersionedParams, prefilling: Prefilling) -> Prefilling:
        """Returns `prefilling` with one more chunk computed under `params`; do not use the old one again.

        The chunk's rows are the next tokens of the first prompts that are not complete.
        """
        rows, width = self.prefill_rows, self.prefill_width
        table, tokens, start, known = self._no_rows()
        prompts, row = [], 0
        for prompt in prefilling.prompts:
            while not prompt.is_complete and row < rows:
                part = prompt.tokens[prompt.done : prompt.done + width]
                table[row] = self._numbers(prompt, self.pages_per_slot)
                tokens[row, : len(part)] = part
                start[row], known[row] = prompt.done, prompt.count - 1
                prompt, row = prompt._replace(done=prompt.done + width), row + 1
            prompts.append(prompt)
        table = table[:, : self._pages_read(int(start.max()) + width)]
        with Running("prefill"):
            cache = self.jitted.prefill(params.params, prefilling.cache, table, tokens, start, known)
        return Prefilling(cache, tuple(prompts))

    def prefixes(self, prefilling: Prefilling) -> list[Prefix]:
        """Returns the prefix of each prompt of a complete prefill."""
        return [
            Prefix(
                self.jitted.take(prefilling.cache, self._numbers(prompt, self._bucket(prompt.count))),
                prompt.tokens,
                np.asarray(prompt.count, np.int32),
            )
            for prompt in prefilling.prompts
        ]

    def prefill_rows_for(self, count: int, known: int = 0) -> int:
        """Returns how many rows the prefill of a prompt of `count` tokens takes, `known` of which have KV."""
        return -(-max(0, count - 1 - known) // self.prefill_width)

    def recompute(
        self,
        params: VersionedParams,
        decode_state: DecodeState,
        only: Bool[np.ndarray, " N"] | None = None,
    ) -> DecodeState:
        """Returns the state with live slots' KV rebuilt under `params`.

        `only`: mask of the slots to rebuild; None: all.
        """
        only = self._every_slot if only is None else only
        known = np.asarray(decode_state.filled) - 1
        longest = int(np.where(np.asarray(decode_state.is_live) & only, known, 0).max())
        # One call per chunk: a loop in the program would ask a GPU at each chunk whether another one follows.
        for start in range(0, longest, self.recompute_chunk):
            pages = self._pages_read(start + self.recompute_chunk)
            with Running("recompute"):
                decode_state = self.jitted.recompute(params.params, decode_state, only, start, pages)
        return decode_state

    def free_resource(self, slot: int, decode_state: DecodeState | None = None) -> Any:
        """Returns the decode state with the slot freed, and its pages too unless another slot uses them.

        If `decode_state` is None, as from later versions of JetStream, returns None; the next `generate` then
        frees the slot.
        """
        if decode_state is None:
            self._freed.add(slot)
            return None
        return self.jitted.release(decode_state, slot)

    def extract(self, slot: int, decode_state: DecodeState, filled: int) -> Prefix:
        """Returns the sample in `slot`, with its `filled` tokens and their KV, as a prefix for `insert`."""
        with Running("extract"):
            return self.jitted.extract(decode_state, slot, self._bucket(filled))

    def extract_existing(self, slot: int, decode_state: DecodeState, tokens: np.ndarray) -> ExistingPrefix:
        """Returns the KV of `tokens`, the first of the slot's sample, except the last, in host memory."""
        known = np.array(tokens[:-1], np.int32)
        cache = jax.device_get(self.extract(slot, decode_state, len(tokens)).cache)
        pages = max(1, self.pages_for(len(known)))
        return ExistingPrefix(jax.tree.map(lambda leaf: leaf[:, : pages + 1].copy(), cache), known)

    def is_own(self, prefix: Prefix) -> bool:
        """Whether the prefix has this engine's page layout, so that `insert` can continue it."""
        own = jax.eval_shape(partial(self._kv_pages, self._bucket(int(prefix.true_length))))
        of = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]  # noqa: E731
        return of(own) == of(prefix.cache) and prefix.tokens.shape == (self.length,)

    def pages_for(self, count: int, has_sibling: bool = False) -> int:
        """Returns how many free pages `insert` takes for `count` tokens: 1 if a sibling shares the others."""
        used = (count - 1) // self.page_tokens
        return 1 if has_sibling else used + 1

    def blank(self, dtype: str) -> VersionedParams:
        """Returns parameters of value 0 in `dtype`, as version -1, for `warm` before a version arrives."""
        zeros = lambda like: jnp.zeros(like.shape, like.dtype, device=like.sharding)  # noqa: E731
        params = jax.tree.map(zeros, self.abstract_params(dtype))
        return VersionedParams(-1, params, "")

    def warm(self, params: VersionedParams) -> None:
        """Compile every program that a host calls, or load it from the compilation cache.

        Samples with truncations that this engine's `sampling` lacks need another decode program; that one
        compiles when the first such sample is decoded (a client's: `Preparing`). The method runs each program
        once, with as little work as possible.
        """
        state, cache = self.init_decode_state(), self.jitted.empty_prefix(self.prefill_pages)
        for pages, count in {self._bucket(count): count for count in range(1, self.length)}.items():
            prefix, nowhere = self.blank_prefix(np.zeros(count, np.int32)), np.full(pages, NONE, np.int32)
            cache = self.jitted.put(cache, nowhere, prefix.cache)
            prefix = prefix.replace(cache=self.jitted.take(cache, nowhere))
            request = self.request(SampleId(0, 0), 0, Sampling(max_tokens=1), count)
            state = self.insert(prefix, state, 0, request=request)
            self.extract(0, state, count)
        state = self.free_resource(0, state)
        for pages in {self._pages_read(end) for end in range(1, self.length + 1)}:
            table, *others = self._no_rows()
            cache = self.jitted.prefill(params.params, cache, table[:, :pages], *others)
            state = self.jitted.recompute(params.params, state, self._every_slot, 0, pages)
        jax.block_until_ready(self.generate(params, state)[0])

    def abstract_params(self, dtype: str) -> Params:
        """Returns shapes, dtypes and shardings of parameters published in `dtype`, before `load_params`."""
        return abstract_in(dtype, self.model.abstract_params, self.param_shardings)

    def abstract_served(self, dtype: str) -> Params:
        """Returns shapes, dtypes and shardings of the result of `load_params`, as `abstract_params`."""
        params = self.abstract_params(dtype)
        if self.quantize != "none":
            codes = jax.eval_shape(lambda params: quantize_tree(params, self.quantize), params)
            params = jax.tree.map(
                lambda leaf, on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on),
                codes,
                self._served_shardings,
            )
        return abstractly_laid_out(self._served, params, self.weight_layout, self._mesh)

    def abstract_calls(self, dtype: str) -> dict[str, tuple[Any, tuple]]:
        """Returns name -> (jitted function, abstract arguments) of the programs that a host calls.

        Each program has its largest size. `dtype`: the dtype of the parameters. The programs can be compiled
        without a device.
        """
        params = self.abstract_served(dtype)
        state = self.jitted.empty_state.eval_shape(self._neutral)
        cache = self.jitted.empty_prefix.eval_shape(self.prefill_pages)
        largest = self.jitted.empty_prefix.eval_shape(self.pages_per_slot)
        prefix = Prefix(largest, np.zeros(self.length, np.int32), np.int32(0))
        return {
            "prefill": (self.jitted.prefill, (params, cache, *self._no_rows())),
            "insert": (self.jitted.insert, (state, prefix, 0, self._neutral, -1)),
            "decode": (self.jitted.generate, (params, 0, state, self._every_slot, self._truncation)),
            "recompute": (self.jitted.recompute, (params, state, self._every_slot, 0, self.pages_per_slot)),
            "extract": (self.jitted.extract, (state, 0, self.pages_per_slot)),
        }

    # --- inside --------------------------------------------------------------------------------------------

    @staticmethod
    def _refuse(sampler: Any) -> None:
        if sampler is not None:
            raise ArealError(
                f"sampler={sampler!r}: a sampler is not supported; give the engine `sampling`, or insert "
                "with a `request`"
            )

    def _bucket(self, count: int) -> int:
        """Returns how many pages the KV cache of a prefix of `count` tokens has.

        That is the smallest power of 4 that suffices, so that few sizes compile, or all of a slot's pages.
        """
        # `insert` and `extract` compile once for each size: there are few, at most four times too large.
        pages, used = 1, (count - 1) // self.page_tokens + 1
        while pages < used:
            pages *= 4
        return min(pages, self.pages_per_slot)

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of a sample with zeros up to `length`, (length,).

        Raises ArealError if they leave no space for a completion.
        """
        if reason := reason_against_length(len(tokens), self.length):
            raise ArealError(reason)
        padded = np.zeros(self.length, np.int32)
        padded[: len(tokens)] = tokens
        return padded

    def _no_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns the arguments of `Programs.prefill` after the cache, for a call that computes nothing."""
        each = (self.pages_per_slot, self.prefill_width, 1, 1)
        table, tokens, start, known = (np.zeros((self.prefill_rows, n), np.int32) for n in each)
        return table, tokens, start, known

    def _numbers(self, prompt: PrefillingPrompt, pages: int) -> np.ndarray:
        """Returns the numbers of a prompt's first `pages` pages, (pages,); beyond the last one, NONE."""
        own = np.arange(pages, dtype=np.int32)
        return np.where(own < self.pages_for(prompt.count), prompt.first_page + own, NONE)

    def _with_pages(self, cache: KVPages, pages: int) -> KVPages:
        """Returns a copy of a prefix's cache on this engine's devices, with so many pages."""

        def resized(leaf: np.ndarray) -> np.ndarray:
            own = leaf[:, : pages + 1]
            return np.pad(own, [(0, 0), (0, pages + 1 - own.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])

        return jax.device_put(jax.tree.map(resized, jax.device_get(cache)), self.kv_sharding)

    def _pages_read(self, end: int) -> int:
        """Returns how many pages of a sample a chunk of prefill or recompute reads that ends before `end`.

        If attention reads no more than the tokens that it needs, that is all of them, so that one program
        suffices.
        """
        programs = self._programs
        if programs.ends_early or programs.kernel is not None:
            return self.pages_per_slot
        return self._bucket(min(end, self.length))

    def _request_penalty(self, penalties: Penalties | None) -> RequestPenalty | None:
        if not self.has_penalties:
            if penalties is not None and penalties != Penalties():
                raise ArealError(
                    "this engine was made, as for training, without penalties and logit biases; leave them "
                    "out of the request, or make the Engine with has_penalties=True"
                )
            return None
        penalties = penalties or Penalties()
        bias = np.zeros(self.model.config.vocab_size, np.float32)
        bias[list(penalties.bias)] = list(penalties.bias.values())
        return RequestPenalty(
            np.asarray(penalties.repetition, np.float32), np.asarray(penalties.presence, np.float32), bias
        )

    @property
    def _served_shardings(self) -> Params:
        """The shardings of the parameters as this engine decodes with them, before they are laid out."""
        return param_shardings(self._served.logical_axes, self._served.abstract_params, self._mesh)

    def _kv_sharding(self) -> NamedSharding:
        # Pages are split by KV heads if the axis divides them; otherwise every device holds all heads.
        axis = "tensor" if self.model.config.kv_heads % self._mesh.shape["tensor"] == 0 else None
        return NamedSharding(self._mesh, PartitionSpec(None, None, axis, None, None))
