"""The control plane's state: groups, hosts and a dozen numbers, all of them plain values.

A group passes the stages waiting (for a host), decoding, scoring, complete (scored, and in no batch yet) and
training, and is then removed. A drop removes a group at any stage. A lost host, or a restart of the group,
returns a group to the stage waiting. Therefore the size of the state depends on the number of groups in
flight (neither trained nor dropped), not on the length of the run.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from areal_jax.control import events as e
from areal_jax.control.errors import ControlError
from areal_jax.types import SampleId

T = TypeVar("T")


@dataclass(frozen=True)
class GroupState:
    """The group of one admitted prompt. Its unfinished samples are all on one host or all wait for a host."""

    ordinal: int
    oldest: tuple[int | None, ...]
    """For each sample: the oldest weights version of its tokens; None until the sample is finished."""
    stage: str = "waiting"
    attempt: int = 0
    host: str = ""
    """The host that decodes the unfinished samples; "" at any stage other than decoding."""
    min_version: int = -1
    """The newest committed version when the group was first dispatched since its last restart; -1 before."""
    failures: int = 0
    correct: float | None = None
    """Mean of the reward part `correct` over the group's samples; None before scoring, or without a gate."""
    version: int = -1
    """The newest committed version when the group was last dispatched; -1 before."""
    target: str = ""
    """The host to which the unfinished samples are moving; "" if they stay on `host`."""
    is_offered: bool = False
    """Whether `host` has stopped to decode the samples that move, and keeps them for `target`."""
    may_move: bool = True
    """Whether the group has begun no turn, no host has refused to take it over, and it has not come back with
    a host that was lost; else it stays."""
    turns: tuple[int, ...] = ()
    """For each sample: number of turns that its workflow has asked for; empty before the first one, as it is
    for samples without a workflow."""
    away: tuple[int, ...] = ()
    """The members, ascending, that wait for their workflow between two turns: they take no host's slot."""
    segments: tuple[int, ...] = ()
    """For each sample: the branch of the last turn that its workflow has asked for; empty before."""
    calls: tuple[int, ...] = ()
    """For each sample: number of tool calls that its workflow has begun; empty before the first one."""

    @property
    def counted_on(self) -> str:
        """The host that has the unfinished samples in its `HostState.outstanding`; "" if there is none."""
        return self.target or self.host

    @property
    def counted(self) -> int:
        """Number of samples in that host's `HostState.outstanding`."""
        return self.oldest.count(None) - len(self.away)

    @property
    def is_finished(self) -> bool:
        """Whether all samples are finished."""
        return None not in self.oldest

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
    """The weights version that the host adopted last; -1 if the host has adopted none yet."""
    outstanding: int = 0
    """Number of samples dispatched or moving to the host and not yet finished or canceled."""
    serves: int = -1
    """The version of the host's last Serve command; -1 if hosts adopt every version by themselves."""


