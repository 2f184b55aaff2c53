"""Measures prefill, sampling, and decode steps, both of the whole engine and of the model alone."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.algorithms.sampling import Settings, Truncation, draw
from areal_jax.assembly.devices import machine, usable_cores
from areal_jax.generation.engine import Engine
from areal_jax.generation.fastest_layout import fastest_layout
from areal_jax.generation.programs import DecodeState
from areal_jax.lab.bench.measure import (
    in_turn,
    matrix_peak,
    median_s,
    random_model,
    random_params,
    read_bandwidth,
    timed_s,
)
from areal_jax.models.device_layout import WeightLayout
from areal_jax.models.model import Model
from areal_jax.plan.targets import target_of
from areal_jax.types import SampleId, Sampling, VersionedParams


def decode(
    *,
    shape: str = "smollm2-135m",
    slots: int = 16,
    dtype: str = "bfloat16",
    prompt: int = 64,
    tokens: int = 32,
    decode_steps: int = 8,
    page_tokens: int | None = None,
    kv_dtype: str = "auto",
    weight_layout: WeightLayout | Literal["auto"] = "auto",
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures sampled tokens per second of the whole engine with every slot live, log-probs included.

    Each slot samples about `tokens` tokens after `prompt` prompt tokens; other settings: see `Engine`. In the
    result, `seconds` is the time of a decode step (one token per slot) of the engine, and `bare_seconds` the
    time of a greedy decode step of the model alone; both are measured in turn. `limit` is the tokens per
    second if a step only read all weights once, or only multiplied by them for every slot, whichever is
    slower.
    `fraction_of_bandwidth` is (bytes of weights and of live samples' KV) / `seconds` / memory bandwidth
    measured here; `fraction_of_nominal_bandwidth` uses the vendor's bandwidth (None for an unknown device).
    """
    engine, value = bench_engine(
        shape,
        dtype,
        prompt + tokens,
        slots=slots,
        decode_steps=decode_steps,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        weight_layout=weight_layout,
    )
    return decode_figures(engine, value, shape=shape, prompt=prompt, tokens=tokens, repeats=repeats)


def bench_engine(
    shape: str,
    dtype: str,
    tokens: int,
    *,
    slots: int,
    decode_steps: int,
    page_tokens: int | None = None,
    weight_layout: WeightLayout | Literal["auto"] = "auto",
    **sizes: Any,
) -> tuple[Engine, VersionedParams]:
    """Returns an engine for samples of `tokens` tokens, prompt included, and random parameters in its layout.

    `weight_layout`: auto is, as in a run, what is measured to be fastest on a CPU. `sizes`: other arguments
    of `Engine`.
    """
    model = random_model(shape, dtype)
    if weight_layout == "auto" and jax.default_backend() == "cpu":
        published = Model(dataclasses.replace(model.config, params_dtype=dtype), model.tokenizer)
        weight_layout = fastest_layout(published, slots, usable_cores())
    length = tokens + decode_steps
    length += -length % (page_tokens or length)
    engine = Engine(
        model,
        slots=slots,
        length=length,
        decode_steps=decode_steps,
        page_tokens=page_tokens,
        weight_layout=weight_layout,
        **sizes,
    )
    return engine, engine.load_params(VersionedParams(0, random_params(model, dtype), ""))


