"""`config.json` to sizes and back; rotary frequencies; what a config may not ask for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.models.config import ModelConfig, model_config
from areal_jax.models.io.families import read_config, write_config
from areal_jax.models.rope import LinearScaling, Llama3Scaling, inverse_frequencies
from areal_jax.types import ArealError

FREQUENCIES = json.loads((Path(__file__).parents[1] / "golden" / "frequencies.json").read_text())
LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128_256, num_hidden_layers=16,
    hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
    rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151_936, num_hidden_layers=48,
    hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, intermediate_size=6144,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu", attention_bias=False,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False, router_aux_loss_coef=0.001,
    sliding_window=None, use_sliding_window=False,
)  # fmt: skip
QWEN2_MOE: dict[str, Any] = dict(
    architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", vocab_size=151_936, num_hidden_layers=24,
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, intermediate_size=5632,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu", num_experts=60,
    num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    norm_topk_prob=False, decoder_sparse_step=1, sliding_window=32_768, use_sliding_window=False,
)  # fmt: skip
OLMOE: dict[str, Any] = dict(
    architectures=["OlmoeForCausalLM"], model_type="olmoe", vocab_size=50_304, num_hidden_layers=16,
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, intermediate_size=1024,
    rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False, hidden_act="silu", num_experts=64,
    num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None, attention_bias=False,
)  # fmt: skip
MIXTRAL: dict[str, Any] = dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral", vocab_size=32_000, num_hidden_layers=32,
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
    rms_norm_eps=1e-5, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu", num_local_experts=8,
    num_experts_per_tok=2, sliding_window=None, output_router_logits=False, router_aux_loss_coef=0.02,
)  # fmt: skip
MIXTURES = {
    "qwen3_moe": (QWEN3_MOE, model_config("qwen3-30b-a3b", 1)),
    "qwen2_moe": (
        QWEN2_MOE,
        ModelConfig(
            family="qwen2_moe", vocab_size=151_936, layers=24, width=2048, heads=16, kv_heads=16,
            head_dim=128, mlp_width=5632, rope_theta=1e6, norm_eps=1e-6, is_tied=False, has_qkv_bias=True,
            experts=60, experts_per_token=4, expert_width=1408, shared_width=5632,
        ),
    ),
    "olmoe": (OLMOE, model_config("olmoe-1b-7b", 1)),
    "mixtral": (
        MIXTRAL,
        ModelConfig(
            family="mixtral", vocab_size=32_000, layers=32, width=4096, heads=32, kv_heads=8, head_dim=128,
            mlp_width=14_336, rope_theta=1e6, norm_eps=1e-5, is_tied=False, has_unit_weights=True, experts=8,
            experts_per_token=2, expert_width=14_336,
        ),
    ),
}  # fmt: skip
"""Family -> the released `config.json` of a model, and what it says."""


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_are_those_of_transformers(name: str):
    case = FREQUENCIES[name]
    config = read_config({**without(LLAMA, "rope_theta"), **case})
    got = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert config.head_dim == case["head_dim"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6, atol=0)


def test_a_llama_config_is_read():
    """Llama 3.2 1B's, in the form of transformers 4; head_dim and a missing kv head count are derived."""
    assert read_config({**LLAMA, "rope_scaling": LLAMA3}) == ModelConfig(
        vocab_size=128_256, layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, mlp_width=8192,
        rope_theta=500_000.0, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192), norm_eps=1e-5, is_tied=True,
        family="llama",
    )  # fmt: skip
    assert read_config(without(LLAMA, "num_key_value_heads")).kv_heads == 32
    assert read_config({**LLAMA, "head_dim": None}).head_dim == 64
    assert read_config({**LLAMA, "head_dim": 128}).head_dim == 128


def test_what_a_config_leaves_out_is_what_transformers_takes():
    bare = without(LLAMA, "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act", "architectures")
    config = read_config(bare)
    assert (config.norm_eps, config.rope_theta, config.is_tied) == (1e-6, 10_000.0, False)
    assert read_config(QWEN3).head_dim == 128
    assert read_config(without(QWEN3_MOE, "head_dim")).head_dim == 64
    assert not read_config(without(QWEN3_MOE, "norm_topk_prob")).has_unit_weights
    assert read_config(without(QWEN2_MOE, "qkv_bias")).has_qkv_bias
    assert read_config(without(OLMOE, "num_key_value_heads", "clip_qkv")) == MIXTURES["olmoe"][1]
    mixtral = read_config(without(MIXTRAL, "rms_norm_eps", "rope_theta"))
    assert (mixtral.norm_eps, mixtral.rope_theta) == (1e-5, 1e6)


