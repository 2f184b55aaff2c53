"""Whether float32 products on a GPU are computed in float32 or in TF32, its default."""

from __future__ import annotations

import re

import jax
import pytest

from areal_jax.assembly.gpus import PRECISION, gpu_environment
from areal_jax.config.loading import load_config
from areal_jax.lab.bench.measure import matrix_product
from areal_jax.models.kernels.packed_attention import abstract_on
from areal_jax.plan.planning import absent_devices
from areal_jax.plan.targets import parse_target
from tests.accelerators.compiling import CONFIGS, Setting, compiled

pytestmark = pytest.mark.accelerators

TARGET = "h100x2"


@pytest.mark.parametrize(
    ("precision", "kinds"), [("as in a run", {"f32 highest"}), (None, {"f32"})], ids=["run", "default"]
)
def test_a_float32_model_trains_and_samples_without_tf32(precision: str | None, kinds: set[str]):
    recipe = "quickstart.yaml"
    chosen = gpu_environment(load_config(CONFIGS / recipe), {})[PRECISION]
    with jax.default_matmul_precision(chosen if precision else None):
        for name in ("accumulate", "prefill", "decode"):
            found = compiled(Setting(f"float32, precision {precision}", TARGET, recipe), name)
            assert set(found.products) == {"f32 x f32"}
            assert set(found.costs.flops) == kinds, name


def test_the_ceiling_of_float32_products_is_that_of_tf32():
    square = ((512, 512), "float32")
    arguments = abstract_on(absent_devices(parse_target(TARGET))[0], square, square)
    with jax.default_matmul_precision("highest"):
        text = matrix_product.lower(*arguments).compile().as_text() or ""
    assert re.search(r"\bdot\(|cublas", text) and "highest" not in text.lower()
