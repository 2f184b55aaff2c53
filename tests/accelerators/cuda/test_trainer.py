"""What XLA makes of the trainer's programs of Qwen2.5-1.5B for H100s, on meshes of 1, 4, 8 and 2 by heads.

Two rows of 4,096 tokens a device, bfloat16, remat=layer, as in the packaged recipe.
"""

from __future__ import annotations

import pytest

from tests.accelerators.compiling import Setting, compiled, moved, off_the_committed_costs, opened

pytestmark = pytest.mark.accelerators


def on_mesh(target: str, rows: int, **axes: int) -> Setting:
    mesh = {"fsdp": 1, "tensor": 1} | axes
    label = " ".join(["trainer", *(f"{axis} {size}" for axis, size in axes.items()), "on H100"])
    words = [f"trainer.mesh.{axis}={size}" for axis, size in mesh.items()]
    words += [f"trainer.rows={rows}", "runtime.hosts=1"]
    return Setting(label, target, "qwen2.5_1.5b_gsm8k_8gpu.yaml", tuple(words))


MESHES = {
    "1": on_mesh("h100x2", 2),
    "fsdp 4": on_mesh("h100x5", 8, fsdp=4),
    "fsdp 8": on_mesh("h100x9", 16, fsdp=8),
    "tensor 2": on_mesh("h100x3", 2, tensor=2),
}
SHARDED = ["fsdp 4", "fsdp 8"]

LAYERS = 28
MATRICES = LAYERS * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
"""Elements of the matrices of all layers."""
HEAD = 151_936 * 1536
"""Elements of the LM head, which is the embedding."""

every_mesh = pytest.mark.parametrize("mesh", MESHES)


@every_mesh
def test_products_of_the_forward_pass_have_bfloat16_operands(mesh: str):
    found = compiled(MESHES[mesh], "arrive")
    assert set(found.products) == {"bf16 x bf16"}
    assert set(found.costs.flops) == {"bf16"}


@every_mesh
def test_products_of_the_backward_pass_have_bfloat16_operands(mesh: str):
    found = compiled(MESHES[mesh], "begin")
    assert set(found.products) == {"bf16 x bf16"}
    assert set(found.costs.flops) == {"bf16"}


@every_mesh
def test_the_heads_matrix_is_cast_once_and_not_for_each_chunk(mesh: str):
    """Over fsdp it is cast before the devices exchange it, on each one's own part."""
    shape = "[75968,1536]" if mesh == "tensor 2" else "[151936,1536]"
    for name in ("arrive", "begin"):
        casts = sum(
            times
            for one, times in compiled(MESHES[mesh], name).costs.traffic.items()
            if any(moved.array == f"f32{shape}" for moved in one.reads)
            and any(moved.array == f"bf16{shape}" for moved in one.writes)
        )
        assert casts == (0 if mesh in SHARDED else 1), name


@every_mesh
def test_the_trainer_computes_attention_by_a_kernel(mesh: str):
    """Forward twice, since a layer is recomputed, and backward once."""
    assert opened(MESHES[mesh]).sides[0].attention == "cudnn"
    assert compiled(MESHES[mesh], "arrive").costs.kernels == {"cudnn attention fwd": LAYERS}
    kernels = compiled(MESHES[mesh], "begin").costs.kernels
    assert kernels == {"cudnn attention fwd": 2 * LAYERS, "cudnn attention bwd": LAYERS}


@pytest.mark.parametrize("mesh", SHARDED)
def test_weights_are_gathered_in_bfloat16(mesh: str):
    """The head once; a layer once for the scores, and twice for the update: forward, and when recomputed."""
    for program, times in (("arrive", 1), ("begin", 2)):
        gathered = moved(compiled(MESHES[mesh], program).costs, "all-gather", "bf16")
        assert gathered == pytest.approx(2 * (times * MATRICES + HEAD), rel=0.01)


@pytest.mark.parametrize("mesh", SHARDED)
def test_layers_scatter_their_gradients_once(mesh: str):
    """In float32, each element of the matrices once; the embedding's gradient besides."""
    scattered = moved(compiled(MESHES[mesh], "begin").costs, "reduce-scatter", "f32")
    assert scattered == pytest.approx(4 * (MATRICES + HEAD), rel=0.01)


@pytest.mark.parametrize("mesh", SHARDED)
def test_the_head_is_gathered_in_bfloat16(mesh: str):
    assert moved(compiled(MESHES[mesh], "arrive").costs, "all-gather", "f32") < 0.01 * 4 * HEAD


@pytest.mark.parametrize("mesh", SHARDED)
def test_the_heads_gradient_is_scattered(mesh: str):
    assert moved(compiled(MESHES[mesh], "begin").costs, "all-reduce", "f32") < 0.01 * 4 * HEAD


@every_mesh
@pytest.mark.parametrize("program", ["arrive", "begin", "apply"])
def test_costs_are_those_of_the_committed_table(mesh: str, program: str):
    assert off_the_committed_costs(MESHES[mesh], program) == ""


@every_mesh
def test_an_optimiser_step_moves_the_state_once(mesh: str):
    """Read and written: 12 bytes a parameter on a shard; the gradient read, once more for its norm."""
    recipe = opened(MESHES[mesh])
    parameters = recipe.model.parameter_count / recipe.config.trainer.mesh.devices
    assert compiled(MESHES[mesh], "apply").costs.bytes == pytest.approx(32 * parameters, rel=0.05)
