"""Workflows in their thread: what they ask for, how they run again after a crash, and how they fail."""

from __future__ import annotations

import asyncio
import queue
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_jax.control import events as e
from areal_jax.episodes import workflow_runner
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.errors import EpisodeError, ToolError
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.sandboxed_tools import python
from areal_jax.episodes.workflow_runner import WorkflowRunner
from areal_jax.tasks.tokenizers import LARGE, CharTokenizer, Tokenizer
from areal_jax.types import NOT_SAMPLED, Prompt, Reward, SampleId, Sampling, Trajectory
from tests.hangs import HANG_S

TOKENIZER = CharTokenizer(string.printable)
LIMITS = Limits(length=40, max_tokens=8, max_turns=4, timeout_s=20.0, tool_timeout_s=20.0)
SAMPLE = SampleId(3, 1)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


class Run:
    """The driver's part: records events, and samples each turn as the text that `say(turn)` returns."""

    def __init__(
        self,
        workflow: Callable[..., Any],
        prompt: Prompt,
        limits: Limits,
        say: Callable[[int], str],
        tokenizer: Tokenizer = TOKENIZER,
    ):
        self.events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        own: Any = dict(fail=self.failed.put, note=self.notes.put)
        self.runner = WorkflowRunner({"own": workflow}, tokenizer, limits, self.events.put, 0, **own)
        self.prompt, self.say, self.seen, self.tokenizer = prompt, say, [], tokenizer
        self.talk = Conversation(tuple(tokenizer.render(prompt)))

    def close(self) -> None:
        self.runner.close()

    def until(self, *kinds: type) -> e.Event:
        """Plays on until an event of one of these kinds is next, and returns it unanswered."""
        while True:
            event = self.events.get(timeout=HANG_S)
            self.seen.append(event)
            if isinstance(event, kinds):
                return event
            self.play(event)

    def play(self, event: e.Event) -> None:
        match event:
            case e.TurnAdded(sample, _, turn):
                self.talk.add(event)
                self.talk.finish(*self.sampled(turn))
                self.runner.answer(sample, turn, self.talk)
            case e.ToolStarted(sample, call):
                self.talk.calls[call] = event, None
                self.runner.call(sample, call)
            case e.ToolReturned(_, call):
                self.talk.calls[call] = self.talk.calls[call][0], event

    def sampled(self, turn: int) -> tuple[e.TurnFinished, Trajectory]:
        before = self.talk.request(turn, Sampling()).tokens
        said = tuple(self.tokenizer.encode(self.say(turn)))
        mask = np.arange(len(before) + len(said)) >= len(before)
        versions = np.where(mask, turn, NOT_SAMPLED).astype(np.int32)
        own = np.array(before + said, np.int32), mask, np.where(mask, -1, 0).astype(np.float32), versions
        made = Trajectory(SAMPLE, *own, np.where(mask, 0, -1).astype(np.int32), Sampling(), "stop")
        joined = self.talk.joined(turn, made)
        return e.TurnFinished(SAMPLE, 0, turn, "host", made.spans, "stop"), joined


@contextmanager
def running(
    workflow: Callable[..., Any],
    prompt: Prompt | None = None,
    limits: Limits = LIMITS,
    say: Callable[[int], str] = "abc".__getitem__,
) -> Iterator[Run]:
    prompt = prompt or Prompt("q:", task="own")
    with closing(Run(workflow, prompt, limits, say)) as run:
        run.runner.begin(SAMPLE, run.prompt, run.talk)
        yield run


def outcome(workflow: Callable[..., Any], **kwargs: Any) -> e.Event:
    with running(workflow, **kwargs) as run:
        return run.until(e.EpisodeEnded, e.EpisodeFailed)


# --- turns --------------------------------------------------------------------------------------------------


async def two_turns(prompt, episode):
    first = await episode.generate(max_tokens=3)
    episode.add("user", "no\n")
    second = await episode.generate(stop=["\n"])
    return Reward(0.5, {"correct": 1.0}, first.text + second.text)