@dataclass
class State:
    """The control plane's whole state. Any code may read it; only `ControlPlane.handle` changes it."""

    steps: int
    version: int = -1
    """The newest committed weights version; -1 before the event RunStarted."""
    trained_version: int = 0
    """Number of batches trained so far; also the number of the trainer's weights version."""
    admitted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped groups by reason."""
    dropped_in_a_row: dict[str, int] = field(default_factory=dict)
    """Those of them since the last group with usable rewards, or since the run was resumed."""
    failed_prompts: list[int] = field(default_factory=list)
    """Ordinals of the newest prompts that could not be used, since the run was resumed (`drops.NEWEST`)."""
    training: e.Train | None = None
    """The Train command that the trainer has not completed yet; None if there is no such command."""
    is_held: bool = False
    """Whether the next Train waits for groups that would be too old for a later batch (`Hold`)."""
    hosts: dict[str, HostState] = field(default_factory=dict)
    groups: dict[int, GroupState] = field(default_factory=dict)
    """By ordinal: every admitted group that is neither trained nor dropped."""
    waiting: list[int] = field(default_factory=list)
    """Ordinals of the groups that wait for a host, ascending."""
    complete: list[int] = field(default_factory=list)
    """Ordinals of the groups that are scored and in no batch yet, ascending."""
    digests: dict[int, str] = field(default_factory=dict)
    """Version -> digest, for each committed version that is not older than the oldest kept checkpoint."""
    checkpoints: list[int] = field(default_factory=list)
    accuracy: float | None = None
    """Mean of the reward part `correct` over the batch trained last; None before, or without a gate."""
    stale_events: int = 0
    """Number of events that arrived too late or a second time, and were ignored."""
    is_finished: bool = False
    """Whether the control plane has issued `Finish`: the run is complete. A resume sets this to False."""

    @property
    def refunds(self) -> int:
        return sum(self.dropped.values())

    @property
    def running(self) -> int:
        """Number of groups at the stages waiting (for a host), decoding or scoring."""
        # control.max_concurrent bounds these; complete groups hold no slot.
        return len(self.groups) - len(self.complete) - (len(self.training.ordinals) if self.training else 0)

    def is_stale(self, event: e.Event) -> bool:
        """Whether the event is late or a duplicate, so that it must be ignored and its trajectory not stored.

        Such events arrive after a host was lost, after a group was restarted, or by a second delivery.
        """
        match event:
            case e.SampleFinished(sample, host):  # first, as most events are of this kind
                return not (self.awaits(sample, host) or self.is_away(sample))
            case e.HostLost(host) | e.HostAdopted(host):
                return host not in self.hosts
            case e.SampleFailed(sample, host):
                return not self.awaits(sample, host)
            case e.TurnFinished(sample, _, turn, host):
                return not (self.awaits(sample, host) and self.turns_of(sample) == turn + 1)
            case e.TurnAdded(sample, _, turn):
                is_next = self.is_open(sample) and self.turns_of(sample) == turn
                return not (is_next and (turn == 0 or self.is_away(sample)))
            case e.EpisodeEnded(sample, reward):
                return not (self.is_away(sample) or (reward is None and self.is_open(sample)))
            case e.ToolStarted(sample, call):
                return not (self.is_open(sample) and self.calls_of(sample) == call)
            case e.ToolReturned(sample) | e.EpisodeFailed(sample):
                return not self.is_open(sample)
            case e.RewardScored(ordinal, attempt) | e.RewardFailed(ordinal, attempt):
                return not self.is_scoring(ordinal, attempt)
            case e.PromptFailed(ordinal, attempt):
                group = self.groups.get(ordinal)
                if group is None or group.attempt != attempt:
                    return True
                return group.stage in ("complete", "training")
            case e.BatchTrained(step):
                return step < self.trained_version
            case e.SamplesOffered(samples, host, target):
                return not self.is_moving(samples, host, target, is_offered=False)
            case e.SamplesMoved(samples, host, source) | e.MoveFailed(samples, host, source):
                return not self.is_moving(samples, source, host, is_offered=True)
            case e.KVShort(host):
                return host not in self.hosts
        return False

    def awaits(self, sample: SampleId, host: str) -> bool:
        """Whether this sample is being decoded on this host."""
        is_there = self.is_open(sample) and self.groups[sample.ordinal].host == host != ""
        return is_there and not self.is_away(sample)

    def is_open(self, sample: SampleId) -> bool:
        """Whether this sample is unfinished, and its group was neither dropped nor restarted."""
        group = self.groups.get(sample.ordinal)
        return (
            group is not None
            and group.attempt == sample.attempt
            and 0 <= sample.member < len(group.oldest)
            and group.oldest[sample.member] is None
        )

    def waits_half_decoded(self, sample: SampleId) -> bool:
        """Whether this sample was given to a host that was lost, and to no other host since.

        False once its workflow has begun a turn: the next host decodes that turn again.
        """
        if not self.is_open(sample):
            return False
        group = self.groups[sample.ordinal]
        return group.stage == "waiting" and group.min_version >= 0 and not group.turns

    def is_away(self, sample: SampleId) -> bool:
        """Whether this sample waits for its workflow between two turns."""
        return self.is_open(sample) and sample.member in self.groups[sample.ordinal].away

    def turns_of(self, sample: SampleId) -> int:
        """Returns the number of turns that the workflow of this open sample has asked for."""
        turns = self.groups[sample.ordinal].turns
        return turns[sample.member] if turns else 0

    def calls_of(self, sample: SampleId) -> int:
        """Returns the number of tool calls that the workflow of this open sample has begun."""
        calls = self.groups[sample.ordinal].calls
        return calls[sample.member] if calls else 0

    def is_moving(self, samples: tuple[SampleId, ...], source: str, target: str, is_offered: bool) -> bool:
        """Whether the group of these samples is moving from `source` to `target`, and is offered or not."""
        group = self.groups.get(samples[0].ordinal)
        return (
            group is not None
            and group.attempt == samples[0].attempt
            and (group.host, group.target, group.is_offered) == (source, target, is_offered)
        )

    def is_scoring(self, ordinal: int, attempt: int) -> bool:
        group = self.groups.get(ordinal)
        return group is not None and (group.stage, group.attempt) == ("scoring", attempt)

    def began(self, but: Collection[int]) -> list[int]:
        """Returns the weights version under which each group began, in ordinal order, except groups `but`.

        Trained and dropped groups are left out too. A group that was not dispatched since its start or last
        restart counts as begun under the newest committed version.
        """
        # A group that has not begun will begin under the newest version or a later one.
        left = sorted(ordinal for ordinal in self.groups if ordinal not in but)
        first = [self.groups[ordinal].min_version for ordinal in left]
        return [self.version if version < 0 else version for version in first]

    def open_places(self, batch_size: int, limit: int | None) -> int:
        """Returns how many more groups the run needs and has room for, whatever the strategy says.

        `limit`: maximum number of running groups, None = unlimited.
        """
        # Each dropped group has another one in its place.
        left = self.steps * batch_size + self.refunds - self.admitted
        return max(0, left if limit is None else min(left, limit - self.running))

    @property
    def hosts_behind(self) -> list[str]:
        """Names of hosts that have unfinished samples and have not adopted the newest committed version."""
        used = {group.counted_on for group in self.groups.values() if not group.is_finished}
        return [name for name, host in self.hosts.items() if name in used and host.version < self.version]

    def has_begun(self, batches: int, batch_size: int) -> bool:
        """Whether all groups of the first `batches` batches are dispatched, and all hosts are up to date.

        A host is up to date if it has no unfinished samples or has adopted the newest committed version.
        `batch_size`: number of groups in a batch.
        """
        # Drops are refunded, so this many admissions fill all these batches.
        needed = min(batches, self.steps) * batch_size + self.refunds
        return self.admitted >= needed and not self.waiting and not self.hosts_behind

    def roomiest_host(self, beyond: int | None, serving: int = -1) -> str | None:
        """Returns the name of the host with the fewest unfinished samples, or None if no host has capacity.

        A host has capacity while it has fewer unfinished samples than its slots + `beyond`; if `beyond` is
        None, every host has capacity. Hosts that serve an older version than `serving` have none.
        """
        # Samples that wait on the host itself refill its slots without a message from here. Ties go by name,
        # so that the choice is the same in every fold.
        room = [
            (h.outstanding, name)
            for name, h in self.hosts.items()
            if (beyond is None or h.outstanding < h.slots + beyond) and h.serves >= serving
        ]
        return min(room)[1] if room else None

    def wait(self, group: GroupState) -> None:
        """Records that the group waits for a host."""
        self.groups[group.ordinal] = replace(group, stage="waiting", host="", target="", is_offered=False)
        insort(self.waiting, group.ordinal)

    def place(self, group: GroupState, host: str) -> None:
        """Records that `host` decodes the group's unfinished samples."""
        first = self.version if group.min_version < 0 else group.min_version
        self.groups[group.ordinal] = replace(
            group, stage="decoding", host=host, min_version=first, version=self.version
        )
        self.unload(host, -group.counted)

    def finish(self, sample: SampleId, oldest: int) -> GroupState:
        """Records that a sample is finished, with tokens of version `oldest` and newer; returns its group.

        Once all samples of the group are, it is to be scored.
        """
        group, member = self.groups[sample.ordinal], sample.member
        away = group.away
        if member in away:
            away = tuple(one for one in away if one != member)
        else:
            self.unload(group.counted_on, 1)
        versions = (*group.oldest[:member], oldest, *group.oldest[member + 1 :])
        group = _changed(group, oldest=versions, away=away)
        if group.is_finished:
            self.unlist(group.ordinal)
            group = replace(group, stage="scoring", host="", target="", is_offered=False)
        self.groups[group.ordinal] = group
        return group

    def move(self, group: GroupState, target: str) -> e.Move:
        """Records that the group's unfinished samples are to move to `target`; returns the command."""
        self._count_on(replace(group, target=target), group.host)
        return e.Move(group.unfinished, group.host, target)

    def end_move(self, group: GroupState, host: str) -> None:
        """Records that the group's move is over, and that `host`, its source or target, decodes it."""
        self._count_on(replace(group, host=host, target="", is_offered=False), group.target)

    def _count_on(self, group: GroupState, former: str) -> None:
        self.groups[group.ordinal] = group
        self.unload(former, group.counted)
        self.unload(group.counted_on, -group.counted)

    def unlist(self, ordinal: int) -> None:
        """Removes a group's ordinal from the lists `waiting` and `complete`, if one of them contains it."""
        for ordinals in (self.waiting, self.complete):
            if ordinal in ordinals:
                ordinals.remove(ordinal)

    def lose(self, host: str) -> None:
        """Removes the host. Its unfinished samples wait for any host; its finished samples stay finished.

        Samples that were moving to it stay where they came from.
        """
        for group in [group for group in self.groups.values() if host in (group.host, group.target)]:
            if group.host == host:
                self.unload(group.counted_on, group.counted)
                # The attempt stays: the same random keys draw the same tokens on another host.
                self.wait(group)
            else:
                self.end_move(group, group.host)
        del self.hosts[host]

    def require_digest(self, version: int, digest: str, subject: str) -> None:
        """Raises ControlError unless this is the version's committed digest; `subject` begins the message."""
        # Versions older than every kept checkpoint have no digest here; the audit still checks them.
        if version >= min(self.digests) and self.digests.get(version) != digest:
            raise ControlError(
                f"{subject} version {version} with digest {digest}, but its committed digest is "
                f"{self.digests.get(version)}: the weights were damaged, or another run published them; end "
                "any second run in this run's folder, then resume this run"
            )

    def replace_digest(self, version: int, old: str, new: str) -> None:
        """Records that the version has another digest than the committed one; ControlError if not `old`."""
        if version <= self.version:  # a version that was never committed reached no host
            self.require_digest(version, old, "the resumed trainer took back")
            self.digests |= {version: new} if version in self.digests else {}

    def add_checkpoint(self, version: int, kept: int) -> None:
        """Records a complete checkpoint; `kept`: number of checkpoints that stay."""
        self.checkpoints = sorted({*self.checkpoints, version})[-kept:]
        # A resume trains again from a kept checkpoint on, so no older digest is needed.
        needed = min(self.checkpoints[0], self.version)
        self.digests = {version: digest for version, digest in self.digests.items() if version >= needed}

    def unload(self, name: str, samples: int) -> None:
        """Lowers the number of unfinished samples recorded for a host by `samples`, which may be negative."""
        host = self.hosts[name]
        self.hosts[name] = _changed(host, outstanding=host.outstanding - samples)


