"""What a crash leaves: journal, checkpoints and weights at different places, and one run all the same."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.control.events import (
    BatchTrained,
    CheckpointCommitted,
    Event,
    RunStarted,
    SampleFinished,
    VersionCommitted,
)
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.runtime import one_process
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trajectories.sqlite import JournalError, SqliteQueue
from areal_jax.weights import staged
from areal_jax.weights.manifest import committed
from tests.hangs import HANG_S, wait_for
from tests.small_run import killed_at, small

STEPS, EVERY = 6, 2

WORDS = (
    f"run.steps={STEPS}",
    f"trainer.checkpoint_every={EVERY}",
    "trainer.keep_checkpoints=1",
    "control.max_staleness=0",
    "observe.keep_groups=0",
)

STAGED = ("weights.backend=orbax", "weights.keep_versions=2")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of a run that nobody disturbed, its weights in memory."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    run(small(folder, *WORDS), stream=io.StringIO())
    return digests(folder)


def digests(folder: Path) -> list[str]:
    return [row["params_digest"] for row in read_rows(folder)]


def crash_at(folder: Path, monkeypatch: pytest.MonkeyPatch, is_last: Callable[[Event], bool]) -> None:
    with killed_at(monkeypatch, is_last):
        run(small(folder, *WORDS, *STAGED), stream=io.StringIO())


def check_whole(folder: Path, untouched: list[str]) -> None:
    assert digests(folder) == untouched
    assert vars(audit_run(folder)) == {
        "ok": True, "trained": 4 * STEPS, "dropped": {}, "in_flight": 0, "violations": [],
    }  # fmt: skip
    assert committed(folder / "weights")[-1] == STEPS
    assert committed(folder / "checkpoints") == [STEPS]


@pytest.mark.slow
def test_weights_in_files_change_no_bit_and_are_told_after_their_batch(tmp_path, untouched):
    folder = tmp_path / "run"
    run(small(folder, *WORDS, *STAGED), stream=io.StringIO())
    check_whole(folder, untouched)
    assert committed(folder / "weights") == [STEPS - 1, STEPS]
    with open_journal(folder) as journal:
        events = [row.event for row in journal.rows()]
    trained = [place for place, event in enumerate(events) if isinstance(event, BatchTrained)]
    told = [place for place, event in enumerate(events) if isinstance(event, VersionCommitted)]
    assert len(trained) == len(told) == STEPS
    assert all(batch < version for batch, version in zip(trained, told, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, STEPS])
def test_a_checkpoint_that_the_journal_never_came_to_is_discarded(tmp_path, monkeypatch, untouched, version):
    """Only one is kept, and the one before is there all the same, with the trajectories to go on from it."""
    folder = tmp_path / "run"
    crash_at(folder, monkeypatch, lambda e: isinstance(e, BatchTrained) and e.step == version - 1)
    assert committed(folder / "checkpoints") == [version - EVERY, version]
    said = io.StringIO()
    resume(folder, stream=said)
    assert (
        f"checkpoint {version} is deleted, because it is newer than the journal, which ends at version "
        f"{version - 1}; the run continues from an older checkpoint or" in said.getvalue()
    )
    assert f"training steps {version - EVERY} to {version - 2} again" in said.getvalue()
    check_whole(folder, untouched)


@pytest.mark.slow
def test_an_interrupt_loses_no_event_that_was_taken_from_the_inbox(tmp_path, monkeypatch, untouched):
    taken, first_message = [], one_process.LocalRun._first_message

    def take_then_interrupt(self):
        message = first_message(self)
        if not taken and isinstance(message, tuple) and isinstance(message[0], VersionCommitted):
            taken.append(message[0])
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # Python runs the handler in here, before the event is recorded
                pass
        return message

    monkeypatch.setattr(one_process.LocalRun, "_first_message", take_then_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(small(tmp_path / "run", *WORDS), stream=io.StringIO())
    finally:
        signal.signal(signal.SIGINT, before)
    with open_journal(tmp_path / "run") as journal:
        assert taken[0] in [row.event for row in journal.rows()]
    assert audit_run(tmp_path / "run").ok
    resume(tmp_path / "run", stream=io.StringIO())
    assert digests(tmp_path / "run") == untouched


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [VersionCommitted, pytest.param(CheckpointCommitted, marks=pytest.mark.soak)]
)
def test_what_was_committed_and_not_journaled_is_found_again(tmp_path, monkeypatch, untouched, kind):
    folder = tmp_path / "run"
    crash_at(folder, monkeypatch, lambda e: isinstance(e, kind) and e.version == 4)
    said = io.StringIO()
    resume(folder, stream=said)
    assert "again with digest" not in said.getvalue() and "refused" not in said.getvalue()
    check_whole(folder, untouched)


@pytest.mark.slow
def test_a_checkpoint_journaled_without_its_snapshot_is_one(tmp_path, monkeypatch, untouched):
    folder = tmp_path / "run"

    def killed(self, seq, state):
        raise JournalError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteQueue, "snapshot", killed)
        with pytest.raises(JournalError, match="killed"):
            run(small(folder, *WORDS, *STAGED), stream=io.StringIO())
    resume(folder, stream=io.StringIO())
    check_whole(folder, untouched)


@pytest.mark.slow
def test_versions_that_no_journal_knows_are_void(tmp_path, monkeypatch, untouched):
    """Killed after versions were committed and before their batches were journaled."""
    folder = tmp_path / "run"
    crash_at(folder, monkeypatch, lambda e: isinstance(e, BatchTrained) and e.step == 3)
    newest = committed(folder / "weights")[-1]
    (folder / "weights" / str(newest)).rename(folder / "weights" / "19")
    resume(folder, stream=io.StringIO())
    assert committed(folder / "weights") == [STEPS - 1, STEPS]
    check_whole(folder, untouched)


@pytest.mark.slow
def test_on_a_slow_disk_a_run_starts_with_a_whole_version_and_ends_with_all_of_them_told(
    tmp_path, monkeypatch
):
    folder, started_with = tmp_path / "run", []
    write, append = staged.write, SqliteQueue.append

    def slow(path, *rest, **options):
        time.sleep(0.4 if path.name == "weights" else 0)
        write(path, *rest, **options)

    def watched(self, entries, durable=False):
        if any(isinstance(entry.event, RunStarted) for entry in entries):
            started_with.append(committed(folder / "weights"))
        return append(self, entries, durable)

    monkeypatch.setattr(staged, "write", slow)
    monkeypatch.setattr(SqliteQueue, "append", watched)
    run(small(folder, *WORDS, *STAGED, "run.steps=2"), stream=io.StringIO())
    assert started_with == [[0]]
    with open_journal(folder) as journal:
        told = [row.event.version for row in journal.rows() if isinstance(row.event, VersionCommitted)]
    assert told == [1, 2]


def test_generation_and_training_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first checkpoint is not written before samples have ended and a batch has been trained."""
    folder, meanwhile = tmp_path / "run", []
    write, append, is_writing = staged.write, SqliteQueue.append, threading.Event()

    def slow(path, *rest, **options):
        if path.name == "checkpoints" and not meanwhile:
            is_writing.set()
            wait_for(lambda: meanwhile.count(SampleFinished) >= 4 and meanwhile.count(BatchTrained) >= 1)
            is_writing.clear()
        write(path, *rest, **options)

    def watched(self, entries, durable=False):
        if is_writing.is_set():
            meanwhile.extend(type(entry.event) for entry in entries)
        return append(self, entries, durable)

    monkeypatch.setattr(staged, "write", slow)
    monkeypatch.setattr(SqliteQueue, "append", watched)
    run(small(folder, *WORDS, "trainer.checkpoint_every=2"), stream=io.StringIO())
    assert meanwhile.count(SampleFinished) >= 4 and meanwhile.count(BatchTrained) >= 1


