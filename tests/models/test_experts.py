"""A mixture's parts against plain numpy, and its experts split over devices against one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import ModelConfig
from areal_jax.models.experts import (
    BLOCK,
    FEWEST,
    Arithmetic,
    Blocks,
    RouterSums,
    Rows,
    block_size,
    in_windows,
    product,
    routes,
    window_size,
)
from areal_jax.models.mlp import Mixture
from areal_jax.models.model import Model
from areal_jax.models.transformer import Execution
from areal_jax.parallel.mesh import make_mesh, param_shardings, rows_over
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trainer.forward import Forward
from areal_jax.types import ArealError
from tests.algorithms.batches import positions_of, segments_of
from tests.models import reference

pytestmark = pytest.mark.few_optimizations

RNG = np.random.default_rng(0)
SIZES = dict(
    vocab_size=13, layers=2, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=8, experts=8,
    experts_per_token=3, expert_width=4, shared_width=6,
)  # fmt: skip

SEGMENTS = segments_of(((5, 4), (9, 2), (3, 3), (11,)), 12)
IDS = RNG.integers(0, 13, SEGMENTS.shape).astype(np.int32)


# --- routes -------------------------------------------------------------------------------------------------


def test_equally_likely_experts_are_taken_in_their_order():
    found = routes(jnp.array([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2, False)
    np.testing.assert_array_equal(found.experts, [[1, 2], [0, 1]])
    each = np.exp(2) / (np.exp(1) + 3 * np.exp(2))
    np.testing.assert_allclose(found.weights, [[each, each], [0.25, 0.25]], rtol=1e-6)


def test_weights_are_of_all_experts_or_of_the_chosen_ones():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.4]]))
    np.testing.assert_allclose(routes(logits, 2, False).weights, [[0.5, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(routes(logits, 2, True).weights, [[5 / 9, 4 / 9]], rtol=1e-6)


def test_given_experts_have_the_weights_of_the_current_router_and_its_gradient():
    """The gradient reaches the scores of experts that the router would not choose, and of the others."""
    logits, given = jnp.log(jnp.array([[0.1, 0.5, 0.4]])), jnp.array([[0, 2]])

    def first(logits: jax.Array) -> jax.Array:
        return routes(logits, 2, True, given).weights[0, 0]

    np.testing.assert_allclose(first(logits), 0.2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(first)(logits), [[0.16, 0.0, -0.16]], atol=1e-6)


# --- rows and blocks ----------------------------------------------------------------------------------------


def draws(kind: str, tokens: int, count: int, k: int) -> np.ndarray:
    """The experts of each token: of any expert, of one for half of the tokens, of none for some."""
    found = np.stack([RNG.permutation(count)[:k] for _ in range(tokens)])
    if kind == "skewed":
        found[::2, 0] = count - 1
    if kind == "sparse":
        found[RNG.random(found.shape) < 0.4] = -1
    return found.astype(np.int32)


BY = Arithmetic("float32")


@pytest.mark.parametrize("kind", ["any", "skewed", "sparse"])
@pytest.mark.parametrize(("tokens", "count", "k"), [(1, 4, 2), (7, 3, 3), (50, 40, 2), (90, 4, 1)])
def test_products_are_each_rows_with_its_experts_matrix(kind: str, tokens: int, count: int, k: int):
    """The value, and the gradients with respect to rows and matrices, in float32."""
    experts = draws(kind, tokens, count, k)
    x = RNG.normal(size=(tokens, 6)).astype(np.float32)
    matrices = RNG.normal(size=(count, 6, 5)).astype(np.float32)
    weights = RNG.random((tokens, k)).astype(np.float32)
    slope = RNG.normal(size=(tokens, 5)).astype(np.float32)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def of(x: Any, matrices: Any, weights: Any) -> Any:
        rows = Rows.of(jnp.asarray(experts), count, block_size(experts.size, count))
        y = product(rows.spread(x, BY) * rows.weights(weights), matrices, rows.starts, rows.block, BY)
        out = rows.summed(y, BY)
        return (out * slope).sum(), out

    (_, out), (of_x, of_matrices, of_weights) = of(x, matrices, weights)
    want, want_x = np.zeros((tokens, 5)), np.zeros((tokens, 6))
    want_matrices, want_weights = np.zeros(matrices.shape), np.zeros((tokens, k))
    for t, j in np.argwhere(experts >= 0):
        matrix, weight = matrices[experts[t, j]].astype(float), float(weights[t, j])
        want[t] += weight * (x[t] @ matrix)
        want_x[t] += weight * (matrix @ slope[t])
        want_matrices[experts[t, j]] += weight * np.outer(x[t], slope[t])
        want_weights[t, j] = x[t] @ matrix @ slope[t]
    for got, wanted in (
        (out, want), (of_x, want_x), (of_matrices, want_matrices), (of_weights, want_weights)
    ):  # fmt: skip
        np.testing.assert_allclose(got, wanted, atol=3e-5)


@pytest.mark.parametrize("kind", ["any", "skewed", "sparse"])
@pytest.mark.parametrize("size", [8, 24, 40])
def test_windows_give_what_all_rows_at_once_do(kind: str, size: int):
    """The value, and the gradients of tokens, weights and matrices; 60 rows, of which some have no expert."""
    experts = draws(kind, 20, 6, 3)
    rows = Rows.of(jnp.asarray(experts), 4, 8)  # those of experts 4 and 5 are on other devices
    shapes = (20, 6), (20, 3), (4, 6, 5)
    floats = tuple(jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes)
    slope = RNG.normal(size=(20, 5)).astype(np.float32)

    def of(rows: Rows, floats: Any, fixed: Any) -> Any:
        x, weights, matrices = floats
        y = product(rows.spread(x, BY), matrices, rows.starts, rows.block, BY)
        return rows.summed(jnp.tanh(y) * rows.weights(weights), BY)

    def both(f: Any) -> Any:
        out, pull = jax.vjp(f, floats)
        return out, pull(jnp.asarray(slope))

    whole = jax.jit(lambda: both(lambda floats: of(rows, floats, None)))()
    parts = jax.jit(lambda: both(lambda floats: in_windows(of, rows, size, floats, None)))()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=2e-5), whole, parts)


def test_a_window_is_needed_only_for_many_rows_of_several_devices():
    assert window_size(1_000_000, 1) == 1_000_000
    assert window_size(4096, 8) == 4096
    assert window_size(524_288, 8) == 81_920  # 1.25 times the 65,536 that a device has on average
    assert window_size(40_000, 2) * 2 >= 40_000


def test_blocks_cover_each_experts_rows_and_are_no_more_than_needed():
    """Experts with 0, 1, 8, 9 and 30 rows: 0, 1, 1, 2 and 4 blocks of 8."""
    starts = np.cumsum([0, 0, 1, 8, 9, 30])
    blocks = jax.jit(partial(Blocks.of, block=8, rows=60))(starts)
    assert int(blocks.count) == 8
    np.testing.assert_array_equal(blocks.expert[:8], [1, 2, 3, 3, 4, 4, 4, 4])
    np.testing.assert_array_equal(blocks.first[:8], [0, 1, 9, 17, 18, 26, 34, 42])


@pytest.mark.parametrize(
    ("rows", "experts", "size"), [(16, 128, FEWEST), (100, 4, BLOCK), (4096, 64, BLOCK), (90, 6, 16)]
)
def test_a_block_has_about_as_many_rows_as_an_expert(rows: int, experts: int, size: int):
    assert block_size(rows, experts) == size


def test_padding_tokens_pass_through_no_expert():
    """They would fill blocks of the experts that they happen to be sent to."""
    mixture = Mixture(ModelConfig(**{**SIZES, "shared_width": 0}), nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(7).normal(size=(1, 5, 8)), jnp.float32)
    attend = PackedAttention(jnp.array([[1, 1, 2, 0, 0]]))
    found = mixture.mixed(x, mixture.routes(x), attend, None, None)
    assert (found[0, 3:] == 0).all() and (jnp.abs(found[0, :3]).max(-1) > 1e-3).all()


# --- what routers did ---------------------------------------------------------------------------------------


def test_router_sums_are_over_tokens_that_are_not_padding():
    """By layer, against the float64 reference; the hidden states are those without sums, bit for bit."""
    model = Model(ModelConfig(**SIZES, dtype="float32"), CharTokenizer("abcdefghijk"))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.abstract_params)

    @jax.jit
    def of(params: Any, sums: Any) -> Any:
        attend = PackedAttention(jnp.asarray(SEGMENTS))
        return model.hidden(params, IDS, positions_of(SEGMENTS), attend, sums)

    found, sums = of(params, RouterSums.zeros(2, 8, "float32"))
    np.testing.assert_array_equal(*(np.asarray(x)[SEGMENTS > 0] for x in (found, of(params, None)[0])))
    routed: list[list[np.ndarray]] = []
    for row, number in np.argwhere(SEGMENTS * (np.diff(SEGMENTS, prepend=0) != 0)):
        routed.append([])
        reference.hidden(model.config, params, IDS[row][SEGMENTS[row] == SEGMENTS[row, number]], routed[-1])
    of_layers = [np.concatenate(each) for each in zip(*routed, strict=True)]
    assert len(of_layers[0]) == (SEGMENTS > 0).sum()
    for layer, each in enumerate(of_layers):
        chosen = np.argsort(-each, axis=1)[:, :3]
        np.testing.assert_array_equal(sums.tokens[layer], np.bincount(chosen.ravel(), minlength=8))
        np.testing.assert_allclose(sums.probabilities[layer], each.sum(0), rtol=1e-4)
        np.testing.assert_allclose(sums.entropy[layer], -(each * np.log(each)).sum(), rtol=1e-4)


def test_figures_of_routers():
    """2 layers, 3 experts, 4 tokens with 2 experts each: the busiest has 4 of 8 and 3 of 8 rows."""
    sums = RouterSums(
        np.array([[4, 3, 1], [2, 3, 3]]), np.array([[2.0, 1.5, 0.5], [1.0, 1.5, 1.5]]), np.array([3.0, 4.0])
    )
    assert sums.figures() == {
        "router_load_max": pytest.approx((4 + 3) / 2 / (8 / 3)),
        "router_load_min": pytest.approx((1 + 2) / 2 / (8 / 3)),
        "router_entropy": pytest.approx(7 / 8),
        "router_balance_loss": pytest.approx(3 * (6 * 3.0 + 6 * 3.0 + 4 * 2.0) / 64),
    }
    even = RouterSums(np.full((2, 4), 6.0), np.full((2, 4), 3.0), np.zeros(2))
    assert even.figures()["router_balance_loss"] == pytest.approx(2)  # experts a token
    assert RouterSums.zeros(2, 3, "float32").figures() == {}


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_are_the_slopes_of_routers_experts_and_the_shared_mlp():
    """In float64, leaf by leaf along random directions; an expert without a token has a gradient of 0."""
    options: dict[str, Any] = dict(has_unit_weights=True, dtype="float64", accumulate="float64")
    model = Model(ModelConfig(**{**SIZES, "experts": 12}, **options), CharTokenizer("abcdefghijk"))
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), model.abstract_params)
    slope, ids = rng.normal(size=(1, 3, 8)), np.array([[1, 5, 9]], np.int32)
    with jax.enable_x64(True):

        @jax.jit
        @jax.value_and_grad
        def of(params: Any) -> jax.Array:
            attend = PackedAttention(jnp.ones((1, 3), jnp.int32))
            return (model.hidden(params, ids, np.arange(3)[None], attend)[0] * slope).sum()

        gradient = jax.device_get(of(params)[1])["blocks"]["mlp"]
        for path, leaf in jax.tree.leaves_with_path(params["blocks"]["mlp"]):
            direction = 1e-6 * rng.normal(size=leaf.shape)

            def along(times: int, path: Any = path, direction: Any = direction) -> float:
                moved = jax.tree_util.tree_map_with_path(
                    lambda place, x: x + times * direction if place[2:] == path else x, params
                )
                return float(of(moved)[0])

            (own,) = (g for at, g in jax.tree.leaves_with_path(gradient) if at == path)
            assert (own * direction).sum() == pytest.approx((along(1) - along(-1)) / 2, rel=1e-6)
    is_used = np.abs(gradient["expert_up"]).max((2, 3)) > 0
    assert (is_used.sum(1) < 10).all() and is_used.any()  # 3 tokens have at most 9 of 12 experts


# --- on several devices -------------------------------------------------------------------------------------

MESHES = [{"expert": 2}, {"expert": 4}, *({axis: 2, "expert": 2} for axis in ("fsdp", "tensor", "data"))]


def hidden_and_gradient(dtype: str, mesh: dict[str, int] | None) -> Any:
    """The hidden states of 4 packed rows, and the gradient of a weighted sum of them."""
    options = dict(dtype="float64", accumulate="float64") if dtype == "float64" else {"dtype": dtype}
    model = Model(ModelConfig(**SIZES, **options), CharTokenizer("abcdefghijk"))
    rng = np.random.default_rng(1)
    kind = np.float64 if dtype == "float64" else np.float32
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(kind), model.abstract_params)
    slope = rng.normal(size=(*SEGMENTS.shape, 8)).astype(np.float32) * (SEGMENTS > 0)[..., None]
    execution, on = Execution(), None
    if mesh is not None:
        on = make_mesh({"data": 1, "fsdp": 1, "tensor": 1, "expert": 1, **mesh}, jax.devices(), "the trainer")
        execution = Execution(rows=rows_over(on), mesh=on)
        params = jax.device_put(params, param_shardings(model.logical_axes, model.abstract_params, on))

    def of(params: Any) -> Any:
        attend = PackedAttention(jnp.asarray(SEGMENTS), mesh=on)
        found = model.hidden(params, IDS, positions_of(SEGMENTS), attend, None, execution)[0]
        return (jnp.where(SEGMENTS[..., None] > 0, found, 0) * slope).sum(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(params)
    return jax.device_get((jnp.where(SEGMENTS[..., None] > 0, found, 0), gradient))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (0, r"trainer\.mesh\.expert=2 with a model without experts; set it to 1, and raise trainer"),
        (5, r"trainer\.mesh\.expert=2 with a model whose number of experts, 5, .* choose a divisor of 5"),
    ],
)
def test_a_mesh_that_cannot_split_the_experts_is_refused(experts: int, message: str):
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 1, "expert": 2}, jax.devices(), "the trainer")
    options = dict(experts=experts, **dict.fromkeys(("experts_per_token", "shared_width"), int(experts > 0)))
    config = ModelConfig(**{**SIZES, **options, "expert_width": int(experts > 0)})
    with pytest.raises(ArealError, match=message):
        Forward(Model(config, CharTokenizer("abcdefghijk")), mesh, chunk=8, remat="none")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_experts_on_several_devices_are_those_of_one(mesh: dict[str, int]):
    """To 1e-12 in float64, for hidden states and gradients."""
    with jax.enable_x64(True):
        (one, slopes), (other, found) = (hidden_and_gradient("float64", on) for on in (None, mesh))
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-12 * np.abs(one).max())
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(slopes))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=0, atol=1e-12 * largest), slopes, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_on_fsdp_devices_in_fewer_bits(dtype: str):
    (one, slopes), (other, found) = (hidden_and_gradient(dtype, on) for on in (None, MESHES[2]))
    within = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(other, one, rtol=0, atol=within * np.abs(one).max())
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(y, x, rtol=0, atol=within * np.abs(x).max()), slopes, found
    )
