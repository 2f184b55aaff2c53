"""Checks a run's journal and reports every violated invariant.

The audit counts admitted, restarted and dropped groups, batches and versions itself, from the recorded events
and actions alone. It also replays the recorded events with another control plane, and compares the actions of
that control plane with the recorded actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.control.account import Account, Accounts
from areal_jax.control.errors import ControlError
from areal_jax.control.events import Action, Event
from areal_jax.control.findings import Findings
from areal_jax.control.host_books import HostBooks
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import DECIMALS
from areal_jax.types import SampleId

BOUNDED = ("sync", "one_step", "pinned")
"""Strategies in which max_staleness bounds the age of every trained token, not only the mean age."""

ONE_VERSION = ("pinned", "drain")
"""Values of generation.on_update with which all tokens of a trajectory are of one version."""

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""What a changed event or action may make its readers raise."""

Row = tuple[int, Event, Sequence[Action]]
"""(sequence number in the journal, event, actions that the control plane returned for the event)."""


@dataclass(frozen=True)
class AuditResult:
    ok: bool
    trained: int
    dropped: dict[str, int]
    in_flight: int
    violations: list[str]


def audit(config: Config, rows: Iterable[Row]) -> AuditResult:
    """Checks a journal's rows, in order; returns the violations and the counts of groups."""
    checked = Audit(config)
    for row in rows:
        checked.see(*row)
    return checked.result()


class Audit:
    """Checks a journal row by row. Of rows that are checked, only a byte of each group stays in memory."""

    def __init__(self, config: Config) -> None:
        self._books = _Books(config)
        self.plane: ControlPlane | None = ControlPlane(config)
        """A control plane that has handled the events so far; None once it has rejected one."""
        self._is_answered = True
        """Whether the recorded actions are those of `plane`, so far."""
        self._last: int | None = None

    def see(self, seq: int, event: Event, actions: Sequence[Action]) -> None:
        """Checks the next row: number in the journal, event, recorded actions."""
        books, last = self._books, self._last
        books.findings.row, self._last = seq, seq
        if last is not None and seq <= last:
            books.wrong(f"follows row {last} in the journal, but rows must ascend")
        elif last is not None and seq > last + 1:
            books.wrong(f"follows row {last} in the journal; the rows between are missing")
        try:
            for record in (event, *actions):
                books.enter(record)
            books.hosts.require_cancelled()
        except MALFORMED as error:
            books.wrong(f"{type(event).__name__} has values that contradict the rows before it: {error!r}")
        if self.plane is not None:
            self._replay(self.plane, event, tuple(actions))

    def _replay(self, plane: ControlPlane, event: Event, actions: tuple[Action, ...]) -> None:
        """Compares the recorded actions with those of `plane`, up to the first difference.

        After it the states differ too, and every later row would be reported again.
        """
        difference = ""
        try:
            answered = plane.handle(event)
            if answered != actions:
                difference = (
                    f"replaying the journal gives the actions {answered}, but the journal records {actions}"
                )
        except (ControlError, *MALFORMED) as error:
            self.plane = None
            difference = f"the control plane rejects this event when the journal is replayed: {error!r}"
        if difference and self._is_answered:
            self._is_answered = False
            self._books.wrong(difference)

    def result(self) -> AuditResult:
        """Returns the violations so far, and the counts of groups.

        The counts: groups trained, groups dropped (by reason), and groups in flight (neither of the two).
        """
        books = self._books
        violations, accounts = list(books.findings.violations), books.accounts
        trained, in_flight = accounts.count("trained"), len(accounts.live())
        return AuditResult(not violations, trained, books.dropped, in_flight, violations)


def _oldest_trained(config: Config) -> int | None:
    """Returns the largest age that a token of a batch may have, in versions; None if there is no such bound.

    With control.over_age=mask a batch may have older tokens, which are not trained.
    """
    # At eta = 0 the gate alone keeps every group in the version that trains it.
    is_bounded = config.control.strategy in BOUNDED or config.max_staleness == 0
    if is_bounded or config.control.over_age == "mask":
        return config.max_staleness if is_bounded else None
    return config.control.max_token_age


