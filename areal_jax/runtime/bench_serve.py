"""A whole host at work: skewed lengths beside the ideal schedule, room for KV, and what a swap costs."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.control.events import Event
from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.generation.slots import DecodeState, ResultTokens
from areal_jax.models.model import Model
from areal_jax.runtime.bench_decode import filled
from areal_jax.runtime.measure import machine, random_model, random_params, timed_s
from areal_jax.types import SampleId, Sampling, Trajectory, VersionedParams
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
    repeats: int = 3,
) -> dict[str, Any]:
    """Useful tokens a second over requests of lognormal lengths whose mean is a quarter of the longest.

    The ideal schedule decodes the same lengths in the same order, each in the next slot that is free, at this
    run's time of a full decode step, and computes every prompt once at this run's time of a prefill; nothing
    else takes time. `static` is what batches of all slots would take that wait for their longest answer.
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
    store = _store(engine, random_params(model, dtype))
    answers = skewed_lengths(requests, longest, sigma)
    step_s, prefill_s, took = [], [], []
    for repeat in range(repeats + 1):
        step, prefill = _parts_s(engine, store, prompt)
        seconds = timed_s(lambda: _served(engine, store, answers, prompt))
        if repeat:  # the first compiles
            step_s.append(step)
            prefill_s.append(prefill)
            took.append(seconds)
    step, prefill, seconds = (statistics.median(each) for each in (step_s, prefill_s, took))
    ideal = makespan(answers, slots) * step + requests * prefill
    static = sum(max(answers[i : i + slots]) for i in range(0, requests, slots)) * step + requests * prefill
    return machine(shape, dtype, seconds, took) | {
        "tokens_per_s": sum(answers) / seconds,
        "slots": slots,
        "limit": sum(answers) / ideal,
        "fraction_of_limit": ideal / seconds,
        "static_tokens_per_s": sum(answers) / static,
        "decode_step_s": step,
        "prefill_s": prefill,
        "lengths_mean": statistics.mean(answers),
    }


