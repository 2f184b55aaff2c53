"""`accumulate=float64`: the forward pass in float64 against numpy, and the options that it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.logprobs import PackedTokens, packed_stats
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import ModelConfig, model_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import ArealError
from tests.algorithms.batches import positions_of, segments_of
from tests.models import reference

SIZES = dict(vocab_size=13, layers=2, width=16, heads=4, kv_heads=2, head_dim=6, mlp_width=24)
OPTIONS = {
    "qwen2, tied": dict(has_qkv_bias=True, norm_eps=1e-6, rope_theta=500.0),
    "qwen3, untied": dict(has_qk_norm=True, is_tied=False),
}
WIDE = dict(dtype="float64", accumulate="float64")


def model_of(**options: Any) -> Model:
    return Model(ModelConfig(**{**SIZES, **options}), CharTokenizer("abcdefghijk"))


def parameters(model: Model) -> Any:
    """None of them is 0 or 1, and none has a float32 value."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: (leaf.ndim < 3) + 0.3 * rng.normal(size=leaf.shape), model.abstract_params
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_hidden_states_and_log_probs_are_right_to_float64s_rounding(name: str):
    """Measured: 1e-15 of the largest value. A cast to float32 anywhere leaves 1e-8."""
    segments = segments_of(((5, 70), (9, 2)), 80)  # 70 tokens are more than a block
    positions = positions_of(segments)
    tokens = np.random.default_rng(2).integers(0, 13, segments.shape).astype(np.int32)

    @jax.jit
    def computed(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(segments))
        previous = jnp.where(positions > 0, jnp.arange(80) - 1, -1)
        asked = PackedTokens(tokens, previous, segments > 0, jnp.ones(tokens.shape))
        return hidden, packed_stats(model.head, model.head_weight(params), hidden, asked, 64).logp

    with jax.enable_x64(True):
        model = model_of(**OPTIONS[name], **WIDE)
        params = parameters(model)
        hidden, logp = map(np.asarray, computed(params))
    assert hidden.dtype == logp.dtype == np.float64
    for segment in range(1, segments.max() + 1):
        at = segments == segment
        want = reference.hidden(model.config, params, tokens[at])
        np.testing.assert_allclose(hidden[at], want, rtol=0, atol=1e-12 * np.abs(want).max())
        logits = reference.logits(model.config, params, tokens[at])
        of_next = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        want = of_next[np.arange(at.sum() - 1), tokens[at][1:]]
        np.testing.assert_allclose(logp[at][1:], want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(accumulate="bfloat16"), "accumulate='bfloat16' is unknown; use float32 or float64"),
        (dict(dtype="float64"), "dtype=float64 with accumulate=float32 would round the sums"),
        (dict(accumulate="float64"), "accumulate=float64 with dtype=float32 is not supported"),
        ({**WIDE, "numerics": "exact"}, "accumulate=float64 with numerics=exact is not supported"),
        ({**WIDE, "numerics": "exact"}, "set numerics=bounded or accumulate=float32"),
        ({**WIDE, "quantize": "int8"}, "accumulate=float64 with quantize=int8 is not supported"),
        ({**WIDE, "params_dtype": "bfloat16"}, "float64 with params_dtype=bfloat16 is not supported"),
    ],
)
def test_options_that_compute_in_fewer_bits_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ArealError) as caught:
        ModelConfig(**SIZES, **options)
    assert message in str(caught.value)


def test_it_is_no_size_that_a_run_can_override():
    with pytest.raises(ArealError, match=r"unknown key model\.overrides\.accumulate"):
        model_config("tiny", 19, accumulate="float64")


def test_float64_without_x64_is_refused_rather_than_computed_in_float32():
    model, tokens = model_of(**WIDE), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ArealError, match="jax_enable_x64=False: JAX would compute in float32"):
        model.hidden(parameters(model), tokens, tokens, PackedAttention(tokens))