class _Books:
    """What the audit knows of the run, from the journal's rows that it has checked so far.

    Each `_on_` method checks one kind of event or action, and records what the event or action changes.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.batch_size, self.group_size = config.trainer.batch_size, config.algorithm.group_size
        self.findings = Findings()
        self.wrong, self.require = self.findings.wrong, self.findings.require
        self.accounts = Accounts()
        self.hosts = HostBooks(self.findings, self.accounts, self.group_size)
        self.dropped: dict[str, int] = {}
        self.steps = config.run.steps
        self.committed = -1
        self.trained_version = 0
        self.training: e.Train | None = None
        self.accuracy: float | None = None
        """Accuracy of the batch trained last; None before the first batch."""
        self.digests: dict[int, str] = {}
        self.ready: set[int] = set()
        """Ordinals of the complete groups that are in no batch yet."""
        self.restart = 0
        """The versions that one_step promises are checked only for batches above this number. A resume that
        changes run.steps sets the number, because groups of the batch with this number may have begun while
        no batch was in training.
        """

    def enter(self, record: Event | Action) -> None:
        """Checks and records one event or action; adds a message to `violations` for each broken rule."""
        # Kinds without a reader (Score, a failure, a checkpoint) promise nothing by themselves.
        reader = _READERS.get(type(record))
        if reader is not None:
            reader(self, record)

    # --- versions -------------------------------------------------------------------------------------------

    def _on_started(self, event: e.RunStarted) -> None:
        self.require(self.committed < 0, "a second RunStarted")
        self.committed, self.digests[0] = 0, event.digest
        self.steps = event.steps or self.config.run.steps

    def _on_committed(self, event: e.VersionCommitted) -> None:
        if event.version <= self.committed:
            self._check_digest("committed again", event.version, event.digest)
            return
        self.require(
            event.version <= self.trained_version,
            f"version {event.version} was committed, but the newest trained version was "
            f"{self.trained_version}",
        )
        self.committed = event.version
        self.digests[event.version] = event.digest

    def _on_reissued_version(self, event: e.VersionReissued) -> None:
        if event.version <= self.committed:
            self._check_digest("reissued", event.version, event.old)
            self.digests[event.version] = event.new  # hosts that adopt it from here on have the new bits

    def _on_adopted(self, event: e.HostAdopted) -> None:
        if event.host not in self.hosts:  # a late message of a lost host
            return
        self.hosts.adopted(event)
        self._check_digest(f"adopted by {event.host}", event.version, event.digest)

    def _check_digest(self, how: str, version: int, digest: str) -> None:
        known = self.digests.get(version)
        self.require(
            known == digest,
            f"version {version} was {how} with digest {digest}, but it was committed with digest {known}",
        )

    def _on_resumed(self, event: e.RunResumed) -> None:
        steps, self.steps = self.steps, event.steps or self.config.run.steps
        if self.steps != steps:
            self.restart = self.trained_version + 1
        for host in list(self.hosts.versions):
            self.hosts.lose(host)

    # --- samples and groups ---------------------------------------------------------------------------------

    def _on_dispatch(self, action: e.Dispatch) -> None:
        ordinal, _, attempt = action.samples[0]
        members = [sample.member for sample in action.samples]
        self.require(
            len(set(members)) == len(members)
            and all((s.ordinal, s.attempt) == (ordinal, attempt) for s in action.samples),
            f"{action}: the samples are not different members of one group",
        )
        self.require(
            action.host in self.hosts,
            f"group {ordinal} was dispatched to host {action.host}, which is not part of the run",
        )
        self.require(
            action.min_version == self.committed,
            f"group {ordinal} was dispatched for version {action.min_version}, but the newest committed "
            f"version is {self.committed}",
        )
        if ordinal not in self.accounts:
            self._admit(ordinal)
        account = self.accounts.of(ordinal)
        begun = {*account.oldest, *account.turns, *account.held}
        missing = sorted(set(range(self.group_size)) - begun)
        # Apart from the rest of a group that came back with its host.
        is_free = account.host == (action.host if account.held else "")
        self.require(
            account.fate == "live" and account.attempt == attempt and is_free and members == missing,
            f"group {ordinal} ({account.fate}, attempt {account.attempt}, on {account.host or 'no host'}, "
            f"unfinished members {missing}) was dispatched as {action}, which contradicts that state",
        )
        account.host = action.host
        account.held.clear()
        # Versions only grow, so the first requested one is the lowest.
        account.asked.setdefault(action.host, action.min_version)

    def _on_continue(self, action: e.Continue) -> None:
        account, sample = self.accounts.of(action.sample.ordinal), action.sample
        # Where a sample has one version, a later turn asks for that of the group's dispatch.
        first = self.committed
        if self.config.is_one_version:
            first = account.asked.get(action.host, first)
        self.require(
            account.is_open(sample)
            and account.is_decoding(sample.member, action.turn)
            and account.host in ("", action.host)
            and action.host in self.hosts
            and first <= action.min_version <= self.committed,
            f"{action} contradicts the state of its group: {account.fate}, attempt {account.attempt}, on "
            f"{account.host or 'no host'}, {account.turns.get(sample.member, 0)} turns of this sample asked "
            f"for, newest committed version {self.committed}",
        )
        account.host = action.host
        account.asked.setdefault(action.host, action.min_version)

    def _on_serve(self, action: e.Serve) -> None:
        self.require(
            action.host in self.hosts and action.version == self.committed,
            f"{action}: the host is not part of the run, or the newest committed version is {self.committed}",
        )

    def _admit(self, ordinal: int) -> None:
        admitted, refunds = len(self.accounts) + 1, sum(self.dropped.values())
        size, eta = self.batch_size, self.config.max_staleness
        self.accounts.admit(ordinal)
        self.require(
            ordinal == admitted - 1, f"ordinal {ordinal} was admitted, but the next ordinal is {admitted - 1}"
        )
        self.require(
            eta is None or (admitted - refunds - 1) // size <= self.committed + eta,
            f"staleness gate: ordinal {ordinal} was admitted, but (admitted - refunds - 1) // batch_size > "
            f"version + eta: ({admitted} - {refunds} - 1) // {size} > {self.committed} + {eta}",
        )
        self.require(
            admitted <= self.steps * size + refunds,
            f"ordinal {ordinal} was admitted beyond the {self.steps} batches of {size} groups and {refunds} "
            "replaced groups of the run",
        )

    def _on_sample(self, event: e.SampleFinished) -> None:
        versions = self._check_versions(event)
        account = self._account_of(event.sample, event.host)
        if account is None:
            return
        member = event.sample.member
        asked = min(account.asked.values()) if member in account.turns else account.asked[event.host]
        versions = versions or [asked]  # a completion without tokens is as old as its dispatch
        if versions[0] < asked:
            self.wrong(
                f"{event.sample} began under version {versions[0]}, but was dispatched for at least version "
                f"{asked}"
            )
        account.away.discard(member)
        account.oldest[member], account.newest[member] = versions[0], versions[-1]
        for span in event.spans:
            account.tokens[span.version] += span.end - span.start
        if len(account.oldest) == self.group_size:
            account.host = account.target = ""

    def _check_versions(self, event: e.SampleFinished | e.TurnFinished) -> list[int]:
        """Checks the weights versions of the event's tokens, and returns them in the tokens' order."""
        versions = [span.version for span in event.spans]
        if versions != sorted(versions):
            self.wrong(f"the token versions of {event.sample} decrease: {versions}")
        if len(set(versions)) > 1 and self.config.on_update in ONE_VERSION:
            self.wrong(
                f"{event.sample} has tokens of versions {versions}; "
                f"generation.on_update={self.config.on_update} allows only one"
            )
        if (newest := max(versions, default=0)) > self.committed:
            self.wrong(
                f"{event.sample} has tokens of version {newest}, but the newest committed version is "
                f"{self.committed}"
            )
        return versions

    # --- turns ----------------------------------------------------------------------------------------------

    def _on_turn_added(self, event: e.TurnAdded) -> None:
        account, member = self.accounts.of(event.sample.ordinal), event.sample.member
        if account.is_open(event.sample) and account.is_next_turn(member, event.turn):
            account.turns[member] = event.turn + 1
            account.away.discard(member)

    def _on_turn(self, event: e.TurnFinished) -> None:
        self._check_versions(event)
        account, member = self._account_of(event.sample, event.host), event.sample.member
        if account is not None and account.is_decoding(member, event.turn):
            account.away.add(member)

    def _on_call(self, action: e.Call) -> None:
        account, call = self.accounts.of(action.sample.ordinal), (action.sample.member, action.call)
        self.require(
            account.is_open(action.sample) and call not in account.calls,
            f"{action} contradicts the state of its group: {account.fate}, attempt {account.attempt}; the "
            f"calls {sorted(account.calls)} began already",
        )
        account.calls.add(call)

    def _account_of(self, sample: SampleId, host: str) -> Account | None:
        """Returns what is known of the sample's group; None if the sample is late or a duplicate.

        Such a sample arrives after `host` was lost, after the group was restarted, or by a second delivery.
        """
        account = self.accounts.of(sample.ordinal)
        is_there = account.host == host or sample.member in account.away
        is_member = 0 <= sample.member < self.group_size
        return account if is_there and is_member and account.is_open(sample) else None

    def _on_scored(self, event: e.RewardScored) -> None:
        account = self.accounts.of(event.ordinal)
        if (account.fate, account.attempt, account.is_scored) != ("live", event.attempt, False):
            return
        if len(account.oldest) == self.group_size:
            account.is_scored = True
            right = [value for parts in event.parts for name, value in parts if name == "correct"]
            if len(right) == self.group_size:
                account.correct = fmean(right)
            self.ready.add(event.ordinal)

    def _on_reissue(self, action: e.Reissue) -> None:
        account = self.accounts.of(action.ordinal)
        if (account.fate, account.attempt) != ("live", action.attempt - 1):
            self.wrong(
                f"{action} contradicts the state of its group: {account.fate}, attempt {account.attempt}"
            )
            return
        self.ready.discard(action.ordinal)
        self.accounts.restart(action.ordinal, action.attempt)

    def _on_drop(self, action: e.Drop) -> None:
        account = self.accounts.of(action.ordinal)
        self.dropped[action.reason] = self.dropped.get(action.reason, 0) + 1
        if account.fate != "live":
            self.wrong(
                f"ordinal {action.ordinal} was dropped ({action.reason}), but its state was {account.fate}"
            )
            return
        self.ready.discard(action.ordinal)
        self.accounts.close(action.ordinal, action.reason)

    # --- batches --------------------------------------------------------------------------------------------

    def _on_train(self, action: e.Train) -> None:
        if action == self.training:  # commanded again after a resume
            return
        self.require(
            self.training is None,
            f"the trainer was asked for batch {action.step} while it trained {self.training}",
        )
        self.require(
            action.step == self.trained_version,
            f"the trainer was asked for batch {action.step}, but the next batch is {self.trained_version}",
        )
        # Lowest first, so that no group waits for ever behind newer ones.
        lowest = tuple(sorted(self.ready)[: self.batch_size])
        self.require(
            action.ordinals == lowest and len(lowest) == self.batch_size,
            f"batch {action.step} consists of ordinals {action.ordinals}, but the lowest complete ordinals "
            f"are {lowest}",
        )
        for ordinal, attempt in zip(action.ordinals, action.attempts, strict=True):
            self._check_trainable(action.step, ordinal, attempt)
        self._check_gates(action)
        self.training = action
        self.ready.difference_update(action.ordinals)

    def _check_gates(self, action: e.Train) -> None:
        """Decides the gate again from the journaled rewards, and compares it with the journaled decision."""
        gate, accuracy = self.config.algorithm.gate, self._accuracy_of(action.ordinals)
        expected: tuple[tuple[str, bool], ...] = ()
        if gate.part is not None and accuracy is not None:
            before = self.accuracy
            is_paid = gate.first == "open"
            if before is not None:  # rounded as the gate itself is: 0.6 - 0.05 is not 0.55
                is_paid = round(accuracy - before + gate.tolerance, DECIMALS) > 0
            expected = ((gate.part, is_paid),)
        self.require(
            action.gates == expected,
            f"batch {action.step} was trained with the gates {dict(action.gates)}, but its accuracy "
            f"{accuracy} after {self.accuracy} gives {dict(expected)}",
        )

    def _accuracy_of(self, ordinals: Sequence[int]) -> float | None:
        """Returns the mean of the part `correct` over a batch; None if a group's rewards lack it."""
        means = [mean for n in ordinals if (mean := self.accounts.of(n).correct) is not None]
        return fmean(means) if len(means) == len(ordinals) else None

    def _check_trainable(self, step: int, ordinal: int, attempt: int) -> None:
        account = self.accounts.of(ordinal)
        self.require(
            account.fate == "live", f"ordinal {ordinal} is in batch {step}, but its state is {account.fate}"
        )
        self.require(
            account.attempt == attempt and len(account.oldest) == self.group_size,
            f"ordinal {ordinal} is in batch {step} with attempt {attempt} and finished members "
            f"{sorted(account.oldest)}, but needs attempt {account.attempt} and all {self.group_size} "
            "members",
        )
        age = self.trained_version - min(account.oldest.values(), default=self.trained_version)
        bound = _oldest_trained(self.config)
        self.require(
            bound is None or age <= bound,
            f"ordinal {ordinal} is in batch {step} at token age {age}, above the bound {bound}",
        )
        newest = max(account.newest.values(), default=0)
        self.require(
            newest <= self.trained_version,
            f"ordinal {ordinal} has tokens of version {newest}, but the newest trained version is "
            f"{self.trained_version}",
        )
        if account.is_again:
            return
        versions = {*account.oldest.values(), *account.newest.values()}
        self.require(
            len(versions) <= 1 or self.config.on_update != "drain",
            f"ordinal {ordinal} has tokens of versions {sorted(versions)}; with generation.on_update=drain "
            "all samples of a group have one",
        )
        # Groups are admitted in order, so the ordinal says the batch; a drop moves later ones forward.
        own = ordinal // self.batch_size
        if self.config.control.strategy == "one_step" and own > self.restart and not self.dropped:
            self.require(
                versions == {own - 1},
                f"ordinal {ordinal} of batch {own} has tokens of versions {sorted(versions)}, but "
                f"control.strategy=one_step promises version {own - 1}",
            )

    def _on_trained(self, event: e.BatchTrained) -> None:
        if event.step < self.trained_version:  # a duplicate delivery
            return
        self.require(
            self.training is not None
            and (event.step, event.ordinals) == (self.training.step, self.training.ordinals),
            f"batch {event.step} of ordinals {event.ordinals} was trained, but the trainer was asked for "
            f"{self.training}",
        )
        self.accuracy = self._accuracy_of(event.ordinals)
        self._check_mask(event)
        for ordinal in event.ordinals:
            account = self.accounts.of(ordinal)
            self.require(
                account.fate == "live",
                f"ordinal {ordinal} was trained in batch {event.step}, but its state was {account.fate}",
            )
            self.accounts.close(ordinal, "trained")
        self.trained_version, self.training = event.step + 1, None

    def _check_mask(self, event: e.BatchTrained) -> None:
        """Compares the trainer's number of trained tokens with those of the samples that are not too old."""
        control, count = self.config.control, event.metrics.get("trained_tokens")
        # Reference answers have tokens without a version.
        if control.over_age != "mask" or count is None or self.config.algorithm.samples == "reference":
            return
        oldest = event.step - (control.max_token_age or 0)
        tokens = sum((self.accounts.of(ordinal).tokens for ordinal in event.ordinals), Counter())
        young = sum(number for version, number in tokens.items() if version >= oldest)
        # The trainer counts in float32, which is exact up to 2^24 tokens.
        self.require(
            abs(count - young) <= 1e-6 * young,
            f"batch {event.step} trained {count:.0f} tokens, but {young} of its {tokens.total()} tokens are "
            f"at most control.max_token_age={control.max_token_age} versions old",
        )

    def _on_finish(self, action: e.Finish) -> None:
        # A run drains: admission stops at steps x B + refunds, so nothing may be left over at its end.
        live = list(self.accounts.live())
        self.require(not live, f"the run finished with ordinals {live} neither trained nor dropped")
        self.require(
            self.trained_version >= self.steps,
            f"the run finished after {self.trained_version} of {self.steps} batches",
        )


