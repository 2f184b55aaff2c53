"""Answers of interleaved responses: found as the tokens come, sent while the response goes on, and timed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import grpc
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.generation.engine import Engine
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.serving.answers import AnswerStream, require_tags
from areal_jax.serving.proto import rollout_pb2 as messages
from areal_jax.serving.proto.rollout_pb2_grpc import RolloutStub
from areal_jax.serving.server import Server, ServeSettings
from areal_jax.tasks.blocks import BlockParser, Opened, render
from areal_jax.tasks.tokenizers import ByteTokenizer, CharTokenizer
from areal_jax.types import ArealError, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from tests.serving.served import LENGTH, SIZES, SLOTS, STEPS, wait_until
from tests.serving.test_server import DEADLINE_S, by_text, by_tokens, channel, get, refused

from jetstream.core.proto.jetstream_pb2_grpc import OrchestratorStub  # isort: skip - as a client has it
from tests.hangs import HANG_S

QUESTION = "?"
SCRIPT = (
    *("<th", "ink>", "2+2", " is 4", "</thi", "nk><ans", "wer>", "4", "</answer", ">"),
    *("<think>", "4+", "3", "</think>", "<answer>", "7", "</answer>", "so"),
)
WHOLE = tuple(range(17))
BROKEN = (*range(10), 17, *range(10, 17))
"""The response WHOLE with the text "so" between the first answer and the second thought."""

HELD_CALL = 5
"""The decode call after the one that completes the first answer: WHOLE takes 9 calls of 2 tokens."""

HELD_S = 0.05


class Scripted(ByteTokenizer):
    """Bytes, but the first ids, which are control characters, are the tokens of a response."""

    def token_bytes(self, token):
        return SCRIPT[token].encode() if token < len(SCRIPT) else super().token_bytes(token)


@cache
def scripted_engine() -> Engine:
    model = Model(model_config("tiny", 258, **SIZES), Scripted())
    sizes = dict(slots=SLOTS, length=LENGTH, decode_steps=STEPS, page_tokens=16, prefill_chunk=16)
    return Engine(model, has_penalties=True, **sizes)  # type: ignore[arg-type]


@cache
def answering(response: tuple[int, ...]) -> VersionedParams:
    """Parameters of a model that answers QUESTION with these tokens and the EOS.

    The layers add nothing, so that a hidden state is the last token's embedding: its product with the
    column of the LM head of the token that comes next is 100, with other columns a fraction of that.
    """
    engine = scripted_engine()
    tokens = (ord(QUESTION), *response, engine.tokenizer.eos_id)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(tokens), SIZES["width"]))
    params = jax.tree.map(lambda leaf: 0 * leaf if leaf.ndim > 1 else leaf, engine.model.init(0))
    params["embedding"] = params["embedding"].at[np.array(tokens)].set(signs)
    heads = 100 / SIZES["width"] * signs[:-1].T
    params["head"] = params["head"].at[:, np.array(tokens[1:])].set(heads)
    params = jax.device_put(params, engine.param_shardings)
    return VersionedParams(0, params, digest(params))


@contextmanager
def running(response: tuple[int, ...] = WHOLE, *, answers_only: bool = False) -> Iterator[Server]:
    settings = ServeSettings(port=0, http_port=0, is_answers_only=answers_only)
    # Without calls ahead, the tokens of a decode call are passed on before the next call begins.
    server = Server(
        "scripted", scripted_engine(), answering(response), settings, Sampling(max_tokens=40), calls_ahead=0
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def is_read(monkeypatch) -> threading.Event:
    """Decode call HELD_CALL waits for this event: until a test sets it, no later token is sampled."""
    event, calls, decode = threading.Event(), iter(range(1000)), scripted_engine().generate

    def held(*args, **kwargs):
        if next(calls) == HELD_CALL:
            assert event.wait(HANG_S), "the client got no answer while the response went on"
        return decode(*args, **kwargs)

    monkeypatch.setattr(scripted_engine(), "generate", held)
    return event


def samples_of(stream) -> Iterator:
    return (sample for response in stream for sample in response.stream_content.samples)


def generate(server: Server, **fields) -> list:
    request = messages.GenerateRequest(**{"text": QUESTION, "temperature": 0.0, **fields})
    with channel(server) as opened:
        return list(RolloutStub(opened).Generate(request, timeout=DEADLINE_S))


# --- found as the tokens come -------------------------------------------------------------------------------


def added(text: str, sizes: Sequence[int]) -> tuple[str, str]:
    """The text and the answers that an AnswerStream returns for the text's bytes, pushed in these sizes."""
    stream, tokens, found = AnswerStream(ByteTokenizer()), list(text.encode()), []
    for size in [*sizes, len(tokens)]:
        found.append(stream.push(tokens[:size]))
        tokens = tokens[size:]
    found.append(stream.finish())
    return "".join(each.text for each in found), "".join(each.answers for each in found)


