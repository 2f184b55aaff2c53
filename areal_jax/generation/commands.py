"""Commands to a generation host, its record of each sample (`HostSample`), and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from areal_jax.control import events
from areal_jax.control.events import Event, HostCommand
from areal_jax.generation.slots import Penalties, Prefix
from areal_jax.types import PolicyVersion, SampleId, Sampling


@dataclass(frozen=True)
class Start:
    """Command: decode samples of one prompt (token ids) with weights version `min_version` or newer.

    If `sampling` or `seed` is None, the host's default is used. Only clients' requests may have `penalties`.
    """

    samples: tuple[SampleId, ...]
    prompt: tuple[int, ...]
    min_version: int
    sampling: Sampling | None = None
    penalties: Penalties | None = None
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a sample, in addition to the host's stop tokens."""
    drawn_as: int | None = None
    """Ordinal from which random draws are derived instead of the samples' ordinal; None: the samples'.

    Samples of equal seed, ordinal, member, attempt and segment draw the same numbers, whatever slots and
    neighbours they have.
    """
    turn: int | None = None
    """Number of the turn of an episode; None for samples without a workflow."""
    segment: int = 0
    """Number of the branch of an episode, on which random draws depend."""
    is_request: bool = False
    """Whether a client requested the samples; False: they are rollouts, samples to train on.

    A host that drains (on_update=drain) starts no request until it has loaded the newer weights.
    """

    def works(self, sampling: Sampling, seed: int, stops: tuple[int, ...]) -> list[HostSample]:
        """Returns a new record of each sample of this command.

        The arguments are the host's defaults: `sampling` and `seed` are used where this command has None, and
        the token ids `stops` end a sample in addition to this command's `stop_tokens`.
        """
        seed = seed if self.seed is None else self.seed
        sampling, stops = self.sampling or sampling, stops + self.stop_tokens
        return [HostSample(sample, self, sampling, seed, stops) for sample in self.samples]


@dataclass(frozen=True)
class Expect:
    """Command: `samples` are episodes, the first turns of which follow as Starts for `min_version`.

    A host that drains (on_update=drain) counts them among those that it ends under the version that it has,
    if that is not older than `min_version`, until a Start or a Stop of each comes.
    """

    samples: tuple[SampleId, ...]
    min_version: int


@dataclass(frozen=True)
class Stop:
    """Command: drop `samples` without a result, waiting or in a slot; if empty, end the host's loop."""

    samples: tuple[SampleId, ...] = ()


@dataclass(frozen=True)
class Pause:
    """Command: decode nothing and start no sample until Unpause; samples in slots keep slots and KV."""


@dataclass(frozen=True)
class Unpause:
    """Command: resume decoding after a Pause."""


@dataclass(frozen=True)
class Wake:
    """Command: an idle host takes one more step, in which it loads newer weights if there are any."""


@dataclass(frozen=True)
class HandOver:
    """Command: stop decoding `samples`, and call `to` with copies of their records, tokens and KV included.

    Samples that are not on this host are left out. The host keeps the others, and the parameters of their
    version, until Stop forgets them or TakeBack returns them to its queue.
    """

    samples: tuple[SampleId, ...]
    to: Callable[[list[HostSample]], None]


@dataclass(frozen=True)
class TakeOver:
    """Command: continue `works`, samples of another host, with the KV computed there instead of a prefill.

    The host calls `answer` with "" or, if it takes none of them, with the reason: it does not hold the
    parameters with which the KV was computed, or lays out KV pages differently.
    """

    works: Sequence[HostSample]
    answer: Callable[[str], None]


InboxCommand = (
    Start | Expect | Stop | Pause | Unpause | Wake | HandOver | TakeOver | events.Serve | events.TakeBack
)
"""What a host obeys. Serve and TakeBack are the control plane's own; `command_of` translates its others."""


