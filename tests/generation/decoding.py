"""Driving an engine by hand, slot by slot, as the tests of engine and host need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.algorithms.sampling import Truncation
from areal_jax.control.events import Event
from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.generation.programs import DecodeState
from areal_jax.types import NOT_SAMPLED, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.memory import MemoryStore


class Asked(NamedTuple):
    """One slot's work."""

    prompt: Sequence[int]
    sample: SampleId = SampleId(0, 0)
    sampling: Sampling = Sampling(max_tokens=64)
    stops: tuple[int, ...] = ()


def fill(engine: Engine, params: VersionedParams, slots: Mapping[int, Asked], seed: int = 0) -> DecodeState:
    state = engine.init_decode_state()
    for slot, asked in slots.items():
        prefix = engine.prefill(
            params=params, padded_tokens=np.array(asked.prompt), true_length=len(asked.prompt)
        )
        request = engine.request(asked.sample, seed, asked.sampling, len(asked.prompt), asked.stops)
        state = engine.insert(prefix, state, slot, request=request)
    return state


def decode(
    engine: Engine,
    params: VersionedParams,
    slots: Mapping[int, Asked],
    seed: int = 0,
    between: Callable[[int, VersionedParams, DecodeState], tuple[VersionedParams, DecodeState]] | None = None,
) -> dict[int, Trajectory]:
    """Every slot's sample to its end. `between(call, params, state)` may change both before each call."""
    served = engine.load_params(params)
    state = fill(engine, served, slots, seed)
    tokens = {slot: list(asked.prompt) for slot, asked in slots.items()}
    logp = {slot: [0.0] * len(asked.prompt) for slot, asked in slots.items()}
    versions = {slot: [NOT_SAMPLED] * len(asked.prompt) for slot, asked in slots.items()}
    blank = [-1] * engine.support_size
    support = {slot: [blank] * len(asked.prompt) for slot, asked in slots.items()}
    truncation = Truncation.joined(Truncation.of(asked.sampling) for asked in slots.values())
    for call in range(engine.length):
        if between is not None:
            former = params
            params, state = between(call, params, state)
            served = served if params is former else engine.load_params(params)
        state, results = engine.generate(served, state, truncation=truncation)
        rows = results.rows
        for slot in slots:
            for step in np.flatnonzero(rows["valid"][slot]):
                tokens[slot].append(int(rows["tokens"][slot, step]))
                logp[slot].append(float(rows["logp"][slot, step]))
                versions[slot].append(int(rows["version"][slot]))
                if engine.support_size:
                    support[slot].append(rows["support"][slot, step].tolist())
            length = results.get_result_at_slot(slot).lengths.item()
            assert length == len(tokens[slot]) - len(slots[slot].prompt)
        if not rows["is_live"].any():
            break
    assert not rows["is_live"].any()
    return {
        slot: Trajectory(
            sample=asked.sample,
            tokens=np.array(tokens[slot], np.int32),
            loss_mask=np.arange(len(tokens[slot])) >= len(asked.prompt),
            behavior_logp=np.array(logp[slot], np.float32),
            versions=np.array(versions[slot], np.int32),
            turn_ids=np.zeros(len(tokens[slot]), np.int32),
            sampling=asked.sampling,
            stop_reason="stop" if tokens[slot][-1] in asked.stops else "length",
            support=np.array(support[slot], np.int32) if engine.support_size else None,
        )
        for slot, asked in slots.items()
    }


class Heard:
    """An `emit` that keeps what it hears, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done: dict[SampleId, Trajectory] = {}

    def __call__(self, event: Event, trajectory: Trajectory | None) -> None:
        self.events.append(event)
        if trajectory is not None:
            assert trajectory.sample not in self.done
            self.done[trajectory.sample] = trajectory

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def start(ordinal: int, members: int, prompt: Sequence[int], min_version: int = 0, first: int = 0) -> Start:
    samples = tuple(SampleId(ordinal, first + member) for member in range(members))
    return Start(samples, tuple(prompt), min_version)


def make_host(
    engine: Engine, store: MemoryStore, heard: Heard, stops: tuple[int, ...] = (), **changes: object
) -> Host:
    """Without stop tokens unless given: then every sample is as long as it may be."""
    settings = {"seed": 0, "sampling": Sampling(max_tokens=64), "stops": stops, **changes}
    return Host("host-0", engine, store, heard, **settings)  # type: ignore[arg-type]