CONTENT = st.text("ab é<", min_size=1).filter(str.strip)


@given(st.lists(st.tuples(CONTENT, CONTENT), max_size=3), st.lists(st.integers(0, 9), max_size=20))
def test_answers_are_the_same_however_the_tokens_come(pairs, sizes):
    text = render([block for pair in pairs for block in zip(("think", "answer"), pair, strict=True)])
    assert added(text, sizes) == (text, "".join(f"{answer}\n" for _, answer in pairs))


def test_an_answer_comes_with_its_closing_tag_verbatim():
    stream = AnswerStream(ByteTokenizer())
    pieces = ["<think>a</think><answer>", " \n", "4", "\n</answer", ">", "<think>b"]
    assert [stream.push(list(piece.encode())).answers for piece in pieces] == ["", "", "", "", " \n4\n\n", ""]


def test_an_answer_has_begun_with_its_first_content():
    stream = AnswerStream(ByteTokenizer())
    begun = []
    for piece in ["<think>a</think>", "<answer>", " \n", "4", "</answer>"]:
        stream.push(list(piece.encode()))
        begun.append(stream.has_answer)
    assert begun == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("plain", ""),
        ("<answer>4</answer>", ""),
        ("<think>a</think><answer>4</answer> so <think>b</think><answer>7</answer>", "4\n"),
        ("<think>a</think><answer>4</answer><answer>7</answer>", "4\n"),
        ("<think>a</think><answer> </answer><think>b</think><answer>7</answer>", ""),
        ("<think>a</think><answer>4", ""),
    ],
)
def test_after_a_break_of_the_template_no_answer_is_found_and_all_text_is_decoded(text, answers):
    assert added(text, [3] * 40) == (text, answers)


@pytest.mark.parametrize("needs_text", [True, False])
def test_after_a_break_tokens_are_decoded_only_for_a_client_that_gets_text(needs_text):
    """The requests of a training run send token ids, and few of their responses have blocks."""

    decoded = set()

    class Recording(ByteTokenizer):
        def token_bytes(self, token):
            decoded.add(token)
            return super().token_bytes(token)

    stream = AnswerStream(Recording(), needs_text)
    texts = [stream.push([byte]).text for byte in b"no tags"]
    assert decoded == set(b"no tags" if needs_text else b"n")
    assert "".join(texts) == ("no tags" if needs_text else "n")
    assert stream.finish() == ("", "")


def test_a_tokenizer_without_the_tags_as_text_is_refused():
    class Special(ByteTokenizer):
        """Its tags are special tokens: rendered as such, and left out of decoded text."""

        def render(self, prompt):
            return [self.bos_id] * 4

    for tokenizer in (CharTokenizer("abc"), Special()):
        with pytest.raises(ArealError, match="--answers-only: the tokenizer of mine has no tokens with"):
            require_tags(tokenizer, "mine")
    require_tags(ByteTokenizer(), "mine")
    require_tags(CharTokenizer("ab", ["<think>", "</think>", "<answer>", "</answer>"]), "mine")


# --- sent while the response goes on ------------------------------------------------------------------------


def test_the_first_answers_content_reaches_the_client_before_the_response_ends(is_read):
    """The decode loop waits until the client has read the answer's content: nothing after it exists yet."""
    parser, at_s = BlockParser(), {}
    request = messages.GenerateRequest(text=QUESTION, temperature=0)
    with running() as server, channel(server) as opened:
        started_s = time.monotonic()
        for response in RolloutStub(opened).Generate(request, timeout=DEADLINE_S):
            for event in parser.feed(response.sampled.text):
                if isinstance(event, Opened) and event.kind == "answer" and "answer" not in at_s:
                    at_s["answer"] = time.monotonic() - started_s
                    assert server.host.statistics().live == 1
                    time.sleep(HELD_S)
                    is_read.set()
            if response.HasField("finished"):
                at_s["end"] = time.monotonic() - started_s
    parsed = parser.finish()
    assert [block.text for block in parsed.answers] == ["4", "7"] and parsed.is_valid
    assert list(at_s) == ["answer", "end"]  # messages come in this order
    assert 0 < at_s["answer"] <= at_s["end"] - HELD_S


