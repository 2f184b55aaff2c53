"""The command itself, in a process of its own: one JSON object, the verdict, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.accelerators.compiling import CONFIGS

pytestmark = pytest.mark.accelerators


def planned(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `areal-jax plan` for the quickstart recipe, and its answer."""
    command = [sys.executable, "-m", "areal_jax.cli.main", "plan", str(CONFIGS / "quickstart.yaml"), *words]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=400)
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_small_recipe_fits_and_every_program_is_planned():
    code, figures = planned("--target", "h100x2", "model.dtype=bfloat16")
    assert (code, figures["fits"], figures["placement"]) == (0, True, "split")
    assert [(one["role"], one["name"]) for one in figures["programs"]] == [
        *(("trainer", name) for name in ("begin", "accumulate", "apply", "wire copy")),
        *(("host", name) for name in ("prefill", "insert", "decode", "recompute", "extract", "digest")),
    ]
    assert all(one["at_least_s"] > 0 for one in figures["programs"])
    assert 0 < figures["speed"]["mfu"] < 1


def test_too_many_slots_do_not_fit_and_the_message_names_fewer():
    """A slot takes 32 tokens of 1,024 bytes: 2.5 million slots need 76 GiB of pages."""
    code, figures = planned("--target", "h100", "generation.slots=2500000", "generation.decode_steps=1")
    host = figures["roles"][1]
    assert (code, figures["fits"], host["fits"]) == (1, False, False)
    assert host["peak"] > 76 * 2**30
    assert host["text"].startswith("host: does not fit (") and "generation.slots=" in host["text"]


def test_the_bytes_of_one_program_are_named_to_nine_tenths():
    code, figures = planned("--target", "h100x2", "model.dtype=bfloat16", "--bytes", "trainer.wire_copy")
    assert (code, figures["program"], figures["devices"]) == (0, "trainer.wire copy", 2)
    sizes = [one["bytes"] for one in figures["traffic"]]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.9 * figures["bytes"] <= figures["named_bytes"] == sum(sizes) <= figures["bytes"]
    largest = figures["traffic"][0]
    moved = sum(array["bytes"] for side in ("reads", "writes") for array in largest[side])
    assert largest["bytes"] == largest["times"] * moved
    # Half of a float32 parameter, beside its bfloat16 copy for the hosts and the bits of its digest.
    shapes = [one["array"] for side in ("reads", "writes") for one in largest[side]]
    assert shapes == ["f32[2,64,256]", "u32[2,64,256]", "bf16[2,64,256]"]
    assert moved == 2 * 64 * 256 * (4 + 4 + 2) and largest["line"].rpartition(":")[0].endswith(
        "weights/digest.py"
    )
