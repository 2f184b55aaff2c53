"""A bfloat16 model's gradient: what its products read, how far it is from float64, what devices exchange."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.algorithms.logprobs import PackedTokens, packed_stats
from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models import attention
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import Lora, ModelConfig
from areal_jax.models.model import Model
from areal_jax.models.transformer import Execution
from areal_jax.parallel.mesh import make_mesh
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.packing import pack
from tests.models import reference
from tests.trainer import gradient_reference
from tests.trainer.conftest import LENGTH, VOCAB, make_groups

SIZES = dict(vocab_size=VOCAB, layers=3, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=96)

ATTENTION = 2 + 2 + 5
"""Products of attention in a gradient's program: forward, forward again, backward."""
PROJECTIONS = 7 + 6 + 2 * 7
"""The same of q, k, v, out, gate, up and down; the result of down is not needed again."""
HEAD = 1 + 1 + 2


def model_of(dtype: str, **options: Any) -> Model:
    letters = "".join(map(chr, range(97, 97 + VOCAB - 2)))
    return Model(ModelConfig(**SIZES, dtype=dtype, **options), CharTokenizer(letters))


@pytest.fixture(params=["cpu", "accelerator"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU attention's products read float32, on any other device `model.dtype`."""
    if request.param == "accelerator":
        monkeypatch.setattr(attention, "platform_of", lambda mesh: "gpu")
    return request.param


def lowered(model: Model, **mesh: int) -> Any:
    """The program of a micro-batch's gradient."""
    over = make_mesh({"data": 1, "fsdp": 1, "tensor": 1, **mesh}, jax.devices(), "the trainer")
    settings = {"preset": "grpo", "kl": {"coef": 0}, "group_size": 4}
    algorithm = AlgorithmConfig.model_validate(preset_settings(settings))
    of = Learner(model, algorithm, optax.sgd(1.0), rows=4, length=LENGTH, mesh=over, remat="layer")
    state, batch = of.abstract_state(), pack(make_groups(), 4, LENGTH)
    prepared = jax.eval_shape(of.objective.finish, batch, state.version, state.kl_control, {})
    return of.programs.begin.lower(state, prepared)


# --- what the products read ---------------------------------------------------------------------------------


def products_of(model: Model) -> Counter[str]:
    """The dtypes of a product's two operands -> the number of such products in the gradient's program."""
    text = lowered(model).as_text()
    found = re.findall(r"dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)", text)
    assert len(found) == text.count("stablehlo.dot_general")
    return Counter(" ".join(pair) for pair in found)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_every_product_reads_bfloat16_forward_and_backward(device: str, is_tied: bool):
    """All but attention's on a CPU, where bfloat16 is no faster for them."""
    exceptions = {"f32 f32": ATTENTION} if device == "cpu" else {}
    wanted = PROJECTIONS + HEAD + (0 if device == "cpu" else ATTENTION)
    assert products_of(model_of("bfloat16", is_tied=is_tied)) == {"bf16 bf16": wanted, **exceptions}


@pytest.mark.parametrize("rounds", [True, False])
def test_the_gradients_of_activations_are_bfloat16_and_nothing_else_is(rounds: bool):
    """The layers' results, forward twice, logits, the gradients of weights and of the hidden states before
    the head are float32.
    """
    text = lowered(model_of("bfloat16", rounds_activations=rounds, is_tied=False)).as_text()
    results = re.findall(r"dot_general .*: \(tensor<[\dx]*xbf16>, .*\) -> tensor<[\dx]*x(\w+)>", text)
    of_activations = {"bf16": 7, "f32": PROJECTIONS - 7 + HEAD} if rounds else {"f32": PROJECTIONS + HEAD}
    assert Counter(results) == of_activations


def test_log_probs_do_not_depend_on_how_the_backward_pass_rounds():
    """Every bit of the forward pass is equal, and the gradients differ."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (4, 48)).astype(np.int32)
    slopes = rng.normal(size=tokens.shape).astype(np.float32)
    places, found = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), []
    for rounds in (True, False):
        model = model_of("bfloat16", rounds_activations=rounds, lora=Lora(4, 8.0))
        params = model.init(0)
        hidden, _ = jax.jit(model.hidden)(params, tokens, places, PackedAttention(jnp.ones_like(tokens)))
        found.append((hidden, gradient(model, params, tokens, slopes)))
    (hidden, some), (same, others) = found
    np.testing.assert_array_equal(hidden, same)
    assert not np.array_equal(some["blocks"]["mlp"]["up"], others["blocks"]["mlp"]["up"])


def test_adapters_read_bfloat16_too():
    found = products_of(model_of("bfloat16", lora=Lora(4, 8.0)))
    assert found["f32 f32"] == ATTENTION and set(found) == {"f32 f32", "bf16 bf16"}
    assert found["bf16 bf16"] > PROJECTIONS + HEAD


def test_a_float32_model_reads_float32():
    assert products_of(model_of("float32")) == {"f32 f32": PROJECTIONS + HEAD + ATTENTION}


# --- how far the gradient is from float64 -------------------------------------------------------------------


def gradient(model: Model, params: Any, tokens: np.ndarray, slopes: np.ndarray) -> Any:
    def value(params: Any) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        attend = PackedAttention(jnp.ones_like(tokens))
        hidden, _ = model.hidden(params, tokens, positions, attend, None, Execution("layer"))
        asked = PackedTokens(tokens, positions - 1, positions > 0, jnp.ones(tokens.shape))
        return (packed_stats(model.head, model.head_weight(params), hidden, asked, 64).logp * slopes).sum()

    return jax.jit(jax.grad(value))(params)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((True, True), id="tied", marks=pytest.mark.slow),
        pytest.param((False, True), id="untied"),
        pytest.param((False, False), id="float32 activations"),
    ],
)
def case(request: pytest.FixtureRequest) -> tuple[Model, Any, np.ndarray, np.ndarray, Any]:
    """A model, parameters, tokens, the gradients of their log-probs, and the parameters' in float64."""
    is_tied, rounds = request.param
    model, rng = model_of("bfloat16", is_tied=is_tied, rounds_activations=rounds), np.random.default_rng(0)
    params, tokens = model.init(0), rng.integers(0, VOCAB, (4, 48)).astype(np.int32)
    slopes = rng.normal(size=tokens.shape).astype(np.float32)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)
        dense = jax.jit(partial(gradient_reference.logits, model.config))(wide, tokens[0])
        np.testing.assert_allclose(dense, reference.logits(model.config, params, tokens[0]), atol=1e-12)
        want = jax.tree.map(np.asarray, gradient_reference.gradient(model.config, wide, tokens, slopes))
    return model, params, tokens, slopes, want


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "accelerator"], indirect=True)
def test_a_bfloat16_gradient_is_unbiased_and_as_close_as_bfloat16_is(device: str, case: tuple):
    """Against float64: of all leaves together 1.4 %, of each at most 1.7 %; the part along the true gradient
    is right to 0.3 %. With float32 backward products the figures are the same: they come from the forward
    pass. A float32 model's are below a millionth.
    """
    model, params, tokens, slopes, want = case
    got = gradient(model, params, tokens, slopes)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}
    pairs = [
        (np.ravel(one).astype(np.float64), np.ravel(other))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    whole = tuple(np.concatenate(side) for side in zip(*pairs, strict=True))
    for (one, other), error, bias in [(whole, 0.02, 0.003), *((pair, 0.025, 0.006) for pair in pairs)]:
        assert 0.005 < np.linalg.norm(one - other) / np.linalg.norm(other) < error
        assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 1 - error**2
        assert abs(np.linalg.norm(one) / np.linalg.norm(other) - 1) < bias
        assert abs(one @ other / (other @ other) - 1) < bias


# --- what devices exchange ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_fsdp_devices_exchange_the_head_in_bfloat16_and_sum_only_their_part(is_tied: bool):
    """Once a micro-batch: the matrix as bfloat16, and of the float32 sum of its gradient each device's part.

    A tied head's columns are exchanged as rows. The one sum over devices of a whole matrix is of the
    embedding's rows that were looked up. A CPU's compiler widens what it exchanges to float32, so the first
    dtype is read before it.
    """
    program = lowered(model_of("bfloat16", is_tied=is_tied), fsdp=4)
    gathers = [line for line in program.as_text().splitlines() if "stablehlo.all_gather" in line]
    assert [f"-> tensor<64x{VOCAB}xbf16>" in line for line in gathers] == [True]
    lines = program.compile().as_text().splitlines()
    scattered = [line for line in lines if " reduce-scatter(" in line]
    assert [f"f32[16,{VOCAB}]" in line and "/while/" not in line for line in scattered] == [True]
    sums = " ".join(line.partition(" all-reduce(")[0] for line in lines if " all-reduce(" in line)
    assert sums.count(f"f32[{VOCAB},64]") == 1 and f"f32[64,{VOCAB}]" not in sums