def test_turns_keep_their_tokens_and_what_is_added_has_no_loss():
    with running(two_turns, say=["ab", "c"].__getitem__) as run:
        ended = run.until(e.EpisodeEnded)
    assert ended == e.EpisodeEnded(SAMPLE, 0.5, (("correct", 1.0),), "abc", "stop")
    asked = [event for event in run.seen if isinstance(event, e.TurnAdded)]
    assert asked == [
        e.TurnAdded(SAMPLE, 0, 0, (), 3),
        e.TurnAdded(SAMPLE, 0, 1, tokens("no\n"), 8, ("\n",)),
    ]
    whole = run.talk.whole("stop")
    assert TOKENIZER.decode(whole.tokens.tolist()) == "q:abno\nc"
    assert whole.loss_mask.tolist() == [False, False, True, True, False, False, False, True]
    assert whole.turn_ids.tolist() == [-1, -1, 0, 0, -1, -1, -1, 1]
    assert whole.versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, 1]
    assert whole.behavior_logp.tolist() == [0, 0, -1, -1, 0, 0, 0, -1]
    assert whole.spans == ((0, 2, 4), (1, 7, 8))


def test_a_chat_is_continued_as_its_template_does():
    chat = Prompt(messages=[{"role": "user", "content": "hi"}], task="own")

    async def workflow(prompt, episode):
        await episode.generate()
        episode.add("user", "more")
        await episode.generate()
        return 1.0

    with running(workflow, prompt=chat, limits=LIMITS._replace(length=99)) as run:
        run.until(e.EpisodeEnded)
    said = TOKENIZER.decode(run.talk.whole("stop").tokens.tolist())
    assert said == "user: hi\nassistant: a\nuser: more\nassistant: b"


@pytest.mark.parametrize(
    ("limits", "turns"), [(LIMITS._replace(max_turns=2), 2), (LIMITS._replace(length=9), 2), (LIMITS, 4)]
)
def test_without_room_or_turns_a_turn_has_no_tokens_and_the_sample_is_truncated(limits, turns):
    async def workflow(prompt, episode):
        for turn in range(9):
            said = await episode.generate()
            if said.stop_reason == "length":
                assert (said.text, len(said.tokens), turn) == ("", 0, turns)
                return 1.0
            episode.add("user", "no")
        return 0.0

    ended = outcome(workflow, limits=limits, say=lambda turn: "ab")
    assert ended == e.EpisodeEnded(SAMPLE, 1.0, stop_reason="length")


CHAT = Prompt(messages=[{"role": "user", "content": "hi"}], task="own")


@pytest.mark.parametrize("prompt", [Prompt("q:", task="own"), CHAT])
@pytest.mark.parametrize("history", ["exact", "template"])
def test_what_cannot_have_room_is_refused_before_it_is_encoded(prompt, history, monkeypatch):
    encoded: list[int] = []
    encode = CharTokenizer.encode
    for name in ("encode", "encode_chat"):
        own = lambda self, text: (encoded.append(len(text)), encode(self, text))[1]  # noqa: E731
        monkeypatch.setattr(CharTokenizer, name, own)

    async def workflow(prompt, episode):
        await episode.generate()
        episode.add("user", "x" * 10**6)
        said = await episode.generate()
        return float(said.stop_reason == "length" and len(said.tokens) == 0)

    ended = outcome(workflow, prompt=prompt, limits=LIMITS._replace(length=99, history=history))
    assert ended == e.EpisodeEnded(SAMPLE, 1.0, stop_reason="length")
    assert encoded and max(encoded) < 100


