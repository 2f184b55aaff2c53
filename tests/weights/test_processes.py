"""Weights between processes that share a folder or a socket and nothing else; killed at the worst moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.generation.engine import Engine
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import PublisherLostError
from areal_jax.weights.manifest import committed
from areal_jax.weights.orbax import OrbaxReader
from areal_jax.weights.store import load_newer
from areal_jax.weights.transfer import arrays
from areal_jax.weights.transfer.arrays import start_server
from areal_jax.weights.transfer.pulling import Pull
from areal_jax.weights.transfer.reader import TransferReader
from tests.hangs import ends
from tests.processes import stop
from tests.weights.group import SPECS, params_of, probe
from tests.weights.processes import DEADLINE_S, SECRET, make_engine, wait_for
from tests.weights.values import on
from tests.weights.values import wait_for as wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STORES = pytest.mark.parametrize("kind", ["orbax", pytest.param("transfer", marks=pytest.mark.soak)])


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """`start("processes", 1, "publish", ...)`: a module here on so many devices; killed in the end."""
    running: list[subprocess.Popen] = []

    def begin(module: str, devices: int, *words: Any) -> subprocess.Popen:
        command = [sys.executable, "-m", f"tests.weights.{module}", *map(str, words)]
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


def said(process: subprocess.Popen) -> list[dict]:
    """All that it says until it ends, which it does well."""
    out, _ = process.communicate(timeout=3 * DEADLINE_S)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def next_of(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@STORES
def test_a_host_of_its_own_process_and_mesh_adopts_every_version(start, tmp_path, kind):
    trainer = start("processes", 1, "publish", kind, tmp_path, 0, 4)
    host = start("processes", 2, "adopt", kind, tmp_path, 4)
    adopted, published = said(host), said(trainer)
    assert [one["version"] for one in adopted] == [0, 1, 2, 3, 4]
    assert [one["digest"] for one in adopted] == [one["digest"] for one in published]
    assert len({one["digest"] for one in adopted}) == 5
    assert all(len(one["tokens"]) == 4 for one in adopted)
    if kind == "orbax":
        assert committed(tmp_path / "weights") == [3, 4]
    else:  # no file was touched
        assert {path.name for path in tmp_path.iterdir()} == {"address", *(f"adopted-{v}" for v in range(5))}


@STORES
def test_a_publisher_killed_between_stage_and_commit_leaves_the_version_before_in_force(
    start, tmp_path, kind
):
    trainer = start("processes", 1, "publish", kind, tmp_path, 0, 4, 2)
    host = start("processes", 2, "adopt", kind, tmp_path, 4)
    assert {"staged": 2} in [next_of(trainer) for _ in range(4)]
    trainer.kill()
    trainer.wait()
    folder = tmp_path / "weights"
    if kind == "orbax":
        assert (folder / ".staged-2" / "manifest.json").exists()
        assert OrbaxReader(folder, probe).latest() == 1
    again = said(start("processes", 1, "publish", kind, tmp_path, 2, 4))
    adopted = said(host)
    assert [one["version"] for one in adopted] == [0, 1, 2, 3, 4]
    assert [one["digest"] for one in adopted[2:]] == [one["digest"] for one in again]
    if kind == "orbax":
        assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


@STORES
def test_a_killed_host_harms_nobody_and_its_successor_takes_the_newest(start, tmp_path, kind):
    trainer = start("processes", 1, "publish", kind, tmp_path, 0, 3)
    host = start("processes", 2, "adopt", kind, tmp_path, 3)
    assert next_of(host)["version"] == 0
    host.kill()
    host.wait()
    adopted, published = said(start("processes", 2, "adopt", kind, tmp_path, 3)), said(trainer)
    assert adopted[-1]["version"] == 3
    digests = {one["version"]: one["digest"] for one in published}
    assert all(one["digest"] == digests[one["version"]] for one in adopted)


# --- in the middle of a pull --------------------------------------------------------------------------------


@pytest.fixture
def host() -> Engine:
    return make_engine(2)


def before_the_pull(monkeypatch: pytest.MonkeyPatch, strike: Callable[[], object]) -> None:
    """Granted, and not begun."""
    ask = Pull._ask

    def and_strike(self, channel, **request):
        answer = ask(self, channel, **request)
        if request["ask"] == "pull":
            strike()
        return answer

    monkeypatch.setattr(Pull, "_ask", and_strike)


def test_a_publisher_killed_in_mid_pull_is_an_error_at_once(start, tmp_path, monkeypatch, host: Engine):
    trainer = start("processes", 1, "publish", "transfer", tmp_path, 0, 2)
    wait_for(tmp_path / "address")
    address = (tmp_path / "address").read_text()
    with (
        closing(TransferReader(address, host.canary, DEADLINE_S, SECRET)) as reader,
        closing(TransferReader(address, host.canary, DEADLINE_S, SECRET)) as late,
    ):
        wait_until(lambda: reader.latest() == late.latest() == 0)
        held = reader.load(0, host.param_shardings)
        before_the_pull(monkeypatch, lambda: (trainer.kill(), trainer.wait()))
        with pytest.raises(PublisherLostError, match=f"version 0 could not be pulled from {address}") as lost:
            ends(lambda: late.load(0, host.param_shardings))
        assert "timed out" not in str(lost.value), "it waited for its deadline"
        assert load_newer(reader, host.param_shardings, than=0) is None
        assert digest(held.params) == held.digest


def test_a_publisher_that_stands_still_is_given_up_at_the_deadline(
    start, tmp_path, monkeypatch, host: Engine
):
    """Its machine answers still, and the process does not; when it goes on, so does the reader."""
    trainer = start("processes", 1, "publish", "transfer", tmp_path, 0, 2)
    wait_for(tmp_path / "address")
    address = (tmp_path / "address").read_text()
    with closing(TransferReader(address, host.canary, 2.0, SECRET)) as reader:
        wait_until(lambda: reader.latest() == 0)
        with monkeypatch.context() as patch:
            before_the_pull(patch, lambda: stop(trainer.pid))
            started = time.monotonic()
            with pytest.raises(PublisherLostError, match=r"within 2 s: (\S+: )?timed out"):
                ends(lambda: reader.load(0, host.param_shardings))
            assert time.monotonic() - started > 1.9
        trainer.send_signal(signal.SIGCONT)
        found: list[VersionedParams | None] = []
        wait_until(lambda: found.append(load_newer(reader, host.param_shardings)) or found[-1] is not None)
        loaded = found[-1]
        assert loaded is not None and loaded.version == 0 and digest(loaded.params) == loaded.digest


def test_a_reader_whose_connections_broke_while_they_were_made_pulls_again(
    start, tmp_path, monkeypatch, host: Engine
):
    """The publisher stands still at each connect. A transfer server that is kept often moves nothing then."""
    trainer = start("processes", 1, "publish", "transfer", tmp_path, 0, 2)
    wait_for(tmp_path / "address")
    address = (tmp_path / "address").read_text()

    def stop_and_start(own_host: str) -> Any:
        stop(trainer.pid)
        return start_server(own_host)

    with closing(TransferReader(address, host.canary, 0.5, SECRET)) as reader:
        wait_until(lambda: reader.latest() == 0)
        for _ in range(12):
            with monkeypatch.context() as patch:
                patch.setattr(arrays, "start_server", stop_and_start)
                with pytest.raises(PublisherLostError, match=r"within 0\.5 s"):
                    reader.load(0, host.param_shardings)
            trainer.send_signal(signal.SIGCONT)
        wait_until(lambda: load_newer(reader, host.param_shardings) is not None)


# --- several processes that publish as one ------------------------------------------------------------------


def test_each_process_serves_its_own_shards(start, tmp_path, port: int):
    """Two processes of two devices; the reader's one mesh has two, on other axes."""
    group = [start("group", 2, tmp_path, 2, index, port) for index in range(2)]
    wait_for(tmp_path / "address")
    specs = {name: list(spec)[::-1] for name, spec in SPECS.items()}
    onto = {name: on(2, 3)["w" if len(spec) == 2 else "b"] for name, spec in specs.items()}
    address = (tmp_path / "address").read_text()
    with closing(TransferReader(address, probe, DEADLINE_S, SECRET)) as reader:
        for version in range(2):
            wait_until(lambda version=version: reader.latest() == version, DEADLINE_S)
            loaded = reader.load(version, onto)
            for name, wanted in params_of(version).items():
                np.testing.assert_array_equal(np.asarray(loaded.params[name]), wanted, err_msg=name)
                assert loaded.params[name].sharding == onto[name]
            (tmp_path / f"adopted-{version}").touch()
        sizes = {name: leaf.nbytes for name, leaf in params_of(0).items()}
        assert reader.pulled_bytes == 2 * sum(sizes.values()) - sizes["frozen"]
    assert [process.wait(DEADLINE_S) for process in group] == [0, 0]
    assert jax.process_count() == 1
