"""The controller's handling of single messages, without Redis and without processes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import msgpack
import pytest

from areal_jax.cluster import controller as controller_module
from areal_jax.cluster import messages as m
from areal_jax.cluster.controller import TRAINER, Controller
from areal_jax.cluster.membership import Member, Membership
from areal_jax.cluster.payloads import Posted
from areal_jax.cluster.reward_placement import PlacedGroups, PlacedWorkflows
from areal_jax.config.loading import make_config
from areal_jax.control import events as e
from areal_jax.control.state import GroupState, HostState, State
from areal_jax.episodes.conversation import Conversation
from areal_jax.runtime.recovery import Journaled
from areal_jax.trajectories.codec import encode
from areal_jax.types import SampleId, VersionSpan
from tests.trajectories.journals import finished


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


HELLO = m.Hello("generate", "host-0", "first", "machine", 1)


def bare_controller() -> Controller:
    """With what decides on the events of its one host, "host-0", in the epochs "one" and, now, "two"."""
    controller = object.__new__(Controller)
    controller._control = SimpleNamespace(state=State(9, version=4, hosts={"host-0": HostState(4)}))
    controller._membership = Membership({"host-0": Member(HELLO, 0.0)})
    controller._epochs, controller._confirmed = ["one", "two"], {}
    return controller


@pytest.mark.parametrize(("number", "is_handled"), [(2, False), (3, False), (4, True)])
def test_an_event_is_handled_until_it_is_confirmed(number: int, is_handled: bool):
    """Delivery is at least once, and the event with the confirmed number is journaled too."""
    controller, short = bare_controller(), e.KVShort("host-0")
    controller._confirmed = {"host-0.first": 3, "host-0.second": 9}
    message = m.Event("host-0", "first", "two", number, short)
    assert controller._valid(message, {}) == ([(short, None)] if is_handled else [])


@pytest.mark.parametrize(
    ("name", "incarnation", "epoch", "is_handled"),
    [
        ("host-0", "first", "two", True),
        ("host-0", "first", "one", False),  # its samples may have gone to another host since
        ("host-0", "second", "two", False),
        ("host-1", "first", "two", False),
        (TRAINER, "first", "two", True),
        (TRAINER, "first", "one", True),  # a batch that it trained stays trained
        (TRAINER, "first", "before Redis lost its data", False),  # it sends all its events again, in order
    ],
)
def test_an_event_is_handled_if_its_sender_and_its_epoch_are_in_force(
    name: str, incarnation: str, epoch: str, is_handled: bool
):
    event = e.CheckpointCommitted(4) if name == TRAINER else e.KVShort(name)
    found = bare_controller()._valid(m.Event(name, incarnation, epoch, 0, event), {})
    assert found == ([(event, None)] if is_handled else [])


@pytest.mark.parametrize("attempt", [0, 1])
def test_the_payload_of_a_late_sample_is_deleted_and_does_not_become_the_samples(attempt: int):
    """Its group was restarted since: trainers fetch a payload by the sample's name."""
    controller, held = bare_controller(), []
    group = GroupState(0, (None,), stage="decoding", attempt=1, host="host-0")
    controller._control.state.groups[0] = group
    controller._held = SimpleNamespace(
        accept=lambda one: held.append(("accepted", one)), refuse=lambda one: held.append(("refused", one))
    )
    entry = finished(SampleId(0, 0, attempt))
    posted = Posted(SampleId(0, 0, attempt), "host-0.first", 5)
    payloads = {posted: encode(entry.trajectory)}
    ((event, payload),) = controller._valid(m.Event("host-0", "first", "two", 5, entry.event), payloads)
    assert event == entry.event  # the journal counts it as late
    assert held == [("accepted" if attempt == 1 else "refused", posted)]
    assert (payload is not None) == (attempt == 1)


def test_a_host_that_starts_again_is_lost_before_it_joins():
    """Its samples then start again; a second Hello of one start changes nothing."""
    controller, handled = bare_controller(), []
    controller._handle = lambda *events: handled.extend(events)
    controller._view = SimpleNamespace(note=lambda text: None)
    controller._unfinished, controller._has_begun, controller._dismissed = {}, False, set()
    controller._register(HELLO)
    assert handled == []
    controller._register(replace(HELLO, incarnation="second"))
    assert handled == [e.HostLost("host-0", "its process started again")]
    assert controller._membership.of("host-0", "second") is not None