@pytest.mark.parametrize("prompt", [Prompt("q:", task="own"), CHAT])
@pytest.mark.parametrize("history", ["exact", "template"])
def test_a_long_text_that_may_have_room_is_encoded_beside_the_event_loop(prompt, history, monkeypatch):
    threads: dict[bool, set[threading.Thread]] = {False: set(), True: set()}
    encode = CharTokenizer.encode

    def own(self, text):
        threads[len(text) > LARGE].add(threading.current_thread())
        return encode(self, text)

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(CharTokenizer, name, own)
    loops = set()

    async def workflow(prompt, episode):
        loops.add(threading.current_thread())
        await episode.generate()
        episode.add("user", "x" * (LARGE + 1))
        await episode.generate()
        episode.add("user", "y")
        return float(len((await episode.generate()).tokens))

    ended = outcome(workflow, prompt=prompt, limits=LIMITS._replace(length=3 * LARGE, history=history))
    assert ended == e.EpisodeEnded(SAMPLE, 1.0)
    assert threads[True] and not threads[True] & loops


# --- tools --------------------------------------------------------------------------------------------------


def test_a_result_that_is_too_long_for_the_journal_fails_the_call(monkeypatch):
    monkeypatch.setattr("areal_jax.episodes.tools.LONGEST_RESULT", 12)

    async def workflow(prompt, episode):
        await episode.generate()
        assert await episode.tool(str.upper, "a" * 10) == "A" * 10
        with pytest.raises(ToolError, match="it returned 13 characters of JSON; return at most 12"):
            await episode.tool(str.upper, "a" * 11)
        return 1.0

    assert outcome(workflow) == e.EpisodeEnded(SAMPLE, 1.0)


def double(number: int, by: int = 2) -> int:
    return number * by


async def slowly(number: int) -> int:
    await asyncio.sleep(0.01)
    return number


async def with_tools(prompt, episode):
    await episode.generate()
    found = await asyncio.gather(episode.tool(double, 4, by=3), episode.tool(slowly, 5))
    try:
        await episode.tool(int, "x")
    except ToolError as error:
        return Reward(float(sum(found)), note=str(error))


def test_tools_are_called_once_their_beginning_is_journaled():
    with running(with_tools) as run:
        begun = run.until(e.ToolStarted)
        other = run.until(e.ToolStarted)
        assert (begun.call, begun.tool, other.call, other.tool) == (0, "double", 1, "slowly")
        with pytest.raises(queue.Empty):
            run.events.get(timeout=0.3)  # no result before the calls are allowed
        run.play(begun)
        run.play(other)
        ended = run.until(e.EpisodeEnded)
    returned = {event.call: event.result for event in run.seen if isinstance(event, e.ToolReturned)}
    assert returned == {0: "12", 1: "5", 2: "null"}
    assert ended.reward == 17.0 and "the tool int failed: ValueError" in ended.note


def test_a_second_run_is_answered_from_the_journal():
    calls: list[int] = []

    def tool(number: int) -> int:
        calls.append(number)
        return number

    async def workflow(prompt, episode):
        first = await episode.generate()
        drawn = await episode.tool(tool, int(episode.random.integers(1000)))
        episode.add("user", "go")
        second = await episode.generate()
        return Reward(float(drawn), note=first.text + second.text)

    with running(workflow) as run:
        run.play(run.until(e.ToolStarted))
        second = run.until(e.TurnAdded)  # here the process dies
    run.talk.add(second)
    again = Run(workflow, run.prompt, LIMITS, run.say)
    again.talk = run.talk
    with closing(again):
        again.runner.begin(SAMPLE, again.prompt, again.talk)
        with pytest.raises(queue.Empty):
            again.events.get(timeout=0.3)  # it waits for the turn that it had asked for
        again.talk.finish(*again.sampled(1))
        again.runner.answer(SAMPLE, 1, again.talk)
        ended = again.until(e.EpisodeEnded)
    assert calls == [ended.reward] and ended.note == "ab"


def test_a_call_without_a_result_is_in_doubt_unless_it_may_be_repeated():
    def workflow_of(is_idempotent: bool):
        async def workflow(prompt, episode):
            await episode.generate()
            return float(await episode.tool(double, 1, is_idempotent=is_idempotent))

        return workflow

    for is_idempotent in (False, True):
        with running(workflow_of(is_idempotent)) as run:
            begun = run.until(e.ToolStarted)
        run.talk.calls[0] = begun, None
        again = Run(workflow_of(is_idempotent), run.prompt, LIMITS, run.say)
        again.talk = run.talk
        with closing(again):
            again.runner.begin(SAMPLE, again.prompt, again.talk)
            ended = again.until(e.EpisodeEnded, e.EpisodeFailed)
        if is_idempotent:
            assert ended.reward == 2.0
        else:
            assert (
                ended.reason == "tool_in_doubt" and "double, which may have happened or not" in ended.message
            )


