"""The environment of processes on GPUs, and what `doctor` says of GPUs that jax cannot use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from areal_jax.assembly import gpus
from areal_jax.assembly.gpus import (
    FLAGS,
    FRACTION,
    PRECISION,
    gpu_environment,
    gpu_problems,
    use_gpu_environment,
)
from areal_jax.config.loading import load_config
from areal_jax.plugin import NOT_INSTALLED
from tests.hangs import HANG_S

OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true"
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ([], OVERLAP),
        (["control.max_staleness=0"], f"{OVERLAP} {DETERMINISTIC}"),
        (["trainer.numerics=exact", "trainer.remat=none"], f"{OVERLAP} {DETERMINISTIC}"),
    ],
)
def test_a_run_that_promises_bits_has_deterministic_kernels(words: list[str], flags: str):
    found = gpu_environment(load_config("configs/quickstart.yaml", "model.dtype=bfloat16", *words), {})
    assert found == {FRACTION: "0.92", FLAGS: flags}


def test_what_the_user_set_stays_and_comes_last():
    config = load_config("configs/quickstart.yaml", "control.max_staleness=0")
    own = "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=there"
    found = gpu_environment(config, {FRACTION: "0.5", FLAGS: own, PRECISION: "high"})
    assert found == {FRACTION: "0.5", FLAGS: f"{DETERMINISTIC} {own}", PRECISION: "high"}
    assert gpu_environment(config, found) == found  # a process that inherits them adds nothing


@pytest.mark.slow
def test_xla_knows_every_flag():
    """An unknown flag ends the process; jaxlib for the CPU knows those of GPUs too."""
    config = load_config("configs/quickstart.yaml", "control.max_staleness=0")
    env = {**os.environ, **gpu_environment(config, {}), "JAX_PLATFORMS": "cpu"}
    for flags, status in ((env[FLAGS], True), (f"{env[FLAGS]} --xla_gpu_no_such_flag=true", False)):
        done = subprocess.run(
            [sys.executable, "-c", "import jax; jax.jit(lambda x: x + 1)(1)"],
            env=env | {FLAGS: flags},
            capture_output=True,
            timeout=HANG_S,
            check=False,
        )
        assert (done.returncode == 0) is status, done.stderr.decode()[-500:]


def test_only_a_process_that_may_use_gpus_changes_its_environment(monkeypatch: pytest.MonkeyPatch):
    config = load_config("configs/quickstart.yaml", "model.dtype=bfloat16")
    for name in (FRACTION, FLAGS):
        monkeypatch.setenv(name, "")  # so that what the process sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    use_gpu_environment(config)
    assert FRACTION not in os.environ and FLAGS not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    use_gpu_environment(config)
    assert (os.environ[FRACTION], os.environ[FLAGS]) == ("0.92", OVERLAP)


PRECISIONS = """
import jax, jax.numpy as jnp
from areal_jax.assembly.gpus import use_gpu_environment
from areal_jax.config.loading import load_config
if WORDS is not None:
    use_gpu_environment(load_config("configs/quickstart.yaml", *WORDS))
print("HIGHEST" in jax.jit(jnp.dot).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).as_text())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "given", "is_highest"),
    [
        ([], {}, True),
        (["model.dtype=bfloat16"], {}, False),
        ([], {PRECISION: "high"}, False),
        (None, {}, False),
        (None, {PRECISION: "highest"}, True),  # a process that another one started with this environment
    ],
)
def test_products_of_a_float32_model_are_not_tf32(
    words: list[str] | None, given: dict[str, str], is_highest: bool
):
    """jax reads the variable when it is imported, which is before a process knows its config."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0", **given}
    code = PRECISIONS.replace("WORDS", repr(words))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=HANG_S, check=True
    )
    assert done.stdout.decode().strip() == str(is_highest)


@pytest.mark.parametrize(
    ("visible", "platform", "versions", "problems"),
    [
        ("", "cpu", {}, []),
        ("0,1", "gpu", {"jax-cuda12-plugin": "1.2", "jaxlib": "1.2", "nvidia-nccl-cu12": "2"}, []),
        ("0", "gpu", {"jax-cuda13-plugin": "1.2", "jaxlib": "1.2"}, []),  # one GPU needs no NCCL
        ("0", "cpu", {"jaxlib": "1.2"}, ["jax has no CUDA plugin; pip install '.[cuda12]'"]),
        (
            "0",
            "cpu",
            {"jax-cuda12-plugin": "1.1", "jaxlib": "1.2"},
            ["jax-cuda12-plugin 1.1 does not match jaxlib 1.2; install both in one version"],
        ),
        (
            "0",
            "cpu",
            {"jax-cuda12-plugin": "1.2", "jaxlib": "1.2"},
            ["perhaps the driver (535.5) is too old"],
        ),
        ("0,1", "gpu", {"jax-cuda12-plugin": "1.2", "jaxlib": "1.2"}, ["NCCL is missing, without which"]),
    ],
)
def test_the_problems_of_gpus_are_named_with_their_remedy(
    visible: str,
    platform: str,
    versions: dict[str, str],
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpus, "version_of", lambda name: versions.get(name, NOT_INSTALLED))
    monkeypatch.setattr(gpus, "find_library", lambda name: None)
    monkeypatch.setattr(gpus, "_driver", lambda: "535.5")
    found = gpu_problems(platform)
    assert len(found) == len(problems)
    for said, expected in zip(found, problems, strict=True):
        assert expected in said