@pytest.mark.parametrize("digest", ["held", "of other weights", ""])
def test_a_host_that_outlived_an_epoch_counts_as_holding_its_version(digest: str):
    """one_step trains once the hosts hold the newest version, and a host reports an adoption only once."""
    controller = object.__new__(Controller)
    handled: list[e.Event] = []
    controller._handle = lambda *events: handled.extend(events)
    controller._remote = SimpleNamespace(join=lambda name: None)
    controller._control = SimpleNamespace(state=State(9, version=4, digests={4: "held"}))
    controller._ready(Member(HELLO, 0.0), m.Ready("host-0", "first", "epoch", 4, version=4, digest=digest))
    adopted = [e.HostAdopted("host-0", 4, "held")] if digest == "held" else []
    assert handled == [e.HostJoined("host-0", 4), *adopted]


def test_a_restarted_trainer_is_sent_the_steps_with_which_a_batch_was_trained(monkeypatch):
    """The learning rate may depend on the run's number of steps, which a resume has changed since."""
    one = Journaled(e.Train(3, (6, 7), (0, 0)), "digest", "published", {"loss": 0.5}, 40, True)
    trainer = Member(m.Hello("trainer", TRAINER, "first", "machine", 1), 0.0)
    controller = bare_controller()
    controller._membership = Membership({TRAINER: trainer})
    controller._journaled, controller._shares_prompts = [one], True
    controller._held = SimpleNamespace(put_back=lambda groups: None)
    controller._out, controller._config = defaultdict(list), make_config({})
    controller._inputs = controller._journal = None
    monkeypatch.setattr(controller_module, "journaled_groups", lambda *_: ())
    monkeypatch.setattr(controller_module, "plan_groups", lambda *_: SimpleNamespace(to_wire=lambda: "plan"))
    controller._catch_up(3)
    (sent,) = controller._out[trainer.mailbox]
    command = m.from_plain(msgpack.unpackb(msgpack.packb(sent)))
    assert command.payload["plan"] == "plan"
    assert Journaled(command.action, *command.payload["journaled"]) == one


def test_a_group_goes_to_the_reward_process_with_the_fewest_and_to_another_when_that_is_lost():
    posted: dict[str, list[int]] = defaultdict(list)
    placed = PlacedGroups(lambda mailbox, action, _: posted[mailbox].append(action.ordinal), most=2)
    for ordinal in range(5):
        placed.score(e.Score(ordinal, 0), ())
    placed.assign(["reward-0.first", "reward-1.first"])
    assert posted == {"reward-0.first": [0, 2], "reward-1.first": [1, 3]}  # 4 waits
    placed.scored(1, 0)
    placed.assign(["reward-0.first", "reward-1.first"])
    assert posted == {"reward-0.first": [0, 2], "reward-1.first": [1, 3, 4]}
    placed.scored(3, 0)
    placed.assign(["reward-1.first"])
    assert posted == {"reward-0.first": [0, 2], "reward-1.first": [1, 3, 4, 0]}
    placed.assign(["reward-0.second", "reward-1.first"])
    assert posted["reward-0.second"] == [2]


def test_a_workflow_runs_again_in_another_reward_process_when_its_own_is_lost():
    posted: list[tuple[str, e.Action, object]] = []
    placed = PlacedWorkflows(lambda *command: posted.append(command))
    samples, talk = [SampleId(0, member) for member in range(3)], Conversation((1, 2))
    for sample in samples:
        placed.begin(sample, talk)
    placed.assign([])
    assert not posted
    placed.assign(["reward-0.a", "reward-1.b"])
    reruns = [(mailbox, e.Rerun(sample)) for mailbox, sample in zip(
        ["reward-0.a", "reward-1.b", "reward-0.a"], samples, strict=True
    )]  # fmt: skip
    assert [command[:2] for command in posted] == reruns
    assert placed.conducts("reward-0.a", samples[0]) and not placed.conducts("reward-1.b", samples[0])
    posted.clear()
    talk.add(e.TurnAdded(samples[0], 0, 0, (3,), 4))
    placed.assign(["reward-1.b"])
    ((mailbox, action, plain), (_, other, _)) = posted
    assert (mailbox, action, other) == ("reward-1.b", e.Rerun(samples[0]), e.Rerun(samples[2]))
    again = Conversation.from_wire(msgpack.unpackb(msgpack.packb(plain)))
    assert again.turns == talk.turns and again.prompt == (1, 2)
    placed.call(samples[0], 0)
    placed.end(0)
    assert [(command[0], command[1]) for command in posted[2:]] == [
        ("reward-1.b", e.Call(samples[0], 0)),
        ("reward-1.b", e.Drop(0, "")),
    ]
    assert not placed.conducts("reward-1.b", samples[0])