def test_a_second_run_that_does_something_else_has_diverged():
    words = iter(["one", "two"])

    async def workflow(prompt, episode):
        await episode.generate()
        episode.add("user", next(words))
        await episode.generate()
        return 0.0

    with running(workflow) as run:
        run.play(run.until(e.TurnAdded))
        run.talk.add(run.until(e.TurnAdded))
    again = Run(workflow, run.prompt, LIMITS, run.say)
    with closing(again):
        again.runner.begin(SAMPLE, again.prompt, run.talk)
        failed = again.until(e.EpisodeFailed)
    assert failed.reason == "workflow_diverged" and "turn 1 was asked for as" in failed.message


# --- failures -----------------------------------------------------------------------------------------------


async def raises(prompt, episode):
    raise ZeroDivisionError("by zero")


async def early(prompt, episode):
    return 1.0


async def no_number(prompt, episode):
    await episode.generate()
    return "much"


async def unanswered(prompt, episode):
    await episode.generate()
    await episode.generate()


async def idle(prompt, episode):
    await asyncio.sleep(1000)


async def rejects(prompt, episode):
    return None


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        (raises, "the workflow raised ZeroDivisionError: by zero"),
        (early, "before its first turn"),
        (no_number, "the reward is 'much', a str"),
        (idle, r"longer than 0.2 s between two turns; raise episode.timeout_s"),
    ],
)
def test_a_workflow_that_fails_says_why(workflow, said):
    failed = outcome(workflow, limits=LIMITS._replace(timeout_s=0.2 if workflow is idle else HANG_S))
    assert isinstance(failed, e.EpisodeFailed) and failed.reason == "failed_episode"
    assert said in failed.message


def test_a_chat_needs_something_to_answer():
    chat = Prompt(messages=[{"role": "user", "content": "hi"}], task="own")
    failed = outcome(unanswered, prompt=chat)
    assert "nothing was added since the last turn" in failed.message


def test_none_rejects_the_sample():
    assert outcome(rejects) == e.EpisodeEnded(SAMPLE, None)


def test_a_tool_that_exceeds_its_deadline_is_an_error_for_the_workflow():
    async def workflow(prompt, episode):
        await episode.generate()
        await episode.tool(time.sleep, 5, timeout_s=0.1)

    with running(workflow) as run:
        failed = run.until(e.EpisodeFailed)
    assert "the tool sleep failed: it took longer than 0.1 s" in failed.message


def test_an_ended_workflow_emits_nothing_and_many_run_at_once():
    begun, release = [], threading.Event()

    async def workflow(prompt, episode):
        begun.append(episode.sample)
        while not release.is_set():
            await asyncio.sleep(0.01)
        return None

    with running(workflow) as run:
        for ordinal in range(1000):
            run.runner.begin(SampleId(ordinal + 10, 0), run.prompt, Conversation(run.talk.prompt))
        run.runner.end(SAMPLE.ordinal)
        deadline_s = time.monotonic() + HANG_S
        while len(begun) < 1000 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        release.set()
        ended = {run.events.get(timeout=HANG_S).sample.ordinal for _ in range(1000)}
    assert ended == set(range(10, 1010)) and run.events.empty()


def test_two_turns_at_once_are_refused():
    async def workflow(prompt, episode):
        await asyncio.gather(episode.generate(), episode.generate())

    assert "before the last one was sampled; await each" in outcome(workflow).message


