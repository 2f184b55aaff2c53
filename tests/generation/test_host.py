"""The decode loop: who gets a slot, under which version, what it says, and what it waits for."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from areal_jax.control.events import HostAdopted, SampleFinished
from areal_jax.generation.commands import Stop
from areal_jax.observe.waits import Timeline, WaitTimeout
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH, SLOTS, STEPS
from tests.generation.decoding import Asked, Heard, decode, make_host, start
from tests.hangs import HANG_S

PROMPT = (5, 9, 2, 14, 3)


@pytest.fixture
def counted(engine, monkeypatch) -> dict[str, int]:
    """Calls of the engine's programs."""
    calls = {"begin_prefill": 0, "generate": 0, "recompute": 0}

    def count(name: str) -> None:
        original = getattr(engine, name)

        def counting(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(engine, name, counting)

    for name in calls:
        count(name)
    return calls


def finish(host) -> None:
    host.take_commands()
    while host.has_work:
        host.step()


# --- slots --------------------------------------------------------------------------------------------------


def test_slots_are_refilled_as_soon_as_a_sample_ends(engine, store, counted):
    """Skewed lengths: near the bound of tokens over slots, far from whole batches of slots."""
    heard = Heard()
    host = make_host(engine, store, heard)
    lengths = [1, 2, 3, 1, 24, 2, 1, 3, 2, 1, 24, 1, 3, 2, 2, 1, 24, 1, 2, 3, 2, 24, 1, 1, 2]
    for ordinal, length in enumerate(lengths):
        prompt = tuple(i % 15 + 2 for i in range(LENGTH - length))  # leaves room for just that
        host.inbox.put(start(ordinal, 1, prompt))
    finish(host)
    assert len(heard.done) == len(lengths)
    ends = [heard.done[SampleId(ordinal, 0)].completion_tokens for ordinal in range(len(lengths))]
    assert ends == lengths
    calls = [-(-end // STEPS) for end in ends]
    static = sum(max(calls[i : i + SLOTS]) for i in range(0, len(calls), SLOTS))
    bound = sum(calls) / SLOTS
    assert counted["generate"] <= bound + max(calls)
    assert counted["generate"] < 0.75 * static
    assert host.generated_tokens == sum(ends)


def test_a_sample_does_not_depend_on_the_slot_and_neighbours_the_host_gave_it(engine, store, versions):
    heard = Heard()
    host = make_host(engine, store, heard)
    for ordinal in range(4):
        host.inbox.put(start(ordinal, 3, PROMPT[: 2 + ordinal]))
    finish(host)
    for ordinal in range(4):
        sample = SampleId(ordinal, 1)
        asked = Asked(PROMPT[: 2 + ordinal], sample)
        alone = decode(engine, versions(0), {0: asked})[0]
        mine = heard.done[sample]
        np.testing.assert_array_equal(mine.tokens, alone.tokens)
        np.testing.assert_array_equal(mine.behavior_logp, alone.behavior_logp)
        assert mine.stop_reason == alone.stop_reason


def test_one_prefill_a_group_and_one_more_after_a_swap(engine, store, versions, counted):
    host = make_host(engine, store, Heard(), sampling=Sampling(max_tokens=4))
    host.inbox.put(start(0, 2 * SLOTS, PROMPT))
    host.take_commands()
    host.step()
    assert counted["begin_prefill"] == 1
    store.publish(versions(1))
    while host.has_work:
        host.step()
    assert counted["begin_prefill"] == 2
    assert not host._admission.rollouts.prefixes
    host.inbox.put(start(1, 2, PROMPT))
    host.inbox.put(start(2, 2, PROMPT))
    finish(host)
    assert counted["begin_prefill"] == 4


def test_cancelled_samples_free_their_slots_and_say_nothing(engine, store):
    heard = Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, SLOTS + 2, PROMPT))  # two wait
    host.inbox.put(start(1, 1, PROMPT))
    host.take_commands()
    host.step()
    host.inbox.put(Stop(tuple(SampleId(0, member) for member in range(SLOTS + 2))))
    assert host.take_commands()
    rollouts = host._admission.rollouts
    assert (len(host._slots.works), len(rollouts.waiting), rollouts.prefixes) == (0, 1, {})
    finish(host)
    assert set(heard.done) == {SampleId(1, 0)}
    assert host.generated_tokens == SLOTS * STEPS + heard.done[SampleId(1, 0)].completion_tokens


def test_cancelling_one_leaves_its_neighbours_alone(engine, store, versions):
    heard = Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 3, PROMPT))
    host.take_commands()
    host.step()
    host.inbox.put(Stop((SampleId(0, 1),)))
    finish(host)
    assert set(heard.done) == {SampleId(0, 0), SampleId(0, 2)}
    asked = Asked(PROMPT, SampleId(0, 2))
    np.testing.assert_array_equal(
        heard.done[SampleId(0, 2)].tokens, decode(engine, versions(0), {0: asked})[0].tokens
    )


