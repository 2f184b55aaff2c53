"""The form that weights and pages take for decoding changes where bits lie, never what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.algorithms.logprobs import packed_stats
from areal_jax.generation.engine import Engine
from areal_jax.generation.layout import pages_dtype, serving_layout
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
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


def test_only_stacked_matrices_change_their_form_and_none_its_bits():
    params = bfloat16_params()
    served = serving_layout(MODEL, params, "cpu")
    attention, mlp = served["blocks"]["attention"], served["blocks"]["mlp"]
    as_bits = {name for name, leaf in {**attention, **mlp}.items() if leaf.dtype == jnp.uint16}
    assert as_bits == {"q", "k", "v", "out", "gate", "up", "down"}
    for leaf, of in zip(jax.tree.leaves(params), jax.tree.leaves(served), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint16), np.asarray(of).view(np.uint16))


def test_elsewhere_and_for_float32_they_lie_as_they_are():
    params = bfloat16_params()
    assert serving_layout(MODEL, params, "gpu") is params
    float32 = MODEL.init(0)
    assert serving_layout(MODEL, float32, "cpu") is float32
    assert pages_dtype("bfloat16", "gpu") == "bfloat16" and pages_dtype("bfloat16", "cpu") == "float32"


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
        logp.extend(results.convert_to_numpy().logp[0])
    tokens = jnp.asarray(np.asarray(state.tokens)[:1, :22])
    positions = jnp.arange(22)[None]
    hidden, _ = MODEL.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
    stats = packed_stats(
        hidden,
        tokens,
        positions - 1,
        positions > 0,
        jnp.ones(tokens.shape),
        MODEL.head,
        MODEL.head_weight(params),
        None,
        22,
    )
    np.testing.assert_allclose(np.asarray(stats.logp)[0, 6:22], logp, atol=3e-2)