def test_a_workflow_that_exits_fails_its_own_episode():
    async def workflow(prompt, episode):
        if episode.sample == SAMPLE:
            raise SystemExit(3)
        return None

    with running(workflow) as run:
        assert "raised SystemExit: 3" in run.until(e.EpisodeFailed).message
        run.runner.begin(SampleId(4, 0), run.prompt, Conversation(run.talk.prompt))
        assert run.until(e.EpisodeEnded).sample == SampleId(4, 0)


def test_a_workflow_that_cancels_itself_fails():
    async def workflow(prompt, episode):
        raise asyncio.CancelledError

    assert outcome(workflow) == e.EpisodeFailed(SAMPLE, "failed_episode", "the workflow cancelled itself")


def test_a_program_that_the_policy_wrote_runs_in_the_sandbox():
    programs = (
        "print(6 * int(input()))",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "while True: pass",
    )
    found: list[dict[str, Any]] = []

    async def workflow(prompt: Prompt, episode: Any) -> float:
        for source in programs:
            found.append(await episode.tool(python, source, stdin="7", seconds=1.0, is_idempotent=True))
        await episode.generate()
        return 1.0

    with running(workflow) as run:
        run.until(e.EpisodeEnded)
    assert [one["outcome"] for one in found] == ["ok", "error", "timed_out"]
    assert found[0]["stdout"] == "42\n" and found[0]["exit_code"] == 0
    assert "socket" in found[1]["stderr"] and found[2]["exit_code"] is None


def test_an_episode_ends_after_a_turn_that_its_workflow_did_not_wait_for():
    left: list[Any] = []

    async def workflow(prompt: Prompt, episode: Any) -> float:
        await episode.generate()
        episode.add("user", "x")
        left.append(asyncio.ensure_future(episode.generate()))
        await asyncio.sleep(0.01)
        return 1.0

    with running(workflow) as run:
        first = run.until(e.TurnAdded)
        run.play(first)
        second = run.until(e.TurnAdded)
        time.sleep(0.1)
        assert run.events.empty()
        run.play(second)
        assert run.until(e.EpisodeEnded) == e.EpisodeEnded(SAMPLE, 1.0)
    assert left[0].exception() is None


# --- users' code that shares a thread -----------------------------------------------------------------------

OTHER = SampleId(4, 0)


def requires_others_go_on(run: Run) -> None:
    """Another episode begins in the same runner, has a turn, and ends."""
    talk, run.talk = run.talk, Conversation(run.talk.prompt)
    run.runner.begin(OTHER, replace(run.prompt, info={"other": True}), run.talk)
    while True:
        event = run.events.get(timeout=HANG_S)
        if event.sample == OTHER and isinstance(event, e.EpisodeEnded):
            break
        if event.sample == OTHER:
            run.play(event)
    run.talk = talk


def beside_others(workflow: Callable[..., Any]) -> Callable[..., Any]:
    """`workflow`, or one turn if the prompt is the other one."""

    async def either(prompt, episode):
        if "other" in prompt.info:
            await episode.generate()
            return 1.0
        return await workflow(prompt, episode)

    return either


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_an_error_for_its_workflow_alone(kind: type, is_async: bool):
    def tool():
        raise kind("enough")

    async def async_tool():
        raise kind("enough")

    async def workflow(prompt, episode):
        await episode.generate()
        try:
            await episode.tool(async_tool if is_async else tool)
        except ToolError as error:
            return Reward(0.5, note=str(error))

    with running(beside_others(workflow)) as run:
        ended = run.until(e.EpisodeEnded)
        assert ended.reward == 0.5 and "tool failed: " in ended.note
        requires_others_go_on(run)
        assert run.failed.empty()


def test_a_task_that_exits_fails_its_episode_alone():
    async def exits():
        raise SystemExit(3)

    async def workflow(prompt, episode):
        await episode.generate()
        await asyncio.gather(exits(), asyncio.sleep(0))

    with running(beside_others(workflow)) as run:
        assert run.until(e.EpisodeFailed).message == "the workflow raised SystemExit: 3"
        requires_others_go_on(run)