# --- what is recorded ---------------------------------------------------------------------------------------


def test_a_trajectory_says_what_was_sampled_and_how(engine, store, versions):
    heard = Heard()
    sampling = Sampling(temperature=0.7, max_tokens=6)
    host = make_host(engine, store, heard, sampling=sampling, seed=5)
    host.inbox.put(start(2, 1, PROMPT))
    finish(host)
    t = heard.done[SampleId(2, 0)]
    n = len(t.tokens)
    assert t.tokens[: len(PROMPT)].tolist() == list(PROMPT)
    assert t.loss_mask.tolist() == [False] * len(PROMPT) + [True] * (n - len(PROMPT))
    assert t.versions.tolist() == [-1] * len(PROMPT) + [0] * (n - len(PROMPT))
    assert t.turn_ids.tolist() == [-1] * len(PROMPT) + [0] * (n - len(PROMPT))
    assert (t.behavior_logp[: len(PROMPT)] == 0).all() and (t.behavior_logp[len(PROMPT) :] < 0).all()
    assert (t.sampling, t.support, t.reward, t.interruptions) == (sampling, None, None, 0)
    assert t.truncated and n == len(PROMPT) + 6
    assert heard.of(SampleFinished) == [
        SampleFinished(SampleId(2, 0), "host-0", ((0, len(PROMPT), n),), t.stop_reason, 0)
    ]


def test_supports_are_recorded_where_sampling_is_cut(support_engine, versions, dense):
    heard = Heard()
    store = MemoryStore(support_engine.canary)
    store.publish(versions(0))
    host = make_host(support_engine, store, heard, sampling=Sampling(top_k=3, max_tokens=64))
    host.inbox.put(start(0, SLOTS + 1, PROMPT))
    finish(host)
    for t in heard.done.values():
        assert (t.support[~t.loss_mask] == -1).all()
        assert ((t.support[t.loss_mask] >= 0).sum(axis=1) == 3).all()
        assert (t.support[t.loss_mask] == t.tokens[t.loss_mask, None]).any(axis=1).all()
        assert np.abs(t.behavior_logp - dense(versions(0).params, t))[t.loss_mask].max() < 1e-5


def test_every_stop_reason_is_the_tokens(engine, store):
    heard = Heard()
    host = make_host(engine, store, heard, (1,), sampling=Sampling(temperature=1.5, max_tokens=20))
    for ordinal in range(6):
        host.inbox.put(start(ordinal, 4, PROMPT))
    finish(host)
    reasons = [t.stop_reason for t in heard.done.values()]
    assert {"stop", "length"} == set(reasons)
    for t in heard.done.values():
        completion = t.tokens[t.loss_mask]
        assert (completion[:-1] != 1).all()
        assert t.stop_reason == ("stop" if completion[-1] == 1 else "length")
        assert t.stop_reason == "stop" or len(completion) == 20


# --- versions -----------------------------------------------------------------------------------------------


def test_no_token_is_sampled_before_the_version_that_was_asked_for(engine, store, versions):
    heard = Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 1, PROMPT))
    host.inbox.put(start(1, 2, PROMPT, min_version=2))
    host.take_commands()
    for _ in range(3):
        host.step()
    assert {live.sample.ordinal for live in host._slots.works.values()} == {0}
    store.publish(versions(1))
    host.step()
    assert {live.sample.ordinal for live in host._slots.works.values()} == {0}
    store.publish(versions(2))
    finish(host)
    assert all(heard.done[SampleId(1, member)].first_version == 2 for member in range(2))


def test_recomputing_mixes_versions_and_counts_interruptions(engine, store, versions, counted):
    heard = Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 2, PROMPT))
    host.take_commands()
    host.step()
    store.publish(versions(1))
    finish(host)
    assert counted["recompute"] == 1
    assert [event.interrupted for event in heard.of(HostAdopted)] == [0, 2]
    for t in heard.done.values():
        assert t.spans == ((0, 5, 5 + STEPS), (1, 5 + STEPS, len(t.tokens)))
        assert t.interruptions == 1