_READERS: dict[type, Any] = {
    e.RunStarted: _Books._on_started,
    e.RunResumed: _Books._on_resumed,
    e.HostJoined: lambda books, event: books.hosts.joined(event),
    e.HostLost: lambda books, event: books.hosts.lose(event.host),
    e.HostAdopted: _Books._on_adopted,
    e.SampleFinished: _Books._on_sample,
    e.TurnAdded: _Books._on_turn_added,
    e.TurnFinished: _Books._on_turn,
    e.RewardScored: _Books._on_scored,
    e.BatchTrained: _Books._on_trained,
    e.VersionCommitted: _Books._on_committed,
    e.VersionReissued: _Books._on_reissued_version,
    e.SamplesMoved: lambda books, event: books.hosts.moved(event),
    e.MoveFailed: lambda books, event: books.hosts.unmoved(event),
    e.Dispatch: _Books._on_dispatch,
    e.Continue: _Books._on_continue,
    e.Call: _Books._on_call,
    e.Cancel: lambda books, action: books.hosts.cancelled(action),
    e.Serve: _Books._on_serve,
    e.Move: lambda books, action: books.hosts.move(action),
    e.Fetch: lambda books, action: books.hosts.fetch(action),
    e.TakeBack: lambda books, action: books.hosts.took_back(action),
    e.Train: _Books._on_train,
    e.Drop: _Books._on_drop,
    e.Reissue: _Books._on_reissue,
    e.Finish: _Books._on_finish,
}
