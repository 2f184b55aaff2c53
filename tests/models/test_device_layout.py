"""The form that weights and pages take for decoding changes where bits lie, never what they say."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.logprobs import PackedTokens, packed_stats
from areal_jax.generation.engine import Engine
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import PROJECTIONS, Lora, model_config
from areal_jax.models.device_layout import abstractly_laid_out, laid_out, layout_on
from areal_jax.models.model import Model
from areal_jax.models.projections import FeatureMajor, project
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import SampleId, Sampling, VersionedParams

pytestmark = pytest.mark.few_optimizations

MODEL = Model(
    model_config(
        "tiny",
        10,
        "bfloat16",
        width=32,
        heads=2,
        kv_heads=1,
        mlp_width=48,
        has_qkv_bias=True,
        has_qk_norm=True,
    ),
    CharTokenizer("abcdefgh"),
)


def bfloat16_params():
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), MODEL.init(0))


@pytest.mark.slow
def test_each_layer_lies_apart_and_no_value_changes():
    """Against the definition of a matrix: outputs in front, flattened as `project` flattens them."""
    params = bfloat16_params()
    served = laid_out(MODEL, params, "feature_major", "cpu")
    assert len(served["blocks"]) == MODEL.config.layers
    for i, layer in enumerate(served["blocks"]):
        for part in ("attention", "mlp"):
            for name, leaf in layer[part].items():
                stacked = np.asarray(params["blocks"][part][name][i])
                if name in PROJECTIONS:
                    outputs = 32 if name in ("out", "down") else stacked.size // 32
                    np.testing.assert_array_equal(leaf.rows, stacked.reshape(-1, outputs).T)
                else:
                    np.testing.assert_array_equal(leaf, stacked)
        np.testing.assert_array_equal(layer["mlp_norm"], params["blocks"]["mlp_norm"][i])
    assert served["head"].rows is served["embedding"] is params["embedding"]
    assert laid_out(MODEL, served, "feature_major", "cpu") is served


def test_what_was_laid_out_ahead_is_adopted_as_it_is():
    engine = Engine(MODEL, slots=2, length=24, page_tokens=8)
    served = engine.load_params(VersionedParams(3, MODEL.init(0), "three"))
    assert isinstance(served.params["blocks"], tuple)
    assert engine.load_params(served) is served


def test_split_layers_have_arrays_of_their_own():
    params = bfloat16_params()
    served = laid_out(MODEL, params, "split", "gpu")
    for i, layer in enumerate(served["blocks"]):
        jax.tree.map(
            lambda own, stacked, i=i: np.testing.assert_array_equal(own, stacked[i]), layer, params["blocks"]
        )
    assert served["embedding"] is params["embedding"] and "head" not in served
    assert laid_out(MODEL, params, "stacked", "cpu") is params


def test_auto_is_feature_major_on_one_cpu_and_stacked_on_several_and_with_exact_numerics():
    one, two = (jax.sharding.Mesh(np.array(jax.devices()[:n]), ("tensor",)) for n in (1, 2))
    exact = Model(dataclasses.replace(MODEL.config, numerics="exact"), MODEL.tokenizer)
    assert layout_on(one, MODEL, "auto") == "feature_major"
    assert layout_on(two, MODEL, "auto") == layout_on(one, exact, "auto") == "stacked"
    assert layout_on(one, MODEL, "split") == "split"


@pytest.mark.parametrize(
    ("devices", "layout"), [(1, "stacked"), (1, "feature_major"), (1, "split"), (2, "split")]
)
def test_abstract_parameters_are_those_that_a_host_loads(devices, layout):
    """Shapes, dtypes and shardings: a plan compiles for these, and a host calls with the others."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    engine = Engine(MODEL, slots=2, length=24, page_tokens=8, mesh=mesh, weight_layout=layout)
    loaded = engine.load_params(VersionedParams(0, bfloat16_params(), "")).params
    planned = abstractly_laid_out(MODEL, engine.abstract_params("bfloat16"), layout, mesh)

    def same(planned, loaded):
        assert (planned.shape, planned.dtype) == (loaded.shape, loaded.dtype)
        assert planned.sharding.is_equivalent_to(loaded.sharding, loaded.ndim)

    jax.tree.map(same, planned, loaded)
    sharded = [not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(loaded["blocks"])]
    assert any(sharded) == (devices == 2)


@pytest.mark.parametrize("rows", [1, 7, 8, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_the_same_in_both_forms(rows, dtype):
    """Few rows of bfloat16 are padded; none of the padding may be seen."""
    numbers = np.random.default_rng(rows)
    x, w = numbers.normal(size=(rows, 1, 24)), numbers.normal(size=(24, 2, 5))
    found = project(jnp.asarray(x, jnp.float32), FeatureMajor(jnp.asarray(w.reshape(24, 10).T, dtype)), dtype)
    as_read = [np.asarray(jnp.asarray(v, dtype), np.float64) for v in (x, w.reshape(24, 10))]
    np.testing.assert_allclose(found, as_read[0] @ as_read[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["feature_major", "split"])
@pytest.mark.parametrize(
    "change", ["plain", pytest.param("untied", marks=pytest.mark.slow), "adapters", "int8"]
)
def test_hidden_states_and_logits_are_those_of_the_stack(change, layout):
    changes = {
        "plain": {},
        "untied": {"is_tied": False},
        "adapters": {"lora": Lora(2, 4.0)},
        "int8": {"quantize": "int8"},
    }[change]
    model = Model(dataclasses.replace(MODEL.config, dtype="float32", **changes), MODEL.tokenizer)
    params = jax.tree.map(  # so that adapters are not zero
        lambda leaf: leaf + 0.1 if leaf.dtype == jnp.float32 else leaf, model.init(0)
    )
    served = laid_out(model, params, layout, "cpu")
    tokens = jnp.arange(14).reshape(2, 7) % 10
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))

    @jax.jit
    def logits(params):
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        return model.logits(params, hidden.reshape(14, -1))

    np.testing.assert_allclose(logits(served), logits(params), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto", "stacked", "split"])
def test_what_is_recorded_is_what_a_dense_forward_says(layout):
    """Bits read as numbers, or a bias taken for a matrix, would be far off; rounding to bfloat16 is not."""
    params = bfloat16_params()
    engine = Engine(
        MODEL, slots=2, length=24, decode_steps=4, page_tokens=8, prefill_chunk=4, weight_layout=layout
    )
    value = engine.load_params(VersionedParams(0, params, ""))
    prompt = np.array([2, 5, 3, 7, 4, 6], np.int32)
    state = engine.init_decode_state()
    prefix = engine.prefill(params=value, padded_tokens=prompt, true_length=6)
    request = engine.request(SampleId(0, 0), 0, Sampling(max_tokens=16), 6)
    state = engine.insert(prefix, state, 0, request=request)
    logp = []
    for _ in range(4):
        state, results = engine.generate(value, state)
        logp.extend(results.rows["logp"][0])
    tokens = jnp.asarray(np.asarray(state.tokens)[:1, :22])
    positions = jnp.arange(22)[None]

    @jax.jit
    def dense(params):
        hidden, _ = MODEL.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        asked = PackedTokens(tokens, positions - 1, positions > 0, jnp.ones(tokens.shape))
        return packed_stats(MODEL.head, MODEL.head_weight(params), hidden, asked, 22).logp

    np.testing.assert_allclose(np.asarray(dense(params))[0, 6:22], logp, atol=3e-2)
