"""Several processes train as one: the same metrics, norms and parameters, on rows that each builds itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest

from areal_jax.trajectories.codec import encode
from areal_jax.trajectories.packing import plan_batch
from tests.ports import reserved_ports
from tests.trainer.conftest import make_groups
from tests.trainer.processes import LENGTH, ROWS, STEPS

pytestmark = [pytest.mark.few_optimizations, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every step's plan, and its trajectories one by one."""
    folder = tmp_path_factory.mktemp("processes")
    for step in range(STEPS):
        groups = make_groups(seed=step)
        plan = plan_batch(groups, ROWS, LENGTH, minibatches=2)
        (folder / f"plan-{step}").write_bytes(msgpack.packb(plan.to_wire()))
        for place, one in enumerate(one for group in groups for one in group.trajectories):
            (folder / f"{step}-{place}").write_bytes(encode(one))
    return folder


def run(folder: Path, processes: int, devices: int, *meshes: str) -> None:
    """Start them all and wait for their good end; whatever is left at the deadline is killed by its id."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    started = []
    with reserved_ports() as (port,):
        for index in range(processes):
            words = [
                "tests.trainer.processes",
                folder,
                f"{index}-of-{processes}",
                processes,
                index,
                port,
                *meshes,
            ]
            log = (folder / f"log-{index}-of-{processes}").open("w")
            command = [sys.executable, "-m", *map(str, words)]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + DEADLINE_S
        try:
            for process in started:
                process.wait(max(0.0, end - time.monotonic()))
        finally:
            for process in started:
                process.kill()
                process.wait()
    logs = [(folder / f"log-{index}-of-{processes}").read_text()[-3000:] for index in range(processes)]
    assert [process.returncode for process in started] == [0] * processes, "\n".join(logs)


def results(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, np.ndarray]:
    """One process, one device."""
    run(folder, 1, 1, "data=1")
    return results(folder, "0-of-1-data=1")


@pytest.mark.parametrize(
    "devices, mesh",
    [
        pytest.param(1, "data=2", marks=pytest.mark.soak),
        pytest.param(1, "fsdp=2", marks=pytest.mark.soak),
        (2, "fsdp=2,tensor=2"),
    ],
)
def test_two_processes_train_as_one(folder: Path, alone: dict[str, np.ndarray], devices: int, mesh: str):
    run(folder, 2, devices, mesh)
    assert np.ptp(alone["paramsembedding"]) > 0
    first, second = (results(folder, f"{index}-of-2-{mesh}") for index in range(2))
    assert first.keys() == second.keys() == alone.keys()
    for name, wanted in alone.items():
        if name.startswith("digest"):
            assert first[name] == second[name], name  # bits are another mesh's own
            continue
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