def test_the_families_differ_in_bias_and_norm():
    assert [(c.has_qkv_bias, c.has_qk_norm) for c in map(read_config, (LLAMA, QWEN2, QWEN3))] == [
        (False, False),
        (True, False),
        (False, True),
    ]


def test_both_forms_of_rope_are_read():
    five = {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert read_config(five) == read_config({**LLAMA, "rope_scaling": LLAMA3})
    linear = {"type": "linear", "factor": 2.0}  # the key before transformers 4.43
    assert read_config({**LLAMA, "rope_scaling": linear}).rope_scaling == LinearScaling(2.0)
    assert read_config({**LLAMA, "rope_scaling": {"rope_type": "default"}}).rope_scaling is None
    both = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "rope_scaling": LLAMA3}
    assert read_config(both) == read_config({**LLAMA, "rope_scaling": LLAMA3})  # they agree


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_read(name: str):
    """From a released `config.json`, and as transformers 5 writes the same."""
    raw, config = MIXTURES[name]
    assert read_config(raw) == config
    count = "num_experts" if "num_experts" in raw else "num_local_experts"
    five = without(raw, "rope_theta", count) | {"rope_parameters": {"rope_theta": config.rope_theta}}
    for key in ("num_experts", "num_local_experts"):
        assert read_config(five | {key: raw[count]}) == config
    assert read_config(raw | {"num_experts": raw[count], "num_local_experts": raw[count]}) == config


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_written_as_released(name: str):
    raw, config = MIXTURES[name]
    written = write_config(config, "bfloat16")
    assert {key: written[key] for key in raw if key in written} == {
        key: value for key, value in raw.items() if key in written
    }
    assert {key for key in written if "expert" in key} == {
        key for key in raw if "expert" in key and "router" not in key
    }


def test_options_of_a_mixture_are_read():
    assert not read_config(QWEN2_MOE | {"qkv_bias": False}).has_qkv_bias
    assert read_config(QWEN2_MOE | {"norm_topk_prob": True}).has_unit_weights
    assert read_config(OLMOE | {"clip_qkv": 8}).clip_qkv == 8.0


MIXED = dict(experts=5, experts_per_token=2, expert_width=11)
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": dict(has_qkv_bias=True),
    "qwen3": dict(has_qk_norm=True),
    "qwen3_moe": dict(**MIXED, has_qk_norm=True, has_unit_weights=True),
    "qwen2_moe": dict(**MIXED, shared_width=3),
    "olmoe": dict(**MIXED, mlp_width=11, has_qk_norm=True, is_qk_norm_joint=True, clip_qkv=8.0),
    "mixtral": dict(**MIXED, mlp_width=11, has_unit_weights=True),
}
"""Family -> options of a model that has no other family."""


@given(
    st.sampled_from(sorted(OPTIONS)),
    st.booleans(),
    st.sampled_from([None, LinearScaling(2.0), Llama3Scaling(8.0, 1.0, 4.0, 8192)]),
    st.tuples(*[st.integers(1, 9)] * 5),
    st.sampled_from([1e-5, 1e-6, 3e-7]),
)
def test_writing_then_reading_is_the_identity(
    family: str, is_tied: bool, scaling: Any, sizes: tuple[int, ...], eps: float
):
    vocab, layers, kv_heads, half, mlp = sizes
    values = dict(
        vocab_size=vocab, layers=layers, width=7, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=2 * half,
        mlp_width=mlp, rope_theta=1234.5, rope_scaling=scaling, norm_eps=eps, is_tied=is_tied, family=family,
    )  # fmt: skip
    config = ModelConfig(**{**values, **OPTIONS[family]})
    written = json.loads(json.dumps(write_config(config, "bfloat16")))
    assert read_config(written) == config
    assert written["torch_dtype"] == "bfloat16"
    assert write_config(dataclasses.replace(config, family=None), "bfloat16") == written


