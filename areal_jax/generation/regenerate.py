"""Decodes finished samples again, with the versions under which their tokens were sampled.

No bit of a sample depends on its slot or on the samples beside it, so any samples may share a decode call. A
sample's version changes, and its KV is rebuilt, where both happened the first time: between two of its decode
calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from areal_jax.generation.admission import KeptTurns, prompt_key
from areal_jax.generation.commands import Start
from areal_jax.generation.engine import Engine
from areal_jax.generation.live_slots import LiveSlots
from areal_jax.generation.slots import ExistingPrefix, Prefix
from areal_jax.observe.waits import Timeline
from areal_jax.types import PolicyVersion, SampleId, Sampling, Trajectory, VersionedParams, VersionSpan


@dataclass(frozen=True)
class Finished:
    """A finished sample, or turn of a sample: its prompt (token ids), and how it was decoded."""

    sample: SampleId
    prompt: tuple[int, ...]
    spans: tuple[VersionSpan, ...]
    """Not empty, in order; the first one starts at the prompt's end."""
    rebuilds: tuple[int, ...] = ()
    """How many tokens the sample had, prompt included, at each rebuild of its KV."""
    turn: int | None = None
    """Number of an episode's turn, of which all tokens before it are the prompt; None without a workflow."""
    sampling: Sampling | None = None
    """The turn's sampler settings; None: the run's."""
    segment: int = 0
    """Number of the episode's branch."""
    reused: tuple[int, ...] = ()
    """As in TurnFinished. The earlier turn must have been generated again before."""

    def version_at(self, tokens: int) -> PolicyVersion:
        """Returns the version that sampled the next token of a sample of so many tokens."""
        return next((span.version for span in self.spans if tokens < span.end), self.spans[-1].version)


class Regenerator:
    """Decodes finished samples again on one engine, as a host does that has the given settings.

    `seed`, `sampling`, `on_update`: those of the run. The engine needs the sizes of the run's hosts: the
    number of slots may change bits. `turns`: the KV of the turns that were generated again, with which later
    ones begin; the caller forgets those of samples that have ended.
    """

    def __init__(
        self, engine: Engine, turns: KeptTurns, *, seed: int, sampling: Sampling, on_update: str
    ) -> None:
        self._engine, self._seed, self._sampling, self._on_update = engine, seed, sampling, on_update
        self._turns = turns
        self._live = LiveSlots(engine, Timeline(None).clock("replay"))
        self._finished: dict[SampleId, Finished] = {}
        self._prompt: tuple[object, Prefix] | None = None
        # With a whole slot's pages for each of them, no sample ever waits for pages.
        at_once = engine.shared_pages // engine.pages_per_slot
        self._slots = range(engine.reserved_slots, min(engine.slots, engine.reserved_slots + at_once))

    def run(
        self, wanted: Sequence[Finished], params: Mapping[PolicyVersion, VersionedParams]
    ) -> dict[SampleId, Trajectory]:
        """Returns the samples' trajectories, without rewards.

        `params`: the parameters of every version in the spans, as `Engine.load_params` returned them.
        """
        waiting, found = deque(sorted(wanted, key=lambda one: one.sample)), {}
        self._finished = {one.sample: one for one in wanted}
        while waiting or self._live.works:
            for slot in [slot for slot in self._slots if slot not in self._live.works][: len(waiting)]:
                self._begin(slot, waiting.popleft(), params)
            self._change_versions(params)
            self._live.decode(params)
            for ended in self._live.collect(with_all=False).progress:
                found[ended.work.sample] = self._live.records.trajectory(ended, self._on_update)
                if ended.kv is not None:
                    self._turns.keep(ended.work, ended.kv)
        self._prompt = None
        return found

    def _begin(self, slot: int, one: Finished, params: Mapping[PolicyVersion, VersionedParams]) -> None:
        version = one.spans[0].version
        start = Start((one.sample,), one.prompt, version, one.sampling, turn=one.turn, segment=one.segment)
        (work,) = start.works(self._sampling, self._seed, self._engine.tokenizer.end_ids)
        work.version, work.digest = version, params[version].digest
        key = prompt_key(work), version
        if self._prompt is None or self._prompt[0] != key:
            tokens = np.asarray(one.prompt, np.int32)
            prefix = self._engine.prefill(
                params=params[version],
                padded_tokens=tokens,
                true_length=len(tokens),
                existing_prefix=self._reused(one),
            )
            self._prompt = key, prefix
        work.reused = one.reused
        self._live.insert(slot, work, self._prompt[1])

    def _reused(self, one: Finished) -> ExistingPrefix | None:
        """The KV with which a turn begins; None if it has none, or if the earlier turn's tokens differ now.

        They may differ on another machine, where values are compared within bounds.
        """
        existing = self._turns.first(one.sample, *one.reused) if one.reused else None
        if existing is None or one.prompt[: len(existing.common_prefix_tokens)] != (
            *existing.common_prefix_tokens.tolist(),
        ):
            return None
        return existing

    def _change_versions(self, params: Mapping[PolicyVersion, VersionedParams]) -> None:
        for slot, work in self._live.works.items():
            tokens, one = int(self._live.records.filled[slot]), self._finished[work.sample]
            work.version = one.version_at(tokens)
            work.digest = params[work.version].digest
            work.is_stale = tokens in one.rebuilds
        self._live.rebuild(params)
