"""Reads a journal and says whether the run kept its promises.

It keeps its own books: from the recorded events and actions alone it recounts admissions, refunds, attempts,
batches and versions, and only after each row asks whether the control plane, folded again, answers the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_jax.config import Config
from areal_jax.control import events as e
from areal_jax.control.events import Action, Event
from areal_jax.control.machine import ControlError, ControlPlane
from areal_jax.control.rules import Rules
from areal_jax.types import SampleId

Row = tuple[int, Event, Sequence[Action]]
"""(place in the journal, event, the actions answered to it)."""


@dataclass(frozen=True)
class AuditResult:
    ok: bool
    trained: int
    dropped: dict[str, int]
    in_flight: int
    violations: list[str]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def audit(config: Config | Rules, rows: Iterable[Row]) -> AuditResult:
    """Check every row of a journal, in order. A journal cut short at any row is as good as a whole one."""
    rules = Rules.of(config)
    books = _Books(rules)
    plane: ControlPlane | None = ControlPlane(rules)
    last = None
    for seq, event, actions in rows:
        books.row = seq
        if last is not None and seq <= last:
            books.wrong(f"follows row {last}: rows must ascend")
        last = seq
        books.enter(event)
        for action in actions:
            books.enter(action)
        plane = _refold(plane, event, actions, books)
    live = [account for account in books.accounts.values() if account.fate == "live"]
    trained = sum(account.fate == "trained" for account in books.accounts.values())
    return AuditResult(not books.violations, trained, books.dropped, len(live), books.violations)


def _refold(
    plane: ControlPlane | None, event: Event, actions: Sequence[Action], books: _Books
) -> ControlPlane | None:
    """The plane after one more row; None from the first row on that it would have answered otherwise."""
    if plane is None:
        return None
    try:
        answered = plane.handle(event)
    except ControlError as error:
        books.wrong(f"the control plane refuses this event: {error}")
        return None
    if answered != tuple(actions):
        books.wrong(f"folding answers {answered}, the journal holds {tuple(actions)}")
        return None
    return plane


@dataclass
class _Account:
    """One ordinal, as the rows tell it."""

    attempt: int = 0
    host: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    """By host, the lowest min_version this attempt was dispatched there with."""
    oldest: dict[int, int] = field(default_factory=dict)
    """By finished member of this attempt, its oldest token's version."""
    newest: dict[int, int] = field(default_factory=dict)
    is_scored: bool = False
    fate: str = "live"
    """live | trained | the reason of its drop."""


