"""The controller's handling of single messages, without Redis and without processes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import msgpack
import pytest

from areal_jax.cluster import controller as controlling
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
    ready = m.Ready("host-0", "first", "two", 4)
    controller._membership = Membership({"host-0": Member(HELLO, 0.0, ready)})
    controller._epochs, controller._confirmed = ["one", "two"], {}
    return controller


@pytest.mark.parametrize(("number", "is_handled"), [(2, False), (3, False), (4, True)])
def test_an_event_is_handled_until_it_is_confirmed(number: int, is_handled: bool):
    """Delivery is at least once, and the event with the confirmed number is journaled too."""
    controller, short = bare_controller(), e.KVShort("host-0")
    controller._confirmed = {"host-0.first": 3, "host-0.second": 9}
    message = m.EventReport("host-0", "first", "two", number, short)
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
    found = bare_controller()._valid(m.EventReport(name, incarnation, epoch, 0, event), {})
    assert found == ([(event, None)] if is_handled else [])


def test_an_event_of_a_host_that_has_not_said_what_it_goes_on_with_is_refused():
    """Between its return and its Ready: the sample may have gone to another host, and is not in its Ready."""
    controller = bare_controller()
    controller._membership.members["host-0"].ready = None
    assert controller._valid(m.EventReport("host-0", "first", "two", 5, e.KVShort("host-0")), {}) == []


class Watched(Controller):
    """Watches its one host under a clock of the test, `now_s`, and a Redis with `heartbeats`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        vars(self).update(vars(bare_controller()))
        self.now_s, self.heartbeats, self.handled = 100.0, {}, []
        monkeypatch.setattr(controlling, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.posted: dict[str, list] = defaultdict(list)
        self._broker = SimpleNamespace(
            heartbeats=lambda names: {name: {} for name in names if name in self.heartbeats},
            clear=lambda mailbox: self.posted.pop(mailbox, None),
        )
        nothing = lambda *_: None  # noqa: E731
        self._remote = SimpleNamespace(take_in=nothing, join=nothing)
        self._view, self._held = SimpleNamespace(note=nothing), SimpleNamespace(delete_posted=nothing)
        self._workflows = self._scoring = SimpleNamespace(lose=nothing)
        self._news_s, self._heartbeat_s, self._deadline_s, self._evaluated = 100.0, 98.0, 600.0, {}
        self._out, self._early, self._unfinished, self._dismissed = self.posted, [], {}, set()
        self._weights, self._has_begun, self._error = "", True, ""
        self._membership.members["host-0"].since_s = 98.0

    def _handle(self, *events: e.Event) -> None:
        self.handled += events

    def _is_owner(self) -> bool:
        return True

    def watch_for(self, seconds: float, step_s: float = 2.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            self._watch(True)


def test_a_host_that_was_lost_comes_back_with_its_next_heartbeat(monkeypatch: pytest.MonkeyPatch):
    """The epoch is the same; the host names the samples that it goes on with."""
    controller = Watched(monkeypatch)
    controller.watch_for(20)
    assert controller.handled == [e.HostLost("host-0", "no heartbeat for 15 s")]
    assert controller._membership.members == {}
    controller.watch_for(60)
    controller.heartbeats = {"host-0.first"}
    controller.watch_for(2)
    assert controller.posted == {"host-0.first": [m.to_plain(m.Begin("two"))]}
    samples = SampleId(3, 0), SampleId(3, 1)
    controller._receive(m.Ready("host-0", "first", "two", 4, samples=samples))
    assert controller.handled[1:] == [e.HostJoined("host-0", 4, samples)]
    controller.watch_for(60)
    assert len(controller.handled) == 2


def test_one_that_ended_after_its_loss_does_not_come_back(monkeypatch: pytest.MonkeyPatch):
    """Its last heartbeat counts for some seconds more."""
    controller = Watched(monkeypatch)
    controller.watch_for(20)
    controller._receive(m.Ended("host-0", "first", "an error"))
    controller.heartbeats = {"host-0.first"}
    controller.watch_for(2)
    assert controller.posted == {} and controller._membership.members == {}


def test_after_its_own_pause_the_controller_waits_for_heartbeats(monkeypatch: pytest.MonkeyPatch):
    """A pause of the whole machine, or of Redis, lets the heartbeats of all processes expire."""
    controller = Watched(monkeypatch)
    controller.watch_for(60, step_s=60)
    controller.watch_for(14)
    assert controller.handled == []
    controller.watch_for(4)
    assert controller.handled == [e.HostLost("host-0", "no heartbeat for 15 s")]


def test_an_early_event_of_a_lost_host_is_not_handled_later(monkeypatch: pytest.MonkeyPatch):
    """It would speak for the process that takes its place, or for the host after its return."""
    controller = Watched(monkeypatch)
    other = e.HostAdopted("host-1", 5, "d5")
    controller._early = [(e.HostAdopted("host-0", 5, "d5"), None), (other, None)]
    controller.watch_for(20)
    assert controller._early == [(other, None)]


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
    ((event, payload),) = controller._valid(m.EventReport("host-0", "first", "two", 5, entry.event), payloads)
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
    controller._early = []
    controller._ready(Member(HELLO, 0.0), m.Ready("host-0", "first", "epoch", 4, version=4, digest=digest))
    adopted = [e.HostAdopted("host-0", 4, "held")] if digest == "held" else []
    assert handled == [e.HostJoined("host-0", 4), *adopted]
    # It may hold a version of which the commit is not journaled yet.
    controller._ready(Member(HELLO, 0.0), m.Ready("host-0", "first", "epoch", 4, version=5, digest="newer"))
    assert controller._early == [(e.HostAdopted("host-0", 5, "newer"), None)]


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
    monkeypatch.setattr(controlling, "journaled_groups", lambda *_: ())
    monkeypatch.setattr(controlling, "plan_groups", lambda *_: SimpleNamespace(to_wire=lambda: "plan"))
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
    placed.forget((1, 0))
    placed.assign(["reward-0.first", "reward-1.first"])
    assert posted == {"reward-0.first": [0, 2], "reward-1.first": [1, 3, 4]}
    placed.forget((3, 0))
    placed.assign(["reward-1.first"])
    assert posted == {"reward-0.first": [0, 2], "reward-1.first": [1, 3, 4, 0]}
    placed.assign(["reward-0.second", "reward-1.first"])
    assert posted["reward-0.second"] == [2]
    placed.lose("reward-0.second")  # it was only paused, but its mailbox was cleared
    placed.assign(["reward-0.second", "reward-1.first"])
    assert posted["reward-0.second"] == [2, 2]


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
    posted.clear()
    placed.begin(samples[1], talk)
    placed.assign(["reward-1.b"])
    placed.lose("reward-1.b")
    assert not placed.conducts("reward-1.b", samples[1])
    placed.assign(["reward-1.b"])  # which was only paused, and has ended its workflows since
    assert [action for _, action, _ in posted] == 2 * [e.Rerun(samples[1])]
