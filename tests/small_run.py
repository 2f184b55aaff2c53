"""A run small enough for a test: the quickstart's loop with a narrow model and few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.control.events import Event
from areal_jax.trajectories.sqlite import JournalError, SqliteQueue

RECIPE = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

WORDS = (
    "run.steps=5",
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "algorithm.group_size=4",
    "generation.slots=4",
    "generation.length=24",
    "generation.max_tokens=18",
    "trainer.batch_size=4",
    "trainer.rows=8",
    "trainer.length=24",
    "trainer.supervised.steps=0",
    "trainer.checkpoint_every=2",
    "observe.tensorboard=false",
    "observe.report=false",
    "runtime.deadline_s=600",
)


def small(folder: Path, *words: str) -> Config:
    return load_config(RECIPE, *WORDS, f"run.dir={folder}", *words)


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, is_last: Callable[[Event], bool]) -> Iterator[None]:
    """A run in the block ends: its journal takes nothing any more from that event on. All else works."""
    append, has_ended = SqliteQueue.append, []

    def append_until(self, entries, durable=False):
        if has_ended or any(is_last(entry.event) for entry in entries):
            has_ended.append(True)
            raise JournalError("killed")
        return append(self, entries, durable)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteQueue, "append", append_until)
        with pytest.raises(JournalError, match="killed"):
            yield
