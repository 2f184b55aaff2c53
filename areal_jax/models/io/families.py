"""The model families that can be read and written, as tables of architectures, sizes and tensors.

A family is a Hugging Face architecture. The tables convert a `config.json` of transformers 4 (`rope_theta`,
`rope_scaling`) or transformers 5 (`rope_parameters`) to a `ModelConfig`. A `config.json` is written in the
format of transformers 4, which both versions read. An option that is not implemented raises ArealError.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from areal_jax.models.config import ModelConfig
from areal_jax.models.rope import LinearScaling, Llama3Scaling, RopeScaling
from areal_jax.types import ArealError


class ExpertNames(NamedTuple):
    """Names in Hugging Face files: the module of a layer's router and experts, and an expert's matrices."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture, and how its `config.json` maps to a `ModelConfig`."""

    architecture: str
    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` with the value that they have in every model of the family."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Key in `config.json` -> name of the field of `ModelConfig`, beside those in SIZES."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that `config.json` may omit, as in transformers; all other sizes must be in the file."""
    implemented: Mapping[str, Any] = field(default_factory=dict)
    """Options in `config.json` with the only value that is implemented; a file may omit them."""
    expert_names: ExpertNames | None = None
    """Names of the tensors of router and experts; None: a family without experts."""


NO_BIAS = {"attention_bias": False}
EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""Options with which every layer has experts."""
EXPERT_COUNT = ("num_experts", "num_local_experts")
"""Keys of the number of experts: transformers 5 writes another one than released files have."""
ROUTING = {"num_experts_per_tok": "experts_per_token", "norm_topk_prob": "has_unit_weights"}
QWEN_EXPERTS = {"num_experts": "experts", "moe_intermediate_size": "expert_width", **ROUTING}

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        defaults={"num_key_value_heads": None, "head_dim": None},
        implemented={**NO_BIAS, "mlp_bias": False},
    ),
    Family("Qwen2ForCausalLM", "qwen2", {"has_qkv_bias": True}, defaults={"head_dim": None}),
    Family(
        "Qwen3ForCausalLM", "qwen3", {"has_qk_norm": True}, defaults={"head_dim": 128}, implemented=NO_BIAS
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {"has_qk_norm": True},
        keys=QWEN_EXPERTS,
        defaults={"head_dim": None},
        implemented={**NO_BIAS, **EVERY_LAYER},
        expert_names=ExpertNames(),
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        keys={
            **QWEN_EXPERTS,
            "shared_expert_intermediate_size": "shared_width",
            "qkv_bias": "has_qkv_bias",
        },
        defaults={"head_dim": None, "qkv_bias": True},
        implemented=EVERY_LAYER,
        expert_names=ExpertNames(),
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        {"has_qk_norm": True, "is_qk_norm_joint": True},
        keys={
            "num_experts": "experts",
            "intermediate_size": "expert_width",
            "clip_qkv": "clip_qkv",
            **ROUTING,
        },
        defaults={"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-5},
        implemented=NO_BIAS,
        expert_names=ExpertNames(),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {"has_unit_weights": True},
        keys={
            "num_local_experts": "experts",
            "intermediate_size": "expert_width",
            "num_experts_per_tok": "experts_per_token",
        },
        defaults={"head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        implemented={"sliding_window": None},
        expert_names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    ),
)

_UNSET = {
    option.name: option.default
    for option in dataclasses.fields(ModelConfig)
    if any(option.name in {*family.options, *family.keys.values()} for family in FAMILIES)
}
"""The options in which families differ, with their values in a model without them."""


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
    """One leaf of the parameter tree (`path`) and its names in files.

    `theirs` lists the axes in Hugging Face files, `ours` the axes in the parameter tree: L layers, E experts,
    V vocab, D width, F width of an MLP or of an expert, S width of the MLP that all tokens share, H heads, K
    kv heads, h head dimension. `H*h` is a single axis of size H * h, `1` an axis of size 1. The first axes of
    `ours` may be missing in `theirs`: files have a tensor for each index of these axes (L and E), and the
    name has a `{}` for each number of the index.
    """

    path: str
    name: str
    """The tensor's name in Hugging Face files; `gguf` is the name in GGUF files, empty if none are read."""
    gguf: str
    theirs: str
    ours: str

    @property
    def axes(self) -> list[list[str]]:
        """The letters that each axis of `theirs` combines; none for an axis of size 1."""
        return [[letter for letter in axis.split("*") if letter != "1"] for axis in self.theirs.split()]

    @property
    def letters(self) -> list[str]:
        """All letters of `theirs`."""
        return [letter for axis in self.axes for letter in axis]

    @property
    def spread(self) -> list[str]:
        """The first axes of `ours` that `theirs` lacks: files have a tensor for each of their indices."""
        return [letter for letter in self.ours.split() if letter not in self.letters]

    @property
    def order(self) -> list[int]:
        """Place in `letters` of each axis of `ours` that is not spread: the order in which to transpose."""
        return [self.letters.index(letter) for letter in self.ours.split() if letter in self.letters]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of a single tensor in Hugging Face files."""
        return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.axes)

    def names(self, sizes: Mapping[str, int]) -> dict[tuple[int, ...], str]:
        """Returns index in the axes of `spread` -> name of the tensor in Hugging Face files."""
        ranges = (range(sizes[letter]) for letter in self.spread)
        return {index: self.name.format(*index) for index in itertools.product(*ranges)}


_OUTSIDE = (
    Tensor("embedding", "model.embed_tokens.weight", "token_embd.weight", "V D", "V D"),
    Tensor("norm", "model.norm.weight", "output_norm.weight", "D", "D"),
)
_HEAD = Tensor("head", "lm_head.weight", "output.weight", "V D", "D V")


def _block(path: str, name: str, gguf: str, theirs: str, ours: str) -> Tensor:
    gguf = gguf and f"blk.{{}}.{gguf}"
    return Tensor(f"blocks.{path}", f"model.layers.{{}}.{name}", gguf, theirs, f"L {ours}")


_BLOCK = (
    _block("attention_norm", "input_layernorm.weight", "attn_norm.weight", "D", "D"),
    _block("attention.q", "self_attn.q_proj.weight", "attn_q.weight", "H*h D", "D H h"),
    _block("attention.k", "self_attn.k_proj.weight", "attn_k.weight", "K*h D", "D K h"),
    _block("attention.v", "self_attn.v_proj.weight", "attn_v.weight", "K*h D", "D K h"),
    _block("attention.out", "self_attn.o_proj.weight", "attn_output.weight", "D H*h", "H h D"),
    _block("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "D", "D"),
)
_MLP = (
    _block("mlp.gate", "mlp.gate_proj.weight", "ffn_gate.weight", "F D", "D F"),
    _block("mlp.up", "mlp.up_proj.weight", "ffn_up.weight", "F D", "D F"),
    _block("mlp.down", "mlp.down_proj.weight", "ffn_down.weight", "D F", "F D"),
)
_SHARED_MLP = (
    _block("mlp.shared.gate", "mlp.shared_expert.gate_proj.weight", "", "S D", "D S"),
    _block("mlp.shared.up", "mlp.shared_expert.up_proj.weight", "", "S D", "D S"),
    _block("mlp.shared.down", "mlp.shared_expert.down_proj.weight", "", "D S", "S D"),
    _block("mlp.shared_gate", "mlp.shared_expert_gate.weight", "", "1 D", "D"),
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
_JOINT_QK_NORM = (
    _block("attention.q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "H*h", "H h"),
    _block("attention.k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "K*h", "K h"),
)


def _experts(names: ExpertNames) -> tuple[Tensor, ...]:
    one = f"{names.module}.experts.{{}}"
    return (
        _block("mlp.router", f"{names.module}.gate.weight", "", "E D", "D E"),
        _block("mlp.expert_gate", f"{one}.{names.gate}.weight", "", "F D", "E D F"),
        _block("mlp.expert_up", f"{one}.{names.up}.weight", "", "F D", "E D F"),
        _block("mlp.expert_down", f"{one}.{names.down}.weight", "", "D F", "E F D"),
    )


def tensors_of(config: ModelConfig) -> tuple[Tensor, ...]:
    """Returns every tensor of a model with this config, in the order in which exported files contain them.

    Raises ArealError if the model has experts, and no family has its options.
    """
    tensors = (*_OUTSIDE, *_BLOCK)
    names = _family_with(config).expert_names if config.experts else None
    tensors += _MLP if names is None else _experts(names)
    for is_there, more in (
        (config.shared_width, _SHARED_MLP),
        (config.has_qkv_bias, _QKV_BIAS),
        (config.has_qk_norm, _JOINT_QK_NORM if config.is_qk_norm_joint else _QK_NORM),
        (not config.is_tied, (_HEAD,)),
    ):
        tensors += more if is_there else ()
    return tensors


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the size of each axis letter of `Tensor`."""
    c = config
    return dict(
        L=c.layers, E=c.experts, V=c.vocab_size, D=c.width, F=c.expert_width or c.mlp_width, S=c.shared_width,
        H=c.heads, K=c.kv_heads, h=c.head_dim,
    )  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the model config that a `config.json` describes.

    Raises ArealError if a key is missing or invalid, or for an architecture or option that is not
    implemented.
    """
    family = _family_of(raw)
    _refuse_options(raw, family)
    raw = {**family.defaults, **raw, **_number_of_experts(raw)}
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
        family=family.model_type,
        **family.options,
        **{name: _READ[name](raw, key) for key, name in family.keys.items()},
    )


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a model with this config, for tensors of `dtype`.

    Raises ArealError if the config's family, or without a family each family, lacks one of its options.
    """
    family = _family_with(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, name) for key, name in {**SIZES, **family.keys}.items()},
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_json(config.rope_scaling),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        **family.implemented,
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
    """Returns the family that the config names, or without a name the first one that has its options."""
    if config.family is None:
        for family in FAMILIES:
            if not _contradictions(config, family):
                return family
        there = {name: getattr(config, name) for name in _UNSET}
        raise ArealError(
            "no Hugging Face architecture has all of "
            + ", ".join(f"{name}={value!r}" for name, value in there.items() if value != _UNSET[name])
            + "; change one of these options to get one of: "
            + ", ".join(family.architecture for family in FAMILIES)
        )
    for family in FAMILIES:
        if family.model_type == config.family:
            break
    else:
        raise ArealError(
            f"model: family={config.family!r} is unknown; use one of: "
            + ", ".join(family.model_type for family in FAMILIES)
        )
    if wrong := _contradictions(config, family):
        raise ArealError(
            f"model: {', '.join(wrong)} is not an option of {family.architecture}; change it, or set "
            "model.overrides.family=null to export as a family that has these options"
        )
    return family


def _contradictions(config: ModelConfig, family: Family) -> list[str]:
    """Returns the options of the config, as name=value, that no model of the family has."""
    values = {name: getattr(config, name) for name in _UNSET}
    return [f"{name}={value!r}" for name, value in values.items() if not _can_have(family, name, value)]


def _can_have(family: Family, name: str, value: Any) -> bool:
    if name in family.keys.values():
        return bool(value) or _READ[name] is not _count
    return value == family.options.get(name, _UNSET[name])


def _refuse_options(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ArealError for an option that is not implemented: ignoring it would give wrong results."""
    sliding = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    asked = {
        "hidden_act": raw.get("hidden_act", "silu") not in ("silu", "swish"),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": bool(sliding),
        "pretraining_tp": raw.get("pretraining_tp", 1) not in (1, None),
        "quantization_config": raw.get("quantization_config") is not None,
        **{key: raw.get(key) not in (None, value) for key, value in family.implemented.items()},
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


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = _given(raw, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArealError(
            f"{key}={value!r} in config.json is not a whole number of at least 1; download it again"
        )
    return value


def _number_of_experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns each key of EXPERT_COUNT with the number that one of them has; {} if none has a number."""
    given = {key: raw[key] for key in EXPERT_COUNT if raw.get(key) is not None}
    numbers = list(given.values())
    if any(number != numbers[0] for number in numbers):
        what = " and ".join(f"{key}={number!r:.80}" for key, number in given.items())
        raise ArealError(f"{what} differ; delete the wrong one from config.json")
    return dict.fromkeys(EXPERT_COUNT, numbers[0]) if numbers else {}


def _clip(raw: Mapping[str, Any], key: str) -> float | None:
    return None if raw.get(key) is None else _positive(raw, key)


_READ: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    **dict.fromkeys(("experts", "experts_per_token", "expert_width", "shared_width"), _count),
    **dict.fromkeys(("has_unit_weights", "has_qkv_bias"), _flag),
    "clip_qkv": _clip,
}
"""Field of `ModelConfig` -> function that reads it from `config.json`, for the fields in `Family.keys`."""
