"""Measures a generation host: its throughput, and the cost of new weights."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.lab.bench.decode import call_s, decoding_calls
from areal_jax.lab.bench.measure import in_turn, median_s, random_model, random_params, timed_s
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore


def serve(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    slots: int = 16,
    requests: int = 64,
    prompt: int = 64,
    longest: int = 128,
    sigma: float = 1.0,
    decode_steps: int = 4,
    page_tokens: int = 16,
    prefill_chunk: int = 64,
    calls_ahead: int | Literal["auto"] = "auto",
    repeats: int = 3,
) -> dict[str, Any]:
    """Measures a host's sampled tokens per second over `requests` requests of lognormal completion length.

    A prompt has `prompt` tokens; `longest`, `sigma`: see `skewed_lengths`; `calls_ahead`: as
    generation.calls_ahead. In the result, `limit` is the throughput of an ideal schedule: each request
    starts, in order, in the slot that becomes free first, and only decode steps and one prefill per request
    take time. The seconds of a decode step with all slots live and of a prefill are measured in this run.
    `static_tokens_per_s` is computed for static batches: all slots start together, and other requests start
    only when the longest completion of the batch has ended.
    """
    model = random_model(shape, dtype)
    length = prompt + longest
    engine = Engine(
        model,
        slots=slots,
        length=-(-length // page_tokens) * page_tokens,
        decode_steps=decode_steps,
        page_tokens=page_tokens,
        prefill_chunk=prefill_chunk,
    )
    store = published(engine, random_params(model, dtype))
    answers = skewed_lengths(requests, longest, sigma)
    starts = starts_of(answers, prompt, engine)

    def whole() -> None:
        assert drain(started(engine, store, starts, calls_ahead)) == sum(answers)

    runs = in_turn({"host": lambda: (*_parts_s(engine, store, prompt), timed_s(whole))}, repeats)["host"]
    took = [seconds for _, _, seconds in runs]
    step, prefill, seconds = (statistics.median(each) for each in zip(*runs, strict=True))
    ideal = makespan(answers, slots) * step + requests * prefill
    static = sum(max(answers[i : i + slots]) for i in range(0, requests, slots)) * step + requests * prefill
    return machine(shape, dtype, took) | {
        "tokens_per_s": sum(answers) / seconds,
        "slots": slots,
        "limit": sum(answers) / ideal,
        "fraction_of_limit": ideal / seconds,
        "static_tokens_per_s": sum(answers) / static,
        "decode_step_s": step,
        "prefill_s": prefill,
        "lengths_mean": statistics.mean(answers),
    }


def swap(
    *,
    shape: str = "smollm2-135m",
    dtype: str = "float32",
    slots: int = 16,
    tokens: int = 128,
    prefill_chunk: int = 64,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measures the seconds to recompute the KV of all live samples, as after an update of the weights.

    Every slot holds a sample of `tokens` tokens. In the result, `ratio` is the time of recomputing in chunks
    of `prefill_chunk` tokens, divided by the time of recomputing all tokens in one pass
    (`batched_prefill_s`).
    """
    model = random_model(shape, dtype)
    params = random_params(model, dtype)
    runs = {}
    sizes = dict[str, Any](slots=slots, length=2 * tokens, decode_steps=4, page_tokens=16)
    for chunk in (prefill_chunk, tokens):
        engine = Engine(model, **sizes, prefill_chunk=chunk, prefill_row=chunk)
        value = engine.load_params(VersionedParams(0, params, ""))
        rebuild = partial(engine.recompute, value)
        runs["whole" if chunk == tokens else "chunked"] = partial(call_s, engine, value, tokens, rebuild)
    took = in_turn(runs, repeats)
    seconds = {name: statistics.median(each) for name, each in took.items()}
    rebuilt = seconds.get("chunked", seconds["whole"])
    return machine(shape, dtype, took.get("chunked", took["whole"])) | {
        "tokens_per_s": slots * tokens / rebuilt,
        "slots": slots,
        "recomputed_tokens": slots * tokens,
        "batched_prefill_s": seconds["whole"],
        "ratio": rebuilt / seconds["whole"],
    }


def skewed_lengths(count: int, longest: int, sigma: float) -> list[int]:
    """Returns `count` lognormal lengths, always the same ones for equal arguments.

    The lengths are drawn with a mean of `longest` / 4, and `sigma` is the standard deviation of their
    logarithm; then they are rounded and clipped to 1..`longest`.
    """
    numbers = np.random.default_rng(0)
    median = longest / 4 / np.exp(sigma**2 / 2)
    return np.clip(np.round(numbers.lognormal(np.log(median), sigma, count)), 1, longest).astype(int).tolist()


def makespan(lengths: Sequence[int], slots: int) -> int:
    """Returns how many decode steps `slots` slots need for sequences of `lengths` tokens.

    Sequences start in order, each in the slot that becomes free first; a step decodes one token per slot.
    """
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


# --- parts --------------------------------------------------------------------------------------------------


def published(engine: Engine, params: Any) -> MemoryStore:
    """Returns an in-memory weight store for `engine`, with `params` published as version 0 in their dtype."""
    store = MemoryStore(engine.canary, dtype=str(jax.tree.leaves(params)[0].dtype))
    store.publish(VersionedParams(0, params, digest(params)))
    return store


def started(
    engine: Engine,
    store: MemoryStore,
    starts: Iterable[Start],
    calls_ahead: int | Literal["auto"] = "auto",
) -> Host:
    """Returns a host that has queued the samples of `starts` and has not decoded yet.

    The host reads its weights from `store`. No token id ends a sample, so each reaches its maximum length.
    """
    host = Host(
        "bench",
        engine,
        store,
        lambda *_: None,
        seed=0,
        sampling=Sampling(),
        stops=(),
        calls_ahead=calls_ahead,
    )
    for start in starts:
        host.inbox.put(start)
    host.take_commands()
    return host


def drain(host: Host) -> int:
    """Decodes until every sample has ended; returns the number of tokens sampled since the host's start."""
    while host.has_work:
        host.step()
    return host.generated_tokens


def starts_of(lengths: Sequence[int], prompt: int, engine: Engine) -> list[Start]:
    """Returns for each length n a Start, the command to a host to sample at most n tokens after a prompt.

    Each command is for one sample; its prompt has `prompt` tokens.
    """
    vocab = engine.tokenizer.vocab_size
    return [
        Start(
            (SampleId(i, 0),),
            tuple((np.arange(prompt) * (i + 3) % vocab).tolist()),
            0,
            Sampling(max_tokens=n),
        )
        for i, n in enumerate(lengths)
    ]


def _parts_s(engine: Engine, store: MemoryStore, prompt: int) -> tuple[float, float]:
    """Returns median seconds of (a decode step with every slot live, a prefill of `prompt` tokens)."""
    value = engine.load_params(store.load(0, engine.param_shardings))
    tokens = np.arange(prompt)
    prefill = median_s(lambda: engine.prefill(params=value, padded_tokens=tokens, true_length=prompt), 3)
    call = decoding_calls(engine, value, prompt)
    return statistics.median(timed_s(call) for _ in range(6)) / engine.decode_steps, prefill
