"""Weights between processes that share a folder and nothing else; killed at the worst moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.staged import committed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start() -> Iterator:
    """`start("publish", folder, ...)`; what is left of it is killed in the end."""
    running: list[subprocess.Popen] = []

    def begin(role: str, folder: Path, *numbers: int) -> subprocess.Popen:
        words = [sys.executable, "-m", "tests.weights.processes", role, str(folder), *map(str, numbers)]
        devices = {"publish": "1", "adopt": "2"}[role]
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": devices, "JAX_PLATFORMS": "cpu"}
        running.append(subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


def said(process: subprocess.Popen) -> list[dict]:
    """All that it says until it ends, which it does well."""
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def next_of(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_a_host_of_its_own_process_and_mesh_adopts_every_version(start, tmp_path):
    trainer, host = start("publish", tmp_path, 0, 4), start("adopt", tmp_path, 4)
    adopted, published = said(host), said(trainer)
    assert [one["version"] for one in adopted] == [0, 1, 2, 3, 4]
    assert [one["digest"] for one in adopted] == [one["digest"] for one in published]
    assert len({one["digest"] for one in adopted}) == 5
    assert all(len(one["tokens"]) == 4 for one in adopted)
    assert committed(tmp_path / "weights") == [3, 4]


def test_a_publisher_killed_between_stage_and_commit_leaves_the_version_before_in_force(start, tmp_path):
    trainer, host = start("publish", tmp_path, 0, 4, 2), start("adopt", tmp_path, 4)
    assert {"staged": 2} in [next_of(trainer) for _ in range(4)]
    trainer.kill()
    trainer.wait()
    folder = tmp_path / "weights"
    assert (folder / ".staged-2" / "manifest.json").exists()
    assert OrbaxStore(folder, lambda params: params).latest() == 1
    again = said(start("publish", tmp_path, 2, 4))
    adopted = said(host)
    assert [one["version"] for one in adopted] == [0, 1, 2, 3, 4]
    assert [one["digest"] for one in adopted[2:]] == [one["digest"] for one in again]
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


def test_a_killed_host_harms_nobody_and_its_successor_takes_the_newest(start, tmp_path):
    trainer, host = start("publish", tmp_path, 0, 3), start("adopt", tmp_path, 3)
    assert next_of(host)["version"] == 0
    host.kill()
    host.wait()
    adopted, published = said(start("adopt", tmp_path, 3)), said(trainer)
    assert adopted[-1]["version"] == 3
    digests = {one["version"]: one["digest"] for one in published}
    assert all(one["digest"] == digests[one["version"]] for one in adopted)