def decode_figures(
    engine: Engine, value: VersionedParams, *, shape: str, prompt: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Returns the figures of `decode` for an engine and parameters on its device."""
    slots, decode_steps, dtype = engine.slots, engine.decode_steps, engine.model.config.dtype
    calls, bare = max(1, tokens // decode_steps), _bare(engine)
    arms: dict[str, Callable[[DecodeState], DecodeState]] = {
        "whole": lambda state: engine.generate(value, state)[0],
        "bare": lambda state: bare(value.params, state),
    }
    of_calls = in_turn(
        {name: partial(call_s, engine, value, prompt, call, calls) for name, call in arms.items()}, repeats
    )
    took = {name: [seconds / decode_steps for seconds in each] for name, each in of_calls.items()}
    seconds, bare_s = (statistics.median(took[name]) for name in ("whole", "bare"))
    return machine(shape, dtype, took["whole"]) | {
        "tokens_per_s": slots / seconds,
        "slots": slots,
        "bare_seconds": bare_s,
        "engine_over_bare": seconds / bare_s,
        "runs": took,
        "attention": engine.attention.path,
        "weight_layout": engine.weight_layout,
        **_limits(engine, dtype, seconds, prompt + (calls * decode_steps - 1) / 2),
    }


def call_s(
    engine: Engine,
    value: VersionedParams,
    prompt: int,
    call: Callable[[DecodeState], DecodeState],
    calls: int = 1,
) -> float:
    """Returns the mean seconds of `calls` calls of `call`, each on the state that the call before returned.

    In the first state, every slot is live and holds a prompt of `prompt` tokens, prefilled under `value`.
    """
    states = [filled(engine, value, prompt)]

    def run() -> Any:
        for _ in range(calls):
            states.append(call(states.pop()))
        return states[0]

    return timed_s(run) / calls


def decoding_calls(engine: Engine, value: VersionedParams, prompt: int) -> Callable[[], Any]:
    """Returns a function that makes a decode call and returns its results, before they are computed.

    Its first call continues from a state with every slot live (`filled`), every later one from the state
    that the previous call left.
    """
    states = [filled(engine, value, prompt)]

    def call() -> Any:
        state, results = engine.generate(value, states.pop())
        states.append(state)
        return results.data

    return call


def _limits(engine: Engine, dtype: str, seconds: float, live_tokens: float) -> dict[str, Any]:
    """Returns the entries of `decode`'s result that compare a decode step with this machine's limits.

    `seconds`: the step's time. `live_tokens`: KV tokens that each slot held. `dtype`: the weights' type.
    """
    slots, count, bandwidth = engine.slots, engine.model.parameter_count, read_bandwidth()
    weight_bytes = count * jnp.dtype(dtype).itemsize
    limit_s = max(weight_bytes / bandwidth, 2 * count * slots / matrix_peak(dtype))
    kv = jax.eval_shape(engine.init_decode_state).cache
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    read_bytes = weight_bytes + slots * live_tokens * kv_bytes / ((engine.pages + 1) * engine.page_tokens)
    target = target_of(jax.devices()[0].device_kind)
    return {
        "limit": slots / limit_s,
        "fraction_of_limit": limit_s / seconds,
        "read_bytes": read_bytes,
        "bandwidth": bandwidth,
        "fraction_of_bandwidth": read_bytes / seconds / bandwidth,
        "fraction_of_nominal_bandwidth": target and read_bytes / seconds / target.bandwidth,
    }


def prefill(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    prompts: int = 16,
    prompt: int = 64,
    prefill_chunk: int = 256,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures prompt tokens per second of prefill: `prompts` prompts of `prompt` tokens.

    They are computed in chunks of `prefill_chunk` tokens, of as many prompts as fit into it. In the result,
    `limit` is the throughput if a token costs 2 FLOPs per parameter outside of embedding and LM head, at the
    FLOP/s measured for a large matrix product.
    """
    model = random_model(shape, dtype)
    page = min(prompt, 64)
    length = 2 * page * -(-max(prompt, prefill_chunk) // page)
    engine = Engine(model, slots=1, length=length, page_tokens=page, prefill_chunk=prefill_chunk)
    beside = max(1, engine.prefill_rows // engine.prefill_rows_for(prompt))
    value = engine.load_params(VersionedParams(0, random_params(model, dtype), ""))

    def once() -> Any:
        caches = []
        for first in range(0, prompts, beside):
            own = range(first, min(first + beside, prompts))
            prefilling = engine.begin_prefill([np.arange(prompt) + i for i in own])
            while not prefilling.is_complete:
                prefilling = engine.prefill_next(value, prefilling)
            caches += [prefix.cache for prefix in engine.prefixes(prefilling)]
        return caches

    timed_s(once)
    runs = [timed_s(once) for _ in range(repeats)]
    seconds, count, peak = statistics.median(runs), prompts * prompt, matrix_peak(dtype)
    embedding = model.config.vocab_size * model.config.width
    flops = 2 * count * (model.active_parameter_count - embedding * (1 if model.config.is_tied else 2))
    return machine(shape, dtype, runs) | {
        "tokens_per_s": count / seconds,
        "prompts": [prompts, prompt],
        "limit": count * peak / flops,
        "fraction_of_peak": flops / seconds / peak,
    }


def sample(*, slots: int = 16, vocabulary: int = 49_152, repeats: int = 20) -> dict[str, Any]:
    """Measures the seconds to sample one token per slot from float32 logits over `vocabulary` ids.

    In the result, `plain_seconds` is without truncation, `top_p_seconds` with top-p 0.9, and
    `top_k_256_seconds` with top-k 256, top-p 0.9 and min-p 0.05. `log_prob_seconds` is the time to compute
    the log-probs of given tokens, and `both_seconds` that of one program that samples without truncation and
    computes the log-probs.
    """
    logits = 3 * jax.random.normal(jax.random.key(0), (slots, vocabulary))
    randoms = jax.random.uniform(jax.random.key(1), (slots, 2))
    ones, tokens = jnp.ones(slots), jnp.zeros(slots, jnp.int32)
    cuts = {"plain": (0, 1.0, 0.0, 0), "top_p": (0, 0.9, 0.0, 0), "top_k_256": (256, 0.9, 0.05, 256)}

    def drawn(top_k: int, top_p: float, min_p: float, support: int) -> Callable[..., Any]:
        truncation = Truncation.of(Sampling(1.0, top_k, top_p, min_p))
        settings = Settings(ones, jnp.full(slots, top_k), top_p * ones, min_p * ones)
        run = jax.jit(lambda z, u, s: draw(z, u, s, support, truncation))
        return lambda z, u: run(z, u, settings)  # as arguments: XLA folds constants

    def both(z: jax.Array, u: jax.Array) -> Any:
        chosen = draw(z, u, Settings(ones, tokens, ones, 0 * ones), 0, Truncation())[0]
        return chosen, token_stats(z, chosen, ones).logp

    calls = {name: drawn(*cut) for name, cut in cuts.items()}
    calls |= {"log_prob": jax.jit(lambda z, u: token_stats(z, tokens, ones).logp), "both": jax.jit(both)}
    seconds = {
        name: median_s(lambda call=call: call(logits, randoms), repeats) for name, call in calls.items()
    }
    return machine(f"{slots} x {vocabulary}", "float32", [seconds["plain"]]) | {
        f"{name}_seconds": value for name, value in seconds.items()
    }


# --- parts --------------------------------------------------------------------------------------------------


def _bare(engine: Engine) -> Callable[[Any, DecodeState], DecodeState]:
    """Returns a jitted function (params, state) -> state that makes `engine.decode_steps` decode steps.

    The function runs the model and takes the argmax. Unlike the engine, it draws nothing, computes no
    log-probs and ends no sample.
    """
    model, slots = engine.model, engine.slots

    def step(params: Any, state: DecodeState, _: None) -> tuple[DecodeState, None]:
        # As in the engine, a step computes the KV of the last token and chooses the one after it.
        at = state.filled[:, None] - 1
        fed = jnp.take_along_axis(state.tokens, at, axis=1)
        kernel = engine._programs.kernel
        attend = model.paged_attention(state.pages.table, at, jnp.ones_like(at, bool), kernel)
        hidden, cache = model.hidden(params, fed, at, attend, state.cache)
        chosen = model.logits(params, hidden[:, 0]).argmax(-1)
        tokens = state.tokens.at[jnp.arange(slots), state.filled].set(chosen)
        return state.replace(cache=cache, tokens=tokens, filled=state.filled + 1), None

    def steps(params: Any, state: DecodeState) -> DecodeState:
        pages = state.pages.with_pages(jnp.ones_like(state.pages.table, bool))[0]
        return jax.lax.scan(partial(step, params), state.replace(pages=pages), None, engine.decode_steps)[0]

    return jax.jit(steps, donate_argnums=1)


def filled(engine: Engine, value: VersionedParams, tokens: int) -> DecodeState:
    """Returns a decode state with every slot live: a prompt of `tokens` tokens, prefilled under `value`."""
    state = engine.init_decode_state()
    prefix = engine.prefill(params=value, padded_tokens=np.arange(tokens) % 200, true_length=tokens)
    for slot in range(engine.slots):
        request = engine.request(SampleId(0, slot), 0, Sampling(max_tokens=engine.length), tokens)
        state = engine.insert(prefix, state, slot, request=request)
    return jax.block_until_ready(state)
