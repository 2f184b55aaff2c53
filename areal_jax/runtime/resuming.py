"""What a resumed run keeps of its start, and what it may change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_jax.assembly.run_folder import BRANCH, JOURNAL, open_journal
from areal_jax.config.loading import ConfigError, load_config
from areal_jax.config.tree import Config
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.types import ArealError

RESUMABLE_KEYS = (
    "run.steps",
    "observe.",
    "runtime.",
    "generation.weight_layout",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "weights.backend",
    "weights.dir",
    "weights.keep_versions",
    "launch.",
)
"""Config keys that a resumed run may change, since they do not affect the steps already trained. A key with a
dot at its end stands for all keys of that section.
"""


def read_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the config of the run in `folder`, changed by `overrides` of the form KEY=VALUE.

    Its run.steps, unless overridden, is that of the last resume; other keys are as at the run's start.
    Raises ConfigError if the folder has no journal, or for an override of a key outside RESUMABLE_KEYS.
    """
    if not (folder / JOURNAL).exists():
        if (folder / "config.yaml").exists():
            raise ConfigError(
                f"the run in {folder} ended before its journal was made, so there is nothing to resume; "
                "remove the folder and start the run again"
            )
        raise ConfigError(
            f"{folder} is not a run's folder: it has no {JOURNAL}; start a run with `areal-jax run`"
        )
    for word in overrides:
        if not word.split("=")[0].startswith(RESUMABLE_KEYS):
            raise ConfigError(
                f"{word} can only be set on a new run; a resumed run accepts {', '.join(RESUMABLE_KEYS)}: "
                "leave the key out, or start a new run"
            )
    config = load_config(folder / "config.yaml", *overrides, f"run.dir={folder}")
    has_steps = any(word.startswith("run.steps=") for word in overrides)
    return config if has_steps else with_steps_asked(config, folder)


def steps_asked(journal: SqliteQueue) -> int:
    """Return the number of steps that the run's start or its last resume asked for; 0 if it has none.

    A branch has its parent's events, but not its parent's number of steps.
    """
    branch = journal.header.get(BRANCH)
    after = branch["seq"] if branch else 0
    asked = [e.steps for kind in ("RunStarted", "RunResumed") for e in journal.events(kind, after)]
    return asked[-1] if asked else 0


def with_steps_asked(config: Config, folder: Path) -> Config:
    """Return the config with the number of steps that the run in `folder` was last started or resumed with.

    A resume records it in the journal, and not in config.yaml. The config stays as it is if the run has no
    journal, or has not begun.
    """
    if not (folder / JOURNAL).exists():
        return config
    with open_journal(folder) as journal:
        steps = steps_asked(journal) or config.run.steps
    return config.with_values("run", steps=steps)


def require_new(folder: Path) -> None:
    """Raise ArealError if the folder of a new run exists."""
    if folder.exists():
        raise ArealError(
            f"the run folder {folder} exists; choose another run.name or run.dir, or continue that run with "
            f"`areal-jax resume {folder}`"
        )
