"""Says where a token of a run comes from: weights, random key, sampler settings, log-prob and host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.algorithms.sampling import GENERATOR, sample_key
from areal_jax.assembly.run_folder import open_journal, run_config, sample_id
from areal_jax.config.tree import Config
from areal_jax.control import events as e
from areal_jax.models.experts import NO_EXPERT
from areal_jax.report.viewer import Viewer
from areal_jax.runtime.differences import name_of
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError, SampleId, Sampling, Trajectory


@dataclass(frozen=True)
class Provenance:
    """Where one sampled token comes from, as the journal records it."""

    sample: str
    token: int
    """Index of the token in its sample, prompt included."""
    id: int
    text: str
    version: int
    """The policy version that sampled it."""
    digest: str
    """Digest of this version's weights as they were published to the hosts."""
    key: tuple[int, int]
    """The token's raw random key (threefry): it follows from run.seed, the sample's numbers and `token`."""
    sampling: Sampling
    support: tuple[int, ...] | None
    """The token ids from which it was drawn; None: from all."""
    logp: float
    """Its log-prob when it was sampled."""
    turn: int
    hosts: tuple[str, ...]
    """The hosts that decoded the sample, in order; several if the sample was moved."""
    rebuilds: int
    """How often the KV before the token had been computed again under a newer version."""
    experts: tuple[int, ...] | None
    """Of each layer in turn, the numbers of the experts through which its host passed it on to later tokens;
    None: not kept, or nothing was sampled after it.
    """

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as values that JSON can represent."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns the fields as text, a line each."""
        s, kept = self.sampling, "all ids" if self.support is None else f"{len(self.support)} ids"
        lines = [
            f"sample {self.sample}, token {self.token}: id {self.id}, {self.text!r}",
            f"weights: version {self.version}, digest as published {self.digest}",
            f"random key: {self.key[0]:08x} {self.key[1]:08x}",
            f"drawn from {kept} at temperature {s.temperature:g} (top_k {s.top_k}, top_p {s.top_p:g}, "
            f"min_p {s.min_p:g})",
            f"log-prob when sampled: {self.logp!r}",
            f"turn {self.turn}, on {', then '.join(self.hosts)}; its KV rebuilt {self.rebuilds} times",
        ]
        if self.experts is not None:
            lines.append(f"experts, layer after layer: {' '.join(map(str, self.experts))}")
        return lines


DIGESTS = e.RunStarted, e.VersionCommitted, e.VersionReissued
"""Events that give a version its digest."""


def provenance(folder: Path, name: str, token: int) -> Provenance:
    """Returns where a token of the sample named ORDINAL/MEMBER[/ATTEMPT] comes from.

    `token`: its index in the sample, prompt included. Raises ArealError if the journal does not have the
    sample, or if the token was not sampled.
    """
    sample, config = sample_id(name), run_config(folder)
    with open_journal(folder) as journal:
        one = journal.trajectory(sample)
        _require_sampled(one, token)
        finished = journal.finished(sample)
        if finished is None:
            raise ArealError(
                f"sample {name_of(sample)} has a trajectory in {folder}, but no event of its end; check the "
                f"folder with `areal-jax audit {folder}`"
            )
        digest, hosts = _history(journal, sample, int(one.versions[token]))
        support = None if one.support is None else tuple(int(i) for i in one.support[token] if i >= 0)
        return Provenance(
            sample=name_of(sample),
            token=token,
            id=int(one.tokens[token]),
            text=Viewer(journal, config).text([int(one.tokens[token])]),
            version=int(one.versions[token]),
            digest=digest,
            key=_key(config, sample, token, _segment(journal, sample, int(one.turn_ids[token]))),
            sampling=one.sampling,
            support=support or None,
            logp=float(one.behavior_logp[token]),
            turn=int(one.turn_ids[token]),
            hosts=hosts,
            rebuilds=sum(count <= token for count in finished.rebuilds),
            experts=_experts(one, token),
        )


def _experts(one: Trajectory, token: int) -> tuple[int, ...] | None:
    if one.experts is None or one.experts[token, 0] == NO_EXPERT:
        return None
    return tuple(one.experts[token].tolist())


def _require_sampled(one: Trajectory, token: int) -> None:
    sampled = np.flatnonzero(one.loss_mask)
    if not sampled.size:
        raise ArealError(f"sample {name_of(one.sample)} is a reference answer, which no policy sampled")
    if not 0 <= token < len(one.tokens) or not one.loss_mask[token]:
        kind = "part of the prompt" if 0 <= token < len(one.tokens) else "beyond the sample"
        raise ArealError(
            f"--token {token} is {kind}: of the {len(one.tokens)} tokens of sample {name_of(one.sample)}, "
            f"those from {sampled[0]} to {sampled[-1]} were sampled; give one of them"
        )


def _key(config: Config, sample: SampleId, token: int, segment: int) -> tuple[int, int]:
    key = sample_key(*np.asarray([config.run.seed, *sample, segment], np.int32))  # type: ignore[arg-type]
    own = jax.random.fold_in(jax.random.wrap_key_data(key, impl=GENERATOR), token)
    first, second = np.asarray(jax.random.key_data(own)).tolist()
    return first, second


def _segment(journal: SqliteQueue, sample: SampleId, turn: int) -> int:
    """Returns the number of the episode's branch in which a turn was sampled; 0 without a workflow."""
    for row in journal.rows_of(sample.ordinal):
        if isinstance(row.event, e.TurnAdded) and (row.event.sample, row.event.turn) == (sample, turn):
            return row.event.segment
    return 0


def _history(journal: SqliteQueue, sample: SampleId, version: int) -> tuple[str, tuple[str, ...]]:
    """Returns the digest of `version` as hosts had it, and the hosts that decoded the sample, in order.

    A resume may have given the version other parameters later: the digest is the last one before the sample's
    end; "" if the journal has none. The hosts are the first one, and each that took the sample over.
    """
    hosts, end = list[str](), 0
    for row in journal.rows_of(sample.ordinal):
        hosts += [one for one in _carriers(row.event, row.actions, sample) if not hosts or hosts[-1] != one]
        if isinstance(row.event, e.SampleFinished) and row.event.sample == sample:
            end = row.seq
            break
    seq = max(journal.last(kind.__name__, version, end) for kind in DIGESTS)
    event = journal.row(seq).event if seq else None
    digest = event.new if isinstance(event, e.VersionReissued) else getattr(event, "digest", "")
    return digest, tuple(hosts)


def _carriers(event: e.Event, actions: Iterable[e.Action], sample: SampleId) -> Iterable[str]:
    if isinstance(event, e.SamplesMoved) and sample in event.samples:
        yield event.host
    for action in actions:
        if isinstance(action, e.Dispatch) and sample in action.samples:
            yield action.host
