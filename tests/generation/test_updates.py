"""What becomes of live samples when the version changes: kept, pinned, drained, moved to another host."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.control.events import HostAdopted, SampleFailed, Serve, TakeBack
from areal_jax.generation.commands import (
    HandOver,
    HostSample,
    Pause,
    SoFar,
    Start,
    Stop,
    TakeOver,
    Unpause,
)
from areal_jax.generation.slots import Penalties
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH, SLOTS, STEPS, make_engine
from tests.generation.decoding import Asked, Heard, decode, make_host, start

PROMPT = (5, 9, 2, 14, 3)


def gap(trajectory, dense, versions) -> float:
    """Largest distance of a recorded log-prob from a dense forward under that token's version."""
    return max(
        float(np.abs(trajectory.behavior_logp - dense(versions(v).params, trajectory))[begin:end].max())
        for v, begin, end in trajectory.spans
    )


def played(host, store, versions, updates: int, every: int = 1) -> list[tuple[int, ...]]:
    """To the end of all samples, a new version every so many steps; the versions held after each step."""
    held, step = [], 0
    host.take_commands()
    while host.has_work:
        host.step()
        held.append(host.statistics().held_versions)
        step += 1
        if step % every == 0 and (version := store.latest() + 1) <= updates:
            store.publish(versions(version % 7)._replace(version=version))
    return held


# --- keep ---------------------------------------------------------------------------------------------------


def test_keep_goes_on_with_the_kv_it_has_and_says_so(engine, store, versions, dense):
    """The same bits as swapping parameters under the engine by hand, without a rebuild."""
    heard = Heard()
    host = make_host(engine, store, heard, on_update="keep")
    host.inbox.put(start(0, 1, PROMPT))
    host.take_commands()
    for _ in range(4):
        host.step()
    store.publish(versions(1))
    while host.has_work:
        host.step()

    def between(call, params, state):
        return (versions(1), state) if call == 4 else (params, state)

    asked = Asked(PROMPT, SampleId(0, 0))
    by_hand = decode(engine, versions(0), {0: asked}, 0, between)[0]
    mine = heard.done[SampleId(0, 0)]
    np.testing.assert_array_equal(mine.tokens, by_hand.tokens)
    np.testing.assert_array_equal(mine.behavior_logp, by_hand.behavior_logp)
    assert (mine.on_update, mine.interruptions, mine.is_reproducible) == ("keep", 1, False)
    assert gap(mine, dense, versions) > 1e-2  # which is why it is marked
    assert host.statistics().recomputed_tokens == 0


@pytest.mark.parametrize("on_update", ["keep", "recompute", "pinned"])
def test_nobody_starts_from_a_prompt_of_an_older_version(engine, store, versions, dense, on_update):
    """A group on both sides of an update: late members share no page with early ones that are still live."""
    heard, prompt = Heard(), PROMPT * 3
    host = make_host(engine, store, heard, on_update=on_update)
    early, late = ([SampleId(0, 2 * i + j) for i in range(SLOTS - 1)] for j in range(2))
    for sample in early:
        length = 4 if sample == early[0] else 64
        host.inbox.put(Start((sample,), prompt, 0, Sampling(max_tokens=length)))
    host.inbox.put(Start(tuple(late), prompt, 1))
    host.take_commands()
    host.step()
    assert host._slots.state.pages.users.max() == SLOTS - 1
    store.publish(versions(1))
    while host.has_work:
        host.step()
    for sample in late:
        found = heard.done[sample]
        assert [span.version for span in found.spans] == [1] and found.is_reproducible
        alone = decode(engine, versions(1), {0: Asked(prompt, sample)})[0]
        np.testing.assert_array_equal(found.tokens, alone.tokens)
        np.testing.assert_array_equal(found.behavior_logp, alone.behavior_logp)
        assert gap(found, dense, versions) < 1e-5


# --- pinned -------------------------------------------------------------------------------------------------