class Tokens(NamedTuple):
    """The tokens that one decode call sampled for one sample, with their log-probs and policy version."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    version: PolicyVersion


@dataclass(frozen=True, eq=False)
class SoFar:
    """A half-decoded sample without a slot: records and KV of the sample's n tokens, prompt included.

    A token's record contains its id, log-prob, weights version and more.
    """

    rows: np.ndarray  # (n,) of `live_slots.Records`
    kv: Prefix


@dataclass(eq=False)
class HostSample:
    """A host's record of one sample, kept from the sample's arrival at the host until the sample ends."""

    sample: SampleId
    start: Start
    """The command that created the sample, from which `Start.works` computes the next three fields."""
    sampling: Sampling
    seed: int
    stops: tuple[int, ...]
    so_far: SoFar | None = None
    """Tokens and KV while the sample is half-decoded and has no slot; else None."""
    version: PolicyVersion = -1
    """Weights version that decodes the sample's next token; -1 until the sample first gets a slot."""
    digest: str = ""
    """Digest (hash) of the parameters of `version`."""
    reused: tuple[int, ...] = ()
    """As in TurnFinished: the earlier turn with the KV of which this turn began, for how many tokens."""
    is_stale: bool = False
    """Whether the sample's KV was computed under an older version than `version` and must be recomputed."""
    prompt_version: PolicyVersion = -1
    """Version under which the prompt was prefilled; -1: other samples cannot share the prompt's pages."""
    interruptions: int = 0
    rebuilds: tuple[int, ...] = ()
    """Number of tokens, prompt included, at each rebuild of the KV."""

    def move_to_host_memory(self) -> None:
        """Copies the KV of a half-decoded sample to host memory, and frees that on the device."""
        if self.so_far is not None:
            self.so_far = SoFar(self.so_far.rows, jax.device_get(self.so_far.kv))


@dataclass
class Statistics:
    """A host's state after its last step or command; `version` is -1 until the host has loaded weights.

    `generated_tokens` and the fields after it are totals since the host's start.
    """

    version: PolicyVersion = -1
    digest: str = ""
    slots: int = 0
    live: int = 0
    waiting: int = 0
    is_paused: bool = False
    free_pages: int = 0
    pages: int = 0
    kept_tokens: int = 0
    """Number of tokens with KV in main memory, for the next turns of open episodes."""
    held_versions: tuple[PolicyVersion, ...] = ()
    generated_tokens: int = 0
    interruptions: int = 0
    """Number of version changes in the middle of samples (after their first token), summed over samples."""
    prefilled_tokens: int = 0
    """Number of tokens of prompts for which the KV was computed, once for all samples that share it."""
    reused_tokens: int = 0
    """Number of tokens with KV that a turn of an episode took over from an earlier turn."""
    recomputed_tokens: int = 0
    """Number of tokens for which the KV was computed again under a newer version."""
    swaps: int = 0
    swap_s: float = 0.0
    evictions: int = 0
    prefills: int = 0


def command_of(
    action: HostCommand, payload: Any, emit: Callable[[Event, list[HostSample] | None], None]
) -> InboxCommand:
    """Returns the host's command for an action of the control plane.

    `payload`: for a Dispatch the prompt's tokens, or None if the samples have a workflow; for a Continue a
    TurnRequest; for a Fetch the samples to take over. `emit(event, works)` reports the answer to a Move, with
    the samples to take over, or to a Fetch, with None.
    """
    match action:
        case events.Dispatch(samples, _, min_version):
            if payload is None:
                return Expect(samples, min_version)
            return Start(samples, tuple(payload), min_version)
        case events.Continue(sample, segment, turn, _, min_version):
            return Start(
                samples=(sample,),
                prompt=payload.tokens,
                min_version=min_version,
                sampling=payload.sampling,
                turn=turn,
                segment=segment,
            )
        case events.Cancel(samples):
            return Stop(samples)
        case events.Serve() | events.TakeBack():
            return action
        case events.Move(samples, host, target):

            def offer(works: list[HostSample]) -> None:
                if works:
                    emit(events.SamplesOffered(tuple(work.sample for work in works), host, target), works)

            return HandOver(samples, offer)
        case events.Fetch(samples, host, source):

            def answer(reason: str) -> None:
                moved = events.SamplesMoved(samples, host, source)
                emit(events.MoveFailed(samples, host, source, reason) if reason else moved, None)

            return TakeOver(payload, answer)