def test_a_workflow_that_stops_the_event_loop_stops_nothing():
    async def workflow(prompt, episode):
        asyncio.get_running_loop().stop()
        await episode.generate()
        return 1.0

    with running(beside_others(workflow)) as run:
        assert run.until(e.EpisodeEnded).reward == 1.0
        requires_others_go_on(run)


def test_the_death_of_the_thread_is_reported():
    async def workflow(prompt, episode):
        asyncio.get_running_loop()._clock_resolution = None  # type: ignore[attr-defined]
        await asyncio.sleep(HANG_S)

    with running(workflow) as run:
        assert isinstance(run.failed.get(timeout=HANG_S), TypeError)


async def refuses(prompt, episode):
    await episode.generate()
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(HANG_S)


def test_a_deadline_ends_a_workflow_that_refuses_to_be_cancelled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workflow_runner, "_GRACE_S", 0.1)
    with running(beside_others(refuses), limits=LIMITS._replace(timeout_s=0.5)) as run:
        failed = run.until(e.EpisodeFailed)
        assert "took longer than 0.5 s between two turns" in failed.message
        assert (
            "test_workflow_runner.py" in failed.message
            and "in refuses: await asyncio.sleep" in failed.message
        )
        note = run.notes.get(timeout=HANG_S)
        assert "the workflow of sample 3/1/0 (task own), at " in note and "1 of at most 64 workflows" in note
        requires_others_go_on(run)
        assert run.failed.empty()
        monkeypatch.setattr(workflow_runner, "MOST_LEFT", 0)
        error = run.failed.get(timeout=HANG_S)
    assert isinstance(error, EpisodeError) and "in refuses: await asyncio.sleep(HANG_S); let them" in str(
        error
    )


def test_a_tool_that_refuses_to_be_cancelled_exceeds_its_deadline():
    async def tool():
        await refuses(None, SimpleNamespace(generate=lambda: asyncio.sleep(0)))

    async def workflow(prompt, episode):
        await episode.generate()
        await episode.tool(tool, timeout_s=0.1)

    with running(beside_others(workflow)) as run:
        assert "tool failed: it took longer than 0.1 s" in run.until(e.EpisodeFailed).message
        requires_others_go_on(run)


def test_a_tool_that_goes_on_after_its_deadline_is_named_and_does_not_keep_the_process():
    release = threading.Event()

    def hangs():
        release.wait(HANG_S)

    async def workflow(prompt, episode):
        await episode.generate()
        await episode.tool(hangs, timeout_s=0.1)

    with running(beside_others(workflow), limits=LIMITS._replace(timeout_s=2.0)) as run:
        run.until(e.EpisodeFailed)
        assert "hangs, at " in (note := run.notes.get(timeout=HANG_S)), note
        assert "in hangs: release.wait(HANG_S). 1 of at most 64" in note
        (own,) = [one for one in threading.enumerate() if one.name.endswith("hangs")]
        assert own.daemon
        release.set()


@pytest.mark.parametrize("way", ["in Python", "in C"])
def test_a_workflow_that_blocks_fails_alone_and_the_others_run_again_in_a_new_thread(way: str):
    """Its neighbour had a turn before it blocked, which is neither lost nor sampled again."""
    release, is_blocked = threading.Event(), threading.Event()

    async def workflow(prompt, episode):
        if "other" in prompt.info:
            first = await episode.generate(max_tokens=1)
            episode.add("user", "x")
            second = await episode.generate()
            return Reward(1.0, note=first.text + second.text)
        is_blocked.set()
        while way == "in Python":
            pass
        release.wait(HANG_S)

    with running(workflow, limits=LIMITS._replace(timeout_s=1.0)) as run:
        assert is_blocked.wait(HANG_S)
        blocked = run.runner._thread.thread
        run.runner.begin(OTHER, replace(run.prompt, info={"other": True}), run.talk)
        failed = run.until(e.EpisodeFailed)
        line = "in workflow: " + ("" if way == "in Python" else "release.wait(HANG_S)")
        assert failed.sample == SAMPLE and line in failed.message
        first = run.until(e.TurnAdded)
        assert (first.sample, first.turn) == (OTHER, 0)
        run.play(first)
        ended = run.until(e.EpisodeEnded)
        assert (ended.sample, ended.note) == (OTHER, "ab")
        note = run.notes.get(timeout=HANG_S)
        assert "sample 3/1/0 (task own) has blocked" in note and "it is left there" in note
        assert run.failed.empty()
        if way == "in C":
            assert "a blocked thread, at " in run.notes.get(timeout=HANG_S)
        release.set()
        blocked.join(HANG_S)
        assert not blocked.is_alive()  # Python code met a SystemExit