def test_pinned_samples_are_of_one_version_each_over_many_updates(engine, store, versions, dense):
    """DORA's C1 and D2: stragglers over 20 updates; what nobody needs any more is freed."""
    heard = Heard()
    host = make_host(engine, store, heard, on_update="pinned", versions=4)
    for ordinal in range(16):
        length = LENGTH - 3 if ordinal % 5 == 0 else 2 + ordinal % 3
        sampling = Sampling(max_tokens=length)
        host.inbox.put(Start((SampleId(ordinal, 0), SampleId(ordinal, 1)), PROMPT[:3], 0, sampling))
    held = played(host, store, versions, 24)
    assert len(heard.done) == 32 and store.latest() >= 20
    for trajectory in heard.done.values():
        assert len(trajectory.spans) == 1 and trajectory.interruptions == 0
        assert (trajectory.on_update, trajectory.is_reproducible) == ("pinned", True)
    of = lambda version: versions(version % 7)  # noqa: E731
    assert max(gap(t, dense, of) for t in heard.done.values()) < 1e-4
    sizes = [len(each) for each in held]
    assert max(sizes) == 4 and held[-1] == (held[-1][-1],)  # the window slides shut at the end
    assert len({t.first_version for t in heard.done.values()}) >= 4
    adopted = [event.version for event in heard.of(HostAdopted)]
    assert adopted == sorted(adopted) and len(adopted) < 25  # a full window lets versions pass


def test_pinned_samples_do_not_see_each_others_versions(engine, store, versions):
    """To the bit what each is alone under its version."""
    heard = Heard()
    host = make_host(engine, store, heard, on_update="pinned", versions=3)
    for ordinal in range(4):
        host.inbox.put(start(ordinal, 2, PROMPT[: 2 + ordinal]))
    played(host, store, versions, 2, every=3)
    seen = set()
    for sample, trajectory in heard.done.items():
        seen.add(trajectory.first_version)
        asked = Asked(PROMPT[: 2 + sample.ordinal], sample)
        alone = decode(engine, versions(trajectory.first_version), {0: asked})[0]
        np.testing.assert_array_equal(trajectory.tokens, alone.tokens)
        np.testing.assert_array_equal(trajectory.behavior_logp, alone.behavior_logp)
    assert len(seen) >= 2


# --- drain and recompute ------------------------------------------------------------------------------------


def drained(engine, store, versions, requests=()):
    """Five live, one more than there are slots, an update, and one that is sent under it. Returns the first
    version of each ordinal; those in `requests` are clients' own.
    """
    heard = Heard()
    host = make_host(engine, store, heard, on_update="drain", sampling=Sampling(max_tokens=8))

    def send(command: Start) -> None:
        is_request = command.samples[0].ordinal in requests
        host.inbox.put(replace(command, min_version=0, is_request=True) if is_request else command)

    send(start(0, SLOTS - 1, PROMPT))
    send(Start((SampleId(1, 0),), PROMPT, 0, Sampling(max_tokens=2)))
    send(start(2, 1, PROMPT))
    send(start(4, 2, PROMPT))
    host.take_commands()
    host.step()
    store.publish(versions(1))
    send(start(3, 1, PROMPT, 1))
    host.take_commands()
    while host.has_work:
        host.step()
    assert [e.interrupted for e in heard.of(HostAdopted)] == [0, 0]
    assert host.statistics().recomputed_tokens == 0
    return {sample.ordinal: trajectory.first_version for sample, trajectory in heard.done.items()}


def test_drain_ends_all_that_was_sent_under_the_old_version_first(engine, store, versions):
    assert drained(engine, store, versions) == {0: 0, 1: 0, 2: 0, 4: 0, 3: 1}


def test_a_draining_host_begins_no_request_under_the_old_version(engine, store, versions):
    """A client's request names no version: the host would never drain."""
    assert drained(engine, store, versions, {0, 1, 2, 3, 4}) == {0: 0, 1: 0, 2: 1, 4: 1, 3: 1}


