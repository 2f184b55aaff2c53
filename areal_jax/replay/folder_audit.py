"""Checks a run's folder against its journal, and the tables of the journal against each other.

`control.audit` checks the events and actions alone. Here the trajectories, rewards, snapshots and the chain
of digests in the journal, the metrics, and the digests of checkpoints, published weights, exports and
evaluations have to say the same as the events. A run that is under way, or was killed at any moment, passes:
each file may be one step ahead of the journal, or behind it, by what a kill leaves.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_jax.assembly.run_folder import (
    BRANCH,
    CHECKPOINTS,
    CONFIG_DIGEST,
    EXPORTS,
    config_digest,
    open_journal,
    run_config,
)
from areal_jax.config.tree import Config
from areal_jax.control import audit
from areal_jax.control import events as e
from areal_jax.control.reward_gate import paid, rewards_of
from areal_jax.control.state import from_plain, to_plain
from areal_jax.models.io.safetensors_folder import ABOUT, read_header, read_json
from areal_jax.models.io.safetensors_folder import CONFIG as MODEL_CONFIG
from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import FILE as METRICS
from areal_jax.observe.metrics import as_json, rows_so_far
from areal_jax.runtime.batch_figures import figures_of_rewards
from areal_jax.runtime.differences import MACHINE, name_of
from areal_jax.runtime.rows import RowMaker
from areal_jax.trajectories.codec import CodecError, decode, digest_of
from areal_jax.trajectories.journal import JournalError, Row, pack, reading_all, unpack, with_rewards
from areal_jax.trajectories.paths import paths_of, spans_of
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import NOT_SAMPLED, ArealError, Group, Prompt, SampleId, Trajectory
from areal_jax.weights.folder import weights_folder
from areal_jax.weights.manifest import checked_manifest, combine, committed

PARAMS = "params."
"""Beginning of the names of the parameters' leaves in a checkpoint."""

UNLIKE = ("checkpoints", "digests")
"""Fields of a snapshot that depend on trainer.keep_checkpoints, which a resume may change."""


TOLERANCE = 1e-9
"""Largest relative difference of a figure that is computed again, which another version of numpy may give."""

FAR = 1_000_000
"""A group's ordinal that exceeds those before it by more is not stored by place (`GroupSet`)."""

MALFORMED = (*audit.MALFORMED, ArealError)
"""What reading a value of a wrong form may raise."""


@dataclass
class SeenGroup:
    """What the events say of a group."""

    finished: dict[SampleId, bool] = field(default_factory=dict)
    """Each finished sample -> whether its trajectory must be stored."""
    episodes: set[SampleId] = field(default_factory=set)
    """Samples with a turn."""
    scored: dict[int, e.RewardScored] = field(default_factory=dict)
    """By attempt: the group's rewards."""


class GroupSet:
    """A set of (ordinal, attempt). Groups that were not restarted, nearly all, take a byte each."""

    def __init__(self) -> None:
        self._firsts = bytearray()
        self._others: set[tuple[int, int]] = set()

    def __contains__(self, group: tuple[int, int]) -> bool:
        ordinal, attempt = group
        is_first = attempt == 0 and 0 <= ordinal < len(self._firsts)
        return (is_first and bool(self._firsts[ordinal])) or group in self._others

    def add(self, ordinal: int, attempt: int) -> None:
        # Ordinals come nearly in order; a number far beyond is none of the run's.
        if attempt == 0 and 0 <= ordinal < len(self._firsts) + FAR:
            self._firsts.extend(bytes(max(0, ordinal + 1 - len(self._firsts))))
            self._firsts[ordinal] = True
        else:
            self._others.add((ordinal, attempt))