class _Books:
    """The recount. Every `_on_` method reads one kind of record and notes what is wrong with it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.row = 0
        self.violations: list[str] = []
        self.accounts: dict[int, _Account] = {}
        self.dropped: dict[str, int] = {}
        self.steps = rules.steps
        self.committed = -1
        self.trained_version = 0
        self.training: e.Train | None = None
        self.digests: dict[int, str] = {}
        self.hosts: dict[str, int] = {}
        self.ready: set[int] = set()
        """Ordinals complete and not yet in a batch."""

    def wrong(self, what: str) -> None:
        self.violations.append(f"row {self.row}: {what}")

    def require(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.wrong(what)

    def enter(self, record: Event | Action) -> None:
        """Book one record; kinds that promise nothing are passed over."""
        reader = _READERS.get(type(record))
        if reader is not None:
            reader(self, record)

    # --- versions -------------------------------------------------------------------------------------------

    def _on_started(self, event: e.RunStarted) -> None:
        self.require(self.committed < 0, "a second RunStarted")
        self.committed, self.digests[0] = 0, event.digest
        self.steps = event.steps or self.rules.steps

    def _on_committed(self, event: e.VersionCommitted) -> None:
        if event.version <= self.committed:
            self._check_digest("committed again", event.version, event.digest)
            return
        self.require(
            event.version <= self.trained_version,
            f"version {event.version} committed when the last trained was {self.trained_version}",
        )
        self.committed = event.version
        self.digests[event.version] = event.digest

    def _on_reissued_version(self, event: e.VersionReissued) -> None:
        if event.version <= self.committed:
            self._check_digest("reissued", event.version, event.old)
            self.digests[event.version] = event.new

    def _on_adopted(self, event: e.HostAdopted) -> None:
        if event.host not in self.hosts:
            return
        self.require(
            event.version >= self.hosts[event.host],
            f"host {event.host} went back from version {self.hosts[event.host]} to {event.version}",
        )
        self._check_digest(f"adopted by {event.host}", event.version, event.digest)
        self.hosts[event.host] = event.version

    def _check_digest(self, how: str, version: int, digest: str) -> None:
        known = self.digests.get(version)
        self.require(known == digest, f"version {version} {how} with digest {digest}; committed was {known}")

    # --- hosts ----------------------------------------------------------------------------------------------

    def _on_joined(self, event: e.HostJoined) -> None:
        self._lose(event.host)
        self.hosts[event.host] = -1

    def _on_lost(self, event: e.HostLost) -> None:
        self._lose(event.host)

    def _on_resumed(self, event: e.RunResumed) -> None:
        self.steps = event.steps or self.rules.steps
        for host in list(self.hosts):
            self._lose(host)

    def _lose(self, host: str) -> None:
        if self.hosts.pop(host, None) is not None:
            for account in self.accounts.values():
                if account.host == host:
                    account.host = ""

    # --- samples and groups ---------------------------------------------------------------------------------

    def _on_dispatch(self, action: e.Dispatch) -> None:
        ordinal, _, attempt = action.samples[0]
        members = [sample.member for sample in action.samples]
        self.require(
            len(set(members)) == len(members)
            and all((s.ordinal, s.attempt) == (ordinal, attempt) for s in action.samples),
            f"{action} is not the samples of one group",
        )
        self.require(action.host in self.hosts, f"group {ordinal} dispatched to {action.host}, which is gone")
        self.require(
            action.min_version == self.committed,
            f"group {ordinal} dispatched for version {action.min_version}; committed is {self.committed}",
        )
        if ordinal not in self.accounts:
            self._admit(ordinal)
        account = self.accounts[ordinal]
        missing = sorted(set(range(self.rules.group_size)) - set(account.oldest))
        self.require(
            account.fate == "live" and account.attempt == attempt and not account.host and members == missing,
            f"group {ordinal} ({account.fate}, attempt {account.attempt}, on {account.host or 'no host'}, "
            f"members {missing} unfinished) dispatched as {action}",
        )
        account.host = action.host
        account.asked.setdefault(
            action.host, action.min_version
        )  # versions only grow: the first is the lowest

    def _admit(self, ordinal: int) -> None:
        admitted, refunds = len(self.accounts) + 1, sum(self.dropped.values())
        size, eta = self.rules.batch_size, self.rules.max_staleness
        self.accounts[ordinal] = _Account()
        self.require(ordinal == admitted - 1, f"ordinal {ordinal} admitted where {admitted - 1} was next")
        self.require(
            eta is None or (admitted - refunds - 1) // size <= self.committed + eta,
            f"gate: ordinal {ordinal}: ({admitted} - {refunds} - 1) // {size} > {self.committed} + {eta}",
        )
        self.require(
            admitted <= self.steps * size + refunds,
            f"ordinal {ordinal} admitted beyond {self.steps} batches of {size} groups and {refunds} refunds",
        )

    def _on_sample(self, event: e.SampleFinished) -> None:
        versions = [span.version for span in event.spans]
        self.require(versions == sorted(versions), f"{event.sample} went back in versions: {versions}")
        self.require(
            len(set(versions)) <= 1 or not self.rules.has_one_version,
            f"{event.sample} is of versions {versions} though hosts {self.rules.on_update}: one is allowed",
        )
        self.require(
            max(versions, default=0) <= self.committed,
            f"{event.sample} carries version {max(versions, default=0)}; committed is {self.committed}",
        )
        account = self._account_of(event.sample, event.host)
        if account is None:
            return
        asked, member = account.asked[event.host], event.sample.member
        versions = versions or [asked]  # nothing was sampled: as old as its dispatch
        self.require(
            versions[0] >= asked,
            f"{event.sample} began under version {versions[0]}; its dispatch asked for {asked}",
        )
        account.oldest[member], account.newest[member] = versions[0], versions[-1]
        if len(account.oldest) == self.rules.group_size:
            account.host = ""

    def _account_of(self, sample: SampleId, host: str) -> _Account | None:
        """The account that waits for this sample from this host; None for an echo."""
        account = self.accounts.get(sample.ordinal)
        is_awaited = (
            account is not None
            and (account.fate, account.attempt, account.host) == ("live", sample.attempt, host)
            and sample.member not in account.oldest
            and 0 <= sample.member < self.rules.group_size
        )
        return account if is_awaited else None

    def _on_scored(self, event: e.RewardScored) -> None:
        account = self.accounts.get(event.ordinal)
        if account is None or (account.fate, account.attempt) != ("live", event.attempt) or account.is_scored:
            return
        if len(account.oldest) == self.rules.group_size:
            account.is_scored = True
            self.ready.add(event.ordinal)

    def _on_reissue(self, action: e.Reissue) -> None:
        account = self.accounts.get(action.ordinal)
        if account is None or account.fate != "live" or action.attempt != account.attempt + 1:
            self.wrong(f"{action} of a group that is {account and (account.fate, account.attempt)}")
            return
        self.ready.discard(action.ordinal)
        self.accounts[action.ordinal] = _Account(attempt=action.attempt)

    def _on_drop(self, action: e.Drop) -> None:
        account = self.accounts.get(action.ordinal)
        self.dropped[action.reason] = self.dropped.get(action.reason, 0) + 1
        if account is None or account.fate != "live":
            fate = account.fate if account else "unknown"
            self.wrong(f"ordinal {action.ordinal} dropped ({action.reason}) though {fate}")
            return
        self.ready.discard(action.ordinal)
        account.fate, account.host = action.reason, ""

    # --- batches --------------------------------------------------------------------------------------------

    def _on_train(self, action: e.Train) -> None:
        if action == self.training:  # asked for again after a resume
            return
        self.require(
            self.training is None, f"batch {action.step} asked for while {self.training} is under way"
        )
        self.require(
            action.step == self.trained_version,
            f"batch {action.step} asked for; next is {self.trained_version}",
        )
        lowest = tuple(sorted(self.ready)[: self.rules.batch_size])
        self.require(
            action.ordinals == lowest and len(lowest) == self.rules.batch_size,
            f"batch {action.step} is {action.ordinals}; the lowest complete are {lowest}",
        )
        for ordinal, attempt in zip(action.ordinals, action.attempts, strict=True):
            self._check_trainable(action.step, ordinal, attempt)
        self.training = action
        self.ready.difference_update(action.ordinals)

    def _check_trainable(self, step: int, ordinal: int, attempt: int) -> None:
        account = self.accounts.get(ordinal, _Account(fate="unknown"))
        self.require(account.fate == "live", f"ordinal {ordinal} in batch {step}, but it is {account.fate}")
        self.require(
            account.attempt == attempt and len(account.oldest) == self.rules.group_size,
            f"ordinal {ordinal} in batch {step} with attempt {attempt}, members {sorted(account.oldest)}; it "
            f"needs attempt {account.attempt} and all {self.rules.group_size} members",
        )
        age = self.trained_version - min(account.oldest.values(), default=self.trained_version)
        bound = self.rules.oldest_trained
        self.require(
            bound is None or age <= bound,
            f"ordinal {ordinal} trained in batch {step} at token age {age} > {bound}",
        )
        newest = max(account.newest.values(), default=0)
        self.require(
            newest <= self.trained_version, f"ordinal {ordinal} carries version {newest} before its time"
        )

    def _on_trained(self, event: e.BatchTrained) -> None:
        if event.step < self.trained_version:  # said again
            return
        self.require(
            self.training is not None
            and (event.step, event.ordinals) == (self.training.step, self.training.ordinals),
            f"batch {event.step} of {event.ordinals} trained; asked for was {self.training}",
        )
        for ordinal in event.ordinals:
            account = self.accounts.setdefault(ordinal, _Account(fate="unknown"))
            self.require(
                account.fate == "live",
                f"ordinal {ordinal} trained in batch {event.step} though {account.fate}",
            )
            self.accounts[ordinal] = _Account(account.attempt, fate="trained")
        self.trained_version, self.training = event.step + 1, None

    def _on_finish(self, action: e.Finish) -> None:
        live = [ordinal for ordinal, account in self.accounts.items() if account.fate == "live"]
        self.require(not live, f"the run finished with {live} neither trained nor dropped")
        self.require(
            self.trained_version >= self.steps,
            f"the run finished after {self.trained_version} of {self.steps} batches",
        )


_READERS: dict[type, Any] = {
    e.RunStarted: _Books._on_started,
    e.RunResumed: _Books._on_resumed,
    e.HostJoined: _Books._on_joined,
    e.HostLost: _Books._on_lost,
    e.HostAdopted: _Books._on_adopted,
    e.SampleFinished: _Books._on_sample,
    e.RewardScored: _Books._on_scored,
    e.BatchTrained: _Books._on_trained,
    e.VersionCommitted: _Books._on_committed,
    e.VersionReissued: _Books._on_reissued_version,
    e.Dispatch: _Books._on_dispatch,
    e.Train: _Books._on_train,
    e.Drop: _Books._on_drop,
    e.Reissue: _Books._on_reissue,
    e.Finish: _Books._on_finish,
}