def test_a_draining_host_keeps_rollouts_on_their_version_beside_a_held_request(engine, store, versions):
    """The samples behind the request begin, and end, under the version that they were sent under."""
    assert drained(engine, store, versions, {2}) == {0: 0, 1: 0, 2: 1, 4: 0, 3: 1}


def test_a_swap_that_arrives_during_a_swap_is_the_one_that_counts(engine, versions, dense):
    """The store moves on while the host loads: it decodes under what it got, and adopts the rest next."""

    class Moving(MemoryStore):
        def load(self, version, shardings):
            loaded = super().load(version, shardings)
            if 0 < version < 4:
                self.publish(versions(version + 1))
            return loaded

    store, heard = Moving(engine.canary), Heard()
    store.publish(versions(0))
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 3, PROMPT))
    host.take_commands()
    host.step()
    store.publish(versions(1))
    while host.has_work:
        host.step()
    assert [event.version for event in heard.of(HostAdopted)] == [0, 1, 2, 3, 4]
    for trajectory in heard.done.values():
        assert [span.version for span in trajectory.spans] == [0, 1, 2, 3, 4]
        assert gap(trajectory, dense, versions) < 1e-5
    assert host.statistics().swaps == 4 and host.statistics().interruptions == 12


def test_recomputed_tokens_are_those_whose_kv_was_rebuilt(engine, store, versions):
    host = make_host(engine, store, Heard())
    host.inbox.put(start(0, 2, PROMPT))
    host.take_commands()
    host.step()
    store.publish(versions(1))
    host.step()
    assert host.statistics().recomputed_tokens == 2 * (len(PROMPT) + STEPS - 1)


# --- reserved slots -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reserved_slots_and_their_pages_are_for_requests_alone(model, store, versions):
    """More rollouts than slots and pages: requests start at once, and every sample is what it is alone."""
    engine = make_engine(model, reserved_slots=1, kv_tokens=3 * LENGTH)
    heard, tokens = Heard(), []
    host = make_host(engine, store, heard, on_tokens=lambda sample, _: tokens.append(sample))
    host.inbox.put(start(0, 2 * SLOTS, PROMPT))
    host.take_commands()
    host.step()
    requests = [SampleId(-1, 0), SampleId(-1, 1), SampleId(-2, 0)]
    host.inbox.put(Start(tuple(requests[:2]), PROMPT, 0, is_request=True))
    host.inbox.put(Start((requests[2],), PROMPT[:2], 0, is_request=True))
    host.take_commands()
    host.step()
    assert host._slots.works[0].sample == requests[0]
    seen = set()
    while host.has_work:
        for slot, work in host._slots.works.items():
            assert work.start.is_request == (slot == 0)
            seen |= {work.sample} if work.start.is_request else set()
        host.step()
    assert host.statistics().evictions > 0 and seen == set(requests) == set(tokens)
    for sample, trajectory in heard.done.items():
        asked = Asked(PROMPT[:2] if sample.ordinal == -2 else PROMPT, sample)
        alone = decode(engine, versions(0), {1: asked})[1]
        np.testing.assert_array_equal(trajectory.tokens, alone.tokens)
        np.testing.assert_array_equal(trajectory.behavior_logp, alone.behavior_logp)
    assert len(heard.done) == 2 * SLOTS + 3


# --- moving -------------------------------------------------------------------------------------------------


def moved(host, sample: SampleId) -> HostSample | None:
    found: list[HostSample] = []
    host.inbox.put(HandOver((sample,), found.extend))
    host.take_commands()
    return found[0] if found else None


