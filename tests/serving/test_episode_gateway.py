"""Agents at their base_url: OpenAI's client unmodified, retries, branches, and agents that send rubbish."""

from __future__ import annotations

import io
import json
import socket
import string
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest

from areal_jax.control import events as e
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.conversation import Conversation
from areal_jax.episodes.limits import Limits
from areal_jax.episodes.workflow_runner import WorkflowRunner
from areal_jax.generation.host import Host
from areal_jax.jobs.local import run
from areal_jax.plugin import load_object
from areal_jax.replay.folder_audit import audit_run
from areal_jax.serving.episode_gateway import EpisodeGateway
from areal_jax.tasks.source import WeightedTask
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import NOT_SAMPLED, Completion, Prompt, SampleId, Sampling, Trajectory
from tests.hangs import HANG_S
from tests.small_run import small

TOKENIZER = CharTokenizer(string.printable)
LIMITS = Limits(length=400, max_tokens=16, max_turns=12, timeout_s=30.0, tool_timeout_s=5.0)


class Policy:
    """A run of one process without a model: each turn is sampled as `say(number of its tokens before)`."""

    def __init__(
        self,
        agent: Callable[..., Any],
        say: Callable[[int], str],
        limits: Limits = LIMITS,
        task: Task | None = None,
    ) -> None:
        """`task`: the prompts' task; None: one that scores the text "done" by 1."""
        if task is None:
            task = Task.from_rows([{"prompt": "x"}], lambda _, completion: float(completion.text == "done"))
        tasks = {"own": WeightedTask(task)}
        self.say, self.talks, self.ended = say, {}, {}
        self.done = threading.Condition()
        self._guard = threading.Lock()
        self.asked: list[e.TurnAdded] = []
        workflows = workflows_of(f"{__name__}:agent", tasks) if agent is None else _workflows(agent, tasks)
        self.runner = WorkflowRunner(workflows, TOKENIZER, limits, self._take, 0, make_gateway=EpisodeGateway)

    def begin(self, ordinal: int, content: str = "hi") -> Conversation:
        sample = SampleId(ordinal, 0)
        prompt = Prompt(messages=[{"role": "user", "content": content}], task="own")
        self.talks[sample] = talk = Conversation(tuple(TOKENIZER.render(prompt)))
        self.runner.begin(sample, prompt, talk)
        return talk

    def wait(self, count: int = 1, within_s: float = HANG_S) -> dict[int, e.Event]:
        with self.done:
            assert self.done.wait_for(lambda: len(self.ended) >= count, within_s), len(self.ended)
        return self.ended

    def close(self) -> None:
        self.runner.close()

    def _take(self, event: e.Event) -> None:
        """In the thread of the workflows, as a driver would do it in its own."""
        if isinstance(event, e.TurnAdded):
            self.asked.append(event)
            threading.Thread(target=self._sample, args=(event,), daemon=True).start()
        elif isinstance(event, e.EpisodeEnded | e.EpisodeFailed):
            with self.done:
                self.ended[event.sample.ordinal] = event
                self.done.notify_all()

    def _sample(self, event: e.TurnAdded) -> None:
        with self._guard:
            talk, sample, turn = self.talks[event.sample], event.sample, event.turn
            talk.add(event)
            before = talk.request(turn, Sampling()).tokens
            said = tuple(TOKENIZER.encode(self.say(turn)))[: event.max_tokens]
            mask = np.arange(len(before) + len(said)) >= len(before)
            versions = np.where(mask, turn, NOT_SAMPLED).astype(np.int32)
            own = np.array(before + said, np.int32), mask, -0.5 * mask.astype(np.float32), versions
            made = Trajectory(sample, *own, np.where(mask, 0, -1).astype(np.int32), Sampling(), "stop")
            finished = e.TurnFinished(sample, event.segment, turn, "host", made.spans, "stop")
            talk.finish(finished, talk.joined(turn, made))
        self.runner.answer(sample, turn, talk)


def _workflows(agent: Callable[..., Any], tasks: dict[str, WeightedTask]) -> Any:
    globals()["_agent"] = agent
    assert load_object(f"{__name__}:_agent", {}, "agent") is agent
    return workflows_of(f"{__name__}:_agent", tasks)


@contextmanager
def playing(
    agent: Callable[..., Any], say: Callable[[int], str] = "abcdefghijkl".__getitem__, **kwargs: Any
) -> Iterator[Policy]:
    with closing(Policy(agent, say, **kwargs)) as policy:
        yield policy