class FolderAudit:
    """Compares a run's folder with the journal's events, which `seen` takes in order.

    The constructor looks at tables and files before the events, which therefore have at least what these
    have; the run may go on meanwhile. What is known of a group is forgotten once it was trained or dropped:
    memory depends on the number of groups in flight and of stored trajectories, not on the run's length.
    """

    def __init__(self, folder: Path, config: Config, journal: SqliteQueue) -> None:
        self._folder, self._config, self._journal = folder, config, journal
        self._found: list[str] = []
        self.audit = audit.Audit(config)
        self._bound = journal.last_seq
        """Events up to this number were there before tables and files were read."""
        self._evals: list[dict[str, Any]] = []
        try:
            self._evals = read_evals(folder)
        except ArealError as error:
            self._found.append(str(error))
        self._metrics = rows_so_far(folder)
        self._count = 0
        """Number of rows that `_metrics` has yielded."""
        self._checkpoints = committed(folder / CHECKPOINTS)
        self._weights = weights_folder(config, folder)
        self._versions = committed(self._weights)
        self._exports = [path for path in (folder / EXPORTS).glob("*") if path.name.isdecimal()]
        self._broken = journal.broken_link()
        self._snapshots = set(journal.snapshot_seqs())
        self._stored: defaultdict[int, set[SampleId]] = defaultdict(set)
        """Ordinal -> samples with a stored trajectory, of groups that are neither trained nor dropped."""
        for sample in journal.stored_samples():
            self._stored[sample.ordinal].add(sample)

        self._counts = RowMaker(dict, (), control=config.control)
        self._is_counted = True
        """Whether the next row counts all that `_counts` has seen: after a resume an older version may have
        made it (`RowMaker.COUNTED`)."""
        self._seq = 0
        self._digests: list[str] = []
        """Digest of the parameters after each trained batch."""
        self._trained_before = 0
        """Number of batches trained by events that were there before the files were read."""
        self._is_training = False
        self._published: dict[int, set[str]] = {}
        """Version -> digests of its parameters as published."""
        self._is_repeated: set[int] = set()
        """Versions that a resume trained again, maybe with other bits than the journal has."""
        self._groups: defaultdict[int, SeenGroup] = defaultdict(SeenGroup)
        """By ordinal: groups that are neither trained nor dropped."""
        self._rewarded = GroupSet()
        """(ordinal, attempt) of all groups with a RewardScored."""
        self._missing: deque[tuple[int, str]] = deque()
        """(step, violation) for each sample of a trained group that has no stored trajectory. It is none if
        a newer checkpoint follows."""
        branch = journal.header.get(BRANCH)
        self._first_own = branch["step"] if branch else 0
        """Number of the first batch that was trained with this run's config."""
        self._saved = self._first_own
        """Version of the newest checkpoint by the events that were there before the files were read."""

    def see(self, row: Row) -> None:
        """Takes in the journal's next row."""
        if not self._seq and row.seq != 1:
            self._wrong(f"the journal begins with event {row.seq}; the events before it are missing")
        self._seq = row.seq
        try:
            self._see(row)
        except MALFORMED as error:
            self._wrong(f"row {row.seq}: {type(row.event).__name__} has values of a wrong form: {error!r}")
        self.audit.see(row.seq, row.event, row.actions)
        if (plane := self.audit.plane) is not None:
            self._is_training = plane.state.training is not None
        if row.seq in self._snapshots:
            self._snapshots.remove(row.seq)
            self._check_snapshot(row.seq)

    def violations(self) -> list[str]:
        """Returns what contradicts the events; call it once all of them were seen."""
        for check in (
            self._check_header,
            self._check_rows,
            self._check_checkpoints,
            self._check_weights,
            self._check_exports,
            self._check_evaluations,
            self._check_trajectories,
            self._check_rewards,
        ):
            try:
                check()
            except MALFORMED as error:
                self._wrong(
                    f"{check.__name__.removeprefix('_check_')} have values of a wrong form: {error!r}"
                )
        for seq in self._snapshots:
            self._wrong(f"there is a snapshot of the state after event {seq}, but no such event")
        if self._broken:
            self._wrong(self._broken)
        # Without a digest of config.yaml, an older version of areal-jax began the journal.
        if CONFIG_DIGEST in self._journal.header and not self._journal.is_chained:
            self._wrong("the digests of the journal's events are missing, which this run has written")
        return self._found

    def _wrong(self, what: str) -> None:
        self._found.append(what)

    # --- events ---------------------------------------------------------------------------------------------

    def _see(self, row: Row) -> None:
        is_early, event = row.seq <= self._bound, row.event
        plane = self.audit.plane
        is_stale = plane is not None and plane.state.is_stale(event)
        batch = plane.state.training if plane is not None else None
        match event:
            case e.SampleFinished(sample) if not is_stale:
                # Older versions of areal-jax recorded no digest.
                self._groups[sample.ordinal].finished[sample] = is_early and bool(event.digest)
                if sample in self._stored.get(sample.ordinal, ()):
                    self._check_trajectory(sample, event)
            case e.RewardScored(ordinal, attempt) if (ordinal, attempt) not in self._rewarded:
                self._rewarded.add(ordinal, attempt)
                self._check_reward(event)
                if not is_stale:
                    self._groups[ordinal].scored[attempt] = event
            case e.TurnFinished(sample) if not is_stale:
                self._groups[sample.ordinal].episodes.add(sample)
            case e.RunStarted(digest):
                self._published.setdefault(0, set()).add(digest)
            case e.RunResumed():
                self._is_counted = False
                if self._last_version not in self._published:
                    self._is_repeated.add(self._last_version)
            case e.VersionCommitted(version, digest):
                self._published.setdefault(version, set()).add(digest)
            case e.VersionReissued(version, _, digest):
                self._published.setdefault(version, set()).add(digest)
                self._is_repeated.update(range(version, self._last_version + 1))
            case e.CheckpointCommitted(version) if is_early:
                self._saved = max(self._saved, version)
                while self._missing and self._missing[0][0] < self._saved:
                    self._missing.popleft()
            case e.BatchTrained(step) if not is_stale:
                self._see_batch(event, batch)
                self._check_metrics(event)
                self._digests.append(event.digest)
                self._trained_before += is_early
                for ordinal in event.ordinals:
                    self._end_group(ordinal, step)
        for action in row.actions:
            if isinstance(action, e.Drop):
                self._end_group(action.ordinal)
        self._counts.see(event, row.actions)

    @property
    def _last_version(self) -> int:
        return len(self._digests)

    def _end_group(self, ordinal: int, step: int | None = None) -> None:
        """Checks which trajectories of a group are stored, and forgets the group.

        `step`: the batch that trained it; None if it was dropped.
        """
        stored, seen = self._stored.pop(ordinal, set()), self._groups.pop(ordinal, SeenGroup())
        self._check_ends(stored, seen)
        if step is None:
            return
        for sample in seen.finished.keys() - stored:
            if seen.finished[sample] and (stored or step >= self._saved):
                said = self._said_missing(sample, f"it was trained in step {step}")
                # Trajectories are deleted by groups, after a checkpoint.
                self._wrong(said) if stored else self._missing.append((step, said))

    def _check_ends(self, stored: Iterable[SampleId], seen: SeenGroup) -> None:
        for sample in stored:
            if sample not in seen.finished and sample not in seen.episodes:
                self._wrong(f"there is a trajectory of sample {name_of(sample)}, but no event of its end")

    def _said_missing(self, sample: SampleId, fate: str) -> str:
        return (
            f"sample {name_of(sample)} has no stored trajectory, but {fate}, and the newest checkpoint is "
            f"{self._saved}; trajectories are deleted by groups, after a checkpoint"
        )

    def _check_snapshot(self, seq: int) -> None:
        """Compares the state after an event with the snapshot that was stored then."""
        stored, plane = self._journal.snapshot_at(seq), self.audit.plane
        if stored is None or plane is None:
            return
        try:
            then = unpack(pack(to_plain(from_plain(stored))))
        except MALFORMED as error:
            self._wrong(f"row {seq}: the stored snapshot of the state has values of a wrong form: {error!r}")
            return
        now = unpack(pack(plane.snapshot()))
        names = [name for name in now if name not in UNLIKE and now[name] != then.get(name)]
        if names:
            self._wrong(
                f"row {seq}: the stored snapshot of the state has {names[0]} {then.get(names[0])}, but "
                f"the events give {now[names[0]]}"
            )

    def _see_batch(self, event: e.BatchTrained, batch: e.Train | None) -> None:
        """Computes the figures of a batch's row again that follow from the journal, and compares them."""
        # An older version of areal-jax, or another config, made the row, maybe in another way.
        if MACHINE not in event.metrics or event.step < self._first_own:
            self._counts.of_journal(event.step, ())
            if self._journal.is_chained and event.step >= self._first_own:
                self._wrong(f"step {event.step}: the metrics lack {MACHINE}")
            return
        groups = self._groups_of(batch) if batch is not None else ()
        gates = () if batch is None else batch.gates
        if groups:
            again = self._counts.of_journal(event.step, groups, gates)
        else:
            again = self._counts.of_journal(event.step, (), gates) | self._reward_figures(batch)
        again["params_digest"] = event.digest
        counted = set() if self._is_counted else set(RowMaker.COUNTED)
        self._is_counted = True
        for name in sorted((again.keys() & event.metrics.keys()) - counted):
            if not _is_near(event.metrics[name], again[name]):
                self._wrong(
                    f"step {event.step}, {name}: the metrics have {event.metrics[name]!r}, but samples, "
                    f"rewards and events give {again[name]!r}"
                )

    def _groups_of(self, batch: e.Train) -> tuple[Group, ...]:
        """Returns the groups of a batch with the rewards that it was trained on.

        Empty if trajectories were deleted; `_check_trajectories` says whether they should be there.
        """
        size, groups = self._config.algorithm.group_size, []
        if any(not self._stored.get(ordinal) for ordinal in batch.ordinals):
            return ()
        try:
            for ordinal, attempt in zip(batch.ordinals, batch.attempts, strict=True):
                members = self._journal.group(ordinal, attempt, size)
                scored = self._groups[ordinal].scored[attempt]
                groups.append(Group(ordinal, Prompt(""), with_rewards(members, scored)))
        except (JournalError, CodecError):
            return ()
        return paid(groups, batch.gates)

    def _reward_figures(self, batch: e.Train | None) -> dict[str, float]:
        if batch is None:
            return {}
        scored = [
            self._groups[ordinal].scored[attempt]
            for ordinal, attempt in zip(batch.ordinals, batch.attempts, strict=True)
        ]
        return figures_of_rewards(
            [rewards_of(one.rewards, [dict(parts) for parts in one.parts], batch.gates) for one in scored]
        )

    # --- tables ---------------------------------------------------------------------------------------------

    def _check_trajectory(self, sample: SampleId, event: e.SampleFinished) -> None:
        """Compares a stored trajectory with the event of its end, and with the run's settings."""
        if (payload := self._journal.payload(sample)) is None:  # deleted meanwhile
            return
        try:
            one = decode(payload)
            self._check_settings(sample, one)
            stored = {
                "digest": digest_of(one),
                "spans": tuple(spans_of(one)),
                "stop_reason": one.stop_reason,
                "interruptions": one.interruptions,
            }
        except MALFORMED as error:
            self._wrong(f"the trajectory of sample {name_of(sample)} cannot be read: {error}")
            return
        for name, value in stored.items():
            recorded = getattr(event, name)
            # Older versions of areal-jax recorded no digest.
            if recorded != value and (recorded or name != "digest"):
                self._wrong(
                    f"sample {name_of(sample)}, {name}: its event has {recorded!r}, its stored trajectory "
                    f"{value!r}"
                )
                return

    def _check_settings(self, sample: SampleId, one: Trajectory) -> None:
        """Checks what its digest leaves out, because it follows from the run's settings."""
        g, name = self._config.generation.sampling, name_of(sample)
        if one.sample != sample:
            self._wrong(f"the stored trajectory of sample {name} is that of {name_of(one.sample)}")
        if self._config.algorithm.samples == "reference":  # no policy sampled it
            return
        if any((path.loss_mask != (path.versions != NOT_SAMPLED)).any() for path in paths_of(one)):
            self._wrong(f"sample {name}, loss_mask: it does not select the tokens that a policy sampled")
        own, wanted = ((s.temperature, s.top_k, s.top_p, s.min_p) for s in (one.sampling, g))
        if own != wanted:
            self._wrong(f"sample {name} was sampled with {one.sampling}, but the config has {g}")

    def _check_trajectories(self) -> None:
        for ordinal, seen in self._groups.items():
            for sample in seen.finished.keys() - self._stored.get(ordinal, set()):
                if seen.finished[sample]:
                    self._wrong(self._said_missing(sample, "it is not trained"))
        for ordinal, stored in self._stored.items():
            self._check_ends(stored, self._groups.get(ordinal, SeenGroup()))
        self._found += [said for step, said in self._missing if step >= self._saved]

    def _check_reward(self, event: e.RewardScored) -> None:
        stored = self._journal.scored(event.ordinal, event.attempt)
        group = f"group {event.ordinal}" + (f", attempt {event.attempt}" if event.attempt else "")
        if stored is None:
            self._wrong(f"{group} was scored, but its rewards are not stored")
        elif _wire(stored) != _wire(event):
            self._wrong(f"{group}: its event has {event}, the stored rewards are {stored}")

    def _check_rewards(self) -> None:
        for ordinal, attempt in self._journal.rewarded():
            if (ordinal, attempt) not in self._rewarded:
                group = f"group {ordinal}" + (f", attempt {attempt}" if attempt else "")
                self._wrong(f"{group} has stored rewards, but no event RewardScored")

    # --- files ----------------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        recorded = self._journal.header.get(CONFIG_DIGEST)
        if recorded is not None and recorded != (found := config_digest(self._folder)):
            self._wrong(
                f"config.yaml has digest {found}, but had {recorded} when the run started; `areal-jax "
                "resume` takes changes as words, which do not change the file"
            )

    def _check_metrics(self, batch: e.BatchTrained) -> None:
        """Compares the next row of the file with that of the batch."""
        if (row := self._next_row()) is None or (recorded := as_json(batch.metrics)) == row:
            return
        names = [
            name
            for name in sorted(recorded.keys() | row.keys())
            if recorded.get(name) != row.get(name) or (name in recorded) != (name in row)
        ]
        self._wrong(
            f"{METRICS}, step {batch.step}, {names[0]}: the file has {row.get(names[0])!r}, the journal "
            f"{recorded.get(names[0])!r}"
        )

    def _next_row(self) -> dict[str, Any] | None:
        """Returns the next row of the file; None at its end, or if it cannot be read."""
        try:
            row = next(self._metrics, None)
        except ArealError as error:
            self._wrong(str(error))
            return None
        self._count += row is not None
        return row

    def _check_rows(self) -> None:
        trained = len(self._digests)
        while self._next_row() is not None:
            pass
        if self._count > trained:
            self._wrong(
                f"{METRICS} has {self._count} steps, but the journal ends after {trained}: the end of the "
                "journal is missing"
            )
        # A kill between the journal's row and the file's leaves one row less.
        if self._count < self._trained_before - 1:
            self._wrong(
                f"{METRICS} has {self._count} of the journal's {self._trained_before} steps; `areal-jax "
                "resume` writes the file anew"
            )

    def _is_known(self, what: str, version: int) -> bool:
        """Whether the journal may have come to this version; reports it if not."""
        newest = self._last_version
        # A kill may come after a version was written, and before its batch was journaled.
        if version <= newest + self._is_training:
            return True
        self._wrong(
            f"{what} {version} is there, but the journal ends at version {newest}: the end of the journal is "
            "missing"
        )
        return False

    def _digest_of(self, version: int) -> str:
        """Returns the journaled digest of a version's parameters; "" if these may have other bits."""
        is_trained = 0 < version <= self._last_version and version not in self._is_repeated
        return self._digests[version - 1] if is_trained else ""

    def _check_checkpoints(self) -> None:
        for version in self._checkpoints:
            path = self._folder / CHECKPOINTS / str(version)
            if not self._is_known("checkpoint", version) or (leaves := self._leaves(path)) is None:
                continue
            params = {
                name.removeprefix(PARAMS): digest
                for name, digest in leaves.items()
                if name.startswith(PARAMS)
            }
            self._compare(f"checkpoint {version}", combine(params), {self._digest_of(version)} - {""})
        if self._saved > max(self._checkpoints, default=0):
            older = f"checkpoint {self._checkpoints[-1]}" if self._checkpoints else "the start"
            self._wrong(
                f"checkpoint {self._saved} is missing, which the journal says is the newest one: it was "
                "deleted, or not copied. The run can be read and replayed without it; `resume` goes back to "
                f"{older}, and needs the trajectories since then; `eval` and `convert` use an older version, "
                "or one in weights/"
            )

    def _check_weights(self) -> None:
        for version in self._versions:
            path = self._weights / str(version)
            if self._is_known("published version", version) and (leaves := self._leaves(path)) is not None:
                known = self._published.get(version, set())
                self._compare(f"published version {version}", combine(leaves), known)

    def _leaves(self, path: Path) -> Mapping[str, str] | None:
        """Returns the digests of a stored version's leaves; None if it is damaged, or deleted meanwhile."""
        try:
            return checked_manifest(path).leaves
        except ArealError as error:
            if path.exists():
                self._wrong(str(error))
            return None

    def _check_exports(self) -> None:
        for path in self._exports:
            try:
                about = read_json(path / MODEL_CONFIG).get(ABOUT, {})
                read_header(path)
            except ArealError as error:
                if path.exists():
                    self._wrong(f"export {path.name} cannot be read: {error}")
                continue
            version = int(path.name)
            if self._is_known("export", version) and about.get("version") != version:
                self._wrong(f"export {version} is of version {about.get('version')}")
            self._compare(f"export {version}", str(about.get("digest")), {self._digest_of(version)} - {""})

    def _check_evaluations(self) -> None:
        for line in self._evals:
            version = int(line["version"])
            if self._is_known("an evaluation of version", version) and (own := self._digest_of(version)):
                known = {own, *self._published.get(version, ())}
                self._compare(f"the evaluation of version {version}", line["digest"], known)

    def _compare(self, what: str, digest: str, known: set[str]) -> None:
        if known and digest not in known:
            self._wrong(f"{what} has digest {digest}, but the journal has {' and '.join(sorted(known))}")


def _wire(scored: e.RewardScored) -> bytes:
    """Returns the rewards as bytes, by which two NaN are equal."""
    return pack([scored.rewards, scored.parts, scored.notes])


def _is_near(recorded: Any, again: Any) -> bool:
    """Whether two figures are equal, but for rounding; mappings are compared value by value."""
    if isinstance(recorded, Mapping) and isinstance(again, Mapping):
        return recorded.keys() == again.keys() and all(_is_near(recorded[k], again[k]) for k in again)
    if isinstance(recorded, int | float) and isinstance(again, int | float):
        return recorded == again or math.isclose(recorded, again, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return recorded == again


@reading_all()
def audit_run(folder: Path) -> audit.AuditResult:
    """Check that the run kept its invariants, and that its files and the journal's tables agree with them.

    See `areal_jax.control.audit` and `FolderAudit`.
    """
    with open_journal(folder) as journal:
        of_folder = FolderAudit(folder, run_config(folder), journal)
        for row in journal.rows():
            of_folder.see(row)
        found = of_folder.audit.result()
        violations = [*found.violations, *of_folder.violations()]
    return replace(found, ok=not violations, violations=violations)