@pytest.mark.parametrize("calls_ahead", [0, 1])
def test_a_half_decoded_sample_moves_with_its_kv_without_a_prefill(
    model, engine, store, versions, calls_ahead
):
    """DORA's D5: the same bits as at home; the other host prefills nothing."""
    engines = engine, make_engine(model)
    home, there = (make_host(used, store, Heard(), calls_ahead=calls_ahead) for used in engines)
    home.inbox.put(start(0, 2, PROMPT))
    home.take_commands()
    for _ in range(4):
        home.step()
    there.inbox.put(start(7, 1, PROMPT[:2]))
    there.take_commands()
    there.step()
    prefills = there.statistics().prefills
    sample = SampleId(0, 1)
    work = moved(home, sample)
    assert work is not None and work.so_far is not None
    assert len(work.so_far.rows) == len(PROMPT) + 4 * STEPS
    answers: list[str] = []
    there.inbox.put(TakeOver([work], answers.append))
    there.take_commands()
    while there.has_work:
        there.step()
    assert answers == [""] and there.statistics().prefills == prefills
    alone = decode(engine, versions(0), {0: Asked(PROMPT, sample)})[0]
    mine = there._emit.done[sample]
    np.testing.assert_array_equal(mine.tokens, alone.tokens)
    np.testing.assert_array_equal(mine.behavior_logp, alone.behavior_logp)
    assert home.statistics().live == 1 and moved(home, sample) is None


@pytest.mark.parametrize(
    "why",
    [
        "another version",
        "the same number, other weights",
        pytest.param("other pages", marks=pytest.mark.slow),
    ],
)
def test_a_sample_is_refused_where_its_kv_means_something_else(model, engine, store, versions, why):
    home = make_host(engine, store, Heard())
    home.inbox.put(start(0, 1, PROMPT))
    home.take_commands()
    home.step()
    work = moved(home, SampleId(0, 0))
    other, used = MemoryStore(engine.canary), engine
    if why == "another version":
        other.publish(versions(1))
    elif why == "other pages":
        other, used = store, make_engine(model, page_tokens=4)
    else:
        other.publish(VersionedParams(0, versions(1).params, versions(1).digest))
    there = make_host(used, other, Heard())
    there.inbox.put(start(7, 1, PROMPT[:2]))
    there.take_commands()
    there.step()
    answers: list[str] = []
    there.inbox.put(TakeOver([work], answers.append))
    there.take_commands()
    assert there.statistics().waiting == 0
    assert ("pages" if why == "other pages" else "move the sample to a host with that version") in answers[0]


def test_a_sample_whose_kv_did_not_move_is_rebuilt_under_its_own_version(model, engine, store, versions):
    """The target serves a newer version by then, and still holds the sample's for another one."""
    home, there = (
        make_host(used, store, Heard(), on_update="pinned") for used in (engine, make_engine(model))
    )
    for host, ordinal in ((home, 0), (there, 7)):
        host.inbox.put(start(ordinal, 1, PROMPT))
        host.take_commands()
        for _ in range(2):
            host.step()
    store.publish(versions(1))
    there.step()
    assert there.statistics().held_versions == (0, 1)
    work = moved(home, SampleId(0, 0))
    cache = jax.tree.map(jnp.zeros_like, work.so_far.kv.cache)
    blank = SoFar(work.so_far.rows, work.so_far.kv.replace(cache=cache))
    answers: list[str] = []
    there.inbox.put(TakeOver([replace(work, so_far=blank, is_stale=True)], answers.append))
    there.take_commands()
    while there.has_work:
        there.step()
    assert answers == [""] and there.statistics().recomputed_tokens == len(work.so_far.rows) - 1
    mine = there._emit.done[SampleId(0, 0)]
    alone = decode(engine, versions(0), {0: Asked(PROMPT, SampleId(0, 0))})[0]
    assert [span.version for span in mine.spans] == [0]
    np.testing.assert_array_equal(mine.tokens, alone.tokens)
    np.testing.assert_allclose(mine.behavior_logp, alone.behavior_logp, atol=1e-5)


