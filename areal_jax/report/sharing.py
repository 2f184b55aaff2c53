"""How many tokens of a run's training samples repeat a prefix that a prefix tree would compute once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PARTS = 10
"""Number of parts of a run for which `sharing_by_part` gives figures."""


class Sharing(NamedTuple):
    """Tokens of the samples that the steps from `first_step` to `last_step` trained, prompts included."""

    first_step: int
    last_step: int
    sequence_tokens: int
    """Tokens of all samples."""
    tree_tokens: int
    """Distinct prefixes of the samples of a step: a forward pass over a prefix tree computes each once."""

    @property
    def compression(self) -> float:
        """Tokens of all samples per distinct prefix; at least 1."""
        return self.sequence_tokens / self.tree_tokens

    @property
    def repeated_share(self) -> float:
        """Fraction of the samples' tokens that repeat a prefix of another sample in the same batch."""
        return 1 - self.tree_tokens / self.sequence_tokens

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, and `compression` and `repeated_share`, by name."""
        return self._asdict() | {"compression": self.compression, "repeated_share": self.repeated_share}


def sharing(rows: Sequence[Mapping[str, Any]]) -> Sharing | None:
    """Returns the sums over metrics rows, in the order of their steps; None if no row has the figures.

    A row of an older run has no `sequence_tokens` and `tree_tokens`, and is left out.
    """
    known = [row for row in rows if row.get("sequence_tokens") and row.get("tree_tokens")]
    if not known:
        return None
    first, last = int(known[0]["step"]), int(known[-1]["step"])
    sums = (sum(int(row[name]) for row in known) for name in ("sequence_tokens", "tree_tokens"))
    return Sharing(first, last, *sums)


def sharing_by_part(rows: Sequence[Mapping[str, Any]]) -> list[Sharing]:
    """Returns the sums over each of at most PARTS parts of a run, which have equal numbers of steps."""
    size = -(-len(rows) // PARTS)
    parts = (sharing(rows[start : start + size]) for start in range(0, len(rows), max(size, 1)))
    return [part for part in parts if part is not None]
