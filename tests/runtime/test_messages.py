"""Messages survive the way through msgpack."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from areal_jax.control.events import BatchTrained, RewardScored, SampleFinished
from areal_jax.runtime.messages import (
    KINDS,
    Begin,
    Cancelled,
    Decode,
    End,
    Ended,
    Hello,
    Judge,
    Message,
    MessageError,
    Noted,
    Ready,
    Told,
    TrainOn,
    Weights,
    from_plain,
    to_plain,
)
from areal_jax.types import Completion, SampleId, VersionSpan
from tests.trajectories.samples import trajectory

SAMPLE = SampleId(3, 1, 0)
MESSAGES: list[Message] = [
    Hello("generate", "host-0", "ab", "node", 12),
    Ready("trainer-0", "ab", "e1", version=4, digest="d", weights="127.0.0.1:9", shares_prompts=False),
    Told("host-0", "ab", "e1", SampleFinished(SAMPLE, "host-0", (VersionSpan(1, 2, 5),), "stop", 2)),
    Told("reward-0", "ab", "e1", RewardScored(3, 0, (1.0, 0.5), ((("a", 1.0),), ()), ("x", ""))),
    Told("trainer-0", "ab", "e1", BatchTrained(2, (3, 4), "digest", {"loss": 0.25})),
    Noted("host-0", "warm"),
    Ended("host-0", "ab", "ArealError: gone"),
    Begin("e1", 3, "127.0.0.1:9"),
    Weights("e1", "127.0.0.1:9"),
    Decode("e1", (SAMPLE, SampleId(3, 2, 0)), (5, 6, 7), 2),
    Cancelled("e1", (SAMPLE,)),
    Judge("e1", 3, 0, (Completion("four", (4, 1), "stop"),)),
    TrainOn("e1", 2, (3, 4), (0, 1), {"rows": 2, "pieces": [["<i8", [1], b"12345678"]]}),
    End("e1", "over"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_arrives_is_what_was_sent(message: Message):
    assert from_plain(msgpack.unpackb(msgpack.packb(to_plain(message)))) == message


def test_every_kind_is_tested():
    assert {type(message).__name__ for message in MESSAGES} == set(KINDS)


def test_a_trajectory_travels_with_its_event():
    sent = trajectory(SAMPLE)
    event = SampleFinished(SAMPLE, "host-0", sent.spans, sent.stop_reason)
    wire = msgpack.packb(to_plain(Told("host-0", "ab", "e1", event, sent)))
    got = from_plain(msgpack.unpackb(wire))
    assert isinstance(got, Told) and got.event == event and got.trajectory is not None
    assert got.trajectory.sample == SAMPLE
    np.testing.assert_array_equal(got.trajectory.tokens, sent.tokens)
    np.testing.assert_array_equal(got.trajectory.behavior_logp, sent.behavior_logp)


@pytest.mark.parametrize(
    "body", [None, 3, ["Hello"], ["Nobody", []], ["Begin", []], ["Told", [1, 2, 3, 4, 5]]]
)
def test_what_is_no_message_is_an_error(body):
    with pytest.raises(MessageError, match="same version of areal-jax"):
        from_plain(body)
