"""What the audit knows of each group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from areal_jax.types import SampleId


@dataclass
class Account:
    """What the audit knows of one group, from the journal's rows that it has checked so far."""

    attempt: int = 0
    host: str = ""
    target: str = ""
    """The host to which the group's unfinished samples are moving; "" if they are not moving."""
    held: set[int] = field(default_factory=set)
    """Indices of the samples that `host` held when it came back, until the others are dispatched to it."""
    asked: dict[str, int] = field(default_factory=dict)
    """Host -> lowest weights version that a Dispatch of this group to that host required, or to the host from
    which the group moved there."""
    oldest: dict[int, int] = field(default_factory=dict)
    """Index of each finished sample of the group -> weights version of the sample's oldest token."""
    newest: dict[int, int] = field(default_factory=dict)
    """Index of each finished sample of the group -> weights version of the sample's newest token."""
    tokens: Counter[int] = field(default_factory=Counter)
    """Weights version -> number of tokens of it in the finished samples."""
    turns: dict[int, int] = field(default_factory=dict)
    """Index of each sample with a workflow -> number of turns that the workflow has asked for."""
    away: set[int] = field(default_factory=set)
    """Index of each sample that waits for its workflow between two turns."""
    calls: set[tuple[int, int]] = field(default_factory=set)
    """(index of a sample, number of its tool call), for each call that began."""
    correct: float | None = None
    """Mean of the reward part `correct` over the group's samples; None before scoring or without the part."""
    is_scored: bool = False
    is_again: bool = False
    """Whether the group was restarted or lost its host; one_step then does not fix its tokens' versions."""
    fate: str = "live"
    """live, trained, unknown (never admitted), or the reason for which the group was dropped."""

    def is_open(self, sample: SampleId) -> bool:
        """Whether this sample of the group is unfinished, and the group was neither dropped nor restarted."""
        # A group that was never admitted has another fate, so its samples are not open.
        is_live = (self.fate, self.attempt) == ("live", sample.attempt)
        return is_live and sample.member not in self.oldest

    def is_next_turn(self, member: int, turn: int) -> bool:
        """Whether a sample may ask for this turn now."""
        return self.turns.get(member, 0) == turn and (turn == 0 or member in self.away)

    def is_decoding(self, member: int, turn: int) -> bool:
        """Whether a sample has asked for this turn, and has not got it."""
        return self.turns.get(member) == turn + 1 and member not in self.away


class Accounts:
    """By ordinal: what the audit knows of each admitted group.

    Of a group that was trained or dropped only its fate stays, in one byte.
    """

    def __init__(self) -> None:
        self._live: dict[int, Account] = {}
        self._fates = bytearray()
        """For each ordinal: the place of the group's fate in `_names`."""
        self._names = ["live"]

    def __len__(self) -> int:
        return len(self._fates)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._live or 0 <= ordinal < len(self._fates)

    def admit(self, ordinal: int) -> None:
        self._live[ordinal] = Account()
        self._fates.append(0)

    def of(self, ordinal: int) -> Account:
        """Returns what is known of group `ordinal`; with fate "unknown" if the group was never admitted."""
        if (account := self._live.get(ordinal)) is not None:
            return account
        is_known = 0 <= ordinal < len(self._fates)
        return Account(fate=self._names[self._fates[ordinal]] if is_known else "unknown")

    def restart(self, ordinal: int, attempt: int) -> None:
        """Forgets what is known of a live group, except that it was restarted `attempt` times."""
        self._live[ordinal] = Account(attempt=attempt, is_again=True)

    def close(self, ordinal: int, fate: str) -> None:
        """Records that a group was trained, or dropped for the reason `fate`."""
        if fate not in self._names:
            self._names.append(fate)
        if 0 <= ordinal < len(self._fates):
            self._live.pop(ordinal, None)
            self._fates[ordinal] = self._names.index(fate)
        else:  # it was admitted out of order
            self._live[ordinal] = Account(fate=fate)

    def live(self) -> dict[int, Account]:
        """Returns ordinal -> what is known of the group, for each that is neither trained nor dropped."""
        return {ordinal: account for ordinal, account in self._live.items() if account.fate == "live"}

    def count(self, fate: str) -> int:
        """Returns the number of groups with this fate."""
        return self._fates.count(self._names.index(fate)) if fate in self._names else 0
