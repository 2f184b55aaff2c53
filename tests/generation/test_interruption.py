"""Weights change in the middle of a sample: what is recorded stays true of the version that sampled it."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.control.events import HostAdopted
from areal_jax.types import SampleId, Sampling
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH, SLOTS, STEPS
from tests.generation.decoding import Asked, Heard, decode, make_host, start

PROMPT = (5, 9, 2, 14, 3)


def asked(member: int, **sampling: float) -> Asked:
    return Asked(PROMPT[: 2 + member], SampleId(0, member), Sampling(max_tokens=64, **sampling))


def gap(trajectory, dense, versions) -> float:
    """Largest distance of a recorded log-prob from a dense forward under that token's version."""
    worst = 0.0
    for version in sorted(set(trajectory.versions[trajectory.loss_mask].tolist())):
        mine = trajectory.versions == version
        distance = np.abs(trajectory.behavior_logp - dense(versions(version).params, trajectory))
        worst = max(worst, float(distance[mine].max()))
    return worst


def swapping(engine, versions, calls, is_rebuilt=True):
    """A `between` that swaps to the next version before each of these calls."""

    def between(call, params, state):
        if call in calls:
            params = versions(params.version + 1)
            if is_rebuilt:
                state = engine.recompute(engine.load_params(params), state)
        return params, state

    return between


# --- log-probs across a swap --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_samples_logps_are_those_of_each_tokens_version(engine, versions, dense, seed):
    call = int(np.random.default_rng(seed).integers(1, 10))
    slots = {i: asked(i, temperature=t) for i, t in enumerate([1.0, 0.7, 1.3])}
    done = decode(engine, versions(0), slots, seed, swapping(engine, versions, {call}))
    for slot, trajectory in done.items():
        at = len(slots[slot].prompt) + STEPS * call
        assert trajectory.versions[at - 1] == 0
        assert (trajectory.versions[at:] == 1).all()
        assert gap(trajectory, dense, versions) < 1e-5


def test_an_interrupted_samples_support_is_kept_too(support_engine, versions, dense):
    slots = {0: asked(0, top_k=4, top_p=0.9), 1: asked(1)}
    done = decode(support_engine, versions(0), slots, 0, swapping(support_engine, versions, {3, 7}))
    assert max(gap(trajectory, dense, versions) for trajectory in done.values()) < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_keeping_the_stale_kv_would_be_seen(engine, versions, dense, seed):
    """The negative control: the bound of the test above fails without the rebuild."""
    call = int(np.random.default_rng(seed).integers(1, 10))
    stale = decode(
        engine, versions(0), {0: asked(0)}, seed, swapping(engine, versions, {call}, is_rebuilt=False)
    )[0]
    assert gap(stale, dense, versions) > 1e-2


def test_many_interruptions_of_one_sample(engine, versions, dense):
    calls = {1, 2, 4, 7, 8, 11}
    plain = decode(engine, versions(0), {0: asked(0)})[0]
    done = decode(engine, versions(0), {0: asked(0)}, 0, swapping(engine, versions, calls))[0]
    assert len(done.tokens) == LENGTH
    assert [version for version, _, _ in done.spans] == list(range(len(calls) + 1))
    assert sum(end - begin for _, begin, end in done.spans) == done.completion_tokens
    first = done.spans[0].end
    np.testing.assert_array_equal(done.tokens[:first], plain.tokens[:first])
    assert gap(done, dense, versions) < 1e-5


def test_a_rebuild_leaves_tokens_alone_and_does_not_read_ended_slots(engine, versions):
    """What stands in the decode state is not touched, and a slot that ended costs no chunk."""
    seen = {}

    def between(call, params, state):
        if call == 5:
            before = [np.array(leaf) for leaf in (state.tokens, state.filled, state.is_live, state.key)]
            state = engine.recompute(engine.load_params(versions(1)), state)
            after = [np.array(leaf) for leaf in (state.tokens, state.filled, state.is_live, state.key)]
            for one, other in zip(before, after, strict=True):
                np.testing.assert_array_equal(one, other)
            seen["live"] = before[2].tolist()
        return params, state

    slots = {0: asked(0), 2: Asked(PROMPT, SampleId(0, 2), Sampling(max_tokens=3))}
    decode(engine, versions(0), slots, 0, between)
    assert seen["live"] == [True, False, False, False, False]


def test_a_forced_rebuild_under_the_same_weights_agrees(engine, versions):
    plain = decode(engine, versions(0), {0: asked(0), 3: asked(1)})

    def between(call, params, state):
        return params, engine.recompute(engine.load_params(params), state) if call % 3 == 1 else state

    rebuilt = decode(engine, versions(0), {0: asked(0), 3: asked(1)}, 0, between)
    for slot in plain:
        np.testing.assert_array_equal(plain[slot].tokens, rebuilt[slot].tokens)
        np.testing.assert_allclose(rebuilt[slot].behavior_logp, plain[slot].behavior_logp, atol=1e-5)


# --- through the host ---------------------------------------------------------------------------------------


def test_repeated_interruptions_are_safe(engine, versions, dense):
    """No token is lost, none changes, versions never fall and each of them was committed."""
    store, heard = MemoryStore(engine.canary), Heard()
    committed = [versions(0).version]
    store.publish(versions(0))
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, SLOTS + 2, PROMPT))
    known: dict[SampleId, list[int]] = {}
    while True:
        host.take_commands()
        if not host.has_work:
            break
        host.step()
        for slot, live in host._slots.works.items():
            now = host._slots.records.of(slot)["tokens"].tolist()
            before = known.get(live.sample, [])
            assert now[: len(before)] == before
            known[live.sample] = now
        if (version := committed[-1] + 1) <= 12:
            store.publish(versions(version % 7)._replace(version=version))
            committed.append(version)
    assert len(heard.done) == SLOTS + 2
    for trajectory in heard.done.values():
        assert len(trajectory.tokens) == LENGTH
        assert trajectory.tokens[: len(known[trajectory.sample])].tolist() == known[trajectory.sample]
        sampled = trajectory.versions[trajectory.loss_mask]
        assert (np.diff(sampled) >= 0).all()
        assert set(sampled.tolist()) <= set(committed)
    first = [heard.done[SampleId(0, member)] for member in range(SLOTS)]
    assert all(trajectory.interruptions >= 5 for trajectory in first)
    assert all(len(trajectory.spans) >= 6 for trajectory in first)
    assert max(gap(t, dense, lambda version: versions(version % 7)) for t in heard.done.values()) < 1e-5


def test_swapping_in_identical_weights_rebuilds_nothing_and_changes_no_bit(engine, versions, monkeypatch):
    def run(publish: int) -> Heard:
        store, heard = MemoryStore(engine.canary), Heard()
        store.publish(versions(0))
        host = make_host(engine, store, heard)
        host.inbox.put(start(0, 3, PROMPT))
        host.take_commands()
        while host.has_work:
            host.step()
            if store.latest() < publish:
                store.publish(versions(0)._replace(version=store.latest() + 1))
        return heard

    rebuilt = []
    recompute = engine.recompute
    monkeypatch.setattr(engine, "recompute", lambda *args: rebuilt.append(1) or recompute(*args))
    plain, swapped = run(0), run(4)
    assert rebuilt == []
    assert len(swapped.of(HostAdopted)) == 5
    for sample, trajectory in swapped.done.items():
        np.testing.assert_array_equal(trajectory.tokens, plain.done[sample].tokens)
        np.testing.assert_array_equal(trajectory.behavior_logp, plain.done[sample].behavior_logp)
        assert [version for version, _, _ in trajectory.spans] == [0, 1, 2, 3, 4]
