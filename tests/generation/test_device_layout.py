"""The form that weights and pages take for decoding changes where bits lie, never what they say."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.logprobs import PackedTokens, packed_stats
from areal_jax.generation.device_layout import serving_layout
from areal_jax.generation.engine import Engine
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import PROJECTIONS, Lora, model_config
from areal_jax.models.model import Model
from areal_jax.models.transformer import FeatureMajor, project
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import SampleId, Sampling, VersionedParams

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


def test_each_layer_lies_apart_and_no_value_changes():
    """Against the definition of a matrix: outputs in front, flattened as `project` flattens them."""
    params = bfloat16_params()
    served = serving_layout(MODEL, params, "cpu")
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
    assert serving_layout(MODEL, served, "cpu") is served


def test_what_was_laid_out_ahead_is_adopted_as_it_is():
    engine = Engine(MODEL, slots=2, length=24, page_tokens=8)
    served = engine.load_params(VersionedParams(3, MODEL.init(0), "three"))
    assert isinstance(served.params["blocks"], tuple)
    assert engine.load_params(served) is served


def test_elsewhere_and_on_several_devices_they_lie_as_they_are():
    params = bfloat16_params()
    assert serving_layout(MODEL, params, "gpu") is params
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    spread = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert serving_layout(MODEL, spread, "cpu") is spread


@pytest.mark.parametrize("rows", [1, 7, 8, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_the_same_in_both_forms(rows, dtype):
    """Few rows of bfloat16 are padded; none of the padding may be seen."""
    numbers = np.random.default_rng(rows)
    x, w = numbers.normal(size=(rows, 1, 24)), numbers.normal(size=(24, 2, 5))
    found = project(jnp.asarray(x, jnp.float32), FeatureMajor(jnp.asarray(w.reshape(24, 10).T, dtype)), dtype)
    as_read = [np.asarray(jnp.asarray(v, dtype), np.float64) for v in (x, w.reshape(24, 10))]
    np.testing.assert_allclose(found, as_read[0] @ as_read[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["plain", "untied", "adapters", "int8"])
def test_hidden_states_and_logits_are_those_of_the_stack(change):
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
    served = serving_layout(model, params, "cpu")
    tokens = jnp.arange(14).reshape(2, 7) % 10
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))

    @jax.jit
    def logits(params):
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        return model.logits(params, hidden.reshape(14, -1))

    np.testing.assert_allclose(logits(served), logits(params), rtol=1e-4, atol=1e-4)


def test_what_is_recorded_is_what_a_dense_forward_says():
    """Bits read as numbers, or a bias taken for a matrix, would be far off; rounding to bfloat16 is not."""
    params = bfloat16_params()
    engine = Engine(MODEL, slots=2, length=24, decode_steps=4, page_tokens=8, prefill_chunk=4)
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
