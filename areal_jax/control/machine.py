"""The control plane: told of events, it answers actions.

It has no clock, thread, socket or randomness, so equal events give equal actions: folding a journal rebuilds
the state, and every driver (threads, processes, a simulated clock, replay) runs this same object. Read
`handle`, then `_advance`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from areal_jax.config import Config
from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.rules import Rules
from areal_jax.control.state import GroupState, HostState, State, from_plain, to_plain, who_waits
from areal_jax.control.strategies import STRATEGIES, Progress
from areal_jax.types import ArealError, SampleId

MAX_FAILURES = 2
"""A group's first failure starts it again, its second drops it."""


class ControlError(ArealError):
    """A driver told something that cannot be. Nothing changed; the event does not belong in the journal."""


class ControlPlane:
    """Admission, placement, batches and the end of a run, decided one event at a time."""

    def __init__(self, config: Config | Rules) -> None:
        self._rules = Rules.of(config)
        self._strategy = STRATEGIES[self._rules.strategy](self._rules.max_staleness)
        self._state = State(steps=self._rules.steps)

    @classmethod
    def fold(
        cls, config: Config | Rules, events: Iterable[Event], snapshot: Mapping[str, Any] | None = None
    ) -> ControlPlane:
        """The plane after these events: all of them, or those that followed the snapshot."""
        plane = cls(config)
        if snapshot is not None:
            plane._state = from_plain(snapshot)
        for event in events:
            plane.handle(event)
        return plane

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values (msgpack, JSON); equal states give equal snapshots."""
        return to_plain(self._state)

    # --- what a driver may read -----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Last committed version; -1 before RunStarted."""
        return self._state.version

    @property
    def trained_version(self) -> int:
        """Batches trained so far, which is the version the trainer holds."""
        return self._state.trained_version

    @property
    def steps(self) -> int:
        return self._state.steps

    @property
    def admitted(self) -> int:
        return self._state.admitted

    @property
    def trained(self) -> int:
        """Groups trained."""
        return self._state.trained_version * self._rules.batch_size

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups dropped, by reason."""
        return MappingProxyType(self._state.dropped)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Ordinals neither trained nor dropped, ascending."""
        return tuple(sorted(self._state.groups))

    @property
    def hosts(self) -> Mapping[str, HostState]:
        return MappingProxyType(self._state.hosts)

    @property
    def training(self) -> e.Train | None:
        """The batch under way."""
        return self._state.training

    def digest(self, version: int) -> str:
        """What it was committed with. Raises ControlError if never, or before every checkpoint kept."""
        if version not in (known := self._state.digests):
            raise ControlError(f"no digest of version {version}; known are those of {sorted(known)}")
        return known[version]

    @property
    def stale_events(self) -> int:
        """Events that came too late, or twice, and changed nothing."""
        return self._state.stale_events

    @property
    def is_finished(self) -> bool:
        return self._state.has_told_finish

    def awaits(self, sample: SampleId, host: str) -> bool:
        """Would this sample's end be taken now? If not, its payload must not replace the one in store."""
        return self._state.awaits(sample, host)

    def awaits_reward(self, ordinal: int, attempt: int) -> bool:
        """Would this group's reward be taken now?"""
        return self._state.is_scoring(ordinal, attempt)

    def waits(self) -> tuple[str, ...]:
        """Who waits for whom, one sentence each: what a driver prints when a deadline passes."""
        return who_waits(self._state, self._rules.batch_size)

    # --- events ---------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Take one event; answer what is to be done now. Where it raises ControlError, nothing changed."""
        if (self._state.version < 0) != isinstance(event, e.RunStarted):
            raise ControlError(f"{event}: RunStarted is the first event of a journal, and only the first")
        return tuple(chain(_TAKERS[type(event)](self, event), self._advance()))

    def _run_started(self, event: e.RunStarted) -> Iterable[Action]:
        self._state.version = 0
        self._state.digests[0] = event.digest
        self._state.steps = event.steps or self._rules.steps
        return ()

    def _run_resumed(self, event: e.RunResumed) -> Iterator[Action]:
        s = self._state
        s.steps = event.steps or self._rules.steps
        s.has_told_finish = False
        for name in sorted(s.hosts):
            self._state.lose(name)
        for ordinal in sorted(s.groups):
            if s.groups[ordinal].stage == "scoring":
                yield e.Score(ordinal, s.groups[ordinal].attempt)
        if s.training is not None and s.training.step < s.steps:
            yield s.training

    def _host_joined(self, event: e.HostJoined) -> Iterable[Action]:
        if event.slots < 1:
            raise ControlError(f"host {event.host} joined with {event.slots} slots; it needs at least 1")
        if event.host in self._state.hosts:
            self._state.lose(event.host)
        self._state.hosts[event.host] = HostState(event.slots)
        return ()

    def _host_lost(self, event: e.HostLost) -> Iterable[Action]:
        if event.host not in self._state.hosts:
            return self._stale()
        self._state.lose(event.host)
        return ()

    def _host_adopted(self, event: e.HostAdopted) -> Iterable[Action]:
        host = self._state.hosts.get(event.host)
        if host is None:
            return self._stale()
        if event.version < host.version:
            raise ControlError(f"host {event.host} went back from version {host.version} to {event.version}")
        self._require_digest(event.version, event.digest, f"host {event.host} adopted")
        self._state.hosts[event.host] = replace(host, version=event.version)
        return ()

    def _sample_finished(self, event: e.SampleFinished) -> Iterable[Action]:
        s, sample = self._state, event.sample
        if not self.awaits(sample, event.host):
            return self._stale()
        group = s.groups[sample.ordinal]
        versions = [span.version for span in event.spans] or [group.min_version]
        if versions != sorted(versions) or versions[0] < group.min_version or versions[-1] > s.version:
            raise ControlError(
                f"{sample} of host {event.host} carries versions {versions}: they must ascend from the "
                f"{group.min_version} its dispatch asked for to the committed {s.version} at most"
            )
        oldest = (*group.oldest[: sample.member], versions[0], *group.oldest[sample.member + 1 :])
        s.groups[group.ordinal] = group = replace(group, oldest=oldest)
        self._state.unload(group.host, 1)
        if group.unfinished:
            return ()
        s.groups[group.ordinal] = replace(group, stage="scoring", host="")
        return (e.Score(group.ordinal, group.attempt),)

    def _sample_failed(self, event: e.SampleFailed) -> Iterable[Action]:
        if not self.awaits(event.sample, event.host):
            return self._stale()
        return self._fail(event.sample.ordinal, "failed_sample")

    def _reward_scored(self, event: e.RewardScored) -> Iterable[Action]:
        s = self._state
        if not self._state.is_scoring(event.ordinal, event.attempt):
            return self._stale()
        if len(event.rewards) != (size := self._rules.group_size):
            raise ControlError(
                f"group {event.ordinal} has {len(event.rewards)} rewards for its {size} members"
            )
        if self._rules.group_filter == "signal" and len(set(event.rewards)) == 1:
            return self._drop(event.ordinal, "no_signal")
        s.groups[event.ordinal] = replace(s.groups[event.ordinal], stage="complete")
        insort(s.complete, event.ordinal)
        return ()

    def _reward_failed(self, event: e.RewardFailed) -> Iterable[Action]:
        if not self._state.is_scoring(event.ordinal, event.attempt):
            return self._stale()
        return self._fail(event.ordinal, "failed_reward")

    def _batch_trained(self, event: e.BatchTrained) -> Iterable[Action]:
        s = self._state
        if event.step < s.trained_version:
            return self._stale()
        if s.training is None or (event.step, event.ordinals) != (s.training.step, s.training.ordinals):
            raise ControlError(
                f"batch {event.step} of ordinals {event.ordinals} was trained; asked for was {s.training}"
            )
        for ordinal in event.ordinals:
            del s.groups[ordinal]
        s.trained_version, s.training = event.step + 1, None
        return ()

    def _version_committed(self, event: e.VersionCommitted) -> Iterable[Action]:
        s = self._state
        if event.version <= s.version:  # published again after a resume
            self._require_digest(event.version, event.digest, "committed again:")
        elif event.version > s.trained_version:
            raise ControlError(
                f"version {event.version} was committed, but the last trained is {s.trained_version}; tell "
                "BatchTrained first"
            )
        else:
            s.version = event.version
            s.digests[event.version] = event.digest
        return ()

    def _version_reissued(self, event: e.VersionReissued) -> Iterable[Action]:
        s = self._state
        if event.version <= s.version:  # else it was never committed: nobody saw the old bits
            self._require_digest(event.version, event.old, "reissued")
            s.digests |= {event.version: event.new} if event.version in s.digests else {}
        return ()

    def _checkpoint_committed(self, event: e.CheckpointCommitted) -> Iterable[Action]:
        """A resume redoes versions from a kept checkpoint on, so no older digest is ever asked for."""
        s = self._state
        s.checkpoints = sorted({*s.checkpoints, event.version})[-self._rules.keep_checkpoints :]
        needed = min(s.checkpoints[0], s.version)
        s.digests = {version: digest for version, digest in s.digests.items() if version >= needed}
        return ()

    # --- what follows from any event ------------------------------------------------------------------------

    def _advance(self) -> Iterator[Action]:
        """Whatever has become possible: the end, or a batch and then dispatches."""
        s = self._state
        if s.trained_version >= s.steps:
            yield from self._finish()
            return
        if s.training is None:
            yield from self._reissue_over_age()
            yield from self._form_batch()
        yield from self._dispatch()

    def _finish(self) -> Iterator[Action]:
        s = self._state
        s.training = None
        for ordinal in sorted(s.groups):
            yield from self._drop(ordinal, "end")
        if not s.has_told_finish:
            s.has_told_finish = True
            yield e.Finish()

    def _reissue_over_age(self) -> Iterator[Action]:
        """A complete group only grows older: beyond the bound it can never be trained, so it starts again."""
        s, bound = self._state, self._rules.max_token_age
        if bound is None:
            return
        for ordinal in list(s.complete):
            oldest = min(version for version in s.groups[ordinal].oldest if version is not None)
            if s.trained_version - oldest > bound:
                yield from self._reissue(s.groups[ordinal], "over_age")

    def _form_batch(self) -> Iterator[Action]:
        """The B lowest ordinals among complete groups, in order, unless that makes others too old."""
        s, size = self._state, self._rules.batch_size
        ordinals = tuple(s.complete[:size])
        if len(ordinals) < size or not self._strategy.trains(self._progress, s.began(but=ordinals)):
            return
        del s.complete[:size]
        s.training = e.Train(s.trained_version, ordinals, tuple(s.groups[n].attempt for n in ordinals))
        for ordinal in ordinals:
            s.groups[ordinal] = replace(s.groups[ordinal], stage="training")
        yield s.training

    def _dispatch(self) -> Iterator[Action]:
        """Groups that wait for a host first, then new ones, as long as a host has room."""
        s = self._state
        while (host := s.roomiest_host(self._rules.group_size)) is not None:
            if s.waiting:
                group = s.groups[s.waiting.pop(0)]
            elif self._may_admit():
                group = GroupState(s.admitted, (None,) * self._rules.group_size)
                s.admitted += 1
            else:
                return
            yield self._place(group, host)

    def _may_admit(self) -> bool:
        s, limit = self._state, self._rules.max_concurrent
        return (
            s.admitted < s.steps * self._rules.batch_size + s.refunds
            and (limit is None or s.running < limit)
            and self._strategy.admits(self._progress)
        )

    def _place(self, group: GroupState, host: str) -> Action:
        """All unfinished samples of a group go to one host: one prefill."""
        s, asked = self._state, self._strategy.min_version(self._progress)
        first = asked if group.min_version < 0 else group.min_version
        s.groups[group.ordinal] = replace(group, stage="decoding", host=host, min_version=first)
        s.unload(host, -len(group.unfinished))
        return e.Dispatch(group.unfinished, host, asked)

    # --- ways out of the usual path -------------------------------------------------------------------------

    def _fail(self, ordinal: int, reason: str) -> Iterable[Action]:
        group = self._state.groups[ordinal]
        if group.failures + 1 >= MAX_FAILURES:
            return self._drop(ordinal, reason)
        return self._reissue(replace(group, failures=group.failures + 1), reason)

    def _reissue(self, group: GroupState, reason: str) -> Iterator[Action]:
        """Start a group again on purpose: a new attempt draws anew. Not a drop, so nothing is refunded."""
        attempt, nobody = group.attempt + 1, (None,) * self._rules.group_size
        yield e.Reissue(group.ordinal, attempt, reason)
        yield from self._withdraw(group)
        self._state.wait(GroupState(group.ordinal, nobody, attempt=attempt, failures=group.failures))

    def _drop(self, ordinal: int, reason: str) -> Iterator[Action]:
        """A group leaves for good. Here alone `dropped` grows, so every drop refunds exactly once."""
        s = self._state
        s.dropped[reason] = s.dropped.get(reason, 0) + 1
        yield e.Drop(ordinal, reason)
        yield from self._withdraw(s.groups.pop(ordinal))

    def _withdraw(self, group: GroupState) -> Iterator[Action]:
        self._state.unlist(group.ordinal)
        if group.host:
            self._state.unload(group.host, len(group.unfinished))
            yield e.Cancel(group.unfinished, group.host)

    # --- small things ---------------------------------------------------------------------------------------

    @property
    def _progress(self) -> Progress:
        s, size = self._state, self._rules.batch_size
        return Progress(s.admitted, s.refunds, s.version, s.trained_version, size)

    def _require_digest(self, version: int, digest: str, who: str) -> None:
        """Digests older than every kept checkpoint are forgotten here; the audit knows them still."""
        digests = self._state.digests
        if version >= min(digests) and digests.get(version) != digest:
            raise ControlError(
                f"{who} version {version} with digest {digest}, but committed is {digests.get(version)}; "
                "were the weights published by another run, or torn?"
            )

    def _stale(self) -> Iterable[Action]:
        self._state.stale_events += 1
        return ()


_TAKERS: dict[type, Callable[[ControlPlane, Any], Iterable[Action]]] = {
    e.RunStarted: ControlPlane._run_started,
    e.RunResumed: ControlPlane._run_resumed,
    e.HostJoined: ControlPlane._host_joined,
    e.HostLost: ControlPlane._host_lost,
    e.HostAdopted: ControlPlane._host_adopted,
    e.SampleFinished: ControlPlane._sample_finished,
    e.SampleFailed: ControlPlane._sample_failed,
    e.RewardScored: ControlPlane._reward_scored,
    e.RewardFailed: ControlPlane._reward_failed,
    e.BatchTrained: ControlPlane._batch_trained,
    e.VersionCommitted: ControlPlane._version_committed,
    e.VersionReissued: ControlPlane._version_reissued,
    e.CheckpointCommitted: ControlPlane._checkpoint_committed,
}
"""What takes each kind of event; a test compares it with `events.EVENTS`."""