def test_answers_only_sends_the_first_answer_before_the_response_ends_and_no_thought(is_read):
    found = []
    with running(answers_only=True) as server, channel(server) as opened:
        for sample in samples_of(OrchestratorStub(opened).Decode(by_text(QUESTION), timeout=DEADLINE_S)):
            assert is_read.is_set() or server.host.statistics().live == 1
            found.append((sample.text, list(sample.token_ids)))
            is_read.set()
    assert found == [("4\n", []), ("7\n", [])]


def test_answers_only_generates_text_without_ids_and_log_probs():
    with running(answers_only=True) as server:
        prompt, *sampled, end = generate(server)
        other = generate(server, text="", tokens=messages.TokenIds(ids=[ord(QUESTION)]), n=2)
    assert bytes(prompt.prompt.token_ids[1:]) == QUESTION.encode()
    assert [response.sampled for response in sampled] == [
        messages.Sampled(member=0, version=0, text=text) for text in ("4\n", "7\n")
    ]
    assert (end.finished.stop_reason, end.finished.text) == ("stop", "")
    texts = [(each.sampled.member, each.sampled.text) for each in other if each.HasField("sampled")]
    assert sorted(texts) == [(0, "4\n"), (0, "7\n"), (1, "4\n"), (1, "7\n")]


def test_after_a_break_answers_only_sends_nothing_more_and_the_request_ends_well():
    with running(BROKEN, answers_only=True) as server, channel(server) as opened:
        call = OrchestratorStub(opened).Decode(by_text(QUESTION), timeout=DEADLINE_S)
        assert [sample.text for sample in samples_of(call)] == ["4\n"]
        assert call.code() is grpc.StatusCode.OK
        assert [each.WhichOneof("content") for each in generate(server)] == ["prompt", "sampled", "finished"]
    with running(BROKEN) as server:
        assert "".join(each.sampled.text for each in generate(server)).count("</answer>") == 2


def test_answers_only_refuses_a_prompt_that_is_answered_with_ids():
    says = "token_content is answered with token ids"
    with (
        running(answers_only=True) as server,
        channel(server) as opened,
        refused(grpc.StatusCode.INVALID_ARGUMENT, says),
    ):
        list(OrchestratorStub(opened).Decode(by_tokens([ord(QUESTION)]), timeout=DEADLINE_S))


# --- timed --------------------------------------------------------------------------------------------------


def figures(server: Server, name: str) -> tuple[float, float]:
    """(count, sum of seconds) of a histogram."""
    lines = dict(line.rsplit(" ", 1) for line in get(server, "/metrics")[1].splitlines() if line[0] != "#")
    return float(lines[f"{name}_count"]), float(lines[f"{name}_sum"])


def test_the_seconds_to_the_first_answer_are_counted_once_a_request(is_read):
    with running() as server, channel(server) as opened:
        stub = OrchestratorStub(opened)
        stream = stub.Decode(by_text(QUESTION), timeout=DEADLINE_S)
        wait_until(lambda: figures(server, "areal_jax_first_answer_seconds")[0] == 1, "timed")
        held_s = figures(server, "areal_jax_first_answer_seconds")[1]
        assert figures(server, "areal_jax_first_token_seconds")[1] <= held_s
        is_read.set()
        list(stream)
        list(stub.Decode(by_tokens([ord(QUESTION)]), timeout=DEADLINE_S))  # of ids, which have a text too
        generate(server, n=2)
        assert figures(server, "areal_jax_first_answer_seconds")[0] == 3
        generate(server, max_tokens=7)  # ends with the opening tag of the answer
        list(stub.Decode(by_tokens([SCRIPT.index("2+2")]), timeout=DEADLINE_S))  # the response has no <think>
        assert figures(server, "areal_jax_first_answer_seconds")[0] == 3
        assert figures(server, "areal_jax_first_token_seconds")[0] == 5
