"""Names of targets, and the messages about those that do not exist."""

from __future__ import annotations

import pytest

from areal_jax.plan.targets import GIB, TARGETS, environment, missing_extra, parse_target
from areal_jax.types import ArealError


@pytest.mark.parametrize(
    ("text", "device", "count", "topology"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", 1, "1x1x1"),
        ("h100x8", "NVIDIA H100 80GB HBM3", 8, "1x1x8"),
        ("a100-80", "NVIDIA A100-SXM4-80GB", 1, "1x1x1"),
        ("a100-80x16", "NVIDIA A100-SXM4-80GB", 16, "1x1x16"),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 1, "1x1x1"),
        ("rtx4090x2", "NVIDIA GeForce RTX 4090", 2, "1x1x2"),
        ("v5e-1", "TPU v5e", 1, "v5e:1x1"),
        ("v5e-8", "TPU v5e", 8, "v5e:2x4"),
        ("v6e-16", "TPU v6e", 16, "v6e:4x4"),
        ("v5p-8", "TPU v5p", 4, "v5p:2x2x1"),
    ],
)
def test_names(text: str, device: str, count: int, topology: str):
    machine = parse_target(text)
    assert (machine.target.device, machine.count, machine.topology) == (device, count, topology)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10", "did you mean h100?"),
        ("h100-8", "GPUs are counted as in h100x8"),
        ("h100x0", "give at least h100x1"),
        ("v5e", "use one of v5e-1, v5e-4, v5e-8"),
        ("v5e-7", "use one of v5e-1, v5e-4, v5e-8"),
        ("v5p-4", "use one of v5p-8, v5p-16"),
        ("mi300x8", "use one of h100[xN]"),
    ],
)
def test_what_is_no_target(text: str, said: str):
    with pytest.raises(ArealError, match=r"^--target") as caught:
        parse_target(text)
    assert said in str(caught.value)


def test_a_run_allocates_nine_tenths_of_a_gpu_unless_told_otherwise():
    h100 = TARGETS["h100"]
    assert h100.usable() == int(0.92 * h100.memory)
    assert h100.usable(0.9) == int(0.9 * h100.memory)
    assert TARGETS["v5e"].usable(0.5) == int(0.97 * 16 * GIB)


def test_without_the_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("areal_jax.plan.targets.find_spec", lambda name: None)
    assert "needs the extra [cuda12]" in str(missing_extra(TARGETS["l40s"]))
    assert "needs the extra [tpu]" in str(missing_extra(TARGETS["v6e"]))
    monkeypatch.setattr("areal_jax.plan.targets.find_spec", lambda name: object())
    assert missing_extra(TARGETS["l40s"]) is None


def test_the_process_itself_runs_on_the_cpu_and_keeps_the_users_flags():
    found = environment("--xla_dump_to=here")
    assert found["JAX_PLATFORMS"] == "cpu"
    assert found["XLA_FLAGS"] == "--xla_dump_to=here --xla_gpu_autotune_level=0"