def client_of(base_url: str, **kwargs: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="-", **kwargs)


def text_of(talk: Conversation) -> str:
    return TOKENIZER.decode(talk.whole("stop").tokens.tolist())


# --- turns --------------------------------------------------------------------------------------------------


def test_an_agents_chats_are_the_turns_of_its_episode():
    seen: list[Any] = []

    def agent(base_url, messages):
        client, said = client_of(base_url), list(messages)
        for _ in range(3):
            extra = {"return_token_ids": True}
            answer = client.chat.completions.create(
                model="any", messages=said, max_tokens=5, temperature=0.3, logprobs=True, extra_body=extra
            )
            choice = answer.choices[0]
            seen.append(
                (choice.message.content, choice.token_ids, choice.versions, answer.usage.total_tokens)
            )
            assert [one.logprob for one in choice.logprobs.content] == [-0.5]
            said += [choice.message, {"role": "user", "content": "more"}]
        return "done"

    with playing(agent) as policy:
        talk = policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)
    text = text_of(talk)
    assert text == "user: hi\nassistant: a\nuser: more\nassistant: b\nuser: more\nassistant: c"
    whole = talk.whole("stop")
    assert TOKENIZER.decode(whole.tokens[whole.loss_mask].tolist()) == "abc"
    assert [said[0] for said in seen] == ["a", "b", "c"] and [said[2] for said in seen] == [[0], [1], [2]]
    assert [said[1] for said in seen] == [TOKENIZER.encode(letter) for letter in "abc"]
    assert seen[-1][3] == len(whole.tokens)
    assert {event.segment for event in policy.asked} == {0}


class Hermes(CharTokenizer):
    notation = "hermes"


def test_a_call_with_a_lone_surrogate_is_answered_as_text(monkeypatch: pytest.MonkeyPatch):
    """It was an error 500, with which the policy had failed its own episode."""
    monkeypatch.setitem(globals(), "TOKENIZER", Hermes(string.printable))
    call = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    seen: list[Any] = []

    def agent(base_url, messages):
        answer = client_of(base_url, max_retries=0).chat.completions.create(model="", messages=messages)
        seen.append((answer.choices[0].message.content, answer.choices[0].message.tool_calls))
        return "done"

    with playing(agent, lambda _: call, limits=LIMITS._replace(max_tokens=99)) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)
    assert seen == [(call, None)]


def test_a_message_may_hold_what_no_encoding_can_write():
    """As a tool returns it that was called with a policy's text: lone surrogates become U+FFFD."""
    codes: list[int] = []

    def agent(base_url, messages):
        said = b'{"messages": [{"role": "user", "content": "hi", "name": "\\udc80"}], "stop": "\\uDFFF"}'
        deep = b'{"messages": [{"role": "user", "content": "", "x": ' + b"[" * 300 + b"]" * 300 + b"}]}"
        bodies = said, b'{"messages": ' + b"[" * 500, deep
        codes.extend(status_of(f"{base_url}/chat/completions", body)[0] for body in bodies)
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)
    assert codes == [200, 400, 400]
    assert policy.asked[0].stop == ("\ufffd",)


def test_an_edited_history_begins_a_branch_that_draws_with_another_key():
    def agent(base_url, messages):
        client = client_of(base_url)
        first = client.chat.completions.create(model="", messages=messages).choices[0].message
        again = [*messages, first, {"role": "user", "content": "x"}]
        client.chat.completions.create(model="", messages=again)
        edited = [*messages, {"role": "assistant", "content": "z"}, {"role": "user", "content": "x"}]
        client.chat.completions.create(model="", messages=edited)
        client.chat.completions.create(
            model="", messages=[*messages, first, {"role": "user", "content": "y"}]
        )
        return None

    with playing(agent) as policy:
        talk = policy.begin(0)
        ended = policy.wait()[0]
    assert isinstance(ended, e.EpisodeEnded)
    assert [(event.after, event.segment) for event in policy.asked] == [(-1, 0), (0, 0), (-1, 1), (0, 2)]
    assert text_of(talk) == "user: hi\nassistant: a\nuser: y\nassistant: d"  # the path of the last turn
    assert talk.whole("stop").turn_ids.max() == 3


