"""The recipes for GPUs, each run as its processes on CPUs: a tiny model in bfloat16, in short samples, on
meshes that split the same axes over fewer devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.observe.metrics import read_rows
from areal_jax.replay.folder_audit import audit_run
from tests.cluster.test_launch_local import QUIET, ROOT
from tests.programs import require

pytestmark = [pytest.mark.few_optimizations, pytest.mark.slow]

STEPS, GROUPS = 3, 4
LARGE = ["trainer.mesh.fsdp=4", "trainer.rows=4", "runtime.hosts=2"]
RECIPES = {
    "qwen2.5_0.5b_gsm8k_1gpu": (["run"], []),
    "qwen2.5_7b_gsm8k_16gpu": (["launch", "local"], LARGE),
    "qwen2.5_32b_gsm8k_64gpu": (["launch", "local"], [*LARGE, "runtime.trainer_processes=2"]),
}
"""Name -> the command, and the sizes of the recipe's meshes here."""
SMALL = [
    "model.shape=tiny", f"run.steps={STEPS}", "generation.slots=4", "generation.length=768",
    "generation.max_tokens=8", "generation.prefill_chunk=64", "algorithm.group_size=4",
    "algorithm.minibatches=2", f"trainer.batch_size={GROUPS}", "trainer.length=1536",
    "trainer.checkpoint_every=2", "runtime.reward_workers=1", "runtime.deadline_s=600", "launch.restarts=0",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if "1gpu" in name else pytest.param(name, marks=pytest.mark.soak) for name in RECIPES]
)
def test_a_recipe_trains_a_tiny_model(name: str, tmp_path: Path, shared_data: Path):
    require("redis-server")
    folder = tmp_path / "run"
    where = [f"run.dir={folder}", f"tasks.gsm8k.data_dir={shared_data / 'gsm8k'}"]
    command, sizes = RECIPES[name]
    words = [*command, f"configs/{name}.yaml", *where, *SMALL, *sizes, *QUIET]
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "areal_jax.cli.main", *words], cwd=ROOT, env=env, text=True, timeout=400,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    audit = audit_run(folder)
    assert audit.ok and audit.trained == STEPS * GROUPS and audit.in_flight == 0
    assert [row["step"] for row in read_rows(folder)] == list(range(STEPS))
