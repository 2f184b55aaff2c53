"""The model families that can be read and written, as tables of architectures, sizes and tensors.

A family is a Hugging Face architecture. The tables convert a `config.json` of transformers 4 (`rope_theta`,
`rope_scaling`) or transformers 5 (`rope_parameters`) to a `ModelConfig`. A `config.json` is written in the
format of transformers 4, which both versions read. An option that is not implemented raises ArealError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from areal_jax.models.config import ModelConfig
from areal_jax.models.rope import LinearScaling, Llama3Scaling, RopeScaling
from areal_jax.types import ArealError


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture, and how its `config.json` maps to a `ModelConfig`."""

    architecture: str
    model_type: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that `config.json` may omit, as in transformers; all other sizes must be in the file."""
    refused: tuple[str, ...] = ()
    """Options in `config.json` that are not implemented: each must be false or missing."""


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        defaults={"num_key_value_heads": None, "head_dim": None},
        refused=("attention_bias", "mlp_bias"),
    ),
    Family("Qwen2ForCausalLM", "qwen2", has_qkv_bias=True, defaults={"head_dim": None}),
    Family(
        "Qwen3ForCausalLM", "qwen3", has_qk_norm=True, defaults={"head_dim": 128}, refused=("attention_bias",)
    ),
)


SIZES = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_width",
}
"""Key of a size in `config.json` -> name of the field of `ModelConfig`."""


class Tensor(NamedTuple):
    """One leaf of the parameter tree (`path`) and its names in files; `{}` in a name is the layer's number.

    `theirs` lists the axes in Hugging Face files, `ours` the axes in the parameter tree: V vocab, D width, F
    MLP width, H heads, K kv heads, h head dimension. `H*h` is a single axis of size H * h. A leaf of `blocks`
    has a further first axis, the layers, which `ours` omits.
    """

    path: str
    name: str
    """The tensor's name in Hugging Face files; `gguf` is the name in GGUF files."""
    gguf: str
    theirs: str
    ours: str

    @property
    def is_stacked(self) -> bool:
        return self.path.startswith("blocks.")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the tensor's shape in Hugging Face files, where each layer is a tensor of its own."""
        axes = (axis.split("*") for axis in self.theirs.split())
        return tuple(math.prod(sizes[letter] for letter in letters) for letters in axes)

    def names(self, layers: int) -> list[str]:
        return [self.name.format(layer) for layer in range(layers)] if self.is_stacked else [self.name]


_SHARED = (
    Tensor("embedding", "model.embed_tokens.weight", "token_embd.weight", "V D", "V D"),
    Tensor("norm", "model.norm.weight", "output_norm.weight", "D", "D"),
)
_HEAD = Tensor("head", "lm_head.weight", "output.weight", "V D", "D V")


def _block(path: str, name: str, gguf: str, theirs: str, ours: str) -> Tensor:
    return Tensor(f"blocks.{path}", f"model.layers.{{}}.{name}", f"blk.{{}}.{gguf}", theirs, ours)