def test_a_host_keeps_what_it_offers_with_its_version_until_it_is_taken_back_or_forgotten(
    engine, store, versions
):
    host = make_host(engine, store, Heard(), on_update="pinned", adopts_on_command=True)
    host.inbox.put(start(0, 2, PROMPT))
    host.take_commands()
    host.step()
    assert host.statistics().version == -1  # no Serve yet
    for version in (0, 1):
        host.inbox.put(Serve(host.name, version))
        host.take_commands()
        for _ in range(2):
            host.step()
        assert host.statistics().version == 0  # version 1 does not exist yet
    samples = SampleId(0, 0), SampleId(0, 1)
    works = [moved(host, sample) for sample in samples]
    store.publish(versions(1))
    host.step()
    assert (host.statistics().held_versions, host.has_work) == ((0, 1), False)
    host.inbox.put(Stop((samples[1],)))
    host.inbox.put(TakeBack(samples, host.name))
    host.take_commands()
    while host.has_work:
        host.step()
    assert set(host._emit.done) == {samples[0]} and host.statistics().held_versions == (1,)
    mine = host._emit.done[samples[0]]
    alone = decode(engine, versions(0), {0: Asked(PROMPT, samples[0])})[0]
    np.testing.assert_array_equal(mine.tokens, alone.tokens)
    np.testing.assert_array_equal(mine.behavior_logp, alone.behavior_logp)
    assert works[0].so_far is not None  # the copy that another host would continue with is unchanged
    store.publish(versions(2))
    host.step()
    assert host.statistics().version == 1  # until it is to serve version 2


# --- requests -----------------------------------------------------------------------------------------------


def test_each_request_samples_in_its_own_way(engine, store, versions):
    heard, told = Heard(), []
    host = make_host(engine, store, heard, on_tokens=lambda *said: told.append(said))
    greedy, short = Sampling(0.0, max_tokens=9), Sampling(1.3, max_tokens=3)
    host.inbox.put(Start((SampleId(0, 0),), PROMPT, 0, greedy))
    host.inbox.put(Start((SampleId(1, 0), SampleId(1, 1)), PROMPT, 0, short, seed=5))
    host.inbox.put(start(2, 1, PROMPT))
    played(host, store, versions, 0)
    for sample, sampling, seed in [(SampleId(0, 0), greedy, 0), (SampleId(1, 1), short, 5)]:
        alone = decode(engine, versions(0), {0: Asked(PROMPT, sample, sampling)}, seed)[0]
        assert heard.done[sample].tokens.tolist() == alone.tokens.tolist()
        assert heard.done[sample].sampling == sampling
    for sample, trajectory in heard.done.items():
        pieces = [tokens for name, tokens in told if name == sample]
        assert len(pieces) > 1
        own = trajectory.loss_mask
        assert [t for piece in pieces for t in piece.tokens] == trajectory.tokens[own].tolist()
        assert [p for piece in pieces for p in piece.logp] == trajectory.behavior_logp[own].tolist()
        assert {piece.version for piece in pieces} == {0}


def test_a_stop_text_ends_a_sample_behind_the_token_that_completed_it(engine, store, versions):
    """Also where the text spans two decode calls; tokens sampled beyond it are not part of the sample."""
    free = decode(engine, versions(0), {0: Asked(PROMPT, SampleId(0, 0))})[0]
    decoded = lambda end: engine.tokenizer.decode(free.tokens[len(PROMPT) : end].tolist())  # noqa: E731
    for begin in (3, 4):
        text = decoded(LENGTH)[begin : begin + 3]
        end = next(end for end in range(len(PROMPT), LENGTH) if text in decoded(end))
        heard = Heard()
        host = make_host(engine, store, heard)
        host.inbox.put(Start((SampleId(0, 0),), PROMPT, 0, Sampling(max_tokens=64, stop=("zz", text))))
        played(host, store, versions, 0)
        mine = heard.done[SampleId(0, 0)]
        assert mine.tokens.tolist() == free.tokens[:end].tolist()
        assert (mine.stop_reason, mine.loss_mask.sum()) == ("stop", end - len(PROMPT))
        assert host.statistics().generated_tokens == end - len(PROMPT)


