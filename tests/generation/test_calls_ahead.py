"""One decode call ahead: slots whose sample has ended, or has changed, before the call's results are read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from areal_jax.control.events import SampleFinished
from areal_jax.generation.commands import Pause, Start, Stop, Unpause
from areal_jax.types import SampleId, Sampling
from tests.generation.conftest import LENGTH, SLOTS, STEPS, make_engine
from tests.generation.decoding import Asked, Heard, decode, make_host, start
from tests.generation.test_paging import bits

PROMPT = (5, 9, 2, 14, 3, 3, 7, 1, 4, 4, 6)  # a page of 8, and 3 tokens of the next


def make(engine, store, **settings):
    heard = Heard()
    return make_host(engine, store, heard, calls_ahead=1, **settings), heard


def stepped(host, *commands) -> None:
    for command in commands:
        host.inbox.put(command)
    host.take_commands()
    host.step()
    assert host._slots.free_pages <= int(host._slots.state.pages.free_beside(0))


def finish(host) -> None:
    while host.has_work:
        stepped(host)
    assert not host._slots.calls


def assert_alone(engine, versions, trajectory, prompt=PROMPT) -> None:
    asked = Asked(prompt, trajectory.sample, trajectory.sampling)
    assert bits(trajectory) == bits(decode(engine, versions(0), {3: asked})[3])


@pytest.mark.parametrize("calls_ahead", [0, 1])
def test_a_slot_gets_its_next_sample_after_the_call_that_was_ahead(engine, store, calls_ahead):
    """A sample of one call, and one that waits for the slot."""
    heard = Heard()
    host = make_host(engine, store, heard, calls_ahead=calls_ahead)
    ended, long = Sampling(max_tokens=STEPS), Sampling(max_tokens=64)
    live = [Start((SampleId(i, 0),), PROMPT, 0, long if i else ended) for i in range(SLOTS + 1)]
    slots = []
    stepped(host, *live)
    for _ in range(3):
        slots.append(host._slots.works[0].sample.ordinal if 0 in host._slots.works else None)
        host.step()
    assert slots == ([None, SLOTS, SLOTS] if calls_ahead == 0 else [0, None, SLOTS])


def test_stop_texts_and_cancelled_samples_leave_nothing_to_the_next_sample(engine, store, versions):
    """Only the host knows that these have ended: the call ahead still samples tokens for them."""
    sampling = Sampling(max_tokens=20, stop=("c", "ab"))
    host, heard = make(engine, store, sampling=sampling)
    stepped(host, *(start(ordinal, 3, PROMPT[: 2 + ordinal]) for ordinal in range(6)))
    cancelled = {host._slots.works[slot].sample for slot in (1, 3)}
    stepped(host, Stop(tuple(cancelled)))
    finish(host)
    assert len(heard.done) == 18 - len(cancelled) and not cancelled & set(heard.done)
    cut = 0
    for sample, trajectory in heard.done.items():
        prompt = PROMPT[: 2 + sample.ordinal]
        alone = decode(engine, versions(0), {0: Asked(prompt, sample, sampling)})[0]
        texts = [
            engine.tokenizer.decode(alone.tokens[len(prompt) : end].tolist())
            for end in range(len(prompt) + 1, len(alone.tokens) + 1)
        ]
        is_said = [any(text in said for text in sampling.stop) for said in texts]
        end = len(prompt) + (is_said.index(True) + 1 if any(is_said) else len(texts))
        assert trajectory.tokens.tolist() == alone.tokens[:end].tolist()
        assert trajectory.behavior_logp.tolist() == alone.behavior_logp[:end].tolist()
        assert trajectory.stop_reason == ("stop" if any(is_said) else "length")
        cut += end < len(alone.tokens)
    assert cut > 5


def test_a_sibling_that_ended_in_the_call_ahead_shares_no_page(engine, store, versions):
    """Another sample has its pages by then: the prompt's KV is copied to pages of the new sample's own."""
    host, heard = make(engine, store)
    stepped(host, Start((SampleId(0, 0),), PROMPT, 0, Sampling(max_tokens=STEPS)))
    assert not host._slots.state.is_live.any() and len(host._slots.works) == 1
    stepped(host, start(1, 1, PROMPT[::-1]), start(0, 1, PROMPT, first=1))
    finish(host)
    assert len(heard.done) == 3
    assert_alone(engine, versions, heard.done[SampleId(0, 1)])


def test_calls_are_read_where_only_a_live_sibling_leaves_enough_pages(model, store, versions):
    """Eight pages: a prompt of three, another of three, one taken in the first call, and one left."""
    engine, prompt = make_engine(model, kv_tokens=2 * LENGTH), tuple(range(2, 14)) * 2
    host, heard = make(engine, store)
    stepped(host, start(0, 1, prompt), start(1, 1, prompt[:20]))
    assert host._slots.free_pages == 1 < engine.pages_for(len(prompt))
    stepped(host, start(0, 1, prompt, first=1))
    assert host.statistics().live == 3
    finish(host)
    for sample, trajectory in heard.done.items():
        assert_alone(engine, versions, trajectory, prompt[:20] if sample.ordinal else prompt)


def test_a_pause_and_the_end_read_all_calls(engine, store, versions):
    host, heard = make(engine, store, sampling=Sampling(max_tokens=3 * STEPS))
    stepped(host, start(0, 2, PROMPT))
    assert (host.generated_tokens, len(host._slots.calls)) == (0, 1)
    host.inbox.put(Pause())
    host.take_commands()
    assert (host.generated_tokens, len(host._slots.calls)) == (2 * STEPS, 0)
    stepped(host)
    assert (host.statistics().is_paused, host.generated_tokens) == (True, 2 * STEPS)
    stepped(host, Unpause())
    host.step()
    assert heard.done == {}
    host.inbox.put(Stop())
    assert not host.take_commands()
    assert len(heard.of(SampleFinished)) == 2 and not host._slots.calls
    for trajectory in heard.done.values():
        assert_alone(engine, versions, trajectory)


@pytest.mark.parametrize(
    ("platform", "is_shared", "ahead"),
    [("cpu", False, 0), ("cuda", False, 1), ("tpu", False, 1), ("cuda", True, 0)],
)
def test_auto_is_one_call_ahead_on_an_accelerator_of_the_hosts_own(
    engine, store, monkeypatch, platform, is_shared, ahead
):
    monkeypatch.setattr("areal_jax.generation.host.platform_of", lambda _: platform)
    shared = {"turn": lambda: nullcontext()} if is_shared else {}
    host = make_host(engine, store, Heard(), calls_ahead="auto", **shared)
    stepped(host, start(0, 1, PROMPT))
    assert len(host._slots.calls) == ahead