def test_a_sample_without_a_token_is_not_interrupted(engine, store, versions, monkeypatch):
    """It starts under the newer version; its prompt's KV is rebuilt all the same."""
    heard = Heard()
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 2, PROMPT))
    host.take_commands()
    host._adopt_newer()
    host._refill()
    store.publish(versions(1))
    finish(host)
    assert [event.interrupted for event in heard.of(HostAdopted)] == [0, 0]
    for t in heard.done.values():
        assert (t.first_version, t.interruptions) == (1, 0)
        asked = Asked(PROMPT, t.sample)
        np.testing.assert_array_equal(t.tokens, decode(engine, versions(1), {0: asked})[0].tokens)


def test_adoption_is_told_before_any_sample_of_that_version(engine, store, versions):
    heard = Heard()
    host = make_host(engine, store, heard, sampling=Sampling(max_tokens=5))
    host.inbox.put(start(0, 4 * SLOTS, PROMPT))
    host.take_commands()
    while host.has_work:
        host.step()
        if store.latest() < 6:
            store.publish(versions(store.latest() + 1))
    adopted = {-1}
    for event in heard.events:
        if isinstance(event, HostAdopted):
            assert event.digest == versions(event.version).digest
            assert event.version > max(adopted)
            adopted.add(event.version)
        else:
            assert {span.version for span in event.spans} <= adopted
    assert adopted == set(range(-1, 7))


def test_a_newer_commit_between_name_and_parameters_is_adopted_at_once(engine, versions):
    class Hasty(MemoryStore):
        def latest(self):
            found = super().latest()
            if found == 0:
                self.publish(versions(1))
            return found

    heard, store = Heard(), Hasty(engine.canary)
    store.publish(versions(0))
    host = make_host(engine, store, heard)
    host.inbox.put(start(0, 1, PROMPT))
    finish(host)
    assert [event.version for event in heard.of(HostAdopted)] == [1]
    assert {t.first_version for t in heard.done.values()} == {1}


# --- waits --------------------------------------------------------------------------------------------------


def test_run_serves_until_it_is_told_to_stop(engine, store):
    heard = Heard()
    host = make_host(engine, store, heard, deadline_s=HANG_S)
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    host.inbox.put(start(0, 2, PROMPT))
    end_s = time.monotonic() + HANG_S
    while len(heard.done) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    host.inbox.put(Stop())
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert len(heard.done) == 2


def test_a_host_that_nobody_asks_for_anything_names_who_it_waited_for(engine, store):
    clock = Timeline(None).clock("host-0")
    host = make_host(engine, store, Heard(), deadline_s=0.05, clock=clock)
    with pytest.raises(
        WaitTimeout, match=r"host-0 ends, because it waited 0.05 s for samples from the control plane"
    ):
        host.run()
    assert clock.take_totals()["wait: samples from the control plane"] >= 0.05


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_version_that_never_comes_is_named(engine, store, is_empty):
    """Nobody is live and nobody may start: no busy loop, and no wait for ever."""
    clock = Timeline(None).clock("host-0")
    used = MemoryStore(engine.canary) if is_empty else store
    host = make_host(engine, used, Heard(), deadline_s=0.5, clock=clock)
    host.inbox.put(start(0, 1, PROMPT, min_version=4))
    latest = None if is_empty else 0
    with pytest.raises(
        WaitTimeout, match=rf"host-0 ends, because it waited 0.5 s for version 4 .* latest is {latest}"
    ):
        host.run()
    totals = clock.take_totals()
    assert totals["wait: a version from the trainer"] >= 0.4


def test_gaps_are_between_calls_that_a_sample_lived_through(engine, store):
    host = make_host(engine, store, Heard(), sampling=Sampling(max_tokens=2 * STEPS))
    for ordinal in range(3):  # one after the other: nobody waits for a token while the host idles
        host.inbox.put(start(ordinal, SLOTS, PROMPT))
    finish(host)
    calls = 2 * 3
    assert len(host.gaps_s) == calls - 3
    assert all(gap > 0 for gap in host.gaps_s)


def test_a_version_under_other_parameters_is_refused(engine, versions):
    """The host checks the digest of what comes from other devices."""
    store = MemoryStore(engine.canary)
    elsewhere = jax.device_put(versions(0).params, jax.devices()[1])
    store.publish(VersionedParams(0, elsewhere, versions(1).digest))
    host = make_host(engine, store, Heard())
    host.inbox.put(start(0, 1, PROMPT))
    host.take_commands()
    with pytest.raises(Exception, match="was published with digest"):
        host.step()
