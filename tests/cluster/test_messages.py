"""Messages survive the way through msgpack."""

from __future__ import annotations

import msgpack
import pytest

from areal_jax.cluster.messages import (
    KINDS,
    AnyMessage,
    Begin,
    End,
    Ended,
    Envelope,
    EventReport,
    Hello,
    LogLine,
    MessageError,
    Ready,
    WeightsAddress,
    from_plain,
    to_plain,
)
from areal_jax.control.events import (
    BatchTrained,
    Cancel,
    Dispatch,
    Hold,
    RewardScored,
    SampleFinished,
    Score,
    Train,
)
from areal_jax.types import SampleId, VersionSpan

SAMPLE = SampleId(3, 1, 0)
MESSAGES: list[AnyMessage] = [
    Hello("generate", "host-0", "ab", "node", 12),
    Ready(
        "trainer-0",
        "ab",
        "e1",
        next_step=2,
        version=4,
        digest="d",
        weights="127.0.0.1:9",
        shares_prompts=False,
    ),
    Ready("host-0", "ab", "e1", slots=8, version=4, digest="d", samples=(SAMPLE, SampleId(4, 0, 1))),
    EventReport(
        "host-0", "ab", "e1", 7, SampleFinished(SAMPLE, "host-0", (VersionSpan(1, 2, 5),), "stop", 2)
    ),
    EventReport("reward-0", "ab", "e1", 7, RewardScored(3, 0, (1.0, 0.5), ((("a", 1.0),), ()), ("x", ""))),
    EventReport("trainer-0", "ab", "e1", 7, BatchTrained(2, (3, 4), "digest", {"loss": 0.25})),
    LogLine("host-0", "warm"),
    Ended("host-0", "ab", "ArealError: gone"),
    Begin("e1", 3, "127.0.0.1:9"),
    WeightsAddress("e1", "127.0.0.1:9"),
    Envelope("e1", Dispatch((SAMPLE, SampleId(3, 2, 0)), "host-0", 2), [5, 6, 7]),
    Envelope("e1", Cancel((SAMPLE,), "host-0")),
    Envelope("e1", Hold(2)),
    Envelope("e1", Score(3, 0), [["four", [4, 1], "stop"]]),
    Envelope("e1", Train(2, (3, 4), (0, 1)), {"rows": 2, "pieces": [["<i8", [1], b"12345678"]]}),
    End("e1", "over"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_back_as_it_was_written(message: AnyMessage):
    assert from_plain(msgpack.unpackb(msgpack.packb(to_plain(message)))) == message


def test_every_kind_is_tested():
    assert {type(message).__name__ for message in MESSAGES} == set(KINDS)


@pytest.mark.parametrize(
    "body",
    [
        None,
        3,
        ["Hello"],
        ["Unknown", []],
        ["Begin", []],
        ["EventReport", [1, 2, 3, 4, 5]],
        ["Envelope", ["e1", ["Finish", []], None]],
    ],
)
def test_an_unreadable_message_is_an_error(body):
    with pytest.raises(MessageError, match="same version of areal-jax"):
        from_plain(body)