_BLOCK = (
    _block("attention_norm", "input_layernorm.weight", "attn_norm.weight", "D", "D"),
    _block("attention.q", "self_attn.q_proj.weight", "attn_q.weight", "H*h D", "D H h"),
    _block("attention.k", "self_attn.k_proj.weight", "attn_k.weight", "K*h D", "D K h"),
    _block("attention.v", "self_attn.v_proj.weight", "attn_v.weight", "K*h D", "D K h"),
    _block("attention.out", "self_attn.o_proj.weight", "attn_output.weight", "D H*h", "H h D"),
    _block("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "D", "D"),
    _block("mlp.gate", "mlp.gate_proj.weight", "ffn_gate.weight", "F D", "D F"),
    _block("mlp.up", "mlp.up_proj.weight", "ffn_up.weight", "F D", "D F"),
    _block("mlp.down", "mlp.down_proj.weight", "ffn_down.weight", "D F", "F D"),
)
_QKV_BIAS = (
    _block("attention.q_bias", "self_attn.q_proj.bias", "attn_q.bias", "H*h", "H h"),
    _block("attention.k_bias", "self_attn.k_proj.bias", "attn_k.bias", "K*h", "K h"),
    _block("attention.v_bias", "self_attn.v_proj.bias", "attn_v.bias", "K*h", "K h"),
)
_QK_NORM = (
    _block("attention.q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "h", "h"),
    _block("attention.k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "h", "h"),
)


def tensors_of(config: ModelConfig) -> tuple[Tensor, ...]:
    """Returns every tensor of a model with this config, in the order in which exported files contain them."""
    blocks = _BLOCK + (_QKV_BIAS if config.has_qkv_bias else ()) + (_QK_NORM if config.has_qk_norm else ())
    return _SHARED + blocks + (() if config.is_tied else (_HEAD,))


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the size of each axis letter of `Tensor`: V, D, F, H, K and h."""
    c = config
    return dict(V=c.vocab_size, D=c.width, F=c.mlp_width, H=c.heads, K=c.kv_heads, h=c.head_dim)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the model config that a `config.json` describes.

    Raises ArealError if a key is missing or invalid, or for an architecture or option that is not
    implemented.
    """
    family = _family_of(raw)
    _refuse_options(raw, family)
    raw = {**family.defaults, **raw}
    scaling, theta = _read_rope(raw)
    sizes = {name: _given(raw, key) for key, name in SIZES.items()}
    width, heads = sizes["width"], sizes["heads"]
    if sizes["head_dim"] is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        sizes["head_dim"] = width // heads
    if sizes["kv_heads"] is None:
        sizes["kv_heads"] = heads
    return ModelConfig(
        **sizes,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        is_tied=_flag(raw, "tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias,
        has_qk_norm=family.has_qk_norm,
    )


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a model with this config, for tensors of `dtype`.

    Raises ArealError if no family has this combination of has_qkv_bias and has_qk_norm.
    """
    family = _family_with(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, name) for key, name in SIZES.items()},
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_json(config.rope_scaling),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        **dict.fromkeys(family.refused, False),
        "torch_dtype": dtype,
    }


def _family_of(raw: Mapping[str, Any]) -> Family:
    """Returns the family that a `config.json` names.

    Raises ArealError if the file names no family, several families, or a family that is not implemented.
    """
    architectures, model_type = raw.get("architectures") or [None], raw.get("model_type")
    if isinstance(architectures, list) and len(set(architectures)) > 1:
        raise ArealError(
            f"{architectures=} names several architectures; keep in config.json only the one of the tensors"
        )
    named = architectures[0] if isinstance(architectures, list) else architectures
    for family in FAMILIES:
        if named != family.architecture and (named is not None or model_type != family.model_type):
            continue
        if model_type not in (None, family.model_type):
            # transformers builds the model by model_type alone
            raise ArealError(
                f"{architectures=} and {model_type=} name different models; {family.architecture} has "
                f"model_type={family.model_type!r}; correct config.json"
            )
        return family
    what = named or model_type or "without a name (architectures and model_type are missing)"
    there = ", ".join(family.architecture for family in FAMILIES)
    raise ArealError(f"the architecture {what} is not implemented; use a model of one of: {there}")


def _family_with(config: ModelConfig) -> Family:
    for family in FAMILIES:
        if (family.has_qkv_bias, family.has_qk_norm) == (config.has_qkv_bias, config.has_qk_norm):
            return family
    raise ArealError(
        "a model with both has_qkv_bias and has_qk_norm has no Hugging Face architecture; set one of them to "
        "false to get one of: " + ", ".join(family.architecture for family in FAMILIES)
    )


def _refuse_options(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ArealError for an option that is not implemented: ignoring it would give wrong results."""
    sliding = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    asked = {
        "hidden_act": raw.get("hidden_act", "silu") not in ("silu", "swish"),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": bool(sliding),
        "pretraining_tp": raw.get("pretraining_tp", 1) not in (1, None),
        "quantization_config": raw.get("quantization_config") is not None,
        **{key: bool(raw.get(key)) for key in family.refused},
    }
    for key, is_asked in asked.items():
        if is_asked:
            value = sliding[0] if key == "layer_types" else raw[key]
            raise ArealError(
                f"{key}={value!r:.120} of {family.architecture} is not implemented; use a model without it"
            )


def _read_rope(raw: Mapping[str, Any]) -> tuple[RopeScaling | None, float]:
    """Returns the scaling of rotary frequencies (None: not scaled) and theta, from a `config.json`.

    transformers 5 writes both to the key `rope_parameters`, transformers 4 the scaling to `rope_scaling`. If
    a config has both keys, transformers 5 reads only `rope_scaling`; here ArealError is raised if the values
    of the two keys differ.
    """
    given = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    found = [_read_one_rope(raw, rope) for rope in given.values()] or [_read_one_rope(raw, {})]
    if any(one != found[0] for one in found):
        what = " and ".join(f"{key}={rope!r:.120}" for key, rope in given.items())
        raise ArealError(
            f"{what} describe different rotary embeddings; delete the wrong one from config.json"
        )
    return found[0]


def _read_one_rope(raw: Mapping[str, Any], rope: Any) -> tuple[RopeScaling | None, float]:
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ArealError(
            f"the rope parameters {rope!r:.80} in config.json are not a JSON object of names and numbers; "
            "download config.json again"
        )
    theta = _positive({**raw, **rope}, "rope_theta", 10_000.0)
    rotated = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        raise ArealError(
            f"partial_rotary_factor={rotated!r} is not implemented; use a model with partial_rotary_factor=1"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, theta
    if kind == "linear":
        return LinearScaling(_positive(rope, "factor")), theta
    if kind == "llama3":
        return _llama3(rope), theta
    raise ArealError(f"rope_type={kind!r} is not implemented; use a model with default, linear or llama3")


def _llama3(rope: Mapping[str, Any]) -> Llama3Scaling:
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if low >= high:
        raise ArealError(
            f"low_freq_factor={low} is not below high_freq_factor={high}, so config.json is damaged; "
            "download it again"
        )
    length = int(_positive(rope, "original_max_position_embeddings"))
    return Llama3Scaling(_positive(rope, "factor"), low, high, length)


def scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Returns the value of `rope_scaling` in a `config.json` for this scaling; None for no scaling."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_turns,
        "high_freq_factor": scaling.high_turns,
        "original_max_position_embeddings": scaling.original_length,
    }


def _given(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise ArealError(f"{key} is missing in config.json, so the file is incomplete; download it again")
    return raw[key]


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ArealError(
            f"{key}={value!r} in config.json is not a positive number, so the file is damaged; download it "
            "again"
        )
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ArealError(
            f"{key}={value!r} in config.json is neither true nor false, so the file is damaged; download it "
            "again"
        )
    return value
