"""What the audit knows of the hosts: which are part of the run, and which samples each may decode.

Hosts are lost, and come back with samples of before; groups of half-decoded samples move between them.
"""

from __future__ import annotations

from areal_jax.control import events as e
from areal_jax.control.account import Account, Accounts
from areal_jax.control.findings import Findings
from areal_jax.types import SampleId


class HostBooks:
    """Checks what the journal says of hosts, and records it in the accounts of the groups."""

    def __init__(self, findings: Findings, accounts: Accounts, group_size: int) -> None:
        self._findings, self._accounts, self._group_size = findings, accounts, group_size
        self.versions: dict[str, int] = {}
        """Each host of the run -> the newest version that it adopted; -1: none."""
        self._forbidden: set[tuple[str, SampleId]] = set()
        """(host, sample) for each sample with which the host that joins in this row must not go on."""

    def __contains__(self, host: str) -> bool:
        return host in self.versions

    def adopted(self, event: e.HostAdopted) -> None:
        self._findings.require(
            event.version >= self.versions[event.host],
            f"host {event.host} adopted version {event.version} after the newer version "
            f"{self.versions[event.host]}",
        )
        self.versions[event.host] = event.version

    # --- joining, and coming back ---------------------------------------------------------------------------

    def joined(self, event: e.HostJoined) -> None:
        self.lose(event.host)
        self.versions[event.host] = -1
        back: set[int] = set()
        for sample in event.samples:
            account = self._accounts.of(sample.ordinal)
            is_free = sample.ordinal in back or not account.host
            if is_free and account.is_open(sample) and account.asked and not account.turns:
                account.asked.setdefault(event.host, min(account.asked.values()))
                account.host = event.host
                account.held.add(sample.member)
                back.add(sample.ordinal)
            else:
                self._forbidden.add((event.host, sample))

    def cancelled(self, action: e.Cancel) -> None:
        self._forbidden -= {(action.host, sample) for sample in action.samples}

    def require_cancelled(self) -> None:
        """Checks, at a row's end, that a host goes on with no sample that is not its own any more."""
        for host, sample in sorted(self._forbidden):
            self._findings.wrong(
                f"host {host} came back with {sample}, which is not its own any more, and was not made to "
                "cancel it"
            )
        self._forbidden.clear()

    def lose(self, host: str) -> None:
        if self.versions.pop(host, None) is not None:
            for account in self._accounts.live().values():
                if account.host == host:
                    account.host, account.target, account.is_again = "", "", True
                    account.held.clear()
                elif account.target == host:
                    account.target = ""

    # --- moves ----------------------------------------------------------------------------------------------

    def move(self, action: e.Move) -> None:
        account = self._accounts.of(action.samples[0].ordinal)
        self._check_move(action, account, account.host == action.host and not account.target)
        account.target = action.target

    def fetch(self, action: e.Fetch) -> None:
        account = self._accounts.of(action.samples[0].ordinal)
        self._check_move(action, account, (account.host, account.target) == (action.source, action.host))

    def _check_move(self, action: e.Move | e.Fetch, account: Account, is_there: bool) -> None:
        attempts = {sample.attempt for sample in action.samples}
        members = {sample.member for sample in action.samples}
        missing = set(range(self._group_size)) - set(account.oldest)
        self._findings.require(
            is_there and (account.fate, {account.attempt}, missing) == ("live", attempts, members),
            f"{action} contradicts the state of its group: {account.fate}, attempt {account.attempt}, on "
            f"{account.host or 'no host'}, moving to {account.target or 'no host'}, unfinished members "
            f"{sorted(missing)}",
        )
        target = action.target if isinstance(action, e.Move) else action.host
        self._findings.require(target in self, f"{action}: the target is not part of the run")

    def moved(self, event: e.SamplesMoved) -> None:
        if (account := self._moving(event)) is not None:
            asked = account.asked[event.source]
            account.asked[event.host] = min(asked, account.asked.get(event.host, asked))
            account.host, account.target = event.host, ""

    def unmoved(self, event: e.MoveFailed) -> None:
        if (account := self._moving(event)) is not None:
            account.target = ""

    def took_back(self, action: e.TakeBack) -> None:
        account = self._accounts.of(action.samples[0].ordinal)
        if account.host == action.host:
            account.target = ""

    def _moving(self, event: e.SamplesMoved | e.MoveFailed) -> Account | None:
        """Returns what is known of the group of these samples; None if it is not moving to this host."""
        account = self._accounts.of(event.samples[0].ordinal)
        is_moving = (account.host, account.target) == (event.source, event.host)
        return account if is_moving and account.attempt == event.samples[0].attempt else None