def test_a_paused_host_decodes_nothing_and_goes_on_with_the_same_bits(engine, store, versions):
    heard = Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 2, PROMPT))
    host.take_commands()
    host.step()
    host.inbox.put(Pause())
    host.take_commands()
    host.step()
    assert host.statistics().is_paused and not host.has_work
    assert host.statistics().generated_tokens == 2 * STEPS
    host.inbox.put(Unpause())
    played(host, store, versions, 0)
    alone = decode(engine, versions(0), {0: Asked(PROMPT, SampleId(0, 1))})[0]
    assert heard.done[SampleId(0, 1)].behavior_logp.tolist() == alone.behavior_logp.tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ()}, "a prompt of 0 tokens"),
        ({"prompt": (1,) * LENGTH}, f"a prompt of {LENGTH} tokens does not fit"),
        ({"prompt": (3, 99)}, "token id 99 is outside the vocabulary of 19 ids"),
        ({"prompt": (-1,)}, "token id -1"),
        ({"penalties": Penalties(presence=1.0)}, "applies no penalties"),
        ({"stop_tokens": tuple(range(8))}, "8 stop tokens"),
    ],
)
def test_what_a_host_cannot_serve_fails_alone(engine, store, versions, changes, reason):
    heard = Heard()
    host = make_host(engine, store, heard, sampling=Sampling(max_tokens=3))
    host.inbox.put(
        Start(**{"samples": (SampleId(0, 0), SampleId(0, 1)), "prompt": PROMPT, "min_version": 0, **changes})
    )
    host.inbox.put(start(1, 1, PROMPT))
    played(host, store, versions, 0)
    failed = heard.of(SampleFailed)
    assert [event.sample for event in failed] == [SampleId(0, 0), SampleId(0, 1)]
    assert all(reason in event.reason for event in failed)
    assert set(heard.done) == {SampleId(1, 0)}


def test_out_of_memory_in_a_prefill_fails_that_group_alone(engine, store, versions, monkeypatch):
    import jax

    prefill_next = engine.prefill_next

    def short_of_memory(params, prefilling):
        if prefilling.prompts[0].count == 5:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
        return prefill_next(params, prefilling)

    monkeypatch.setattr(engine, "prefill_next", short_of_memory)
    heard = Heard()
    host = make_host(engine, store, heard, sampling=Sampling(max_tokens=3))
    host.inbox.put(start(0, 2, PROMPT))
    host.inbox.put(start(1, 2, PROMPT[:4]))
    played(host, store, versions, 0)
    assert [event.sample.ordinal for event in heard.of(SampleFailed)] == [0, 0]
    assert {sample.ordinal for sample in heard.done} == {1}


@pytest.mark.slow
def test_penalties_change_what_is_sampled(model, store, versions):
    engine, heard = make_engine(model, has_penalties=True), Heard()
    host = make_host(engine, store, heard, sampling=Sampling(0.0, max_tokens=20))
    wanted = [None, Penalties(), Penalties(presence=1e4), Penalties(bias={7: 1e4})]
    for ordinal, penalties in enumerate(wanted):
        host.inbox.put(Start((SampleId(ordinal, 0),), PROMPT, 0, penalties=penalties))
    played(host, store, versions, 0)
    plain, same, fresh, biased = (heard.done[SampleId(i, 0)].tokens.tolist() for i in range(4))
    assert same == plain
    vocab = model.tokenizer.vocab_size
    # Every id comes once before any comes again, also the prompt's.
    assert len(set(fresh[len(PROMPT) :][:vocab])) == vocab
    assert biased[len(PROMPT) :] == [7] * 20
    of_biased = [2 if token == 7 else int(token in PROMPT) for token in range(model.config.vocab_size)]
    assert of_biased in np.asarray(host._slots.state.occurs).tolist()
