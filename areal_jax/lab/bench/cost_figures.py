"""Measures the cost model of a config on this machine: the time of each kind of work, for the simulator."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np

from areal_jax.assembly.devices import machine
from areal_jax.assembly.parts import Parts, assemble
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.lab.ablations.strategy_ablation import STRATEGIES
from areal_jax.lab.bench.decode import call_s, filled
from areal_jax.lab.bench.hosting import started
from areal_jax.lab.bench.measure import in_turn, random_trajectory, timed_s
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.compute_choice import plan_new
from areal_jax.runtime.trainer_loop import held_batch, train_batch
from areal_jax.tasks.pool import RewardPool
from areal_jax.trainer.state import TrainState
from areal_jax.types import ArealError, Group, SampleId, Sampling
from areal_jax.weights.memory import MemoryStore


def costs(
    *,
    config: str = STRATEGIES.recipe,
    words: Sequence[str] = (),
    median_tokens: float | None = None,
    sigma_tokens: float | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """Measures the figures of a cost model (`lab.published.cost_model.FIGURES`) for a run of the config.

    `words`: further settings, section.key=value. Lengths of completions are lognormal; None: the `median` and
    `sigma` of the config's task. Each figure is measured alone, with random parameters; where trainer and
    hosts share cores, a run is slower.
    """
    c = load_config(config, *words)
    lengths = _lengths(c, median_tokens, sigma_tokens)
    parts = assemble(c)
    engine, state = parts.engine(0), parts.learner.init(parts.model.init(0))
    store = MemoryStore(engine.canary, c.wire_dtype)
    published = parts.learner.publish(state)
    versions = count()

    def publish() -> Any:
        return store.publish(published._replace(version=next(versions))).params

    def adopt() -> Any:
        return engine.load_params(store.load(store.latest() or 0, engine.param_shardings)).params

    for call in (publish, adopt):  # the first calls compile
        call()
    times = in_turn({"publish_s": lambda: timed_s(publish), "swap_s": lambda: timed_s(adopt)}, repeats)
    found = {name: statistics.median(each) for name, each in times.items()}
    calls, found["prefill_s"] = _decode_s(c, engine, store, repeats)
    found |= _kv_s(c, engine, store, repeats)
    runs = _train_s(parts, state, *lengths, repeats)
    found["train_s"], found["reward_s"] = statistics.median(runs), _reward_s(parts, repeats)
    return machine(c.model.shape, c.model.dtype, runs) | {
        "config": config,
        "decode_call_s": calls,
        "decode_steps": c.generation.decode_steps,
        **found,
        "median_tokens": lengths[0],
        "sigma_tokens": lengths[1],
    }


def _lengths(c: Config, median: float | None, sigma: float | None) -> tuple[float, float]:
    own = next(iter(c.tasks.values())) if len(c.tasks) == 1 else {}
    median = own.get("median") if median is None else median
    sigma = own.get("sigma") if sigma is None else sigma
    if median is None or sigma is None:
        raise ArealError(
            f"the tasks {', '.join(c.tasks)} do not say how long completions are; give median_tokens=N and "
            "sigma_tokens=X, for example from a run's `areal-jax report`"
        )
    return float(median), float(sigma)


def _decode_s(c: Config, engine: Engine, store: MemoryStore, repeats: int) -> tuple[dict[int, float], float]:
    """Returns the seconds of a host's decode calls by number of live slots, and of a sample's prefill."""
    group, slots = c.algorithm.group_size, engine.slots
    calls, prefills = {}, []
    prompt = max(1, min(c.generation.length - c.generation.max_tokens, c.generation.length // 2))
    sizes = sorted({min(slots, max(1, slots * part // 4)) for part in (1, 2, 4)} | {1})
    for attempt in range(repeats + 1):
        for live in sizes:
            starts = [
                Start(
                    tuple(SampleId(ordinal, member) for member in range(min(group, live - ordinal * group))),
                    tuple((np.arange(prompt) % 7 + 1).tolist()),
                    0,
                    Sampling(max_tokens=c.generation.max_tokens),
                )
                for ordinal in range(-(-live // group))
            ]
            host = started(engine, store, starts, c.generation.calls_ahead)
            first = timed_s(host.step)
            count = max(1, min(16, c.generation.max_tokens // c.generation.decode_steps - 2))
            call = statistics.median(timed_s(host.step) for _ in range(count))
            if attempt:  # the first round compiles
                calls.setdefault(live, []).append(call)
                prefills.append(max(0.0, first - call) / live)
    return {live: statistics.median(each) for live, each in calls.items()}, statistics.median(prefills)


def _kv_s(c: Config, engine: Engine, store: MemoryStore, repeats: int) -> dict[str, float]:
    """Returns the seconds to recompute the KV of a token, and to move that of a group."""
    value = engine.load_params(store.load(store.latest() or 0, engine.param_shardings))
    tokens, group = max(2, c.generation.length // 2), min(c.algorithm.group_size, engine.slots)
    rebuild = partial(engine.recompute, value)

    def move() -> Any:
        state = filled(engine, value, tokens)
        started_s = time.perf_counter()
        for slot in range(group):
            kv = jax.device_get(engine.extract(slot, state, tokens))
            state = engine.free_resource(slot, state)
            request = engine.request(SampleId(0, slot), 0, Sampling(max_tokens=engine.length), tokens)
            state = engine.insert(kv, state, slot, request=request)
        jax.block_until_ready(state)
        return time.perf_counter() - started_s

    arms = {"recompute": partial(call_s, engine, value, tokens, rebuild), "move": move}
    runs = in_turn(arms, repeats)
    recompute_s, move_s = (statistics.median(runs[name]) for name in arms)
    return {"recompute_token_s": recompute_s / (engine.slots * tokens), "move_s": move_s}


def _train_s(parts: Parts, state: TrainState, median: float, sigma: float, repeats: int) -> list[float]:
    """Returns the seconds of training steps, packing included, each on another batch."""
    c, clock = parts.config, Timeline(None).clock("trainer")
    rng, vocab = np.random.default_rng(0), parts.model.tokenizer.vocab_size
    states, runs = [state], []

    def step(number: int) -> Any:
        groups = []
        for ordinal in range(number * c.trainer.batch_size, (number + 1) * c.trainer.batch_size):
            drawn = rng.lognormal(np.log(median), sigma, c.algorithm.group_size)
            sizes = np.clip(np.round(drawn), 1, c.generation.max_tokens).astype(int) + 1
            each = [
                random_trajectory(SampleId(ordinal, member), int(size), rng, vocab)
                for member, size in enumerate(sizes)
            ]
            groups.append(Group(ordinal, parts.prompt(ordinal), tuple(each)))
        plan = plan_new(c, groups, parts.learner.takes_shared_prompts)
        after, value, _ = train_batch(
            parts.config, parts.learner, states.pop(), held_batch(number, groups, plan), clock
        )
        states.append(after)
        return value.params

    for number in range(2 * repeats + 1):
        runs.append(timed_s(partial(step, number)))
    return runs[repeats + 1 :]  # the first ones compile, for each number of micro-batches


def _reward_s(parts: Parts, repeats: int) -> float:
    """Returns the seconds from a group's completions to its rewards, in the run's own worker processes."""
    c, done = parts.config, queue.SimpleQueue[Any]()
    rng, vocab = np.random.default_rng(0), parts.model.tokenizer.vocab_size
    each = [
        parts.completion(random_trajectory(SampleId(0, member), 8, rng, vocab))
        for member in range(c.algorithm.group_size)
    ]
    tasks = {name: weighted.task for name, weighted in parts.tasks.items()}
    with RewardPool(tasks, c.runtime.reward_workers, c.runtime.reward_timeout_s) as pool:

        def score() -> Callable[[], None]:
            pool.submit(0, 0, parts.prompt(0), each, done.put)
            return done.get(timeout=c.runtime.reward_timeout_s + c.runtime.deadline_s)

        score()  # waits for the workers to start
        return statistics.median(timed_s(lambda: score() and None) for _ in range(repeats))