@pytest.mark.slow
def test_the_step_after_a_checkpoint_waits_for_its_copy(tmp_path, monkeypatch, untouched):
    """The copy goes on once the next batch's gradient is there; its row has the pause, and no bit changes."""
    folder, pause_s, waited, is_waiting = tmp_path / "run", 0.5, [], threading.Event()
    copy, wait_copied = staged._leaf_to_host, Checkpointer.wait_copied

    def held(leaf):
        if not waited:
            assert is_waiting.wait(HANG_S)
            waited.append(True)
            time.sleep(pause_s)
        return copy(leaf)

    def watched(self, deadline_s):
        if not self._copied.is_set():
            is_waiting.set()
        wait_copied(self, deadline_s)

    monkeypatch.setattr(staged, "_leaf_to_host", held)
    monkeypatch.setattr(Checkpointer, "wait_copied", watched)
    run(small(folder, *WORDS), stream=io.StringIO())
    assert digests(folder) == untouched
    pauses = [row["checkpoint_pause_s"] for row in read_rows(folder)]
    assert pauses[EVERY] >= pause_s and max(pauses[:EVERY]) < pause_s
    assert audit_run(folder).ok


@pytest.mark.slow
def test_a_version_that_cannot_be_written_ends_the_run_at_once_and_says_why(tmp_path, monkeypatch):
    """At staleness 0 hosts and trainer wait for it: nobody may wait for the deadline."""
    write = staged.write

    def full(folder, version, *rest, **named):
        if folder.name == "weights" and version == 2:
            raise staged.StagedError("weights/2 could not be written: No space left on device")
        write(folder, version, *rest, **named)

    monkeypatch.setattr(staged, "write", full)
    with pytest.raises(staged.StagedError, match="No space left on device"):
        run(small(tmp_path / "run", *WORDS, *STAGED), stream=io.StringIO())
    monkeypatch.undo()
    resume(tmp_path / "run", stream=io.StringIO())
    assert audit_run(tmp_path / "run").ok
