"""Makes a branch of a run: a new run with the first steps of another one, which goes on with other settings.

The other run is replayed up to the branch, so the branch begins from its exact train state. The branch's
folder has the journal up to there and a checkpoint of that state; `resume` or `launch` goes on with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax

from areal_jax.assembly.devices import header
from areal_jax.assembly.parts import Parts, with_config
from areal_jax.assembly.run_folder import (
    BRANCH,
    CHECKPOINTS,
    CONFIG_DIGEST,
    JOURNAL,
    config_digest,
    open_journal,
)
from areal_jax.config.loading import ConfigError, load_config, resolved
from areal_jax.config.tree import Config
from areal_jax.control.audit import audit
from areal_jax.observe.metrics import rewrite
from areal_jax.replay.reopened import Reopened, branch_record, differences_text
from areal_jax.replay.replay import Replay, Replayed
from areal_jax.runtime.context import make_folder
from areal_jax.runtime.recovery import Note
from areal_jax.runtime.resuming import RESUMABLE_KEYS, require_new, with_steps_asked
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.types import ArealError

CHANGEABLE = ("algorithm.", "control.", "trainer.", *RESUMABLE_KEYS)
"""Config keys that a branch may change. A key with a dot at its end stands for all keys of that section."""

FIXED = ("trainer.numerics", "trainer.mesh", "trainer.supervised", "generation.weight_layout")
"""Beginnings of keys that it may not change all the same: they decide the bits of the steps before it."""


def make_branch(
    run: Reopened, until: int | None, name: str, settings: Sequence[str], note: Note = lambda _: None
) -> tuple[Path, Replayed]:
    """Makes the folder of a branch of `run`, beside the run's own, and returns it with what was replayed.

    `until`: number of the run's steps that the branch has; None: all that were trained. `name`: the branch's
    run.name, and the name of its folder. `settings`: words KEY=VALUE. Raises ConfigError for a setting that
    changes something of the steps before the branch, and ArealError if these do not replay bit for bit.
    """
    folder = run.folder.absolute().parent / name
    require_new(folder)
    config = _changed(run, folder, name, settings)
    one = Replay(run, note)
    _require_one_state(one.parts, config)
    one.run(until)
    if until is not None and one.found.steps < until:
        raise ArealError(
            f"--until={until}: {run.folder} has trained {one.found.steps} steps; give at most that many"
        )
    if one.found.header:
        raise ArealError(
            f"this machine differs from the run's ({differences_text(one.found.header)}), so the train state "
            "that a replay gives here may have other bits than the run's; make the branch on a machine like "
            "the run's"
        )
    _require_one_past(run, config, one.last_seq)
    _write(run, config, one, folder)
    return folder, one.found


def _changed(run: Reopened, folder: Path, name: str, settings: Sequence[str]) -> Config:
    """Returns the branch's config; raises ConfigError for a key that a branch may not change."""
    for word in settings:
        key = word.split("=")[0]
        if not key.startswith(CHANGEABLE) or key.startswith(FIXED):
            raise ConfigError(
                f"{word}: a branch may change {', '.join(CHANGEABLE)}, but not {', '.join(FIXED)}; leave the "
                "key out, or start a new run with model.source=RUN_FOLDER, which takes over the parameters"
            )
    own = with_steps_asked(run.config, run.folder)
    return load_config(resolved(own), *settings, f"run.name={name}", f"run.dir={folder}")


def _require_one_state(parts: Parts, config: Config) -> None:
    """Raises ConfigError unless the branch's train state has the run's leaves."""
    own, other = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), one.learner.abstract_state())
        for one in (parts, with_config(parts, config))
    )
    if jax.tree.structure(own) != jax.tree.structure(other) or own != other:
        raise ConfigError(
            "a setting changes what a train state holds, such as a critic, a reference policy or the trained "
            "parameters, which the run's steps before the branch do not have; start a new run with "
            "model.source=RUN_FOLDER, which takes over the parameters"
        )


def _require_one_past(run: Reopened, config: Config, last_seq: int) -> None:
    """Raises ConfigError unless the control plane decides as the run did until the branch."""
    rows = ((row.seq, row.event, row.actions) for row in run.journal.rows() if row.seq <= last_seq)
    violations = audit(config, rows).violations
    if violations:
        raise ConfigError(
            f"a setting changes decisions that the run took before the branch: {violations[0]}; leave the "
            "setting out, or start a new run with model.source=RUN_FOLDER, which takes over the parameters"
        )


def _write(run: Reopened, config: Config, one: Replay, folder: Path) -> None:
    """Writes the branch's folder under a hidden name, and renames it when it is complete."""
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # a branch that was interrupted
    make_folder(config, new)
    checkpointer = Checkpointer(new / CHECKPOINTS)
    checkpointer.save(one.state, lambda version: None, config.runtime.deadline_s)
    checkpointer.close(config.runtime.deadline_s)
    record = branch_record(run, one.found.steps, one.last_seq)
    own = header(config) | {CONFIG_DIGEST: config_digest(new), BRANCH: record}
    run.journal.copy_until(one.last_seq, new / JOURNAL, own)
    with open_journal(new) as journal:
        rewrite(new, (batch.metrics for batch in journal.events("BatchTrained")))
    new.rename(folder)
