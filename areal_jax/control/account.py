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


class Accounts(dict[int, Account]):
    """By ordinal: what the audit knows of each admitted group."""

    def of(self, ordinal: int) -> Account:
        """Returns what is known of group `ordinal`; with fate "unknown" if the group was never admitted."""
        return self.get(ordinal, Account(fate="unknown"))
