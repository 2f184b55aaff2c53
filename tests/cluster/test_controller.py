"""The controller's handling of single messages, without Redis and without processes."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest

from areal_jax.cluster import messages as m
from areal_jax.cluster.controller import Controller
from areal_jax.cluster.membership import Member, Membership
from areal_jax.control import events as e
from areal_jax.control.state import State
from areal_jax.types import Prompt, SampleId, VersionSpan


def test_an_event_of_an_uncommitted_version_waits_for_its_commit():
    controller = object.__new__(Controller)  # two attributes decide; the others need a whole run
    controller._control, controller._early = SimpleNamespace(state=State(9, version=4)), []
    adopted = e.HostAdopted("host-0", 5, "digest", 0)
    spans = VersionSpan(4, 0, 2), VersionSpan(5, 2, 9)
    finished = e.SampleFinished(SampleId(0, 0, 0), "host-0", spans, "stop")
    older = e.SampleFinished(SampleId(1, 0, 0), "host-0", spans[:1], "stop")
    assert controller._in_time(older) == [(older, None)]
    assert controller._in_time(adopted) == controller._in_time(finished) == []
    assert controller._early == [(adopted, None), (finished, None)]
    controller._control.state.version = 5
    assert controller._in_time(finished) == [(finished, None)]


@pytest.mark.parametrize("digest", ["held", "of other weights", ""])
def test_a_host_that_outlived_an_epoch_counts_as_holding_its_version(digest: str):
    """one_step trains once the hosts hold the newest version, and a host reports an adoption only once."""
    controller = object.__new__(Controller)
    handled: list[e.Event] = []
    controller._handle = lambda *events: handled.extend(events)
    controller._remote = SimpleNamespace(join=lambda name: None)
    controller._control = SimpleNamespace(state=State(9, version=4, digests={4: "held"}))
    hello = m.Hello("generate", "host-0", "first", "machine", 1)
    controller._ready(Member(hello, 0.0), m.Ready("host-0", "first", "epoch", 4, version=4, digest=digest))
    adopted = [e.HostAdopted("host-0", 4, "held")] if digest == "held" else []
    assert handled == [e.HostJoined("host-0", 4), *adopted]


def test_a_group_goes_to_the_reward_process_with_the_fewest_and_to_another_when_that_is_lost():
    controller = object.__new__(Controller)
    controller._epochs, controller._scoring, controller._out = ["epoch"], {}, defaultdict(list)
    controller._config = SimpleNamespace(runtime=SimpleNamespace(reward_workers=1))

    def ready(name: str, incarnation: str) -> Member:
        hello = m.Hello("reward", name, incarnation, "machine", 1)
        return Member(hello, 0.0, m.Ready(name, incarnation, "epoch"))

    members = {name: ready(name, "first") for name in ("reward-0", "reward-1")}
    controller._membership = Membership(members)
    prompt = Prompt("1 + 1 =")

    def assigned() -> dict[str, list[int]]:
        """Posts what waits; the ordinals of the groups that each process has by now."""
        controller._assign()
        found: dict[str, list[int]] = defaultdict(list)
        for (ordinal, _), (mailbox, _) in controller._scoring.items():
            found[mailbox].append(ordinal)
        return dict(found)

    for ordinal in range(5):
        controller.score(e.Score(ordinal, 0), prompt, ())
    assert assigned() == {"reward-0.first": [0, 2], "reward-1.first": [1, 3], "": [4]}
    del controller._scoring[1, 0]  # scored
    assert assigned() == {"reward-0.first": [0, 2], "reward-1.first": [3, 4]}
    del members["reward-0"], controller._scoring[3, 0]
    assert assigned() == {"reward-1.first": [0, 4], "reward-0.first": [2]}
    members["reward-0"] = ready("reward-0", "second")
    assert assigned() == {"reward-1.first": [0, 4], "reward-0.second": [2]}
    posted = {mailbox: len(messages) for mailbox, messages in controller._out.items()}
    assert posted == {"reward-0.first": 2, "reward-1.first": 4, "reward-0.second": 1}