def _changed(record: T, **values: Any) -> T:
    """Returns what `dataclasses.replace` does, in a fifth of its time: these run for every sample."""
    changed = object.__new__(type(record))
    vars(changed).update(vars(record) | values)
    return changed


def to_plain(state: State) -> dict[str, Any]:
    """Returns the state as dicts, lists, strings and numbers, for msgpack and JSON."""
    plain = dict(vars(state))
    training = state.training
    plain["training"] = training and e.to_wire(training)[1]
    plain["hosts"] = {name: list(vars(host).values()) for name, host in state.hosts.items()}
    plain["groups"] = [
        [list(value) if isinstance(value, tuple) else value for value in vars(group).values()]
        for group in state.groups.values()
    ]
    plain["digests"] = [[version, digest] for version, digest in state.digests.items()]
    for name in ("dropped", "dropped_in_a_row", "failed_prompts", "waiting", "complete", "checkpoints"):
        plain[name] = plain[name].copy()
    return plain


def from_plain(plain: Mapping[str, Any]) -> State:
    """Returns the state that `to_plain` turned into `plain`."""
    fields = dict(plain)
    if (training := fields["training"]) is not None:
        fields["training"] = e.from_wire("Train", training, e.ACTIONS)
    fields["hosts"] = {name: HostState(*values) for name, values in fields["hosts"].items()}
    groups = [GroupState(*map(_tupled, values)) for values in fields["groups"]]
    fields["groups"] = {group.ordinal: group for group in groups}
    for name in ("dropped", "dropped_in_a_row", "digests"):
        fields[name] = dict(fields[name])
    for name in ("waiting", "failed_prompts", "complete", "checkpoints"):
        fields[name] = list(fields.get(name, ()))  # older snapshots have no failed_prompts
    return State(**fields)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def waits(state: State, batch_size: int, is_next_begun_first: bool) -> tuple[str, ...]:
    """Returns a sentence for each thing that the run waits for.

    A group can wait for a host, its samples or its rewards; the trainer for complete groups or for hosts; the
    admission of groups for a version. `batch_size`: number of groups in a batch. `is_next_begun_first`:
    whether the strategy trains a batch only after the groups of the following batch have begun.
    """
    if state.is_finished:
        return ("nothing: the run is complete",)
    said = [] if state.hosts else ["every group waits for a generation host to join"]
    for group in state.groups.values():
        if group.stage == "waiting":
            said.append(f"group {group.ordinal} waits for a host with free capacity")
        elif group.target:
            said.append(f"group {group.ordinal} waits for its move from host {group.host} to {group.target}")
        elif group.stage == "decoding":
            away = f", {len(group.away)} of them with their workflows" if group.away else ""
            said.append(
                f"group {group.ordinal} waits for {len(group.unfinished)} samples of host {group.host}{away}"
            )
        elif group.stage == "scoring":
            said.append(f"group {group.ordinal} waits for its rewards")
    late = [g.ordinal for g in state.groups.values() if g.stage not in ("complete", "training")]
    if state.training is not None:
        said.append(f"batch {state.training.step} waits for the trainer")
    elif (missing := batch_size - len(state.complete)) > 0:
        said.append(f"the trainer waits for {missing} more complete groups")
    elif is_next_begun_first and state.hosts_behind:
        hosts = ", ".join(state.hosts_behind)
        said.append(
            f"the trainer waits for {hosts} to adopt version {state.version}, because the next batch "
            "begins with that version"
        )
    elif late:
        said.append(f"the trainer waits for group {min(late)}, which would be too old for a later batch")
    if state.trained_version > state.version:
        said.append(f"the admission of new groups waits for the commit of version {state.version + 1}")
    return tuple(said)
