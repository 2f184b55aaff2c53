"""A later turn of an episode begins with the KV of an earlier one, and computes that of its new tokens."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.control.events import SampleFailed, TurnFinished
from areal_jax.generation.commands import Expect, InboxCommand, Start, Stop
from areal_jax.types import ArealError, SampleId, Sampling, Trajectory
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH
from tests.generation.decoding import Heard, make_host

pytestmark = pytest.mark.all_optimizations  # the other files' programs of these engines

PROMPT, ADDED = (5, 9, 2, 14, 3), (7, 7, 2)
SAMPLE = SampleId(0, 0)


class Turns:
    """Decodes the turns of episodes on one host, one after the other."""

    def __init__(self, engine, store, **changes) -> None:
        self.heard = Heard()
        self.host = make_host(engine, store, self.heard, **changes)

    def turn(self, turn: int, prompt, sample=SAMPLE, max_tokens=4, stop=(), first=0) -> Trajectory:
        """`first`: the oldest version under which the turn may start."""
        sampling = Sampling(max_tokens=max_tokens, stop=stop)
        self.host.inbox.put(Start((sample,), tuple(prompt), first, sampling, turn=turn))
        self.host.take_commands()
        while self.host.has_work:
            self.host.step()
        return self.heard.done.pop(sample)

    @property
    def reused(self) -> list[tuple[int, ...]]:
        """`reused` of each turn so far."""
        return [event.reused for event in self.heard.events if isinstance(event, TurnFinished)]

    @property
    def counts(self) -> tuple[int, int]:
        """How many tokens were prefilled, and how many reused."""
        now = self.host.statistics()
        return now.prefilled_tokens, now.reused_tokens


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_second_turn_costs_the_prefill_of_its_new_tokens(engine, store, versions, dense, ahead):
    turns = Turns(engine, store, calls_ahead=ahead)
    first = turns.turn(0, PROMPT)
    assert turns.counts == (len(PROMPT) - 1, 0)
    second = turns.turn(1, (*first.tokens.tolist(), *ADDED), max_tokens=5)
    # The last token of a turn has no KV before the next token is sampled; the last new one has none either.
    assert turns.counts == (len(PROMPT) - 1 + 1 + len(ADDED) - 1, len(first.tokens) - 1)
    third = turns.turn(2, (*second.tokens.tolist(), *ADDED), max_tokens=3)
    assert turns.reused == [(), (0, len(first.tokens) - 1), (1, len(second.tokens) - 1)]
    for one in (first, second, third):
        gap = np.abs(one.behavior_logp - dense(versions(0).params, one))
        assert gap[one.loss_mask].max() < 1e-5
    assert len(third.tokens) == len(PROMPT) + 4 + 5 + 3 + 2 * len(ADDED) <= LENGTH


def test_an_ended_turn_has_no_page_and_an_ended_episode_no_kv(engine, store):
    turns = Turns(engine, store)
    first = turns.turn(0, PROMPT)
    assert turns.host.statistics().free_pages == engine.pages
    turns.host.inbox.put(Stop((SAMPLE,)))
    turns.turn(1, (*first.tokens.tolist(), *ADDED))
    assert turns.reused == [(), ()]


def test_a_turn_that_ends_at_a_text_keeps_the_kv_up_to_there(engine, store, versions, dense):
    free = Turns(engine, store).turn(0, PROMPT, max_tokens=7)
    said = [engine.tokenizer.decode([token]) for token in free.tokens[len(PROMPT) :].tolist()]
    text = next(text for text in said[1:] if text)
    turns = Turns(engine, store, calls_ahead=1)
    first = turns.turn(0, PROMPT, max_tokens=7, stop=(text,))
    assert first.tokens.tolist() == free.tokens[: len(PROMPT) + said.index(text) + 1].tolist()
    assert len(first.tokens) < len(free.tokens)
    second = turns.turn(1, (*first.tokens.tolist(), *ADDED))
    assert turns.reused[1] == (0, len(first.tokens) - 1)
    assert np.abs(second.behavior_logp - dense(versions(0).params, second))[second.loss_mask].max() < 1e-5


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_across_a_swap_kv_is_computed_again_or_kept_as_that_of_live_samples(
    engine, store, versions, dense, on_update
):
    turns = Turns(engine, store, on_update=on_update)
    first = turns.turn(0, PROMPT)
    store.publish(versions(1))
    second = turns.turn(1, (*first.tokens.tolist(), *ADDED))
    assert turns.reused[1] == (() if on_update == "recompute" else (0, len(first.tokens) - 1))
    gap = np.abs(second.behavior_logp - dense(versions(1).params, second))[second.loss_mask].max()
    assert (gap < 1e-5) == (on_update == "recompute")
    assert set(second.versions[second.loss_mask]) == {1}


def test_a_branch_begins_with_the_kv_of_the_tokens_that_it_shares(engine, store, versions, dense):
    turns = Turns(engine, store)
    first = turns.turn(0, PROMPT)
    turns.turn(1, (*first.tokens.tolist(), *ADDED))
    other = turns.turn(2, (*first.tokens.tolist(), 1, 1))
    assert turns.reused[2] == (1, len(first.tokens))
    assert np.abs(other.behavior_logp - dense(versions(0).params, other))[other.loss_mask].max() < 1e-5


def test_without_room_the_shortest_turns_are_dropped(engine, store):
    longer, shorter = SampleId(0, 0), SampleId(0, 1)
    turns = Turns(engine, store, kept_tokens=20)
    long = turns.turn(0, PROMPT, longer, max_tokens=9)
    short = turns.turn(0, PROMPT, shorter, max_tokens=4)
    assert (len(long.tokens) - 1) + (len(short.tokens) - 1) > 20
    turns.turn(1, (*long.tokens.tolist(), *ADDED), longer)
    turns.turn(1, (*short.tokens.tolist(), *ADDED), shorter)
    assert turns.reused[2:] == [(0, len(long.tokens) - 1), ()]


def test_members_of_a_group_share_the_prefill_of_their_first_turn(engine, store):
    turns = Turns(engine, store)
    for member in range(3):
        turns.host.inbox.put(Start((SampleId(0, member),), PROMPT, 0, Sampling(max_tokens=4), turn=0))
    turns.host.take_commands()
    while turns.host.has_work:
        turns.host.step()
    assert turns.counts == (len(PROMPT) - 1, 0)


def test_an_existing_prefix_must_be_the_prompts_beginning(engine, versions):
    store = MemoryStore(engine.canary)
    store.publish(versions(0))
    turns = Turns(engine, store)
    turns.turn(0, PROMPT)
    kept = turns.host._admission.kept.longest(SAMPLE, PROMPT, 0)
    assert kept is not None and kept.kv.common_prefix_tokens.tolist() == list(PROMPT[:-1])
    with pytest.raises(ArealError, match="does not begin with the 4 tokens"):
        engine.begin_prefill([np.array([5, 9, 2, 1, 1])], [kept.kv])
    with pytest.raises(ArealError, match="does not begin with the 4 tokens"):
        engine.begin_prefill([np.array(PROMPT[:4])], [kept.kv])


def test_a_host_that_drains_adopts_a_version_once_its_episodes_have_ended(engine, store, versions, dense):
    turns = Turns(engine, store, on_update="drain")
    first = turns.turn(0, PROMPT)
    store.publish(versions(1))
    second = turns.turn(1, (*first.tokens.tolist(), *ADDED))
    assert np.abs(second.behavior_logp - dense(versions(0).params, second))[second.loss_mask].max() < 1e-5
    assert turns.reused[1] == (0, len(first.tokens) - 1) and turns.host.statistics().version == 0
    turns.host.inbox.put(Stop((SAMPLE,)))
    other = turns.turn(0, PROMPT, SampleId(0, 1), first=1)
    assert set(other.versions[other.loss_mask]) == {1}


def test_a_host_that_drains_waits_for_the_first_turns_of_its_episodes(engine, store, versions):
    """Also if the first turn of an episode that begins under the next version comes before them."""
    turns = Turns(engine, store, on_update="drain")
    done, (first, second, newer) = turns.heard.done, (SampleId(0, 0), SampleId(0, 1), SampleId(1, 0))

    def after(*commands: InboxCommand) -> dict[SampleId, int]:
        """The first version of each turn that has ended after these commands and some steps."""
        for command in commands:
            turns.host.inbox.put(command)
        turns.host.take_commands()
        for _ in range(20):
            turns.host.step()
        return {sample: trajectory.first_version for sample, trajectory in done.items()}

    def begin(sample: SampleId, version: int) -> Start:
        return Start((sample,), PROMPT, version, Sampling(max_tokens=4), turn=0)

    assert after(Expect((first, second), 0)) == {}
    store.publish(versions(1))
    assert after(Expect((newer,), 1), begin(newer, 1)) == {}
    assert after(begin(first, 0)) == {first: 0}
    assert after(Stop((first,)), begin(second, 0)) == {first: 0, second: 0}
    assert after(Stop((second,))) == {first: 0, second: 0, newer: 1}


def test_a_failed_episode_does_not_keep_a_host_from_draining(engine, store, versions):
    """Its Cancel may be lost with the controller."""
    turns = Turns(engine, store, on_update="drain")
    turns.turn(0, PROMPT)
    turns.host.inbox.put(Expect((SampleId(0, 1),), 0))
    for sample, turn in ((SAMPLE, 1), (SampleId(0, 1), 0)):
        turns.host.inbox.put(Start((sample,), (7,) * LENGTH, 0, Sampling(max_tokens=4), turn=turn))
    turns.host.take_commands()
    assert [event.sample for event in turns.heard.of(SampleFailed)] == [SAMPLE, SampleId(0, 1)]
    store.publish(versions(1))
    turns.host.step()
    assert turns.host.statistics().version == 1


def test_a_pinned_episode_goes_on_under_its_version_beside_newer_ones(engine, store, versions, dense):
    turns = Turns(engine, store, on_update="pinned")
    first = turns.turn(0, PROMPT)
    store.publish(versions(1))
    other = turns.turn(0, PROMPT, SampleId(0, 1))
    second = turns.turn(1, (*first.tokens.tolist(), *ADDED))
    for one, version in ((second, 0), (other, 1)):
        assert np.abs(one.behavior_logp - dense(versions(version).params, one))[one.loss_mask].max() < 1e-5
        assert set(one.versions[one.loss_mask]) == {version}
    assert turns.reused == [(), (), (0, len(first.tokens) - 1)]
    assert turns.host.statistics().held_versions == (0, 1)
    turns.host.inbox.put(Stop((SAMPLE, SampleId(0, 1))))
    store.publish(versions(2))
    turns.turn(0, PROMPT, SampleId(0, 2))
    assert turns.host.statistics().held_versions == (2,)
