"""A driver in memory that does what the control plane asks in whatever order a random source picks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.audit import Row
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlPlane
from areal_jax.types import SampleId, VersionSpan

SECTIONS = {
    "steps": "run", "batch_size": "trainer", "keep_checkpoints": "trainer",
    "group_size": "algorithm", "group_filter": "algorithm", "gate": "algorithm", "on_update": "generation",
}  # fmt: skip
"""Config key -> its section; any other key here is one of section `control`."""


def config_of(**keys: Any) -> Config:
    return changed(Config(), **{"max_staleness": 0, **keys})


def changed(config: Config, **keys: Any) -> Config:
    """`config` with other values of these keys, unchecked: the control plane keeps its promises also with
    combinations that a config refuses. max_staleness=None: unbounded.
    """
    for key, value in keys.items():
        name = SECTIONS.get(key, "control")
        value = "unbounded" if (key, value) == ("max_staleness", None) else value
        config = config.model_copy(update={name: getattr(config, name).model_copy(update={key: value})})
    return config


@dataclass(frozen=True)
class Decoding:
    sample: SampleId
    host: str
    version: int
    """The version that its dispatch asked for."""


@dataclass(frozen=True)
class Moving:
    """A host that was asked to hand samples over, or to fetch them, and has not answered yet."""

    command: e.Move | e.Fetch


@dataclass
class Player:
    """`pending` is what was asked for and not yet answered; `step` answers one of it."""

    config: Config
    random: Random
    equal_rewards: float = 0.0
    failed_rewards: float = 0.0
    failed_samples: float = 0.0
    slots: int = 4
    hosts: int = 2
    drains: bool = False
    """Hosts hold one version at a time and adopt the next once what was dispatched for it has ended."""
    failed_moves: float = 0.0
    rows: list[Row] = field(default_factory=list)
    pending: list[Decoding | Moving | Event] = field(default_factory=list)
    kept: list[Decoding] = field(default_factory=list)
    """What hosts keep of samples that they have offered."""
    ages: list[int] = field(default_factory=list)
    """Trained version - version of each token span, of every trained sample."""
    spans: dict[SampleId, tuple[VersionSpan, ...]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    """The version that each host adopted last."""

    def __post_init__(self) -> None:
        self.plane = ControlPlane(self.config)

    @property
    def events(self) -> list[Event]:
        return [event for _, event, _ in self.rows]

    def start(self) -> Player:
        self.tell(e.RunStarted("d0"))
        for index in range(self.hosts):
            self.tell(e.HostJoined(f"host{index}", self.slots))
        return self

    def tell(self, event: Event) -> tuple[Action, ...]:
        training = self.plane.state.training
        if isinstance(event, e.BatchTrained) and training is not None:
            self.ages += [
                event.step - span.version
                for ordinal, attempt in zip(training.ordinals, training.attempts, strict=True)
                for member in range(self.config.algorithm.group_size)
                for span in self.spans[SampleId(ordinal, member, attempt)]
            ]
        if isinstance(event, e.HostJoined):
            self.held[event.host] = -1
        actions = self.plane.handle(event)
        self.rows.append((len(self.rows), event, actions))
        for action in actions:
            self.do(action)
        if isinstance(event, e.BatchTrained):
            self.pending.append(e.VersionCommitted(event.step + 1, f"d{event.step + 1}"))
        return actions

    def do(self, action: Action) -> None:
        match action:
            case e.Dispatch(samples, host, version):
                self.pending += [Decoding(sample, host, version) for sample in samples]
            case e.Cancel(samples, host):
                is_gone = lambda p: isinstance(p, Decoding) and p.host == host and p.sample in samples  # noqa: E731
                self.pending = [p for p in self.pending if not is_gone(p)]
                self.kept = [p for p in self.kept if not is_gone(p)]
            case e.Move() | e.Fetch():
                self.pending.append(Moving(action))
            case e.TakeBack(samples, host):
                back = [p for p in self.kept if p.host == host and p.sample in samples]
                self.kept = [p for p in self.kept if p not in back]
                self.pending += back
            case e.Score(ordinal, attempt):
                self.pending.append(self.score(ordinal, attempt))
            case e.Train(step, ordinals):
                self.pending.append(e.BatchTrained(step, ordinals, f"d{step + 1}", {}))

    def score(self, ordinal: int, attempt: int) -> Event:
        if self.random.random() < self.failed_rewards:
            return e.RewardFailed(ordinal, attempt, 0, "failed", "")
        is_equal = self.random.random() < self.equal_rewards
        rewards = tuple(0.0 if is_equal else float(m) for m in range(self.config.algorithm.group_size))
        parts = ()
        if (part := self.config.algorithm.gate.part) is not None:
            right = [float(self.random.random() < 0.5) for _ in rewards]
            rewards = tuple(reward + 0.5 * one for reward, one in zip(rewards, right, strict=True))
            parts = tuple((("correct", one), (part, 0.5 * one)) for one in right)
        return e.RewardScored(ordinal, attempt, rewards, parts)

    def finish(self, decoding: Decoding) -> Event:
        """The sample ends now: its head under the version it began with, its tail under the newest, or
        all of it under that of its head where hosts drain or pin.
        """
        if self.random.random() < self.failed_samples:
            return e.SampleFailed(decoding.sample, decoding.host, "")
        version = self.held[decoding.host] if self.drains else decoding.version
        spans = (VersionSpan(version, 0, 3),)
        if self.plane.state.version > decoding.version and self.config.on_update not in ("pinned", "drain"):
            spans += (VersionSpan(self.plane.state.version, 3, 5),)
        self.spans[decoding.sample] = spans
        return e.SampleFinished(decoding.sample, decoding.host, spans, "stop")

    def step(self) -> bool:
        """Answer one thing, chosen at random; commits keep their order. False when nothing is left."""
        if not self.pending:
            return False
        choice = self.random.randrange(len(self.pending))
        if isinstance(self.pending[choice], e.VersionCommitted):
            choice = next(i for i, p in enumerate(self.pending) if isinstance(p, e.VersionCommitted))
        self.answer(self.pending.pop(choice))
        return True

    def answer_move(self, command: e.Move | e.Fetch) -> tuple[Action, ...]:
        """C1: a sample keeps its version where it goes."""
        samples, host = command.samples, command.host
        if isinstance(command, e.Move):
            own = [
                p for p in self.pending if isinstance(p, Decoding) and p.host == host and p.sample in samples
            ]
            self.pending = [p for p in self.pending if p not in own]
            self.kept += own
            offered = e.SamplesOffered(tuple(p.sample for p in own), host, command.target)
            return self.tell(offered) if own else ()
        own = [p for p in self.kept if p.host == command.source and p.sample in samples]
        if len(own) < len(samples) or self.random.random() < self.failed_moves:
            return self.tell(e.MoveFailed(samples, host, command.source, ""))
        self.pending += [replace(p, host=host) for p in own]
        return self.tell(e.SamplesMoved(samples, host, command.source))

    def lose(self, host: str) -> Player:
        """The host dies, with all that it decodes, keeps and was asked for, and joins again."""
        is_its = lambda p: (p.command if isinstance(p, Moving) else p).host == host  # noqa: E731
        self.kept = [p for p in self.kept if not is_its(p)]
        self.pending = [p for p in self.pending if not (isinstance(p, (Decoding, Moving)) and is_its(p))]
        self.tell(e.HostLost(host, ""))
        self.tell(e.HostJoined(host, self.slots))
        return self

    def answer(self, pending: Decoding | Moving | Event) -> tuple[Action, ...]:
        if isinstance(pending, Moving):
            return self.answer_move(pending.command)
        if not isinstance(pending, Decoding):
            return self.tell(pending)
        due = self.drain(pending) if self.drains else pending
        if due != pending:
            self.pending[self.pending.index(due)] = pending
        return self.tell(self.finish(due))

    def drain(self, decoding: Decoding) -> Decoding:
        """The sample that ends in this one's place. A host adopts the newest version as late as it can: now,
        if this sample asked for a newer one and nothing is left of what asked for the version it holds.
        """
        host, held = decoding.host, self.held[decoding.host]
        if decoding.version <= held:
            return decoding
        for other in self.pending:
            if isinstance(other, Decoding) and other.host == host and other.version <= held:
                return other
        self.held[host] = self.plane.state.version
        self.tell(e.HostAdopted(host, self.plane.state.version, f"d{self.plane.state.version}"))
        return decoding

    def play(self) -> Player:
        """Until nothing is left; the run must then be complete."""
        while self.step():
            pass
        assert self.plane.state.is_finished, self.plane.waits()
        return self

    def resume(self, steps: int = 0) -> Player:
        """A new process: all that was under way is forgotten, the journal is folded, hosts join again."""
        self.plane = ControlPlane.fold(self.config, self.events)
        self.pending, self.kept = [], []
        self.tell(e.RunResumed(steps))
        for version in range(self.plane.state.version + 1, self.plane.state.trained_version + 1):
            self.tell(e.VersionCommitted(version, f"d{version}"))
        for index in range(self.hosts):
            self.tell(e.HostJoined(f"host{index}", self.slots))
        return self
