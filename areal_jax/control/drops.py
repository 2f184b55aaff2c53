"""Ends a run that drops one group after the other, or that cannot use too many of its prompts."""

from __future__ import annotations

from collections.abc import Iterator

from areal_jax.control.events import Abort
from areal_jax.control.state import State

MOST, MOST_BATCHES = 500, 50
"""A run ends with an error if more groups are dropped in a row than the larger one of these: groups, and
batches' worth of groups. Even if 95 % of all groups are dropped, so many in a row are practically impossible.
"""

NEWEST = 256
"""Number of prompts, up to the newest one, of which control.max_failed_prompts is a fraction."""


def count(state: State, reason: str, batch_size: int) -> Iterator[Abort]:
    """Counts a dropped group; yields Abort if too many in a row were dropped.

    Drops at the end of a run (reason `end`) do not count. `batch_size`: number of groups in a batch.
    """
    state.dropped[reason] = state.dropped.get(reason, 0) + 1
    if reason == "end":
        return
    row = state.dropped_in_a_row
    row[reason] = row.get(reason, 0) + 1
    # Equal, so that it is said once.
    if sum(row.values()) == 1 + max(MOST, MOST_BATCHES * batch_size):
        yield Abort(tuple(sorted(row.items())))


def count_prompt(state: State, ordinal: int, most: float) -> Iterator[Abort]:
    """Counts a prompt that cannot be used; yields Abort if more than `most` x NEWEST of the newest cannot."""
    first = state.admitted - NEWEST
    state.failed_prompts = [*(one for one in state.failed_prompts if one >= first), ordinal]
    if len(state.failed_prompts) > most * NEWEST:
        yield Abort((("failed_prompt", len(state.failed_prompts)),), min(NEWEST, state.admitted))
