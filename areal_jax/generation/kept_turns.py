"""The KV of ended turns, in host memory: the next turn of an episode computes that of its new tokens only.

A sample gives up its slot and its pages while it waits for its workflow. Its KV is copied out, as that of an
evicted sample is, and copied into the pages of the slot in which the episode goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.generation.commands import Work
from areal_jax.generation.slots import ExistingPrefix
from areal_jax.types import PolicyVersion, SampleId


class KeptTurn(NamedTuple):
    kv: ExistingPrefix
    version: PolicyVersion
    """The version under which the KV can be continued."""


class Reused(NamedTuple):
    """The KV with which a turn begins."""

    turn: int
    """The turn at the end of which it was kept."""
    kv: ExistingPrefix


class KeptTurns:
    """The kept turns of a host's episodes."""

    def __init__(self, room: int | None = None) -> None:
        """`room`: maximum number of tokens of all turns, the shortest is dropped first; None: no maximum."""
        self._room = room
        self._turns: dict[tuple[SampleId, int], KeptTurn] = {}
        self.tokens = 0
        """Number of tokens of all kept turns."""
        self.episodes: dict[SampleId, PolicyVersion] = {}
        """The version of the last turn of each sample that had one here and is not forgotten."""

    def keep(self, work: Work, kv: ExistingPrefix) -> None:
        """Keeps the KV of a turn that ended, in place of the one that it goes on from."""
        turn = work.start.turn
        assert turn is not None
        if work.reused:
            former, reused = work.reused
            before = self._turns.get((work.sample, former))
            if before is not None and _length(before) == reused:
                self._drop((work.sample, former))
        self._drop((work.sample, turn))
        self._turns[work.sample, turn] = kept = KeptTurn(kv, work.version)
        self.tokens += _length(kept)
        self.episodes[work.sample] = work.version
        while self._room is not None and self.tokens > self._room:
            self._drop(min(self._turns, key=lambda one: _length(self._turns[one])))

    def longest(self, sample: SampleId, prompt: Sequence[int], version: PolicyVersion) -> Reused | None:
        """Returns the KV, of `version`, of the most tokens with which `prompt` begins; None if there is none.

        `prompt`: all tokens before the turn that is to be decoded. The last one is never among those.
        """
        tokens, found, most = np.asarray(prompt[:-1], np.int32), None, 0
        for (one, turn), kept in self._turns.items():
            if one == sample and kept.version == version:
                known = kept.kv.common_prefix_tokens[: len(tokens)]
                common = len(known) if (same := known == tokens[: len(known)]).all() else int(same.argmin())
                if common > most:
                    found, most = Reused(turn, ExistingPrefix(kept.kv.cache, known[:common])), common
        return found

    def first(self, sample: SampleId, turn: int, tokens: int) -> ExistingPrefix:
        """Returns the KV of the first `tokens` tokens of a kept turn; KeyError if it is not kept."""
        kv = self._turns[sample, turn].kv
        return ExistingPrefix(kv.cache, kv.common_prefix_tokens[:tokens])

    def forget(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        for one in [one for one in self._turns if one[0] in gone]:
            self._drop(one)
        self.episodes = {one: version for one, version in self.episodes.items() if one not in gone}

    def adopt(self, version: PolicyVersion, is_kv_kept: bool) -> None:
        """Goes on with another version: under it, KV of earlier versions is continued or dropped."""
        if not is_kv_kept:
            self._turns, self.tokens = {}, 0
        self._turns = {one: kept._replace(version=version) for one, kept in self._turns.items()}

    def _drop(self, one: tuple[SampleId, int]) -> None:
        if (kept := self._turns.pop(one, None)) is not None:
            self.tokens -= _length(kept)


def _length(kept: KeptTurn) -> int:
    return len(kept.kv.common_prefix_tokens)
