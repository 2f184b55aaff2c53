"""Checks a run's folder against its journal, and the tables of the journal against each other.

`control.audit` checks the events and actions alone. Here the trajectories, rewards, snapshots and the chain
of digests in the journal, the metrics, and the digests of checkpoints, published weights, exports and
evaluations have to say the same as the events. A run that is under way, or was killed at any moment, passes:
each file may be one step ahead of the journal, or behind it, by what a kill leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from areal_jax.control.machine import ControlPlane
from areal_jax.control.reward_gate import paid, rewards_of
from areal_jax.control.state import from_plain, to_plain
from areal_jax.models.io.safetensors_folder import ABOUT, read_header, read_json
from areal_jax.models.io.safetensors_folder import CONFIG as MODEL_CONFIG
from areal_jax.observe.evals import read_evals
from areal_jax.observe.metrics import FILE as METRICS
from areal_jax.observe.metrics import as_json, read_rows
from areal_jax.runtime.batch_figures import figures_of_rewards
from areal_jax.runtime.differences import name_of
from areal_jax.runtime.rows import RowMaker
from areal_jax.runtime.trainer_loop import MACHINE
from areal_jax.trajectories.codec import CodecError, decode, digest_of
from areal_jax.trajectories.journal import JournalError, Row, pack, unpack, with_rewards
from areal_jax.trajectories.paths import paths_of, spans_of
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import NOT_SAMPLED, ArealError, Group, Prompt, SampleId, Trajectory
from areal_jax.weights.digest import combine
from areal_jax.weights.folder import weights_folder
from areal_jax.weights.staged import checked_manifest, committed

PARAMS = "params."
"""Beginning of the names of the parameters' leaves in a checkpoint."""

UNLIKE = ("checkpoints", "digests")
"""Fields of a snapshot that depend on trainer.keep_checkpoints, which a resume may change."""


TOLERANCE = 1e-9
"""Largest relative difference of a figure that is computed again, which another version of numpy may give."""

MALFORMED = (*audit.MALFORMED, ArealError)
"""What reading a value of a wrong form may raise."""


