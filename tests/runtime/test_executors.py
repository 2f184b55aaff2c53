"""Jobs that differ by config alone: each executor on its own mesh, and what its devices hold (L1, L8)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.few_optimizations, pytest.mark.slow]

MESHES = {
    "ppo": {"trainer": {"fsdp": 2}, "reference": {"tensor": 2}, "generator": {}},
    "grpo": {"trainer": {"data": 2}, "reference": {}, "generator": {"tensor": 2}},
    "rloo": {"trainer": {}, "reference": {"data": 4}, "generator": {}},
    "aipo": {"trainer": {"tensor": 2}, "generator": {}},
}
"""Job -> executor -> the axes of its mesh with more than one device."""

DTYPES = {"ppo": "bfloat16", "grpo": "float32", "rloo": "float32"}
"""Job -> dtype of its reference policy; policies are float32 on the trainer and bfloat16 or int8 on hosts."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.executor_jobs", str(tmp_path_factory.mktemp("jobs"))],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def on(job: dict[str, Any], name: str) -> list[tuple[list[int], str]]:
    """Shape and dtype of the live arrays on an executor's devices after the last update."""
    own = set(job["meshes"][name][1])
    return [(shape, dtype) for devices, shape, dtype in job["live"] if own & set(devices)]


@pytest.mark.parametrize("name", MESHES)
def test_each_executor_has_its_own_mesh_and_devices(jobs, name: str):
    job, taken = jobs[name], []
    assert job["audit"] and len(job["rows"]) == 2
    for executor, wanted in MESHES[name].items():
        shape, devices = job["meshes"][executor]
        assert {axis: size for axis, size in shape.items() if size > 1} == wanted
        taken += devices
    assert len(taken) == len(set(taken)), "two executors share a device"
    assert len({tuple(shape.items()) for shape, _ in job["meshes"].values()}) == len(job["meshes"])


@pytest.mark.parametrize("name", DTYPES)
def test_a_reference_policys_devices_hold_its_parameters_once_in_its_dtype(jobs, name: str):
    job = jobs[name]
    found = [one for one in on(job, "reference") if one[0] in job["matrices"]]
    assert sorted(shape for shape, _ in found) == job["matrices"]
    assert {dtype for _, dtype in found} == {DTYPES[name]}


@pytest.mark.parametrize("name", MESHES)
def test_the_trainer_holds_no_kv_and_the_generator_no_optimiser_state(jobs, name: str):
    """KV pages have a shape of their own. On hosts matrices are bfloat16 or codes: moments are float32."""
    job = jobs[name]
    assert job["kv"] in [shape for shape, _ in on(job, "generator")]  # so that the check can see them
    assert job["kv"] not in [shape for shape, _ in on(job, "trainer")]
    moments = [
        shape for shape, dtype in on(job, "trainer") if dtype == "float32" and shape in job["matrices"]
    ]
    assert len(moments) >= 3 * len(job["matrices"])  # master weights and AdamW's two moments
    served = {dtype for shape, dtype in on(job, "generator") if shape in job["matrices"]}
    assert served and served <= {"bfloat16", "uint16", "int8"}


def test_a_quantised_hosts_mismatch_is_reported(jobs):
    assert all(row["logp_gap_mean"] > 1e-3 for row in jobs["aipo"]["rows"])