SMALL = dict(vocab_size=9, layers=1, width=8, heads=2, kv_heads=2, head_dim=4, mlp_width=8)
NOT_WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "no family": (
        dict(has_qkv_bias=True, has_qk_norm=True),
        "no Hugging Face architecture has all of has_qkv_bias=True, has_qk_norm=True; change one of these",
    ),
    "unknown": (dict(family="gpt2"), "family='gpt2' is unknown; use one of: llama, qwen2, qwen3, qwen3_moe"),
    "a norm": (
        dict(family="llama", has_qk_norm=True),
        "has_qk_norm=True is not an option of LlamaForCausalLM; change it, or set model.overrides.family=",
    ),
    "no norm": (dict(family="qwen3"), "has_qk_norm=False is not an option of Qwen3ForCausalLM"),
    "experts": (
        dict(family="qwen3", has_qk_norm=True, **MIXED),
        "experts=5, experts_per_token=2, expert_width=11 is not an option of Qwen3ForCausalLM",
    ),
    "no experts": (
        dict(family="qwen3_moe", has_qk_norm=True),
        "experts=0, experts_per_token=0, expert_width=0 is not an option of Qwen3MoeForCausalLM",
    ),
    "no shared expert": (dict(family="qwen2_moe", **MIXED), "shared_width=0 is not an option of Qwen2Moe"),
    "weights": (dict(family="mixtral", **MIXED), "has_unit_weights=False is not an option of Mixtral"),
}