class FolderAudit:
    """Compares a run's folder with the journal's events, which `seen` takes in order.

    The constructor reads tables and files before the events, which therefore have at least what these have;
    the run may go on meanwhile.
    """

    def __init__(self, folder: Path, config: Config, journal: SqliteQueue) -> None:
        self._folder, self._config, self._journal = folder, config, journal
        self._found: list[str] = []
        self._bound = journal.last_seq
        """Events up to this number were there before tables and files were read."""
        self._rows: list[dict[str, Any]] = []
        self._evals: list[dict[str, Any]] = []
        try:
            self._rows, self._evals = read_rows(folder), read_evals(folder)
        except ArealError as error:
            self._found.append(str(error))
        self._checkpoints = committed(folder / CHECKPOINTS)
        self._weights = weights_folder(config, folder)
        self._versions = committed(self._weights)
        self._exports = [path for path in (folder / EXPORTS).glob("*") if path.name.isdecimal()]
        self._broken = journal.broken_link()
        self._rewards, self._snapshots = journal.rewards(), journal.snapshots()
        self._stored = dict(self._read_trajectories())

        self._plane: ControlPlane | None = ControlPlane(config)
        self._counts = RowMaker(dict, (), control=config.control)
        self._is_counted = True
        """Whether the next row counts all that `_counts` has seen: after a resume an older version may have
        made it (`RowMaker.COUNTED`)."""
        self._seq = 0
        self._trained: list[e.BatchTrained] = []
        self._trained_before = 0
        """Number of batches trained by events that were there before the files were read."""
        self._step_of: dict[int, int] = {}
        """Ordinal of a trained group -> its step."""
        self._is_training = False
        self._published: dict[int, set[str]] = {}
        """Version -> digests of its parameters as published."""
        self._is_repeated: set[int] = set()
        """Versions that a resume trained again, maybe with other bits than the journal has."""
        self._finished: dict[SampleId, tuple[int, e.SampleFinished]] = {}
        self._episodes: set[SampleId] = set()
        self._scored: dict[tuple[int, int], tuple[int, e.RewardScored]] = {}
        self._dropped: set[int] = set()
        branch = journal.header.get(BRANCH)
        self._first_own = branch["step"] if branch else 0
        """Number of the first batch that was trained with this run's config."""
        self._saved = self._first_own
        """Version of the newest checkpoint by the events that were there before the files were read."""

    def seen(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yields the journal's rows, and takes in each of them."""
        for row in rows:
            if not self._seq and row.seq != 1:
                self._wrong(f"the journal begins with event {row.seq}; the events before it are missing")
            self._seq = row.seq
            try:
                self._see(row)
            except MALFORMED as error:
                self._wrong(
                    f"row {row.seq}: {type(row.event).__name__} has values of a wrong form: {error!r}"
                )
            yield row

    def violations(self) -> list[str]:
        """Returns what contradicts the events; call it once all of them were seen."""
        for check in (
            self._check_header,
            self._check_metrics,
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
        is_stale = self._is_stale(event)
        batch = self._plane.state.training if self._plane is not None else None
        match event:
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
            case e.TurnFinished(sample) if not is_stale:
                self._episodes.add(sample)
            case e.SampleFinished(sample) if not is_stale:
                self._finished[sample] = row.seq, event
            case e.RewardScored(ordinal, attempt):
                self._scored.setdefault((ordinal, attempt), (row.seq, event))
            case e.BatchTrained() if not is_stale:
                self._see_batch(event, batch)
                self._trained.append(event)
                self._trained_before += is_early
                self._step_of |= dict.fromkeys(event.ordinals, event.step)
        self._dropped |= {action.ordinal for action in row.actions if isinstance(action, e.Drop)}
        self._counts.see(event, row.actions)
        self._advance(row)

    def _is_stale(self, event: e.Event) -> bool:
        return self._plane is not None and self._plane.state.is_stale(event)

    @property
    def _last_version(self) -> int:
        return self._trained[-1].step + 1 if self._trained else 0

    def _advance(self, row: Row) -> None:
        """Folds the event, and compares the state with a snapshot that was stored after it."""
        stored = self._snapshots.pop(row.seq, None)
        if self._plane is None:
            return
        try:
            self._plane.handle(row.event)
        except MALFORMED:  # `control.audit` names it
            self._plane = None
            return
        self._is_training = self._plane.state.training is not None
        if stored is None:
            return
        now = self._plane.snapshot()
        then = unpack(pack(to_plain(from_plain(stored))))
        now = unpack(pack(now))
        names = [name for name in now if name not in UNLIKE and now[name] != then.get(name)]
        if names:
            self._wrong(
                f"row {row.seq}: the stored snapshot of the state has {names[0]} {then.get(names[0])}, but "
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
        groups = self._groups(batch) if batch is not None else ()
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

    def _groups(self, batch: e.Train) -> tuple[Group, ...]:
        """Returns the groups of a batch with the rewards that it was trained on.

        Empty if trajectories were deleted; `_check_trajectories` says whether they should be there.
        """
        size, groups = self._config.algorithm.group_size, []
        try:
            for ordinal, attempt in zip(batch.ordinals, batch.attempts, strict=True):
                members = self._journal.group(ordinal, attempt, size)
                _, scored = self._scored[ordinal, attempt]
                groups.append(Group(ordinal, Prompt(""), with_rewards(members, scored)))
        except (JournalError, CodecError):
            return ()
        return paid(groups, batch.gates)

    def _reward_figures(self, batch: e.Train | None) -> dict[str, float]:
        if batch is None:
            return {}
        scored = [self._scored[one][1] for one in zip(batch.ordinals, batch.attempts, strict=True)]
        return figures_of_rewards(
            [rewards_of(one.rewards, [dict(parts) for parts in one.parts], batch.gates) for one in scored]
        )

    # --- tables ---------------------------------------------------------------------------------------------

    def _read_trajectories(self) -> Iterator[tuple[SampleId, dict[str, Any]]]:
        """Yields each stored sample with what its event says of it, too."""
        for sample, blob in self._journal.payloads():
            try:
                one = decode(blob)
                self._check_trajectory(sample, one)
                yield (
                    sample,
                    {
                        "digest": digest_of(one),
                        "spans": tuple(spans_of(one)),
                        "stop_reason": one.stop_reason,
                        "interruptions": one.interruptions,
                    },
                )
            except MALFORMED as error:
                self._wrong(f"the trajectory of sample {name_of(sample)} cannot be read: {error}")

    def _check_trajectory(self, sample: SampleId, one: Trajectory) -> None:
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
        for sample, stored in self._stored.items():
            if sample in self._finished:
                self._compare_trajectory(self._finished[sample][1], stored)
            elif sample not in self._episodes:
                self._wrong(f"there is a trajectory of sample {name_of(sample)}, but no event of its end")
        partly = {sample.ordinal for sample in self._stored}
        for sample, (seq, event) in self._finished.items():
            is_needed = event.digest and sample.ordinal not in self._dropped and seq <= self._bound
            if not is_needed or sample in self._stored:
                continue
            step = self._step_of.get(sample.ordinal)
            if step is None or step >= self._saved or sample.ordinal in partly:
                fate = "it is not trained" if step is None else f"it was trained in step {step}"
                self._wrong(
                    f"sample {name_of(sample)} has no stored trajectory, but {fate}, and the newest "
                    f"checkpoint is {self._saved}; trajectories are deleted by groups, after a checkpoint"
                )

    def _compare_trajectory(self, event: e.SampleFinished, stored: Mapping[str, Any]) -> None:
        for name, value in stored.items():
            recorded = getattr(event, name)
            # Older versions of areal-jax recorded no digest.
            if recorded != value and (recorded or name != "digest"):
                self._wrong(
                    f"sample {name_of(event.sample)}, {name}: its event has {recorded!r}, its stored "
                    f"trajectory {value!r}"
                )
                return

    def _check_rewards(self) -> None:
        for key, stored in self._rewards.items():
            group = f"group {key[0]}" + (f", attempt {key[1]}" if key[1] else "")
            if key not in self._scored:
                self._wrong(f"{group} has stored rewards, but no event RewardScored")
            elif _wire(stored) != _wire(self._scored[key][1]):
                self._wrong(f"{group}: its event has {self._scored[key][1]}, the stored rewards are {stored}")
        for key, (seq, _) in self._scored.items():
            if seq <= self._bound and key not in self._rewards:
                self._wrong(f"group {key[0]} was scored, but its rewards are not stored")

    # --- files ----------------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        recorded = self._journal.header.get(CONFIG_DIGEST)
        if recorded is not None and recorded != (found := config_digest(self._folder)):
            self._wrong(
                f"config.yaml has digest {found}, but had {recorded} when the run started; `areal-jax "
                "resume` takes changes as words, which do not change the file"
            )

    def _check_metrics(self) -> None:
        for batch, row in zip(self._trained, self._rows, strict=False):
            if (recorded := as_json(batch.metrics)) != row:
                names = [
                    name for name in sorted(recorded.keys() | row.keys())
                    if recorded.get(name) != row.get(name) or (name in recorded) != (name in row)
                ]  # fmt: skip
                self._wrong(
                    f"{METRICS}, step {batch.step}, {names[0]}: the file has {row.get(names[0])!r}, the "
                    f"journal {recorded.get(names[0])!r}"
                )
        if len(self._rows) > len(self._trained):
            self._wrong(
                f"{METRICS} has {len(self._rows)} steps, but the journal ends after {len(self._trained)}: "
                "the end of the journal is missing"
            )
        # A kill between the journal's row and the file's leaves one row less.
        if len(self._rows) < self._trained_before - 1:
            self._wrong(
                f"{METRICS} has {len(self._rows)} of the journal's {self._trained_before} steps; `areal-jax "
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
        return self._trained[version - 1].digest if is_trained else ""

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


def audit_run(folder: Path) -> audit.AuditResult:
    """Check that the run kept its invariants, and that its files and the journal's tables agree with them.

    See `areal_jax.control.audit` and `FolderAudit`.
    """
    config = run_config(folder)
    with open_journal(folder) as journal:
        of_folder = FolderAudit(folder, config, journal)
        rows = of_folder.seen(journal.rows())
        found = audit.audit(config, ((row.seq, row.event, row.actions) for row in rows))
        violations = [*found.violations, *of_folder.violations()]
    return replace(found, ok=not violations, violations=violations)
