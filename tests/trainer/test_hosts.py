"""Several processes are one trainer: same losses, one set of versions and checkpoints, and one end.

Each is watched; whatever is left of a group at a test's deadline is killed by its id.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.models.model import Model
from areal_jax.trainer.checkpoint import committed, discard_newer
from areal_jax.trajectories.codec import encode
from areal_jax.trajectories.packing import plan_batch
from areal_jax.trajectories.plan import BatchLayout
from areal_jax.weights.orbax import OrbaxReader
from tests.ports import reserved_ports
from tests.processes import has_ended
from tests.small_run import small
from tests.trainer.conftest import make_groups, same_bits
from tests.trainer.hosts import LENGTH, ROWS, STEPS, WORDS, Asked, probe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
TOGETHER, ALONE = "{fsdp: 2, tensor: 2}", "{data: 1}"
PLANS: dict[str, BatchLayout] = {"plan": "shared", "apart": "apart"}
"""Files of plans: for packed batches, and for updates over prefix trees."""
OWN = (
    "digest", "machine", "compiled_programs", "memory_forecast_bytes", "update_s", "checkpoint_pause_s",
)  # fmt: skip
"""What is another mesh's own, and the times that were measured."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every step's plan, and its trajectories one by one."""
    folder = tmp_path_factory.mktemp("hosts")
    for step in range(STEPS):
        groups = make_groups(seed=step)
        for name, layout in PLANS.items():
            plan = plan_batch(groups, ROWS, LENGTH, minibatches=2, layout=layout)
            (folder / f"{name}-{step}").write_bytes(msgpack.packb(plan.to_wire()))
        for place, one in enumerate(one for group in groups for one in group.trajectories):
            (folder / f"{step}-{place}").write_bytes(encode(one))
    return folder


@contextmanager
def group(folder: Path, name: str, processes: int, **asked: Any) -> Iterator[list[subprocess.Popen]]:
    """The watchers of a trainer's processes, of four devices together or of one."""
    devices, mesh = ("2", TOGETHER) if processes > 1 else ("1", ALONE)
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": devices, "JAX_PLATFORMS": "cpu"}
    asked = {"mesh": mesh, "last": STEPS, **asked}
    started = []
    with reserved_ports() as (port,):
        for index in range(processes):
            own = Asked(name, processes, index, port, **asked)._asdict()
            own["stops_at"] = own["stops_at"] if index == processes - 1 else -1
            command = [sys.executable, "-m", "tests.trainer.hosts", str(folder), json.dumps(own)]
            log = (folder / f"{name}-{index}.log").open("w")
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
        try:
            yield started
        finally:
            for process in started:
                process.kill()  # and the kernel the one it watches
                process.wait()


def log(folder: Path, name: str, index: int) -> str:
    return (folder / f"{name}-{index}.log").read_text()


def train(folder: Path, name: str, processes: int, **asked: Any) -> list[dict[str, Any]]:
    """What each process left."""
    end = time.monotonic() + DEADLINE_S
    with group(folder, name, processes, **asked) as started:
        for process in started:
            process.wait(max(0.0, end - time.monotonic()))
        statuses = [process.returncode for process in started]
    assert statuses == [0] * processes, "\n".join(log(folder, name, i)[-3000:] for i in range(processes))
    return [json.loads((folder / f"{name}-{i}.json").read_text()) for i in range(processes)]


