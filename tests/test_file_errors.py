"""A full disk: one sentence with the file, the space left and the remedy; the run then goes on."""

from __future__ import annotations

import io
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_jax import file_errors
from areal_jax.cluster.launched import make_secret
from areal_jax.config.loading import load_config
from areal_jax.file_errors import DiskFullError, explained, require_space, writing
from areal_jax.jobs.local import resume
from areal_jax.observe import metrics
from areal_jax.observe.evals import append_eval
from areal_jax.observe.waits import Timeline
from areal_jax.replay.folder_audit import audit_run
from areal_jax.runtime.context import make_folder
from areal_jax.types import ArealError
from areal_jax.weights import staged
from tests.hangs import HANG_S
from tests.programs import require, require_root
from tests.small_run import RECIPE, WORDS

FULL = "/dev/full"
ROOT = Path(__file__).parents[1]


def shown(name: str) -> str:
    """A pattern of the sentence about the file `name`."""
    return rf"{name} could not be written \([A-Z][a-z ]+\): [\d,.]+ MB are free in /.*Free some space"


def test_the_error_of_a_full_disk_names_file_space_and_remedy_and_others_pass():
    with pytest.raises(DiskFullError, match=shown("a/b.txt")), writing("a/b.txt"):
        Path(FULL).write_text("x")
    with pytest.raises(FileNotFoundError), writing("a/b.txt"):
        Path("no such folder/x").write_text("x")


def raised(*causes: type[BaseException]) -> BaseException:
    """The last of these errors, each raised while the one before was handled; OSError: of a full disk."""
    if len(causes) == 0:
        raise AssertionError
    *before, last = causes
    try:
        try:
            if before:
                raise raised(*before)
        finally:
            if last is OSError:
                Path(FULL).write_text("x")
            with writing("named"):
                Path(FULL).write_text("x") if last is DiskFullError else None
            raise last("first")
    except BaseException as error:  # noqa: BLE001 - it is the result
        return error


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ([OSError], "/dev/full could not be written"),
        ([DiskFullError, OSError], "named could not be written"),
        ([DiskFullError, OSError, OSError], "named could not be written"),
        ([ArealError, OSError], "first"),
        ([TypeError, OSError], None),  # a fault of ours keeps its traceback
        ([OSError, TypeError], None),
    ],
)
def test_the_first_error_is_shown_though_closing_files_fails_too(errors, text, monkeypatch):
    monkeypatch.setattr(file_errors, "_output", lambda: FULL)
    found = explained(raised(*errors))
    assert found is None if text is None else str(found).startswith(text)


@contextmanager
def without_space() -> Iterator[None]:
    """In the block this process can write to no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_of_a_run_on_a_full_disk_are_named(tmp_path):
    row: dict[str, int] = dict.fromkeys(metrics.REQUIRED, 0)
    writer = metrics.MetricsWriter(tmp_path)
    timeline = Timeline(tmp_path / "timeline.jsonl", now_ns=iter(range(0, 10**12, 10**9)).__next__)
    timeline.clock("host-0")
    writes = {
        metrics.FILE: [lambda: writer.write(row), writer.close, lambda: metrics.rewrite(tmp_path, [row])],
        "timeline.jsonl": [timeline.close],
        "evals.jsonl": [lambda: append_eval(tmp_path, {})],
        "config.yaml": [lambda: make_folder(load_config(RECIPE), tmp_path)],
        "tensorboard": [lambda: metrics.MetricsWriter(tmp_path)],
        "secret": [lambda: make_secret(tmp_path / "secret")],
    }
    for name, each in writes.items():
        for write in each:
            with pytest.raises(DiskFullError, match=shown(name)), without_space():
                write()
    # A file that could not be written does not keep the next one open.
    assert writer._board is not None
    assert writer._board._writer._py_recordio_writer._writer.closed  # pyright: ignore


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path, monkeypatch):
    disk = SimpleNamespace(free=999_000, total=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    require_space(tmp_path / "a", 999_000)
    with pytest.raises(DiskFullError, match=r"a could not be written \(it takes 2.0 MB\): 1.0 MB are free"):
        require_space(tmp_path / "a", 2_000_000)
    disk.total = disk.free = 0  # said by file systems that know neither
    require_space(tmp_path / "a", 2_000_000)


def test_a_version_that_does_not_fit_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    import jax.numpy as jnp

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000, total=5_000_000))
    with pytest.raises(DiskFullError, match=r"7 could not be written \(it takes 4.0 MB\): 3.0 MB are free"):
        staged.write(tmp_path, 7, staged.Detached({"w": jnp.zeros(10**6)}, jnp.zeros(1, jnp.uint32)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("size_kb", [60, 400, 700])
def test_a_run_on_a_full_disk_ends_with_one_sentence_and_goes_on_where_there_is_space(tmp_path, size_kb):
    """On a disk of its own: a page of the journal, some steps of it, or a checkpoint does not fit."""
    require("unshare", "mount")
    require_root("the test mounts a small disk")
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    words = [str(RECIPE), *WORDS, f"run.dir={disk}/run", "observe.tensorboard=true"]
    script = (
        f"mount -t tmpfs -o size={size_kb}k none {disk}; {sys.executable} -m areal_jax.cli.main run "
        f"{' '.join(map(repr, words))}; status=$?; cp -r {disk}/run {run}; exit $status"
    )
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    (error,) = done.stderr.splitlines()
    assert (
        error.startswith(f"error: {disk}/run/") and "MB are free in" in error and "Free some space" in error
    )
    resume(run, stream=io.StringIO())
    assert audit_run(run).ok