def test_a_stream_comes_as_openai_sends_it():
    said = {"role": "user", "content": "hi"}

    def agent(base_url, messages):
        chunks = list(
            client_of(base_url).chat.completions.create(
                model="", messages=[said], stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "a"
        assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == 1
        assert [model.id for model in client_of(base_url).models.list()] == ["policy"]
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)


def test_a_retry_joins_the_first_call_and_equal_calls_without_it_branch():
    begun, slow = threading.Event(), threading.Event()

    def say(turn: int) -> str:
        if turn == 0:
            begun.set()
            assert slow.wait(HANG_S)
        return "abcdef"[turn]

    def agent(base_url, messages):
        body = json.dumps({"messages": messages}).encode()

        def ask(retries: int) -> str:
            headers = {"content-type": "application/json", "x-stainless-retry-count": str(retries)}
            request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(ask, 0)
            assert begun.wait(HANG_S)
            retried = pool.submit(ask, 1)
            time.sleep(0.3)
            slow.set()
            assert (first.result(), retried.result(), ask(2), ask(0)) == ("a", "a", "a", "b")
        return "done"

    with playing(agent, say) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)
    assert [(event.after, event.segment) for event in policy.asked] == [(-1, 0), (-1, 1)]


def test_a_chat_without_room_is_refused_and_the_sample_counts_as_truncated():
    def agent(base_url, messages):
        client, said = client_of(base_url, max_retries=0), list(messages)
        with pytest.raises(openai.BadRequestError, match="has had 3 turns, as many as episode"):
            while True:
                answer = client.chat.completions.create(model="", messages=said).choices[0].message
                said += [answer, {"role": "user", "content": "more"}]
        return "done"

    with playing(agent, limits=LIMITS._replace(max_turns=3)) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0, stop_reason="length")
    assert len(policy.asked) == 3


def test_a_chat_that_cannot_have_room_is_refused_before_it_is_encoded(monkeypatch):
    encoded: list[int] = []
    encode = CharTokenizer.encode_chat
    own = lambda self, text: (encoded.append(len(text)), encode(self, text))[1]  # noqa: E731
    monkeypatch.setattr(CharTokenizer, "encode_chat", own)

    def agent(base_url, messages):
        client = client_of(base_url, max_retries=0)
        with pytest.raises(openai.BadRequestError, match=r"generation\.length"):
            said = [{"role": "user", "content": "x" * 10**6}]
            client.chat.completions.create(model="", messages=said)
        client.chat.completions.create(model="", messages=messages)
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0, stop_reason="length")
    assert encoded and max(encoded) < 400


def test_a_conversation_beyond_the_context_has_the_code_and_words_that_clients_know():
    def agent(base_url, messages):
        said = [{"role": "user", "content": "x" * 400}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client_of(base_url, max_retries=0).chat.completions.create(
                    model="", messages=said, stream=stream
                )
            assert refused.value.code == "context_length_exceeded"
            assert "maximum context length is 400 tokens" in str(refused.value)
            count = len("user: " + "x" * 400 + "_assistant: ")
            assert f"the conversation has {count} tokens" in str(refused.value)
        client_of(base_url).chat.completions.create(model="", messages=messages)
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0, stop_reason="length")


# --- failures -----------------------------------------------------------------------------------------------


def status_of(url: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def test_wrong_requests_are_refused_with_what_to_change():
    def agent(base_url, messages):
        url = f"{base_url}/chat/completions"
        for body, code, said in (
            (b"rubbish", 400, "not JSON"),
            (b"[1]", 400, "the body is [1], but must be a JSON object"),
            (b'{"messages": []}', 400, "messages"),
            (b'{"messages": [{"role": "user"}]}', 400, "content"),
            (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "n: "),
            (b'{"messages": [{"role": "assistant", "content": "x"}]}', 400, "nothing to answer"),
            (b'{"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}', 400, "tool_calls=5"),
            (
                b'{"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}',
                400,
                "a part of type 'image_url'",
            ),
            (b'{"messages": [{"role": "user", "content": "x"}], "stop": ""}', 400, "stop.0: "),
            (b'{"messages": [{"role": "user", "content": "x"}], "tools": [5]}', 400, "tools.0: "),
            (
                b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
                400,
                "tool_choice",
            ),
        ):
            found = status_of(url, body)
            assert found[0] == code and said in found[1], (body, found)
        other = url.replace(url.split("/")[4], "another-secret")
        assert status_of(other, b"{}") == (404, "there is no such episode, or it has ended; end the agent")
        for path in ("embeddings", "chat"):
            assert status_of(f"{base_url}/{path}", b"{}")[0] == 404
        client_of(base_url).chat.completions.create(model="", messages=messages)
        return "done"

    with playing(agent) as policy:
        policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)


