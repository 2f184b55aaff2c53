"""More slots than room: shared prompts, samples that wait for a page, that leave and that come back."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.generation.commands import Start, Statistics, Stop
from areal_jax.types import ArealError, SampleId, Sampling
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH, SLOTS, STEPS, make_engine
from tests.generation.decoding import Asked, Heard, decode, make_host, start

PROMPT = (5, 9, 2, 14, 3, 3, 7, 1, 4, 4, 6)  # a page of 8, and 3 tokens of the next
PAGE = 8


@pytest.fixture(scope="module")
def narrow(model):
    """Room for two whole samples of SLOTS."""
    return make_engine(model, kv_tokens=2 * LENGTH)


def finish(host) -> list[Statistics]:
    seen = []
    host.take_commands()
    while host.has_work:
        host.step()
        seen.append(host.statistics())
    return seen


def bits(trajectory) -> tuple[list[int], list[int]]:
    return trajectory.tokens.tolist(), trajectory.behavior_logp.view(np.int32).tolist()


def insert(engine, params, state, prefix, slot: int, sibling: int | None = None):
    request = engine.request(SampleId(3, slot), 0, Sampling(max_tokens=64), len(PROMPT))
    return engine.insert(prefix, state, slot, request=request, sibling=sibling)


def test_siblings_share_the_full_pages_of_their_prompt(engine, versions):
    prefix = engine.prefill(params=versions(0), padded_tokens=np.array(PROMPT), true_length=len(PROMPT))
    state = insert(engine, versions(0), engine.init_decode_state(), prefix, 0)
    for slot in (1, 2):
        state = insert(engine, versions(0), state, prefix, slot, sibling=0)
    table = np.array(state.pages.table)
    assert len(set(table[:3, 0])) == 1 and len(set(table[:3, 1])) == 3
    assert (
        engine.pages - int(state.pages.free_beside(0))
        == 1 + 3
        == engine.pages_for(11) + 2 * engine.pages_for(11, True)
    )
    state = engine.free_resource(0, state)  # the others still name the page
    assert int(state.pages.users[table[1, 0]]) == 2
    found = {}
    while len(found) < 2:
        state, results = engine.generate(versions(0), state)
        is_live = results.rows["is_live"]
        found |= {slot: np.array(state.tokens)[slot] for slot in (1, 2) if not is_live[slot]}
    for slot in (1, 2):
        alone = decode(engine, versions(0), {4: Asked(PROMPT, SampleId(3, slot))})[4]
        np.testing.assert_array_equal(found[slot], alone.tokens)
    assert int(state.pages.free_beside(0)) == engine.pages


def test_a_slot_without_a_page_keeps_still_and_goes_on_to_the_same_bits(narrow, versions, monkeypatch):
    """Four samples in room for two: whoever gets no page samples nothing, and later what it would have."""
    lengths = [4, 20, 64, 64]
    slots = {i: Asked(PROMPT[: 3 + i], SampleId(0, i), Sampling(max_tokens=n)) for i, n in enumerate(lengths)}
    alone = {slot: decode(narrow, versions(0), {0: asked})[0] for slot, asked in slots.items()}
    generate, starved = narrow.generate, []

    def watched(*args, **settings):
        state, results = generate(*args, **settings)
        starved.append(results.rows["is_starved"].tolist())
        assert not (results.rows["valid"].any(axis=1) & results.rows["is_starved"]).any()
        return state, results

    monkeypatch.setattr(narrow, "generate", watched)
    done = decode(narrow, versions(0), slots)
    assert [False, False, True, True, False] in starved
    for slot in slots:
        assert bits(done[slot]) == bits(alone[slot])


def test_when_room_runs_out_the_youngest_waits_and_loses_not_a_bit(narrow, engine, store, versions):
    heard, plain = Heard(), Heard()
    for used, ear in ((narrow, heard), (engine, plain)):
        host = make_host(used, store, ear)
        for ordinal in range(4):
            host.inbox.put(start(ordinal, 2, PROMPT[: 4 + 2 * ordinal]))
        seen = finish(host)
        assert seen[-1].free_pages == seen[-1].pages
        if used is narrow:
            assert seen[-1].evictions > 0
            assert max(each.live for each in seen) > 2  # more than whole samples would fit
    assert set(heard.done) == set(plain.done)
    for sample, trajectory in heard.done.items():
        assert bits(trajectory) == bits(plain.done[sample])


def test_an_evicted_sample_is_rebuilt_under_a_newer_version(narrow, store, versions, dense):
    """Versions change while it is out of its slot: its tokens stay, its log-probs are of each version."""
    heard = Heard()
    host = make_host(narrow, store, heard)
    host.inbox.put(start(0, 6, PROMPT))
    host.take_commands()
    version = outside = 0
    while host.has_work:
        host.step()
        if any(work.so_far is not None for work in host._admission.rollouts.waiting) and version < 5:
            version, outside = version + 1, outside + 1
            store.publish(versions(version))
    assert outside >= 3
    for trajectory in heard.done.values():
        for found, begin, end in trajectory.spans:
            gap = np.abs(trajectory.behavior_logp - dense(versions(found).params, trajectory))[begin:end]
            assert gap.max() < 1e-5
    assert {found for t in heard.done.values() for found, _, _ in t.spans} == set(range(version + 1))


def test_a_half_decoded_sample_leaves_and_comes_back_with_the_same_bits(engine, versions):
    """Extracted, its pages overwritten by others, inserted elsewhere: KV and all."""
    asked = Asked(PROMPT, SampleId(3, 0))
    plain = decode(engine, versions(0), {0: asked})[0]

    def between(call, params, state):
        if call == 3:
            filled = int(state.filled[0])
            prefix = engine.extract(0, state, filled)
            state = engine.free_resource(0, state)
            other = engine.prefill(params=params, padded_tokens=np.arange(24) % 15, true_length=24)
            state = engine.free_resource(1, insert(engine, params, state, other, 1))
            request = engine.request(asked.sample, 0, asked.sampling, len(PROMPT))
            state = engine.insert(prefix, state, 0, request=request)
        return params, state

    assert bits(decode(engine, versions(0), {0: asked}, 0, between)[0]) == bits(plain)


def test_room_for_no_sample_is_refused(model):
    with pytest.raises(ArealError, match="kv_tokens=31 is too small for a sample of length=32"):
        make_engine(model, kv_tokens=LENGTH - 1)


@pytest.mark.slow
def test_a_long_prompt_does_not_stall_the_live_ones(model, store, versions):
    """Between two decode calls at most 4 chunks for each free slot, here one: 31 tokens take 2 calls."""
    engine = make_engine(model, slots=2, prefill_chunk=4)
    host = make_host(engine, store, Heard())
    host.inbox.put(start(0, 1, PROMPT[:3]))
    host.take_commands()
    host.step()
    host.inbox.put(start(1, 1, PROMPT * 2 + PROMPT[:9]))
    host.take_commands()
    host.step()
    now = host.statistics()
    assert (now.live, now.waiting, now.prefills, now.generated_tokens) == (1, 1, 1, 2 * STEPS)
    host.step()
    assert host.statistics().prefills == 2
    finish(host)


def test_a_swap_in_the_middle_of_a_prefill_begins_it_again(model, store, versions, dense):
    engine, heard = make_engine(model, slots=2, prefill_chunk=4), Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 1, PROMPT[:3]))
    host.take_commands()
    host.step()
    host.inbox.put(start(1, 1, PROMPT * 2))
    host.take_commands()
    host.step()
    assert host._admission.rollouts.begun is not None
    store.publish(versions(1))
    finish(host)
    late = heard.done[SampleId(1, 0)]
    assert [span.version for span in late.spans] == [1]
    gap = np.abs(late.behavior_logp - dense(versions(1).params, late))
    assert gap[late.loss_mask].max() < 1e-5
    assert [span.version for span in heard.done[SampleId(0, 0)].spans] == [0, 1]


@pytest.mark.slow
def test_slots_in_a_tight_room_are_many_more_than_whole_samples(model, store):
    """Short answers: most of a slot's length is never used, and no page of it is taken."""
    engine, heard = make_engine(model, slots=4 * SLOTS, kv_tokens=SLOTS * LENGTH), Heard()
    host = make_host(engine, store, heard, sampling=Sampling(max_tokens=4))
    host.inbox.put(start(0, 4 * SLOTS, PROMPT[:3]))
    host.take_commands()
    host.step()
    assert host.statistics().live == 4 * SLOTS == engine.pages
    finish(host)
    assert (len(heard.done), host.statistics().evictions) == (4 * SLOTS, 0)


