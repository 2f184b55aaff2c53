"""Random parameters have the same bits on every path, on every mesh, and as earlier releases drew them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from areal_jax.models import model as models
from areal_jax.models.model import CPU_OPTIONS, drawing
from tests.models.draws import MESHES, digests, drawn_by_init, model_of

ROOT = Path(__file__).parents[2]

FUSED = {"narrow": "fe05af1189171148", "odd": "76f9a13903cb72f8", "adapted": "d938aa979ea19df0"}
"""Digests of the parameters that XLA 0.10.2 drew at its default optimisation level, one device and one
process, on an x86 CPU with fused multiply-add: recorded before `CPU_OPTIONS` existed.
"""
UNFUSED = {"narrow": "5b1dc4d363a06f59", "odd": "07f6812781eae726", "adapted": "5c07dd83485fd715"}
"""The same on a CPU without it (XLA's SSE4_2)."""

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the digests are of x86 CPUs")


def assert_equal_on_all_paths(found: dict[str, str]) -> None:
    for name in ("narrow", "odd", "adapted", "adapters"):
        own = {path: value for path, value in found.items() if path.split()[0] == name}
        assert set(own.values()) == {found[name]}, own
    assert sum(path.startswith("narrow") for path in found) == 5 + 2 * len(MESHES)


@pytest.mark.slow
def test_each_path_and_mesh_draws_the_same_bits():
    assert_equal_on_all_paths(digests())


@pytest.mark.slow
@on_x86
def test_the_bits_are_those_of_earlier_releases():
    cpu = Path("/proc/cpuinfo").read_text()
    assert drawn_by_init() == (FUSED if " fma " in cpu and " avx2 " in cpu else UNFUSED)


@on_x86
@pytest.mark.soak
@pytest.mark.parametrize(("isa", "wanted"), [("AVX2", FUSED), ("SSE4_2", UNFUSED)])
def test_the_same_holds_with_fewer_instructions(isa: str, wanted: dict[str, str]):
    env = {**os.environ, "XLA_FLAGS": f"--xla_cpu_max_isa={isa}", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-m", "tests.models.draws"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert_equal_on_all_paths(found)
    assert {name: found[name] for name in wanted} == wanted


# --- compiler options ---------------------------------------------------------------------------------------


@pytest.fixture
def jits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each jit that is then called, beside its key."""
    called: list[Any] = []

    def jit(f: Any, static_argnums: int = 0, compiler_options: Any = None) -> Any:
        return lambda model, key: called.append((compiler_options, key))

    monkeypatch.setattr(models, "jax", SimpleNamespace(jit=jit))
    return called


@pytest.mark.parametrize(
    ("platforms", "wanted"),
    [(["cpu"], CPU_OPTIONS), (["cpu"] * 2, CPU_OPTIONS), (["gpu"], None), (["tpu"], None)],
)
def test_options_of_cpus_reach_no_other_compiler(jits: list[Any], platforms: list[str], wanted: Any):
    key: Any = SimpleNamespace(devices=lambda: [SimpleNamespace(platform=name) for name in platforms])
    drawing(lambda model, key: None)(None, key)
    assert jits == [(wanted, key)]


@pytest.mark.parametrize("target", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", ["narrow", "adapted"])
def test_a_draw_lowers_for_devices_that_are_absent(target: str, name: str):
    """The outer program decides: jax refuses options of a jit inside another."""
    lowered = jax.jit(model_of(name).init).trace(0).lower(lowering_platforms=(target,))
    assert "threefry2x32" in lowered.as_text()
    assert "xla_backend_optimization_level" not in lowered.as_text()


def test_seeds_may_be_traced_and_mapped():
    model = model_of("adapted")
    assert jax.eval_shape(model.init, 0) == model.abstract_params
    mapped = jax.eval_shape(jax.vmap(model.init), jax.ShapeDtypeStruct((2,), "int32"))
    assert [leaf.shape[0] for leaf in jax.tree.leaves(mapped)] == [2] * len(jax.tree.leaves(mapped))
