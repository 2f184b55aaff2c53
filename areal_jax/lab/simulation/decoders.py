"""Decoders of simulated hosts: the interface `Decoder`, and a decoder of completions of random lengths.

`lab.ablations.real_machines.EngineDecoder` implements the same interface with the real engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.episodes.conversation import TurnRequest
from areal_jax.runtime.core import Incoming, Offer
from areal_jax.types import NOT_SAMPLED, PolicyVersion, SampleId, Sampling, Trajectory, VersionSpan

SAMPLING = Sampling()


@dataclass(frozen=True)
class StepResult:
    """The result of one step of a decoder."""

    adopted: e.HostAdopted | None
    """The version that the host adopted at the start of the step; None if the host kept its version."""
    prefills: int
    """Number of samples that began in this step."""
    live: int
    """Number of slots that decoded; 0 if there was nothing to decode."""
    tokens: int
    ended: tuple[Incoming, ...]
    """An event for each sample that ended, with its trajectory.

    The host reports these events after the step's virtual time has passed.
    """
    recomputed: int = 0
    """Number of tokens for which the KV was recomputed under the adopted version."""
    passes: int = 1
    """Number of different versions under which live slots decoded; each needs a forward pass."""
    held: int = 1
    """Number of versions of the parameters that the host had to keep in memory."""


class Decoder(Protocol):
    def take(self, dispatch: e.Dispatch, prompt: tuple[int, ...] | None) -> None:
        """Queue new samples; without a prompt they are episodes, which ask for their turns later."""
        ...

    def go_on(self, action: e.Continue, request: TurnRequest) -> None: ...

    def cancel(self, samples: Iterable[SampleId]) -> None: ...

    def serve(self, version: PolicyVersion) -> None:
        """Let the next step adopt `version`; needed by hosts that decode for different versions."""
        ...

    def hand_over(self, samples: Sequence[SampleId]) -> tuple[tuple[SampleId, ...], Offer]:
        """Stop decoding these samples, and keep them until `cancel` or `take_back`.

        Returns those that the host still has, and what another host needs to take them over.
        """
        ...

    def take_over(self, offer: Offer) -> str:
        """Continue to decode another host's samples; returns why they are refused, "" if they are not."""
        ...

    def take_back(self, samples: Sequence[SampleId]) -> None:
        """Decode samples again that are kept for another host."""
        ...

    def step(self) -> StepResult:
        """Adopt the newest committed version, fill free slots with waiting samples, and decode once."""
        ...


@dataclass
class DrawnSample:
    """A sample of a `DrawnDecoder`, waiting or decoding. `fails`: whether it ends in a SampleFailed event."""

    sample: SampleId
    length: int
    """Number of tokens that the completion will have."""
    fails: bool = False
    min_version: PolicyVersion = 0
    """The oldest version under which the sample may start, as its dispatch says."""
    version: PolicyVersion = -1
    """The version under which the sample decodes; -1 before it has a slot. An adoption may change it."""
    tokens: int = 0
    turn: int | None = None
    """Number of the episode's turn that is decoded; None for a sample without a workflow."""
    before: int = 0
    """Number of tokens before the turn."""
    spans: list[VersionSpan] = field(default_factory=list)
    interruptions: int = 0

    def grow(self, tokens: int) -> int:
        """Decode `tokens` tokens, or fewer if the sample ends before; return the number decoded."""
        start, self.tokens = self.tokens, min(self.tokens + tokens, self.length)
        if self.spans and self.spans[-1].version == self.version:
            self.spans[-1] = self.spans[-1]._replace(end=self.tokens)
        else:
            self.spans.append(VersionSpan(self.version, start, self.tokens))
        return self.tokens - start

    @property
    def placed(self) -> tuple[VersionSpan, ...]:
        """The spans with their places in the whole sample."""
        at = self.before
        return tuple(VersionSpan(version, start + at, end + at) for version, start, end in self.spans)

    def trajectory(self, stop_reason: str) -> Trajectory:
        """Return the ended sample as a trajectory with the true versions of its tokens.

        Token ids and log-probs are zeros.
        """
        count = self.before + self.tokens
        versions = np.full(count, NOT_SAMPLED, np.int32)
        for version, start, end in self.placed:
            versions[start:end] = version
        zeros = np.zeros(count, np.int32)
        sampled = np.arange(count) >= self.before
        return Trajectory(
            self.sample,
            zeros,
            sampled,
            zeros,
            versions,
            zeros,
            SAMPLING,
            stop_reason,
            interruptions=self.interruptions,
        )


