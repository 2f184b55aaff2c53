"""Forks of an episode: branches of one sample; each of its tokens is trained once and survives a crash."""

from __future__ import annotations

import asyncio
from contextlib import closing

import numpy as np

from areal_jax.control import events as e
from areal_jax.episodes.conversation import Conversation
from areal_jax.trajectories.codec import decode, encode
from areal_jax.trajectories.paths import paths_of, spans_of, turns_of
from areal_jax.types import Prompt, Reward, Trajectory
from tests.episodes.test_workflow_runner import LIMITS, SAMPLE, TOKENIZER, Run, outcome, running, tokens
from tests.trajectories.samples import assert_same

SAYS = ("ab", "c", "de", "f", "gh")
MANY = LIMITS._replace(max_turns=9)


async def searches(prompt, episode):
    """A turn, two forks of which the second has two turns, and a turn that goes on after the first."""
    await episode.generate()
    episode.add("user", ".")
    said = ""
    for number, turns in enumerate((1, 2)):
        fork = episode.fork()
        fork.add("user", str(number))
        for _ in range(turns):
            said += (await fork.generate()).text
    episode.add("user", "!")
    return Reward(1.0, note=said + (await episode.generate()).text)


def text(path: Trajectory) -> str:
    """The path's text; what is not trained is in brackets."""
    out, mask = "", path.loss_mask.tolist()
    for place, token in enumerate(path.tokens.tolist()):
        out += "[" * (not mask[place] and (place == 0 or mask[place - 1]))
        out += TOKENIZER.decode([token])
        out += "]" * (not mask[place] and (place + 1 == len(mask) or mask[place + 1]))
    return out


def test_forks_go_on_from_one_turn_with_random_keys_of_their_own():
    with running(searches, say=SAYS.__getitem__, limits=MANY) as run:
        ended = run.until(e.EpisodeEnded)
    assert ended.note == "cdefgh"
    asked = [event for event in run.seen if isinstance(event, e.TurnAdded)]
    assert [(one.segment, one.turn, one.tokens, one.after) for one in asked] == [
        (0, 0, (), None),
        (1, 1, tokens(".0"), None),
        (2, 2, tokens(".1"), 0),
        (2, 3, (), None),
        (0, 4, tokens(".!"), 0),
    ]


def test_all_branches_are_trained_and_a_shared_token_once():
    with running(searches, say=SAYS.__getitem__, limits=MANY) as run:
        run.until(e.EpisodeEnded)
    whole = run.talk.whole("stop")
    assert [text(path) for path in paths_of(whole)] == ["[q:]ab[.!]gh", "[q:ab.0]c", "[q:ab.1]def"]
    assert (whole.completion_tokens, turns_of(whole), whole.first_version) == (8, 5, 0)
    # Turn n of the driver is sampled under version n; the spans of all paths are in the order of the turns.
    assert spans_of(whole) == ((0, 2, 4), (1, 6, 7), (2, 6, 8), (3, 8, 9), (4, 6, 8))
    for path in paths_of(whole):
        assert (path.versions[~path.loss_mask] == -1).all() and (path.turn_ids[~path.loss_mask] == -1).all()
        assert (path.behavior_logp == np.where(path.loss_mask, -1, 0)).all()
    assert_same(decode(encode(whole)), whole)
    for one, other in zip(decode(encode(whole)).branches, whole.branches, strict=True):
        assert_same(one, other)


def test_every_path_comes_back_from_what_is_stored():
    """At the end of each turn: what the journal then has gives the paths of all turns, bit for bit."""
    with running(searches, say=SAYS.__getitem__, limits=MANY) as run:
        for turn in range(5):
            run.play(run.until(e.TurnAdded))
            again = Conversation.from_wire(run.talk.to_wire())
            assert list(again.paths) == list(range(turn + 1))
            for number, path in again.paths.items():
                assert_same(path, run.talk.paths[number])


def test_a_second_run_is_answered_from_the_journal_and_goes_on():
    """The process dies while the second fork waits for its second turn."""
    with running(searches, say=SAYS.__getitem__, limits=MANY) as run:
        for _ in range(3):
            run.play(run.until(e.TurnAdded))
        run.talk.add(run.until(e.TurnAdded))
    again = Run(searches, run.prompt, MANY, run.say)
    again.talk = Conversation.from_wire(run.talk.to_wire())
    with closing(again):
        again.runner.begin(SAMPLE, again.prompt, again.talk)
        again.talk.finish(*again.sampled(3))
        again.runner.answer(SAMPLE, 3, again.talk)
        ended = again.until(e.EpisodeEnded)
    assert ended.note == "cdefgh" and [event.turn for event in again.seen[:-1]] == [4]
    assert [text(path) for path in paths_of(again.talk.whole("stop"))] == [
        "[q:]ab[.!]gh",
        "[q:ab.0]c",
        "[q:ab.1]def",
    ]


def test_forks_of_the_prompt_begin_with_it():
    async def workflow(prompt, episode):
        drafts = [await episode.fork().generate() for _ in range(3)]
        return Reward(1.0, note="".join(one.text for one in drafts))

    with running(workflow, say=SAYS.__getitem__) as run:
        assert run.until(e.EpisodeEnded).note == "abcde"
    assert [text(path) for path in paths_of(run.talk.whole("stop"))] == ["[q:]de", "[q:]ab", "[q:]c"]


def test_a_fork_of_a_chat_is_continued_as_its_template_does():
    chat = Prompt(messages=[{"role": "user", "content": "hi"}], task="own")

    async def workflow(prompt, episode):
        await episode.generate()
        fork = episode.fork()
        for one, word in ((episode, "one"), (fork, "two")):
            one.add("user", word)
            await one.generate()
        return 1.0

    with running(workflow, prompt=chat, limits=LIMITS._replace(length=99)) as run:
        run.until(e.EpisodeEnded)
    begin = "[user: hi\nassistant: "
    assert [text(path) for path in paths_of(run.talk.whole("stop"))] == [
        f"{begin}]a[\nuser: two\nassistant: ]c",
        f"{begin}a\nuser: one\nassistant: ]b",
    ]


def test_two_branches_cannot_have_a_turn_at_once():
    async def workflow(prompt, episode):
        await episode.generate()
        await asyncio.gather(episode.fork().generate(), episode.fork().generate())

    failed = outcome(workflow)
    assert failed.reason == "failed_episode"
    assert "a sample, with all its forks, has one turn at a time" in failed.message


def test_all_branches_share_the_limit_of_turns():
    async def workflow(prompt, episode):
        for _ in range(4):
            await episode.fork().generate()
        assert (await episode.fork().generate()).stop_reason == "length"
        return float(episode.turns)

    ended = outcome(workflow, say=SAYS.__getitem__)
    assert ended == e.EpisodeEnded(SAMPLE, 4.0, stop_reason="length")
