"""The model families that can be read and written, as data: a table of names, a table of tensors.

A family is what Hugging Face calls an architecture. `config.json` becomes a `ModelConfig` by the tables
below, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`), and is written
in the form of 4, which both read. What a config asks for and the model does not compute is refused, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from areal_jax.models.config import ModelConfig
from areal_jax.models.rope import LinearScaling, Llama3Scaling, RopeScaling
from areal_jax.types import ArealError


@dataclass(frozen=True)
class Family:
    architecture: str
    model_type: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes where `config.json` lacks the key; other sizes must be there."""
    refused: tuple[str, ...] = ()
    """Options of this family that must be off."""


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


class Tensor(NamedTuple):
    """One leaf of our tree, and where it is found; `{}` in a name is the layer.

    Axes are letters: V vocab, D width, F MLP width, H heads, K kv heads, h head dimension; `H*h` is one axis
    that holds both. A leaf of `blocks` has the layers in front.
    """

    path: str
    name: str
    """Hugging Face's."""
    gguf: str
    theirs: str
    ours: str

    @property
    def is_stacked(self) -> bool:
        return self.path.startswith("blocks.")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """As Hugging Face stores it."""
        return tuple(_product(sizes, axis) for axis in self.theirs.split())

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
    """Every tensor of a model of these sizes, in the order in which files hold them."""
    blocks = _BLOCK + (_QKV_BIAS if config.has_qkv_bias else ()) + (_QK_NORM if config.has_qk_norm else ())
    return _SHARED + blocks + (() if config.is_tied else (_HEAD,))


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The letters of `Tensor` as numbers."""
    c = config
    return dict(V=c.vocab_size, D=c.width, F=c.mlp_width, H=c.heads, K=c.kv_heads, h=c.head_dim)


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The sizes that a `config.json` describes. Raises ArealError for what it lacks or we do not compute."""
    family = _family_of(raw)
    _refuse_options(raw, family)
    raw = {**family.defaults, **raw}
    width, heads = _given(raw, "hidden_size"), _given(raw, "num_attention_heads")
    scaling, theta = _read_rope(raw)
    head_dim = _given(raw, "head_dim")
    if head_dim is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        head_dim = width // heads
    kv_heads = _given(raw, "num_key_value_heads")
    return ModelConfig(
        vocab_size=_given(raw, "vocab_size"),
        layers=_given(raw, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,  # type: ignore[arg-type]  # None is refused as a size
        mlp_width=_given(raw, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        is_tied=_flag(raw, "tie_word_embeddings"),
        has_qkv_bias=family.has_qkv_bias,
        has_qk_norm=family.has_qk_norm,
    )


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` of these sizes, with tensors of `dtype`. Raises ArealError if no family has them."""
    family = _family_with(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_json(config.rope_scaling),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        **dict.fromkeys(family.refused, False),
        "torch_dtype": dtype,
    }


def _family_of(raw: Mapping[str, Any]) -> Family:
    architectures = raw.get("architectures") or [None]
    named = architectures[0] if isinstance(architectures, list) else architectures
    for family in FAMILIES:
        if named == family.architecture or (named is None and raw.get("model_type") == family.model_type):
            return family
    what = named or raw.get("model_type") or "of no name (architectures and model_type are missing)"
    there = ", ".join(family.architecture for family in FAMILIES)
    raise ArealError(f"the architecture {what} is not implemented; there are: {there}")


def _family_with(config: ModelConfig) -> Family:
    for family in FAMILIES:
        if (family.has_qkv_bias, family.has_qk_norm) == (config.has_qkv_bias, config.has_qk_norm):
            return family
    raise ArealError(
        "a model with both has_qkv_bias and has_qk_norm has no Hugging Face architecture; there are: "
        + ", ".join(family.architecture for family in FAMILIES)
    )


def _refuse_options(raw: Mapping[str, Any], family: Family) -> None:
    """What we would silently compute wrongly."""
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
                f"{key}={value!r:.120} of {family.architecture} is not implemented; take a model without it"
            )


def _read_rope(raw: Mapping[str, Any]) -> tuple[RopeScaling | None, float]:
    """The scaling and theta; `rope_parameters` of transformers 5 holds both."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ArealError(f"rope parameters {rope!r:.80} are no object of names and numbers")
    theta = _positive({**raw, **rope}, "rope_theta", 10_000.0)
    rotated = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        raise ArealError(f"partial_rotary_factor={rotated!r} is not implemented; every pair is rotated")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, theta
    if kind == "linear":
        return LinearScaling(_positive(rope, "factor")), theta
    if kind == "llama3":
        return _llama3(rope), theta
    raise ArealError(f"rope_type={kind!r} is not implemented; there are: default, linear, llama3")


def _llama3(rope: Mapping[str, Any]) -> Llama3Scaling:
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if low >= high:
        raise ArealError(f"low_freq_factor={low} is not below high_freq_factor={high}; is the config whole?")
    length = int(_positive(rope, "original_max_position_embeddings"))
    return Llama3Scaling(_positive(rope, "factor"), low, high, length)


def scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a `config.json`."""
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
        raise ArealError(f"there is no {key}; is the config whole?")
    return raw[key]


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ArealError(f"{key}={value!r} is no positive number; is the config whole?")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ArealError(f"{key}={value!r} is neither true nor false")
    return value


def _product(sizes: Mapping[str, int], axis: str) -> int:
    total = 1
    for letter in axis.split("*"):
        total *= sizes[letter]
    return total
