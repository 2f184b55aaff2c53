"""Verdicts on memory name the setting to change, and bounds on speed follow from the programs' own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from areal_jax.config.loading import load_config
from areal_jax.plan.bounds import PlannedProgram
from areal_jax.plan.costs import Costs
from areal_jax.plan.planning import Verdict, speed, verdicts, version_cost
from areal_jax.plan.recipe import CONVERTED, Recipe, open_recipe
from areal_jax.plan.targets import GIB, parse_target

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
H100 = replace(parse_target("h100"), fraction=0.75)


def recipe(*words: str) -> Recipe:
    words = ("model.shape=tiny", "generation.max_tokens=18", *words)
    return open_recipe(load_config(QUICKSTART, *words), jax.devices())


@pytest.fixture(scope="module")
def split() -> Recipe:
    return recipe("runtime.placement=split", "trainer.remat=none", "generation.prefill_chunk=8")


def program(role: str, name: str, gib: float, calls: float = 1, seconds: float = 0.5) -> PlannedProgram:
    return PlannedProgram(
        role=role, name=name, compile_s=1, argument_bytes=GIB, temporary_bytes=int(gib * GIB),
        beyond_bytes=int(gib * GIB), costs=Costs(), products=Counter(),
        seconds={"compute": seconds / 2, "memory": seconds}, calls=calls, tokens=100,
    )  # fmt: skip


def judged(of: Recipe, trainer: float, host: float) -> dict[str, Verdict]:
    programs = [program("trainer", "begin", trainer), program("host", "decode", host)]
    return {verdict.role: verdict for verdict in verdicts(of, programs, H100)}


def test_what_fits(split: Recipe):
    found = judged(split, 10, 10)
    assert found["trainer"].fits and found["host"].fits
    assert found["trainer"].remedies == ()
    assert found["host"].text == "host: fits (10.0 of 59.3 GiB a device, most in decode)"


def test_the_trainers_remedies_scale_its_temporaries(split: Recipe):
    """100 GiB in 24 rows: 14 rows have 58.3; recomputing layers is taken as half."""
    found = judged(split, 100, 10)["trainer"]
    assert not found.fits
    assert found.remedies == (
        "trainer.remat=layer (about 50.0 GiB)",
        "trainer.rows=14 (about 58.3 GiB)",
        "trainer.length=32 (about 50.0 GiB)",
    )
    assert found.text.startswith("trainer: does not fit (100.0 of 59.3 GiB a device, most in begin); set ")


def test_a_hosts_remedies_are_fewer_slots_or_tokens():
    """8 slots of 32 tokens in 40 GiB of pages, and 40 GiB of temporaries: 5 slots have 5/8 of both."""
    of = recipe("runtime.placement=split", "generation.prefill_chunk=8")
    host = of.sides[1]
    pages = {"weights of 2 versions": GIB, "KV pages and slots": 40 * GIB}
    of = replace(of, sides=(of.sides[0], replace(host, resident=pages)))
    found = judged(of, 1, 40)["host"].remedies
    assert found[:2] == ("generation.kv_tokens=96 (about 56.0 GiB)", "generation.slots=5 (about 51.0 GiB)")


def test_stacked_weights_save_the_copy_that_a_conversion_needs(split: Recipe):
    resident = {"weights of 2 versions": GIB, "KV pages and slots": GIB, CONVERTED: 20 * GIB}
    of = replace(split, sides=(split.sides[0], replace(split.sides[1], resident=resident)))
    programs = [program("trainer", "begin", 1), program("host", "recompute", 40)]
    (_, found) = verdicts(of, programs, H100)
    wanted = found.peak / GIB - 20
    assert f"generation.weight_layout=stacked (about {wanted:.1f} GiB)" in found.remedies


def test_where_no_single_setting_is_enough_the_best_two_are_named(split: Recipe):
    (found,) = judged(split, 5000, 10)["trainer"].remedies
    assert found.startswith("trainer.rows=1 (about 208.3 GiB alone) and ")


def test_roles_on_one_device_hold_each_others_arrays():
    found = judged(recipe("runtime.placement=shared"), 1, 1)
    assert "host: KV pages and slots" in found["trainer"].resident
    assert "trainer: train state" in found["host"].resident


def test_speed_is_the_slower_sides(split: Recipe):
    """8 x 16 samples of 32 tokens, 18 of them sampled; the trainer takes 3 x 0.5 s, the host 5 x 0.5 s."""
    programs = [program("trainer", "begin", 1, calls=3), program("host", "decode", 1, calls=5)]
    found = speed(split, programs, H100.target)
    assert (found.trainer_s, found.hosts_s, found.step_s) == (1.5, 2.5, 2.5)
    assert found.trained_tokens_per_s == pytest.approx(128 * 32 / 1.5)
    assert found.sampled_tokens_per_s == pytest.approx(128 * 18 / 2.5)
    flops = 6 * split.model.parameter_count * 128 * 32
    assert found.mfu == pytest.approx(flops / 1.5 / 989.4e12)
    assert speed(recipe("runtime.placement=shared"), programs, H100.target).step_s == 4.0


def test_a_version_costs_its_bytes_over_the_links(split: Recipe):
    programs = [program("trainer", "wire copy", 1, seconds=0.25), program("host", "digest", 1, seconds=0.5)]
    found = version_cost(split, programs, H100.target)
    size = 4 * split.model.parameter_count
    assert found.bytes == size
    assert found.cast_s == 0.75
    assert found.links_s == pytest.approx(size / 450e9)
    assert found.host_link_s == pytest.approx(2 * size / 64e9)


def calls(of: Recipe) -> dict[str, Any]:
    return {one.name: one.calls for side in of.sides for one in side.programs}


def test_how_often_a_batch_calls_each_program(split: Recipe):
    """16 groups of 8 samples of 32 tokens, 2 to a row of 64: 64 rows, 3 micro-batches of 24, padded to 4.

    A prompt of 14 tokens takes 2 chunks of 8, or half of one of 2 rows; 128 x 18 tokens on 8 slots take 144
    calls of 2.
    """
    assert calls(split) == {
        "begin": 0, "accumulate": 4, "apply": 1, "wire copy": 1,
        "prefill": 32, "insert": 128, "decode": 144, "recompute": 4, "extract": 0, "digest": 1,
    }  # fmt: skip
    assert calls(recipe("runtime.placement=split", "generation.prefill_chunk=128"))["prefill"] == 8
    assert calls(recipe("trainer.rows=64"))["begin"] == 1
    assert calls(recipe("algorithm.proximal=recompute"))["arrive"] == 4
