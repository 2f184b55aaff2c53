"""What a decode call costs besides its arithmetic: no value of it decides what runs, and one read-back."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.sampling import EVERY, Truncation
from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.models import attention
from areal_jax.types import SampleId, Sampling
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import SLOTS, STEPS, make_engine
from tests.generation.decoding import Heard, make_host, start

PROMPT = (5, 9, 2)
PLAIN = Truncation()


def decisions(engine: Any, params: Any, truncation: Truncation, **changes: Any) -> tuple[int, int]:
    """How many branches and how many loops of the compiled decode call depend on values."""
    programs = replace(engine._programs, **changes)
    state = jax.eval_shape(engine.init_decode_state)
    jitted = jax.jit(programs.generate, static_argnums=4)
    text = jitted.lower(params, 0, state, engine._every_slot, truncation).compile().as_text()
    assert text is not None and '"known_trip_count":{"n":"2"}' in text  # the scan over the call's steps
    return text.count(" conditional("), open_loops(text)


def open_loops(text: str | None) -> int:
    """How many loops of a compiled program end when values say so."""
    loops = re.findall(r" while\(.*", text or "")
    assert loops
    return sum("known_trip_count" not in loop for loop in loops)


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [PLAIN, EVERY])
def test_no_value_decides_what_a_decode_call_runs(engine, with_kernel, versions, truncation):
    """A GPU would copy each such value to the host, for every token, before it could go on."""
    by_kernel, _ = with_kernel()
    params = versions(0).params
    assert decisions(by_kernel, params, truncation, ends_early=False) == (0, 0)
    # On a CPU, where a condition costs nothing, the searches for top-k and top-p end early.
    assert decisions(by_kernel, params, truncation, ends_early=True) == (0, 2 if truncation.is_any else 0)


def with_fixed_loops(engine: Engine) -> Engine:
    """The engine with the programs that it has on a GPU."""
    engine._compile(replace(engine._programs, ends_early=False))
    return engine


@pytest.mark.slow
def test_prefill_and_rebuild_of_a_gpu_have_only_loops_of_fixed_length(engine, versions):
    counts = {}
    for ends_early in (True, False):
        programs, params = replace(engine._programs, ends_early=ends_early), versions(0).params
        state, only = jax.eval_shape(engine.init_decode_state), engine._every_slot
        pages = engine.begin_prefill([np.zeros(9, np.int32)]).cache
        prefill = jax.jit(programs.prefill).lower(params, pages, *engine._no_rows())
        rebuild = jax.jit(programs.recompute, static_argnums=4).lower(params, state, only, 0, 2)
        counts[ends_early] = [open_loops(lowered.compile().as_text()) for lowered in (prefill, rebuild)]
    assert counts[False] == [0, 0]
    assert min(counts[True]) >= 1


@pytest.mark.slow
def test_loops_of_fixed_length_change_no_bit(model, versions, monkeypatch):
    """Prompts of one page and of four, four blocks of attention, and a swap in the middle of the samples."""
    monkeypatch.setattr(attention, "KV_BLOCK", 8)
    found = []
    for engine in (make_engine(model), with_fixed_loops(make_engine(model))):
        heard, store, pages = Heard(), MemoryStore(engine.canary), []
        jitted, rebuild = engine.jitted, engine.jitted.recompute
        monkeypatch.setattr(jitted, "recompute", lambda *a, r=rebuild, p=pages: p.append(a[4]) or r(*a))
        store.publish(versions(0))
        host = make_host(engine, store, heard)
        for ordinal, count in enumerate([2, 26]):
            host.inbox.put(start(ordinal, 2, PROMPT[:1] * count))
        host.take_commands()
        host.step()
        store.publish(versions(1))
        while host.has_work:
            host.step()
        assert all(set(done.versions.tolist()) == {-1, 0, 1} for done in heard.done.values())
        found.append((heard.done, pages))
    (early, read_early), (fixed, read_fixed) = found
    # The longest sample has 28 tokens, so 27 of KV: seven chunks of 4.
    assert read_early == [4] * 7 and read_fixed == [1, 1, 4, 4, 4, 4, 4]
    for sample, done in early.items():
        np.testing.assert_array_equal(fixed[sample].tokens, done.tokens)
        np.testing.assert_array_equal(
            fixed[sample].behavior_logp.view(np.int32), done.behavior_logp.view(np.int32)
        )


@pytest.mark.slow
@pytest.mark.parametrize("calls_ahead", [0, 1])
def test_a_decode_call_is_read_back_once_and_the_next_one_may_be_made_before(
    model, versions, monkeypatch, calls_ahead
):
    """On two devices, where numpy cannot read an array's memory without jax."""
    engine = make_engine(model, mesh=jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("tensor",)))
    store = MemoryStore(engine.canary)
    store.publish(versions(0))
    sampling = Sampling(max_tokens=10)
    host = make_host(engine, store, Heard(), sampling=sampling, calls_ahead=calls_ahead)
    host.inbox.put(start(0, 3, PROMPT))
    host.take_commands()
    host.step()
    seen, array, generate = [], type(jnp.zeros(())), engine.generate
    value = array._value

    def counted(self: Any) -> Any:
        seen.append(self.shape)
        return value.fget(self)

    monkeypatch.setattr(array, "_value", property(counted))
    monkeypatch.setattr(engine, "generate", lambda *args: seen.append("call") or generate(*args))
    while host.has_work:
        host.step()
    read = (SLOTS, 3 * STEPS + 5)
    # One call ahead, the host makes a sixth call before it has read that the samples ended in the fifth.
    assert seen == ["call", read] * (4 + calls_ahead) + [read] * calls_ahead


