"""The SmolLM2 recipe compiles for a TPU v5e at its real size: update, decode, prefill and recompute."""

from __future__ import annotations

import pytest

from tests.accelerators.compiling import Setting, compiled, off_the_committed_costs

pytestmark = pytest.mark.accelerators

RECIPE = Setting("SmolLM2 on v5e", "v5e-1", "gsm8k_smollm2.yaml")


@pytest.mark.parametrize("program", ["begin", "apply", "prefill", "decode", "recompute"])
def test_costs_are_those_of_the_committed_table(program: str):
    assert off_the_committed_costs(RECIPE, program) == ""


def test_decoding_multiplies_in_bfloat16_but_for_the_sum_of_attention_weights():
    """That sum is a product with ones, in float32, of which no element is a weight's."""
    found = compiled(RECIPE, "decode").products
    assert set(found) == {"bf16 x bf16", "f32 x f32"}
    assert found["f32 x f32"] == 1