class DrawnDecoder:
    """Decodes completions of random lengths in a fixed number of slots, as the host `name`.

    `work(sample, turn)` draws the length of a completion, or of a turn. `latest()` returns the newest
    committed version and its digest; each step first adopts that version. With on_update=drain, a step adopts
    a version only if the host has nothing to decode under its current version; so all samples of a group
    decode under the same version.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        work: Callable[[SampleId, int | None], DrawnSample],
        latest: Callable[[], tuple[PolicyVersion, str]],
        seen: Callable[[str, StepResult, bool], None] = lambda *_: None,
    ) -> None:
        """`seen(name, result, is_waiting)` is called each step; is_waiting: whether samples lack slots."""
        self.name = name
        self._work, self._latest, self._seen = work, latest, seen
        self._slots, self._steps = config.generation.rollout_slots, config.generation.decode_steps
        self._limit, self._on_update = config.generation.max_tokens, config.on_update
        self._version: PolicyVersion = -1
        # None: the host adopts every version by itself, as where hosts decode for all versions.
        self._serves = -1 if config.places_versions else None
        self._queue: deque[DrawnSample] = deque()
        self._live: list[DrawnSample] = []
        self._kept: dict[SampleId, DrawnSample] = {}
        """Samples that are offered to another host."""
        self._episodes: dict[SampleId, PolicyVersion] = {}
        """The open samples that have had a turn here, and its version."""
        self._expected: dict[SampleId, PolicyVersion] = {}
        """The open samples that have not asked for their first turn here, and its oldest version."""

    def take(self, dispatch: e.Dispatch, prompt: tuple[int, ...] | None) -> None:
        if prompt is None:
            self._expected |= dict.fromkeys(dispatch.samples, dispatch.min_version)
            return
        for sample in dispatch.samples:
            self._queue.append(work := self._work(sample, None))
            work.min_version = dispatch.min_version

    def go_on(self, action: e.Continue, request: TurnRequest) -> None:
        work = self._work(action.sample, action.turn)
        work.min_version, work.before = action.min_version, len(request.tokens)
        self._expected.pop(action.sample, None)
        # A later turn goes before new samples, a first one before those that need a newer version.
        later = (
            place
            for place, other in enumerate(self._queue)
            if not other.turn and (action.turn or other.min_version > work.min_version)
        )
        self._queue.insert(next(later, len(self._queue)), work)

    def cancel(self, samples: Iterable[SampleId]) -> None:
        gone = set(samples)
        self._queue = deque(work for work in self._queue if work.sample not in gone)
        self._live = [work for work in self._live if work.sample not in gone]
        self._kept = {sample: work for sample, work in self._kept.items() if sample not in gone}
        self._episodes = {one: version for one, version in self._episodes.items() if one not in gone}
        self._expected = {one: version for one, version in self._expected.items() if one not in gone}

    def serve(self, version: PolicyVersion) -> None:
        if self._serves is not None:
            self._serves = version

    def hand_over(self, samples: Sequence[SampleId]) -> tuple[tuple[SampleId, ...], Offer]:
        own = {work.sample: work for work in [*self._live, *self._queue]}
        found = [own[sample] for sample in samples if sample in own]
        self.cancel(samples)
        self._kept |= {work.sample: work for work in found}
        # Copies: this host may have to take its own back while the other one already decodes.
        copies = [replace(work, spans=list(work.spans)) for work in found]
        return tuple(work.sample for work in found), copies

    def take_over(self, offer: Offer) -> str:
        begun = {work.version for work in offer if work.tokens}
        if missing := begun - self._held:
            return f"{self.name} does not hold version {min(missing)}"
        self._queue.extendleft(reversed(offer))
        return ""

    def take_back(self, samples: Sequence[SampleId]) -> None:
        self._queue.extendleft(self._kept.pop(sample) for sample in reversed(samples) if sample in self._kept)

    @property
    def _held(self) -> set[PolicyVersion]:
        """The versions of the parameters that the host keeps: the newest one and those of begun samples."""
        begun = [work for work in [*self._live, *self._queue, *self._kept.values()] if work.tokens]
        return {work.version for work in begun} | {self._version, *self._episodes.values()}

    def step(self) -> StepResult:
        adopted, recomputed = self._adopt()
        prefills = self._refill()
        versions = {work.version for work in self._live}
        live = len(self._live)
        tokens = sum(work.grow(self._steps) for work in self._live)
        ended = tuple(self._end(work) for work in self._live if work.tokens >= work.length)
        self._live = [work for work in self._live if work.tokens < work.length]
        held = len(versions | self._held)
        result = StepResult(adopted, prefills, live, tokens, ended, recomputed, len(versions), held)
        self._seen(self.name, result, bool(self._queue))
        return result

    def _adopt(self) -> tuple[e.HostAdopted | None, int]:
        """Adopt the newest version; return the event (None if nothing is adopted) and the tokens recomputed.

        Nothing is adopted if the host already has the newest version or, with on_update=drain, still has
        samples to decode under its current version.
        """
        version, digest = self._latest()
        is_busy = self._live or self._is_due() or self._is_expecting() or self._episodes
        if version <= self._version or (self._on_update == "drain" and is_busy):
            return None, 0
        if self._serves is not None and self._serves <= self._version:
            return None, 0
        self._version = version
        interrupted = [work for work in self._live if work.tokens]
        if self._on_update == "pinned":  # live samples keep the version that they started under
            interrupted = []
        for work in interrupted:
            work.version = version
            work.interruptions += 1
        rebuilt = sum(work.tokens for work in interrupted) if self._on_update == "recompute" else 0
        return e.HostAdopted(self.name, version, digest, len(interrupted)), rebuilt

    def _is_due(self) -> bool:
        """Whether samples wait for a slot, and the first of them may start under the current version."""
        return bool(self._queue) and self._queue[0].min_version <= self._version

    def _is_expecting(self) -> bool:
        """Whether first turns of episodes are still to come that may start under the current version."""
        return min(self._expected.values(), default=self._version + 1) <= self._version

    def _refill(self) -> int:
        started = 0
        while self._is_due() and len(self._live) < self._slots:
            self._live.append(work := self._queue.popleft())
            if not work.tokens:
                is_pinned = self._on_update == "pinned"
                work.version = self._episodes.get(work.sample, self._version) if is_pinned else self._version
                started += 1
        return started

    def _end(self, work: DrawnSample) -> Incoming:
        if work.fails:
            self._episodes.pop(work.sample, None)
            return e.SampleFailed(work.sample, self.name, "simulated"), None
        reason = "length" if work.length == self._limit else "stop"
        of = self.name, work.placed, reason, work.interruptions
        if work.turn is not None:
            self._episodes[work.sample] = work.version
            return e.TurnFinished(work.sample, 0, work.turn, *of), work.trajectory(reason)
        return e.SampleFinished(work.sample, *of), work.trajectory(reason)