def test_an_agent_that_fails_or_goes_on_after_its_end_fails_its_own_episode_alone():
    urls: list[str] = []

    def agent(base_url, messages):
        urls.append(base_url)
        client_of(base_url).chat.completions.create(model="", messages=messages)
        if messages[0]["content"] == "fail":
            raise RuntimeError("broken")
        return "done" if messages[0]["content"] != "silent" else None

    def silent(base_url, messages):
        return "done"

    with playing(agent) as policy:
        policy.begin(0, "fail")
        policy.begin(1, "well")
        ended = policy.wait(2)
        assert "the workflow raised RuntimeError: broken" in ended[0].message
        assert ended[1].reward == 1.0
        for url in urls:
            assert status_of(f"{url}/chat/completions", b"{}")[0] == 404
    with playing(silent) as policy:
        policy.begin(0)
        assert "ended without a chat" in policy.wait()[0].message


def hostile(base_url: str, kind: int) -> None:
    """Connects and stalls, sends rubbish, half a request or half a body, or leaves before the answer."""
    parts = urlsplit(base_url)
    with socket.create_connection((parts.hostname, parts.port), timeout=HANG_S) as line:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        line.sendall(
            [b"", b"\x00\xff" * 200, head.encode()[:40], head.encode() + body[:9], head.encode() + body][kind]
        )
        time.sleep(0.05)


def test_an_episode_ends_after_a_turn_that_its_agent_did_not_wait_for():
    """A chat is under way and another one waits behind it when the agent returns."""
    slow = threading.Event()

    def say(turn):
        if turn == 1:
            assert slow.wait(HANG_S)
        return "a"

    def agent(base_url, messages):
        url, body = f"{base_url}/chat/completions", json.dumps({"messages": messages}).encode()
        assert status_of(url, body)[0] == 200
        with ThreadPoolExecutor(2) as pool:
            left = [pool.submit(hostile, base_url, 4) for _ in range(2)]
            [one.result() for one in left]
        threading.Timer(0.3, slow.set).start()
        return "done"

    with playing(agent, say) as policy:
        talk = policy.begin(0)
        assert policy.wait()[0] == e.EpisodeEnded(SampleId(0, 0), 1.0)
        # The second turn ended before the episode did, and the one behind it was not asked for.
        assert [end is not None for _, end in talk.turns] == [True, True]


class Numbered(Task):
    """Chats; the agent gets its prompt's number."""

    def __init__(self) -> None:
        self.tokenizer = TOKENIZER

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(messages=[{"role": "user", "content": str(i)}])

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.tokens[0] % 2)


def hostile_agent(base_url: str, messages: list[dict[str, str]]) -> None:
    """Makes a bad connection, then plays two turns like any other; one prompt in twenty always fails."""
    kind = int(messages[0]["content"])
    hostile(base_url, kind % 5)
    for _ in range(2):
        body = json.dumps({"messages": messages, "max_tokens": 3}).encode()
        with urllib.request.urlopen(f"{base_url}/chat/completions", body, timeout=HANG_S) as answer:
            said = json.load(answer)["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "?"}]
        if kind % 20 == 7:
            raise RuntimeError("gone")


@pytest.mark.soak
def test_a_thousand_agents_that_stall_disconnect_or_send_rubbish_stop_no_run(tmp_path, monkeypatch):
    hosts: list[Host] = []
    begin = Host.__init__

    def recorded(self, *own, **named):
        begin(self, *own, **named)
        hosts.append(self)

    monkeypatch.setattr(Host, "__init__", recorded)
    words = (
        "run.steps=16",
        f"tasks={__name__}:Numbered",
        f"episode.agent={__name__}:hostile_agent",
        "generation.slots=8",
        "generation.length=64",
        "generation.max_tokens=3",
        "trainer.batch_size=16",
        "trainer.rows=32",
        "trainer.length=64",
    )
    result = run(small(tmp_path / "run", *words), stream=io.StringIO())
    audit = audit_run(tmp_path / "run")
    assert (len(result.metrics), audit.violations, audit.in_flight) == (16, [], 0)
    assert audit.trained == 16 * 16  # of four samples each
    assert audit.dropped["failed_episode"] > 0 and set(audit.dropped) == {"failed_episode"}
    (host,) = hosts
    now = host.statistics()
    assert (now.live, now.waiting, now.kept_tokens, now.free_pages) == (0, 0, 0, now.pages)
    assert now.reused_tokens > 0