@pytest.mark.slow
def test_a_call_runs_the_program_for_the_truncations_of_live_samples(engine, store, monkeypatch):
    ran, generate = [], engine.jitted.generate

    def recorded(*args: Any) -> Any:
        ran.append(args[4])
        return generate(*args)

    monkeypatch.setattr(engine.jitted, "generate", recorded)
    heard = Heard()
    host = make_host(engine, store, heard, sampling=Sampling(max_tokens=6))
    host.inbox.put(start(0, 1, PROMPT))
    host.inbox.put(Start((SampleId(1, 0),), PROMPT, 0, Sampling(top_p=0.5, max_tokens=4)))
    host.take_commands()
    while host.has_work:
        host.step()
    assert ran == [Truncation(True, False, True)] * 2 + [PLAIN]
    assert len(heard.done) == 2
    # Driven without a host, an engine runs what all requests so far needed.
    assert engine._truncation.has_top_p
    engine.generate(host._current, engine.init_decode_state())
    assert ran[-1].has_top_p


def test_a_decode_call_is_few_calls_of_python(engine, store):
    """Between two calls the device has nothing to do; with a tiny model that is a large part of its time."""
    host = make_host(engine, store, Heard())
    host.inbox.put(start(0, SLOTS, PROMPT))
    host.take_commands()
    host.step()
    host.step()
    calls = []
    sys.setprofile(
        lambda frame, event, _: calls.append(frame.f_code) if event in ("call", "c_call") else None
    )
    try:
        host.step()
    finally:
        sys.setprofile(None)
    assert host.statistics().live == SLOTS
    assert 50 < len(calls) < 135


def test_a_prompt_on_the_engines_devices_is_not_moved(engine, versions, monkeypatch):
    """`device_put` of arrays that are where they belong still takes longer than an insert's own Python."""
    prefix = engine.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=len(PROMPT))
    moved, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: moved.append(1) or put(*args))
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    assert moved == []
    away = jax.device_get(prefix)
    state = engine.insert(away, state, 1)
    assert moved == [1]
    there = engine.extract(1, state, len(PROMPT)).cache.k
    np.testing.assert_array_equal(there[:, 1:], prefix.cache.k[:, 1:])  # page 0 is scratch
