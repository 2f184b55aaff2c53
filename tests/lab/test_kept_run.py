"""Simulated runs that leave a folder: driver, journal and commands of a long run, without models."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from areal_jax.assembly.run_folder import JOURNAL, open_journal
from areal_jax.config.tree import Config
from areal_jax.lab.bench.long_run import LONG
from areal_jax.lab.bench.registry import bench
from areal_jax.lab.kept_run import keep_run, long_config
from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from areal_jax.report.reading import find, view_sample, write_report
from areal_jax.runtime.resuming import read_config
from tests.hangs import HANG_S

SAMPLES, GROUPS = 64, 4
"""Of a batch."""


def few_kept(folder: Path, steps: int) -> Config:
    """A run that soon deletes trajectories, as a long one does."""
    return long_config(folder, steps, SAMPLES).with_values("observe", keep_groups=8, tensorboard=False)


def killed_at(folder: Path, event: int, steps: int) -> None:
    """Goes on with the run in a process of its own, which is killed once the journal has this event."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.lab.test_kept_run import LONG, few_kept, keep_run\n"
        f"keep_run(few_kept(Path({str(folder)!r}), {steps}), LONG)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline_s = time.monotonic() + HANG_S
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            if (folder / JOURNAL).exists():
                with open_journal(folder) as journal:
                    if journal.last_seq >= event:
                        return
            time.sleep(0.001)
        raise AssertionError(f"the run did not reach event {event}; its exit code is {process.returncode}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_and_is_whole(tmp_path: Path):
    folder, steps = tmp_path / "run", 120
    for event in (700, 1900, 4500):
        killed_at(folder, event, steps)
    keep_run(few_kept(folder, steps), LONG)
    result = audit_run(folder)
    assert (result.ok, result.violations, result.trained) == (True, [], steps * GROUPS)
    with open_journal(folder) as journal:
        batches = list(journal.events("BatchTrained"))
        assert [batch.step for batch in batches] == list(range(steps))
        assert sorted(one for batch in batches for one in batch.ordinals) == list(range(steps * GROUPS))
        assert len(list(journal.events("RunResumed"))) == 3
        # Those of the newest two checkpoints' batches and of keep_groups stay.
        assert len(journal.stored_samples()) < 60 * SAMPLES
    assert [row["step"] for row in read_rows(folder)] == list(range(steps))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "run"
    keep_run(few_kept(folder, 60), LONG)
    return folder


def test_a_run_that_has_ended_stays_as_it_is(whole: Path):
    before = (whole / JOURNAL).read_bytes()
    keep_run(few_kept(whole, 60), LONG)
    with open_journal(whole) as journal:
        assert next(journal.events("RunResumed"), None) is None
    assert (whole / JOURNAL).read_bytes() == before


def test_every_reader_takes_the_folder_for_that_of_a_run(whole: Path):
    assert audit_run(whole).ok
    with open_journal(whole) as journal:
        found = find(journal)
        ages = {SAMPLES * 60: sum(found.head_ages.values())}
        assert ages == {len(found.trained): len(found.lengths)}
        last = next(batch for batch in journal.events("BatchTrained") if batch.step == 59)
    report = write_report(whole, read_config(whole))
    assert "<svg" in report.read_text()
    view = view_sample(whole, f"{last.ordinals[-1]}/3")
    assert view.sample == f"{last.ordinals[-1]}/3"


def test_an_audit_keeps_little_of_each_step(whole: Path, tmp_path: Path):
    long = tmp_path / "run"
    keep_run(few_kept(long, 240), LONG)

    def peak(folder: Path) -> int:
        tracemalloc.start()
        try:
            assert audit_run(folder).ok
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # A version's digests stay, and a byte of each group. The events of one step alone would take 7 kB.
    assert (peak(long) - peak(whole)) / 180 < 2500


@pytest.mark.soak
def test_a_run_of_ten_thousand_steps(tmp_path: Path):
    """5.6 million events; takes half an hour. The commands fail if what they read is not whole."""
    figures = bench("journal", {"steps": 10_000, "folder": str(tmp_path / "run")})
    assert figures["events"] > 5_000_000
    assert figures["audit_mb"] < 200