def replayed(engine, versions, trajectory, sampling: Sampling, stops: tuple[int, ...]):
    """The sample alone in another slot, swapped at the places where its own versions change."""
    prompt = trajectory.tokens[~trajectory.loss_mask].tolist()
    edges = {(begin - len(prompt)) // STEPS: version for version, begin, _ in trajectory.spans}

    def between(call, params, state):
        if call in edges and edges[call] != params.version:
            params = versions(edges[call] % 7)._replace(version=edges[call])
            if trajectory.on_update == "recompute":
                state = engine.recompute(engine.load_params(params), state)
        return params, state

    first = versions(trajectory.first_version % 7)._replace(version=trajectory.first_version)
    asked = Asked(prompt, trajectory.sample, sampling, stops)
    return decode(engine, first, {SLOTS - 1: asked}, 0, between)[SLOTS - 1]


@pytest.fixture
def watched(narrow, monkeypatch):
    """The engine `narrow`; a sample that it inserts without enough free pages fails the test."""
    insert = narrow.insert

    def inserted(prefix, state, slot, **settings):
        state = insert(prefix, state, slot, **settings)
        assert state.is_live[slot]
        return state

    monkeypatch.setattr(narrow, "insert", inserted)
    return narrow


@pytest.mark.parametrize(
    ("on_update", "calls_ahead", "seed"),
    [
        *(("recompute", calls_ahead, seed) for calls_ahead in (0, 1) for seed in range(3)),
        *(("keep", 0, 13), ("keep", 1, 13), ("pinned", 1, 3), ("drain", 1, 4)),
    ],
)
def test_a_sample_is_a_function_of_its_version_spans_whatever_the_host_was_doing(
    watched, versions, on_update, calls_ahead, seed
):
    """Random neighbours, prompts, lengths, cancellations, evictions and swaps: not a bit of it shows."""
    narrow, numbers = watched, np.random.default_rng(seed)
    store, heard = MemoryStore(narrow.canary), Heard()
    store.publish(versions(0))
    stops = (7, 12) if on_update == "keep" else ()
    host = make_host(narrow, store, heard, stops, on_update=on_update, versions=3, calls_ahead=calls_ahead)
    asked: dict[SampleId, Sampling] = {}
    step = 0
    while step < 40 or host.has_work:
        if step < 40 and numbers.random() < 0.35:
            prompt = tuple(numbers.integers(2, 17, numbers.integers(1, 20)).tolist())
            sampling = Sampling(
                float(numbers.choice([0.7, 1.0, 1.3])), max_tokens=int(numbers.integers(1, 30))
            )
            samples = tuple(SampleId(step, member) for member in range(numbers.integers(1, 5)))
            asked |= dict.fromkeys(samples, sampling)
            host.inbox.put(Start(samples, prompt, 0, sampling))
        if numbers.random() < 0.1 and asked:
            host.inbox.put(Stop((list(asked)[numbers.integers(len(asked))],)))
        if numbers.random() < 0.15:
            version = store.latest() + 1
            store.publish(versions(version % 7)._replace(version=version))
        host.take_commands()
        if host.has_work:
            host.step()
            assert host._slots.free_pages <= int(host._slots.state.pages.free_beside(0))
        step += 1
    is_mixed = on_update in ("recompute", "keep")
    assert (host.statistics().interruptions > 3) == is_mixed
    assert host.statistics().evictions > 0
    chosen = [heard.done[sample] for sample in sorted(heard.done)][:: max(1, len(heard.done) // 12)]
    assert len(chosen) >= 10 and (max(len(t.spans) for t in chosen) > 1) == is_mixed
    for trajectory in chosen:
        alone = replayed(narrow, versions, trajectory, asked[trajectory.sample], stops)
        assert bits(trajectory) == bits(alone)
        assert trajectory.stop_reason == alone.stop_reason
