"""What the control plane knows: groups, hosts and a dozen numbers, all of them plain values.

A group's life: waiting -> decoding -> scoring -> complete -> training, then it is forgotten; a drop forgets
it at any stage, a reissue sends it back to waiting. So the state is as large as what is in flight, however
long the run is.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_jax.control.events import Train
from areal_jax.types import SampleId


@dataclass(frozen=True)
class GroupState:
    """One admitted prompt. Its unfinished samples are always on one host, or all waiting for one."""

    ordinal: int
    oldest: tuple[int | None, ...]
    """By member: the oldest version among its tokens; None = unfinished."""
    stage: str = "waiting"
    attempt: int = 0
    host: str = ""
    """Where its unfinished samples are; "" while they wait."""
    min_version: int = -1
    """What this attempt's first dispatch asked for; -1 before it."""
    failures: int = 0

    @property
    def unfinished(self) -> tuple[SampleId, ...]:
        return tuple(
            SampleId(self.ordinal, member, self.attempt)
            for member, version in enumerate(self.oldest)
            if version is None
        )


@dataclass(frozen=True)
class HostState:
    slots: int
    version: int = -1
    """What it adopted last; -1 = nothing yet."""
    outstanding: int = 0
    """Samples dispatched to it and not finished."""


@dataclass
class State:
    steps: int
    version: int = -1
    """Last committed version; -1 before RunStarted."""
    trained_version: int = 0
    admitted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    training: Train | None = None
    hosts: dict[str, HostState] = field(default_factory=dict)
    groups: dict[int, GroupState] = field(default_factory=dict)
    """Every ordinal that is neither trained nor dropped."""
    waiting: list[int] = field(default_factory=list)
    """Ordinals at stage waiting, ascending."""
    complete: list[int] = field(default_factory=list)
    """Ordinals at stage complete, ascending."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the committed versions, from the oldest kept checkpoint on."""
    checkpoints: list[int] = field(default_factory=list)
    stale_events: int = 0
    has_told_finish: bool = False

    @property
    def refunds(self) -> int:
        return sum(self.dropped.values())

    @property
    def running(self) -> int:
        """Groups admitted and neither complete nor dropped."""
        return len(self.groups) - len(self.complete) - (len(self.training.ordinals) if self.training else 0)

    def awaits(self, sample: SampleId, host: str) -> bool:
        """Is this sample being decoded on this host?"""
        group = self.groups.get(sample.ordinal)
        return (
            group is not None
            and (group.stage, group.attempt, group.host) == ("decoding", sample.attempt, host)
            and 0 <= sample.member < len(group.oldest)
            and group.oldest[sample.member] is None
        )

    def is_scoring(self, ordinal: int, attempt: int) -> bool:
        group = self.groups.get(ordinal)
        return group is not None and (group.stage, group.attempt) == ("scoring", attempt)

    def began(self, but: Collection[int]) -> list[int]:
        """By ordinal, what all other groups began under; the newest version where they have not."""
        left = sorted(ordinal for ordinal in self.groups if ordinal not in but)
        first = [self.groups[ordinal].min_version for ordinal in left]
        return [self.version if version < 0 else version for version in first]

    def roomiest_host(self, group_size: int) -> str | None:
        """The one with the fewest outstanding samples; a group beyond its slots waits to refill them."""
        room = [
            (h.outstanding, name) for name, h in self.hosts.items() if h.outstanding < h.slots + group_size
        ]
        return min(room)[1] if room else None

    def wait(self, group: GroupState) -> None:
        """The group waits for a host."""
        self.groups[group.ordinal] = replace(group, stage="waiting", host="")
        insort(self.waiting, group.ordinal)

    def unlist(self, ordinal: int) -> None:
        """The group is neither waiting nor complete any more."""
        for ordinals in (self.waiting, self.complete):
            if ordinal in ordinals:
                ordinals.remove(ordinal)

    def lose(self, host: str) -> None:
        """Its unfinished samples wait for another host, under the same attempt; finished members stay."""
        del self.hosts[host]
        for group in [group for group in self.groups.values() if group.host == host]:
            self.wait(group)

    def unload(self, name: str, samples: int) -> None:
        """So many samples are no longer on this host; negative ones are loaded."""
        host = self.hosts[name]
        self.hosts[name] = replace(host, outstanding=host.outstanding - samples)


def to_plain(state: State) -> dict[str, Any]:
    """The state as dicts, lists, strings and numbers; msgpack and JSON take it."""
    plain = dict(vars(state))
    training = state.training
    plain["training"] = training and [training.step, list(training.ordinals), list(training.attempts)]
    plain["hosts"] = {name: list(vars(host).values()) for name, host in state.hosts.items()}
    plain["groups"] = [
        [list(value) if isinstance(value, tuple) else value for value in vars(group).values()]
        for group in state.groups.values()
    ]
    plain["digests"] = [[version, digest] for version, digest in state.digests.items()]
    for name in ("dropped", "waiting", "complete", "checkpoints"):
        plain[name] = plain[name].copy()
    return plain


def from_plain(plain: Mapping[str, Any]) -> State:
    """The state back from `to_plain`."""
    fields = dict(plain)
    if (training := fields["training"]) is not None:
        step, ordinals, attempts = training
        fields["training"] = Train(step, tuple(ordinals), tuple(attempts))
    fields["hosts"] = {name: HostState(*values) for name, values in fields["hosts"].items()}
    groups = (GroupState(ordinal, tuple(oldest), *rest) for ordinal, oldest, *rest in fields["groups"])
    fields["groups"] = {group.ordinal: group for group in groups}
    fields["digests"] = dict(fields["digests"])
    fields["dropped"] = dict(fields["dropped"])
    for name in ("waiting", "complete", "checkpoints"):
        fields[name] = list(fields[name])
    return State(**fields)


def who_waits(state: State, batch_size: int) -> tuple[str, ...]:
    """Who waits for whom, one sentence each."""
    if state.has_told_finish:
        return ("nobody waits: the run is complete",)
    said = [] if state.hosts else ["everybody waits for a host to join"]
    for group in state.groups.values():
        if group.stage == "waiting":
            said.append(f"group {group.ordinal} waits for a host with room")
        elif group.stage == "decoding":
            said.append(
                f"group {group.ordinal} waits for {len(group.unfinished)} samples of host {group.host}"
            )
        elif group.stage == "scoring":
            said.append(f"group {group.ordinal} waits for its rewards")
    if state.training is not None:
        said.append(f"batch {state.training.step} waits for the trainer")
    elif (missing := batch_size - len(state.complete)) > 0:
        said.append(f"the trainer waits for {missing} more complete groups")
    else:
        slow = min(group.ordinal for group in state.groups.values() if group.stage != "complete")
        said.append(f"the trainer waits for group {slow}, which would be too old for a later batch")
    if state.trained_version > state.version:
        said.append(f"admission waits for the commit of version {state.version + 1}")
    return tuple(said)
