"""The generator's programs: a decode step bare and with all an engine does, prefill, and choosing a token."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.algorithms.logprobs import token_stats
from areal_jax.generation.engine import Engine
from areal_jax.generation.sampling import draw
from areal_jax.generation.slots import DecodeState
from areal_jax.models.exact import paged_attention
from areal_jax.runtime.measure import (
    figures,
    machine,
    matrix_peak,
    median_s,
    random_model,
    random_params,
    read_bandwidth,
    timed_s,
)
from areal_jax.types import SampleId, Sampling, VersionedParams

NOMINAL_BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
"""Bytes a second of device memory by its vendor's data sheet."""


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
    repeats: int = 5,
) -> dict[str, Any]:
    """Tokens a second of the whole engine with every slot live, sampling and log-probs included.

    `bare_seconds` is a step of the model alone with the likeliest token, in turn. The limit of a step is the
    larger of reading the weights once and multiplying by them for every slot. `fraction_of_bandwidth` counts
    the live KV too: (weights + KV bytes) / time / bandwidth, measured here, and as the vendor names it where
    the device is a known one.
    """
    model = random_model(shape, dtype)
    length = prompt + tokens + decode_steps
    length += -length % (page_tokens or length)
    engine = Engine(
        model,
        slots=slots,
        length=length,
        decode_steps=decode_steps,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
    )
    value = engine.load_params(VersionedParams(0, random_params(model, dtype), ""))
    calls, bare = max(1, tokens // decode_steps), _bare(engine)

    def whole(state: DecodeState) -> DecodeState:
        return engine.generate(value, state)[0]

    took: dict[str, list[float]] = {"whole": [], "bare": []}
    for repeat in range(repeats + 1):
        for name, call in (("whole", whole), ("bare", lambda state: bare(value.params, state))):
            states = [filled(engine, value, prompt)]

            def run(call: Callable[..., Any] = call, states: list[DecodeState] = states) -> Any:
                for _ in range(calls):
                    states[:] = [call(states[0])]
                return states[0].tokens

            seconds = timed_s(run) / (calls * decode_steps)
            if repeat:  # the first compiles
                took[name].append(seconds)
    seconds, bare_s = (statistics.median(took[name]) for name in ("whole", "bare"))
    weight_bytes = model.parameter_count * jnp.dtype(dtype).itemsize
    flops, bandwidth = 2 * model.parameter_count * slots, read_bandwidth()
    limit_s = max(weight_bytes / bandwidth, flops / matrix_peak(dtype))
    kv = jax.eval_shape(engine.init_decode_state).cache
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    token_bytes /= (engine.pages + 1) * engine.page_tokens
    read_bytes = weight_bytes + slots * (prompt + (calls * decode_steps - 1) / 2) * token_bytes
    nominal = NOMINAL_BANDWIDTH.get(jax.devices()[0].device_kind)
    return figures(shape, dtype, seconds, took["whole"], slots / seconds) | {
        "slots": slots,
        "limit": slots / limit_s,
        "fraction_of_limit": limit_s / seconds,
        "bare_seconds": bare_s,
        "engine_over_bare": seconds / bare_s,
        "runs": took,
        "attention": engine.attention.path,
        "read_bytes": read_bytes,
        "bandwidth": bandwidth,
        "fraction_of_bandwidth": read_bytes / seconds / bandwidth,
        "fraction_of_nominal_bandwidth": nominal and read_bytes / seconds / nominal,
    }


def prefill(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    prompts: int = 16,
    prompt: int = 64,
    prefill_chunk: int = 64,
    repeats: int = 5,
) -> dict[str, Any]:
    """Prompt tokens a second, a prompt at a time; 2 FLOPs a token and parameter, the head's left out."""
    model = random_model(shape, dtype)
    engine = Engine(
        model, slots=1, length=2 * prompt, page_tokens=min(prompt, 64), prefill_chunk=prefill_chunk
    )
    value = engine.load_params(VersionedParams(0, random_params(model, dtype), ""))

    def once() -> Any:
        return [
            engine.prefill(params=value, padded_tokens=np.arange(prompt) + i, true_length=prompt).cache
            for i in range(prompts)
        ]

    timed_s(once)
    runs = [timed_s(once) for _ in range(repeats)]
    seconds, count, peak = statistics.median(runs), prompts * prompt, matrix_peak(dtype)
    embedding = model.config.vocab_size * model.config.width
    flops = 2 * count * (model.parameter_count - embedding * (1 if model.config.is_tied else 2))
    return figures(shape, dtype, seconds, runs, count / seconds) | {
        "prompts": [prompts, prompt],
        "limit": count * peak / flops,
        "fraction_of_peak": flops / seconds / peak,
    }


def sample(*, slots: int = 16, vocabulary: int = 49_152, repeats: int = 20) -> dict[str, Any]:
    """Seconds to choose a token in every slot from float32 logits, by what truncates them; and its log-prob.

    `log_prob` is that alone, and `both` drawing without truncation and the log-prob in one program.
    """
    logits = 3 * jax.random.normal(jax.random.key(0), (slots, vocabulary))
    randoms = jax.random.uniform(jax.random.key(1), (slots, 2))
    ones, tokens = jnp.ones(slots), jnp.zeros(slots, jnp.int32)
    cuts = {"plain": (0, 1.0, 0.0, 0), "top_p": (0, 0.9, 0.0, 0), "top_k_256": (256, 0.9, 0.05, 256)}

    def drawn(top_k: int, top_p: float, min_p: float, support: int) -> Callable[..., Any]:
        settings = jnp.full(slots, top_k), top_p * ones, min_p * ones  # not constants of the program
        run = jax.jit(lambda z, u, t, k, p, m: draw(z, u, t, k, p, m, support))
        return lambda z, u: run(z, u, ones, *settings)

    def both(z: jax.Array, u: jax.Array) -> Any:
        chosen = draw(z, u, ones, tokens, ones, 0 * ones, 0)[0]
        return chosen, token_stats(z, chosen, ones).logp

    calls = {name: drawn(*cut) for name, cut in cuts.items()}
    calls |= {"log_prob": jax.jit(lambda z, u: token_stats(z, tokens, ones).logp), "both": jax.jit(both)}
    seconds = {
        name: median_s(lambda call=call: call(logits, randoms), repeats) for name, call in calls.items()
    }
    return machine(f"{slots} x {vocabulary}", "float32", seconds["plain"], [seconds["plain"]]) | {
        f"{name}_seconds": value for name, value in seconds.items()
    }


# --- parts --------------------------------------------------------------------------------------------------


def _bare(engine: Engine) -> Callable[[Any, DecodeState], DecodeState]:
    """As many steps as a call of the engine makes, with nothing but the model and the likeliest token."""
    model, slots = engine.model, engine.slots

    def step(params: Any, state: DecodeState, _: None) -> tuple[DecodeState, None]:
        at = state.filled[:, None] - 1
        fed = jnp.take_along_axis(state.tokens, at, axis=1)
        attend = paged_attention(
            model.config, state.pages.table, at, jnp.ones_like(at, bool), engine._programs.kernel
        )
        hidden, cache = model.hidden(params, fed, at, attend, state.cache)
        chosen = model.logits(params, hidden[:, 0]).argmax(-1)
        tokens = state.tokens.at[jnp.arange(slots), state.filled].set(chosen)
        return state.replace(cache=cache, tokens=tokens, filled=state.filled + 1), None

    def steps(params: Any, state: DecodeState) -> DecodeState:
        pages = state.pages.with_pages(jnp.ones_like(state.pages.table, bool))[0]
        one = lambda state, _: step(params, state, _)  # noqa: E731
        return jax.lax.scan(one, state.replace(pages=pages), None, engine.decode_steps)[0]

    return jax.jit(steps, donate_argnums=1)


def filled(engine: Engine, value: VersionedParams, tokens: int) -> DecodeState:
    """Every slot live with a prefix of `tokens` tokens."""
    state = engine.init_decode_state()
    prefix = engine.prefill(params=value, padded_tokens=np.arange(tokens) % 200, true_length=tokens)
    for slot in range(engine.slots):
        request = engine.request(SampleId(0, slot), 0, Sampling(max_tokens=engine.length), tokens)
        state = engine.insert(prefix, state, slot, request=request)
    return jax.block_until_ready(state)