def test_turns_before_a_block_are_answered_from_the_conversation():
    release, is_blocked = threading.Event(), threading.Event()

    async def workflow(prompt, episode):
        if "blocks" in prompt.info:
            is_blocked.set()
            release.wait(HANG_S)
        first = await episode.generate(max_tokens=1)
        episode.add("user", "x")
        return Reward(1.0, note=first.text + (await episode.generate()).text)

    with running(workflow, limits=LIMITS._replace(timeout_s=1.0)) as run:
        run.play(run.until(e.TurnAdded))
        second = run.until(e.TurnAdded)  # asked for, and not answered when the other one blocks
        run.talk.add(second)
        blocks = replace(run.prompt, info={"blocks": True})
        run.runner.begin(OTHER, blocks, Conversation(run.talk.prompt))
        assert is_blocked.wait(HANG_S)
        assert run.until(e.EpisodeFailed).sample == OTHER
        run.talk.finish(*run.sampled(1))
        run.runner.answer(SAMPLE, 1, run.talk)
        ended = run.until(e.EpisodeEnded)  # and no further TurnAdded
        assert (ended.sample, ended.note) == (SAMPLE, "ab")
        assert [type(event).__name__ for event in run.seen].count("TurnAdded") == 2
        release.set()


def test_a_workflow_that_blocks_within_its_time_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workflow_runner, "NOTED_S", 0.1)
    monkeypatch.setattr(workflow_runner, "TICK_S", 0.05)
    release = threading.Event()

    async def workflow(prompt, episode):
        await episode.generate()
        release.wait(HANG_S)
        return 1.0

    with running(workflow, limits=LIMITS._replace(timeout_s=HANG_S)) as run:
        run.play(run.until(e.TurnAdded))
        note = run.notes.get(timeout=HANG_S)
        assert "the workflow of sample 3/1/0 (task own) has blocked the thread of all workflows for" in note
        assert "in workflow: release.wait(HANG_S); let episode.tool" in note
        release.set()
        assert run.until(e.EpisodeEnded).reward == 1.0


def test_all_workflows_end_at_once_although_one_blocks():
    release, is_blocked = threading.Event(), threading.Event()

    async def workflow(prompt, episode):
        is_blocked.set()
        release.wait(HANG_S)
        return None

    with running(workflow, limits=LIMITS._replace(timeout_s=HANG_S)) as run:
        assert is_blocked.wait(HANG_S)
        run.runner.end_all()
        release.set()
        run.runner.begin(OTHER, run.prompt, run.talk)
        assert run.until(e.EpisodeEnded).sample == OTHER


def test_a_pause_of_the_process_costs_no_episode_its_deadline(monkeypatch: pytest.MonkeyPatch):
    """A stopped process, or a suspended machine: the watching thread is late by as much as the workflows."""
    paused_s, now = [0.0], time.monotonic
    monkeypatch.setattr(workflow_runner, "time", SimpleNamespace(monotonic=lambda: now() + paused_s[0]))

    async def workflow(prompt, episode):
        await episode.in_thread(release.wait, HANG_S)
        return None

    release = threading.Event()
    with running(workflow, limits=LIMITS._replace(timeout_s=HANG_S)) as run:
        time.sleep(0.05)
        paused_s[0] = 10 * HANG_S
        with pytest.raises(queue.Empty):
            run.events.get(timeout=2.5)  # the thread looks once a second
        release.set()
        assert run.until(e.EpisodeEnded).reward is None
