"""The digest of the weights that sampled a token, where a resume gave versions other parameters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.control import events as e
from areal_jax.replay.past_versions import _digest_before
from areal_jax.replay.provenance import provenance
from areal_jax.trajectories.sqlite import Entry, SqliteQueue
from areal_jax.types import SampleId, Trajectory
from tests.report.test_reading import finished, trajectory


def decoded(one: Trajectory, *hosts: str) -> list[Entry]:
    """The sample is dispatched to each of these hosts in turn, and ends."""
    starts = [Entry(e.HostJoined(host, 4), (e.Dispatch((one.sample,), host, 0),)) for host in hosts]
    return [*starts, finished(one)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Version 1 was published as `first`, and by two resumes on other machines as `second` and `third`."""
    (tmp_path / "config.yaml").write_text("tasks: countdown\nmodel: {shape: tiny}\n")
    before, after, last = (trajectory(SampleId(ordinal, 0), [0, 1, 1]) for ordinal in range(3))
    with SqliteQueue.create(tmp_path / "journal.sqlite", {}) as journal:
        journal.append([
            Entry(e.RunStarted("zero", 9)),
            Entry(e.BatchTrained(0, (7,), "trained", {})),
            Entry(e.VersionCommitted(1, "first")),
            *decoded(before, "host-0"),
            Entry(e.RunResumed(9)),
            Entry(e.VersionReissued(1, "first", "second")),
            *decoded(after, "host-0", "host-1"),
            Entry(e.VersionCommitted(2, "two")),
            Entry(e.RunResumed(9)),
            Entry(e.VersionReissued(1, "second", "third")),
            *decoded(last, "host-1", "host-1"),
        ])  # fmt: skip
    return tmp_path


@pytest.mark.parametrize(
    ("sample", "digest", "hosts"),
    [("0/0", "first", ("host-0",)), ("1/0", "second", ("host-0", "host-1")), ("2/0", "third", ("host-1",))],
)
def test_a_token_has_the_digest_that_its_version_had_when_it_was_sampled(folder, sample, digest, hosts):
    found = provenance(folder, sample, 3)
    assert (found.version, found.digest, found.hosts) == (1, digest, hosts)
    assert provenance(folder, sample, 2).digest == "zero"


def test_a_checkpoint_is_not_compared_with_a_version_that_a_resume_has_replaced(folder, tmp_path):
    with open_journal(folder) as journal:
        run: Any = SimpleNamespace(journal=journal)
        assert _digest_before(run, 1) == ""
    with SqliteQueue.create(tmp_path / "other.sqlite", {}) as journal:
        journal.append([Entry(e.BatchTrained(0, (7,), "trained", {}))])
        run = SimpleNamespace(journal=journal)
        assert (_digest_before(run, 1), _digest_before(run, 2)) == ("trained", "")