def figures(out: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By step."""
    return {
        step: {name: value for name, value in row.items() if name not in OWN}
        for step, row in out["trained"].items()
    }


def parameters(folder: Path, name: str, which: str) -> dict[str, np.ndarray]:
    """Returns leaf -> values: `drawn` or `first` of `hosts.keep_first_params`."""
    with np.load(folder / f"{name}.npz") as found:
        return {key.removeprefix(f"{which}."): found[key] for key in found if key.startswith(f"{which}.")}


def flat(leaves: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([leaves[name].astype(np.float64).ravel() for name in sorted(leaves)])


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return train(folder, "alone", 1, run="alone")[0]


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[dict[str, Any]]:
    """Two processes of two devices each; their run's folder is `pair`."""
    return train(folder, "pair", 2, run="pair")


def test_two_processes_train_as_one(alone: dict[str, Any], pair: list[dict[str, Any]]):
    first, second = pair
    assert len(alone["trained"]) == STEPS
    assert figures(first).keys() == figures(alone).keys()
    for step, wanted in figures(alone).items():
        assert figures(first)[step] == pytest.approx(wanted, rel=1e-5, abs=1e-8), step
    assert first["digests"] == second["digests"]


def test_two_processes_draw_the_parameters_of_one_in_every_bit(folder: Path, alone: Any, pair: Any):
    wanted, *found = (parameters(folder, name, "drawn") for name in ("alone-0", "pair-0", "pair-1"))
    assert sum(leaf.size for leaf in wanted.values()) > 9000
    assert same_bits(found, [wanted, wanted])


def test_two_processes_begin_supervised_as_one_but_for_rounding(folder: Path, alone: Any, pair: Any):
    """A mesh adds a gradient's parts in its own order, so the bits of version 0 are those of its mesh."""
    drawn, wanted = (flat(parameters(folder, "alone-0", which)) for which in ("drawn", "first"))
    found = flat(parameters(folder, "pair-0", "first"))
    step, rounding = np.linalg.norm(wanted - drawn), np.linalg.norm(found - wanted)
    assert step > 0
    assert rounding <= 1e-3 * step  # measured: 2e-5


def test_the_first_process_tells_and_the_others_do_not(pair: list[dict[str, Any]]):
    reported = pair[0]["reported"]
    assert reported[0] == "str"  # the note on memory
    assert sorted(reported[1:]) == sorted(
        ["BatchTrained", "VersionCommitted"] * STEPS + ["CheckpointCommitted"] * 2
    )
    assert pair[1]["reported"] == []


def test_what_two_processes_published_a_single_one_reads(folder: Path, pair: list[dict[str, Any]]):
    parts = assemble(small(folder / "reader", *WORDS, f"trainer.mesh={ALONE}"))
    model: Model = parts.model
    store = OrbaxReader(folder / "pair" / "weights", probe(model))
    shardings = jax.tree.map(
        lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract_params
    )
    assert store.latest() == STEPS
    assert store.load(STEPS, shardings).digest == pair[0]["digests"][str(STEPS)]


def go_back(folder: Path, run: str) -> None:
    """The pair's run as it was at its first checkpoint, in a folder of that name."""
    shutil.copytree(folder / "pair", folder / run)
    assert discard_newer(folder / run / "checkpoints", 2) == [4]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_of_two_processes_is_gone_on_from(
    folder: Path, pair: list[dict[str, Any]], processes: int
):
    """By two to the same bits, by one to the same losses."""
    name = f"resumed-by-{processes}"
    go_back(folder, name)
    resumed = train(folder, name, processes, run=name)
    middle = pair[0]["trained"]["1"]["digest"]
    for one in resumed:
        assert one["restored"] == 2
        assert one["digests"]["2"] == middle
    assert list(resumed[0]["trained"]) == ["2", "3"]
    for step, row in figures(resumed[0]).items():
        assert row == pytest.approx(figures(pair[0])[step], rel=1e-5, abs=1e-8), step
    if processes == 2:
        assert [one["digests"]["4"] for one in resumed] == [pair[0]["digests"]["4"]] * 2
    assert committed(folder / name / "checkpoints") == [2, 4]


def test_two_processes_train_over_prefix_trees_as_one_trains_packed(
    folder: Path, alone: dict[str, Any], pair: Any
):
    """From the pair's checkpoint of version 2, which saves the supervised start."""
    go_back(folder, "trees")
    first, second = train(folder, "trees", 2, run="trees", plans="apart", last=3)
    assert first["restored"] == second["restored"] == 2
    (found,), wanted = figures(first).values(), figures(alone)["2"]
    assert found.keys() == wanted.keys()
    for name in found.keys() - {"logp_unequal"}:  # a count of tokens that differ in any bit
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert first["digests"] == second["digests"]
    assert first["digests"]["2"] != first["digests"]["3"]


# --- ends ---------------------------------------------------------------------------------------------------


def pids(folder: Path, name: str) -> list[int]:
    """Of watchers and watched."""
    return [int(pid) for i in range(2) for pid in (folder / f"{name}-{i}.pids").read_text().split()]


def wait_for_stop(folder: Path, name: str, started: list[subprocess.Popen]) -> None:
    """Until the second process is at the step in which it stops; the first one's collectives then wait."""
    end = time.monotonic() + DEADLINE_S
    while not (folder / f"{name}-1.stopped").exists():
        is_running = all(process.poll() is None for process in started)
        assert is_running and time.monotonic() < end, log(folder, name, 0)[-3000:]
        time.sleep(0.05)


def ended(folder: Path, name: str, started: list[subprocess.Popen]) -> list[int]:
    """The watchers' statuses; no process is left."""
    end = time.monotonic() + DEADLINE_S
    statuses = [process.wait(max(0.0, end - time.monotonic())) for process in started]
    assert all(map(has_ended, pids(folder, name)))
    return statuses


def test_a_group_with_a_stopped_process_is_ended_by_its_watchdogs(folder: Path, pair: Any):
    go_back(folder, "stopped")
    with group(folder, "stopped", 2, run="stopped", stops_at=3, later_s=15.0) as started:
        wait_for_stop(folder, "stopped", started)
        statuses = ended(folder, "stopped", started)
    assert statuses[1] == 128 + signal.SIGKILL
    assert "no progress reported for 15 s; state: stopped; activity: pack\n" in log(folder, "stopped", 1)
    assert statuses[0] in (1, 128 + signal.SIGABRT, 128 + signal.SIGKILL)  # by Gloo, jax or its watchdog
    assert "; activity: update\n" in log(folder, "stopped", 0)


def test_a_told_group_ends_though_one_is_stopped(folder: Path, pair: Any):
    """As scancel does: SIGTERM to all; the grace is 3 s."""
    go_back(folder, "reported")
    with group(folder, "reported", 2, run="reported", stops_at=2) as started:
        wait_for_stop(folder, "reported", started)
        for process in started:
            process.send_signal(signal.SIGTERM)
        statuses = ended(folder, "reported", started)
    assert statuses == [128 + signal.SIGTERM, 128 + signal.SIGKILL]
    assert "killed: still running 3 s after SIGTERM; activity: pack\n" in log(folder, "reported", 1)


def test_a_killed_process_ends_the_others(folder: Path, pair: Any):
    """By the connection that Gloo lost, or jax's heartbeat: no watchdog comes to its deadline here."""
    asked = {"run": "killed", "stops_at": 2, "by": int(signal.SIGKILL), "heartbeat_s": 5}
    go_back(folder, "killed")
    with group(folder, "killed", 2, **asked) as started:
        wait_for_stop(folder, "killed", started)
        statuses = ended(folder, "killed", started)
    assert statuses[0] in (1, 128 + signal.SIGABRT)
    assert statuses[1] == 128 + signal.SIGKILL
    assert "ended with status 137; activity: pack\n" in log(folder, "killed", 1)
    assert f"ended with status {statuses[0]}; activity: update\n" in log(folder, "killed", 0)