def room(
    *,
    shape: str = "tiny",
    slots: int = 128,
    requests: int = 1024,
    prompt: int = 64,
    longest: int = 128,
    sigma: float = 1.0,
    decode_steps: int = 4,
    page_tokens: int = 8,
    kv_tokens: int = 6144,
) -> dict[str, Any]:
    """How many of the tokens that KV has room for are in use, while requests of skewed lengths wait.

    That is slots in use over memory / mean live KV of a sample. `whole` is how many slots would fit if each
    had room for the longest sample.
    """
    model = random_model(shape, "float32")
    length = -(-(prompt + longest) // page_tokens) * page_tokens
    engine = _Watched(
        model,
        slots=slots,
        length=length,
        decode_steps=decode_steps,
        page_tokens=page_tokens,
        kv_tokens=kv_tokens,
        prefill_chunk=prompt,
    )
    host = _host(engine, _store(engine, model.init(0)))
    for start in _starts(skewed_lengths(requests, longest, sigma), prompt, engine):
        host.inbox.put(start)
    host.take_commands()
    while host.statistics().waiting or not engine.used:
        host.step()
    settled = slice(len(engine.used) // 5, None)  # the first ones fill an empty host
    mean_used, mean_live = statistics.mean(engine.used[settled]), statistics.mean(engine.live[settled])
    return {
        "fraction_of_limit": mean_used / kv_tokens,
        "slots_in_use": mean_live,
        "limit": kv_tokens * mean_live / mean_used,
        "whole": kv_tokens // length,
        "evictions": host.statistics().evictions,
        "page_tokens": page_tokens,
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
    """What live samples of `tokens` tokens cost when the version changes, beside one prefill of them all."""
    model = random_model(shape, dtype)
    params = random_params(model, dtype)
    took: dict[int, list[float]] = {prefill_chunk: [], tokens: []}
    runs = {}
    for chunk in took:
        engine = Engine(
            model, slots=slots, length=2 * tokens, decode_steps=4, page_tokens=16, prefill_chunk=chunk
        )
        value = engine.load_params(VersionedParams(0, params, ""))
        states = [filled(engine, value, tokens)]

        def rebuild(engine: Engine = engine, value: Any = value, states: list = states) -> Any:
            states.append(engine.recompute(value, states.pop()))
            return states[0].cache

        runs[chunk] = rebuild
    for repeat in range(repeats + 1):
        for chunk, run in runs.items():
            seconds = timed_s(run)
            if repeat:
                took[chunk].append(seconds)
    seconds = {chunk: statistics.median(each) for chunk, each in took.items()}
    rebuilt = seconds[prefill_chunk]
    return machine(shape, dtype, rebuilt, took[prefill_chunk]) | {
        "tokens_per_s": slots * tokens / rebuilt,
        "slots": slots,
        "recomputed_tokens": slots * tokens,
        "batched_prefill_s": seconds[tokens],
        "ratio": rebuilt / seconds[tokens],
    }


def batch_seconds(shape: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> list[float]:
    """Seconds of a host for a prompt a slot and `tokens` tokens of each, from its first command on."""
    model = random_model(shape, dtype)
    length = prompt + tokens
    engine = Engine(
        model, slots=slots, length=length + -length % 32, decode_steps=8, page_tokens=32, prefill_chunk=prompt
    )
    store = _store(engine, random_params(model, dtype))
    runs = [timed_s(lambda: _served(engine, store, [tokens] * slots, prompt)) for _ in range(repeats + 1)]
    return runs[1:]  # the first compiles


def skewed_lengths(count: int, longest: int, sigma: float) -> list[int]:
    """Lognormal with a mean of a quarter of `longest`, cut there; seeded."""
    numbers = np.random.default_rng(0)
    median = longest / 4 / np.exp(sigma**2 / 2)
    return np.clip(np.round(numbers.lognormal(np.log(median), sigma, count)), 1, longest).astype(int).tolist()


def makespan(lengths: Sequence[int], slots: int) -> int:
    """Decode steps until all have ended, each begun in order in the next slot that is free."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


# --- parts --------------------------------------------------------------------------------------------------


class _Watched(Engine):
    """Counts live slots and the tokens whose KV they hold, at each decode call."""

    def __init__(self, model: Model, **sizes: Any) -> None:
        super().__init__(model, **sizes)
        self.live: list[int] = []
        self.used: list[int] = []

    def generate(
        self, params: VersionedParams, decode_state: DecodeState, only: Any = None
    ) -> tuple[DecodeState, ResultTokens]:
        is_live = np.asarray(decode_state.is_live)
        self.live.append(int(is_live.sum()))
        self.used.append(int((np.asarray(decode_state.filled)[is_live] - 1).sum()))
        return super().generate(params, decode_state, only)


def _store(engine: Engine, params: Any) -> MemoryStore:
    store = MemoryStore(engine.canary, dtype=str(jax.tree.leaves(params)[0].dtype))
    store.publish(VersionedParams(0, params, digest(params)))
    return store


def _host(engine: Engine, store: MemoryStore) -> Host:
    def ignore(event: Event, trajectory: Trajectory | None) -> None:
        del event, trajectory

    sampling = Sampling(max_tokens=engine.length)
    return Host("bench", engine, store, ignore, seed=0, sampling=sampling, stops=())


def _starts(lengths: Sequence[int], prompt: int, engine: Engine) -> list[Start]:
    vocab = engine.get_tokenizer().vocab_size
    return [
        Start(
            (SampleId(i, 0),),
            tuple((np.arange(prompt) * (i + 3) % vocab).tolist()),
            0,
            Sampling(max_tokens=n),
        )
        for i, n in enumerate(lengths)
    ]


def _served(engine: Engine, store: MemoryStore, lengths: Sequence[int], prompt: int) -> Any:
    host = _host(engine, store)
    for start in _starts(lengths, prompt, engine):
        host.inbox.put(start)
    host.take_commands()
    while host.has_work:
        host.step()
    assert host.generated_tokens == sum(lengths)
    return ()


def _parts_s(engine: Engine, store: MemoryStore, prompt: int) -> tuple[float, float]:
    """Seconds of a decode step with every slot live in the middle of its answer, and of a prefill."""
    value = engine.load_params(store.load(0, engine.param_shardings))
    tokens = np.arange(prompt)
    prefill = statistics.median(
        timed_s(lambda: engine.prefill(params=value, padded_tokens=tokens, true_length=prompt))
        for _ in range(3)
    )
    state = filled(engine, value, prompt)
    took = []
    for _ in range(6):
        states = []

        def call(state: Any = state, states: list = states) -> Any:
            states[:] = engine.generate(value, state)
            return states[1].data

        took.append(timed_s(call) / engine.decode_steps)
        state = states[0]
    return statistics.median(took), prefill