@pytest.mark.parametrize(("options", "message"), NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_a_model_is_not_written_as_a_family_that_would_compute_something_else(
    options: dict[str, Any], message: str
):
    with pytest.raises(ArealError) as caught:
        write_config(ModelConfig(**{**SMALL, **options}), "float32")
    assert message in str(caught.value)


def test_a_config_with_scaling_can_close_over_a_jitted_function():
    one, same = (read_config({**LLAMA, "rope_scaling": dict(LLAMA3)}) for _ in range(2))
    assert hash(one) == hash(same)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma": (
        {**LLAMA, "architectures": ["Gemma3ForCausalLM"]},
        "the architecture Gemma3ForCausalLM is not implemented; use a model of one of: LlamaForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2MoeForCausalLM, OlmoeForCausalLM, "
        "MixtralForCausalLM",
    ),
    "olmo": ({**LLAMA, "architectures": ["Olmo2ForCausalLM"]}, "the architecture Olmo2ForCausalLM is not"),
    "gpt-oss": (
        {**MIXTRAL, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
        "the architecture GptOssForCausalLM is not implemented; use a model of one of: LlamaForCausalLM",
    ),
    "deepseek": (
        {**without(QWEN3_MOE, "architectures"), "model_type": "deepseek_v3"},
        "the architecture deepseek_v3 is not implemented",
    ),
    "glm": ({**QWEN3_MOE, "architectures": ["Glm4MoeForCausalLM"]}, "the architecture Glm4MoeForCausalLM is"),
    "model_type": ({**without(LLAMA, "architectures"), "model_type": "gpt2"}, "the architecture gpt2 is not"),
    "nameless": (without(LLAMA, "architectures", "model_type"), "architectures and model_type are missing"),
    "activation": ({**LLAMA, "hidden_act": "gelu"}, "hidden_act='gelu' of LlamaForCausalLM is not impl"),
    "bias": ({**LLAMA, "attention_bias": True}, "attention_bias=True of LlamaForCausalLM is not"),
    "mlp bias": ({**LLAMA, "mlp_bias": True}, "mlp_bias=True of LlamaForCausalLM is not implemented"),
    "qwen3 bias": ({**QWEN3, "attention_bias": True}, "attention_bias=True of Qwen3ForCausalLM is not"),
    "slices": ({**LLAMA, "pretraining_tp": 2}, "pretraining_tp=2 of LlamaForCausalLM is not implemented"),
    "window": ({**QWEN2, "use_sliding_window": True}, "use_sliding_window=True of Qwen2ForCausalLM is not"),
    "window layers": (
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types='sliding_attention' of Qwen3ForCausalLM is not implemented",
    ),
    "dense layers": ({**QWEN3_MOE, "mlp_only_layers": [0, 5]}, "mlp_only_layers=[0, 5] of Qwen3MoeForC"),
    "every second layer": ({**QWEN2_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step=2 of Qwen2MoeForC"),
    "window of a mixture": ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window=True of Qwen3Moe"),
    "mixtral window": ({**MIXTRAL, "sliding_window": 4096}, "sliding_window=4096 of MixtralForCausalLM is"),
    "bias of a mixture": ({**QWEN3_MOE, "attention_bias": True}, "attention_bias=True of Qwen3MoeForCausal"),
    "olmoe bias": ({**OLMOE, "attention_bias": True}, "attention_bias=True of OlmoeForCausalLM is not impl"),
    "two counts": (
        {**QWEN3_MOE, "num_local_experts": 64},
        "num_experts=128 and num_local_experts=64 differ; delete the wrong one from config.json",
    ),
    "no count": (without(QWEN3_MOE, "num_experts"), "num_experts is missing in config.json"),
    "mixtral's count": (without(MIXTRAL, "num_local_experts"), "num_local_experts is missing in config"),
    "text count": ({**OLMOE, "num_experts": "64"}, "num_experts='64' in config.json is not a whole number"),
    "no experts": ({**QWEN3_MOE, "num_experts": 0}, "num_experts=0 in config.json is not a whole number of"),
    "no shared": (
        {**QWEN2_MOE, "shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size=0 in",
    ),
    "too many": ({**MIXTRAL, "num_experts_per_tok": 9}, "experts_per_token=9 with experts=8; give 1 to 8"),
    "clip": ({**OLMOE, "clip_qkv": 0}, "clip_qkv=0 in config.json is not a positive number"),
    "text norm": ({**QWEN3_MOE, "norm_topk_prob": "yes"}, "norm_topk_prob='yes' in config.json is neither"),
    "quantised": ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} of Llama"),
    "yarn": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type='yarn' is not implemented; use a model with default, linear or llama3",
    ),
    "dynamic": ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not"),
    "partial": (
        {**LLAMA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 is not implemented; use a model with",
    ),
    "rope is text": (
        {**LLAMA, "rope_scaling": "llama3"},
        "the rope parameters 'llama3' in config.json are not a JSON object of names and numbers",
    ),
    "rope by layer": (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope parameters {'full_attention': {'rope_theta': 1000000.0}} in config.json are not a JSON object",
    ),
    "yarn beside parameters": (
        {
            **LLAMA,
            "rope_parameters": {"rope_theta": 5e5},
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        "rope_type='yarn' is not implemented; use a model with default, linear or llama3",
    ),
    "two scalings": (
        {
            **LLAMA,
            "rope_parameters": {"rope_theta": 5e5},
            "rope_scaling": {"rope_type": "linear", "factor": 4},
        },
        "rope_parameters={'rope_theta': 500000.0} and rope_scaling={'rope_type': 'linear', 'factor': 4} "
        "describe different rotary embeddings; delete the wrong one",
    ),
    "two thetas": (
        {**LLAMA, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "default"}},
        "describe different rotary embeddings",
    ),
    "two families": (
        {**LLAMA, "model_type": "mistral", "sliding_window": 4},
        "architectures=['LlamaForCausalLM'] and model_type='mistral' name different models; LlamaForCausalLM "
        "has model_type='llama'",
    ),
    "two architectures": (
        {**LLAMA, "architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
        "architectures=['LlamaForCausalLM', 'MistralForCausalLM'] names several architectures; keep",
    ),
    "no factor": (
        {**LLAMA, "rope_scaling": without(LLAMA3, "low_freq_factor")},
        "low_freq_factor=None in config.json is not a positive number",
    ),
    "factors": (
        {**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "low_freq_factor=4.0 is not below high_freq_factor=4.0",
    ),
    "theta": ({**LLAMA, "rope_theta": "big"}, "rope_theta='big' in config.json is not a positive number"),
    "eps": ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps=0 in config.json is not a positive number"),
    "tied": (
        {**LLAMA, "tie_word_embeddings": "yes"},
        "tie_word_embeddings='yes' in config.json is neither true nor false",
    ),
    "no width": (
        without(LLAMA, "hidden_size"),
        "hidden_size is missing in config.json, so the file is incomplete; download it again",
    ),
    "qwen kv heads": (without(QWEN2, "num_key_value_heads"), "num_key_value_heads is missing"),
    "text width": ({**LLAMA, "hidden_size": "2048"}, "width='2048' is not a valid size"),
    "no layers": ({**LLAMA, "num_hidden_layers": 0}, "layers=0 is not a valid size"),
    "heads": ({**LLAMA, "num_key_value_heads": 5}, "kv_heads=5 does not divide heads=32"),
}


@pytest.mark.parametrize(("raw", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_computed_wrongly_is_refused(raw: dict[str, Any], message: str):
    with pytest.raises(ArealError) as caught:
        read_config(raw)
    assert message in str(caught.value)


def test_options_that_are_off_are_let_through():
    off = {
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": ["full_attention"] * 16,
        "quantization_config": None, "rope_scaling": None, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    assert read_config({**LLAMA, **off}) == read_config(LLAMA)
    assert read_config({**QWEN2, **off, "attention_bias": True}) == read_config(
        QWEN2
    )  # it has no such option
    training = {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.01, "output_router_logits": True}
    for raw, config in MIXTURES.values():
        assert read_config({**raw, **training, "mlp_only_layers": None}) == config
