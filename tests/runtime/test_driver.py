"""What the driver of a real run deletes, without a run."""

from __future__ import annotations

import io
import re
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_jax.assembly.parts import open_inputs
from areal_jax.assembly.run_folder import JOURNAL, run_config
from areal_jax.config.loading import make_config
from areal_jax.control import events as e
from areal_jax.observe.waits import Timeline
from areal_jax.runtime.context import open_context
from areal_jax.runtime.driver import Driver
from areal_jax.trajectories.journal import Entry
from areal_jax.trajectories.sqlite import SqliteQueue
from areal_jax.weights.manifest import MANIFEST


@pytest.mark.parametrize(
    ("checkpoints", "keep", "forgotten", "said"),
    [
        ([2, 3], {"keep_groups": 0}, [0, 1, 2, 3], ""),  # a resume from checkpoint 2 trains batch 2 again
        ([3], {"keep_groups": 0}, [], ""),  # were it damaged, a resume would begin at version 0
        ([2, 3], {"keep_groups": 3}, [0, 1], ""),
        ([2, 3], {"keep_groups": 6, "keep_bytes": 600}, [], ""),
        (
            [2, 3],
            {"keep_groups": 6, "keep_bytes": 599},
            [0, 1],
            "of 2 trained .* 599 bytes .* of 4 trained",
        ),
        ([2, 3], {"keep_bytes": 0}, [0, 1, 2, 3], "of 4 trained .* 0 bytes .* of 2 trained"),
    ],
)
def test_trajectories_stay_while_a_resume_or_inspect_may_need_them(
    checkpoints: list[int], keep: dict[str, int], forgotten: list[int], said: str, tmp_path: Path
):
    for version in checkpoints:
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / MANIFEST).touch()
    driver, found, notes = object.__new__(Driver), [], []  # six attributes decide; others need a whole run
    driver._config = make_config({"trainer": {"keep_checkpoints": 2}, "observe": keep})
    sizes = dict.fromkeys(range(6), 100)
    driver._checkpoints = tmp_path
    driver._journal = SimpleNamespace(forget=found.extend, stored_bytes=lambda: sizes)
    driver._view, driver._is_full = SimpleNamespace(note=notes.append), False
    driver._trained = deque((version, (2 * version - 2, 2 * version - 1)) for version in (1, 2, 3))
    driver._forget_trained()
    assert found == forgotten
    assert len(notes) == bool(said) and re.search(said, "".join(notes))


def test_what_follows_from_events_is_recorded_in_turn_while_the_thread_is_watched():
    """Prompts are read while actions are sent, so a row that blocks is named; then failures are recorded."""
    driver, done = object.__new__(Driver), []
    state = SimpleNamespace(is_watched=False)

    @contextmanager
    def piece():
        state.is_watched = True
        yield
        state.is_watched = False

    def act(actions):
        done.append((list(actions), state.is_watched))
        return [(e.PromptFailed(0, 0, "bad"), None)] if len(done) == 1 else []

    driver._watch = SimpleNamespace(piece=piece)
    driver._core = SimpleNamespace(act=act)
    driver.record = lambda incoming: [
        SimpleNamespace(actions=[type(event).__name__]) for event, _ in incoming
    ]
    driver.handle([(e.PlacementDue(), None)])
    assert done == [(["PlacementDue"], True), (["PromptFailed"], True)]


def test_a_row_after_a_restart_counts_what_the_process_before_saw_since_its_last_row(folder: Path):
    """Then no row depends on which process saw an event, and audit can count again."""
    config = run_config(folder)
    with SqliteQueue.open(folder / JOURNAL) as journal:
        newest = list(journal.events("VersionCommitted"))[-1]
        adopted = e.HostAdopted("host-0", newest.version, newest.digest, interrupted=3)
        journal.append([Entry(adopted, ())])
        seqs = [row.seq for row in journal.rows() if isinstance(row.event, e.BatchTrained)]
        since = [row.event for row in journal.rows(seqs[-1])]
        wanted = sum(event.interrupted for event in since if isinstance(event, e.HostAdopted))
        with open_context(config, folder, journal, Timeline(None), io.StringIO()) as context:
            driver = Driver(open_inputs(config), context, None, [], dict)  # type: ignore[arg-type]
            assert driver._core._rows.of_journal(len(seqs), ())["interruptions"] == wanted >= 3
