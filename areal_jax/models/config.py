"""The sizes of a decoder-only transformer, and the built-in model sizes by name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from areal_jax.models.rope import RopeScaling
from areal_jax.plugin import did_you_mean
from areal_jax.types import ArealError

PROJECTIONS = ("q", "k", "v", "out", "gate", "up", "down")
"""Names of the weight matrices of a transformer block; each of them can have a LoRA adapter."""

ROUTER = "router"
"""Name of the matrix that sends tokens to experts; no cast ever takes bits from it."""
EXPERT_PROJECTIONS = ("expert_gate", "expert_up", "expert_down")
"""Names of the matrices of a block's experts, each an array of all experts' matrices, without adapters."""


def is_router(path: Any) -> bool:
    """Whether a path in a tree of parameters, nested or flat, is that of a router's matrix."""
    names = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return any(str(name).rpartition(".")[2] == ROUTER for name in names)


@dataclass(frozen=True)
class Lora:
    """Settings of LoRA adapters, low-rank matrices that are added to projections (arXiv:2106.09685).

    An adapter adds alpha / rank times a product of two matrices, with inner dimension `rank`. A projection
    has an adapter if the regular expression `targets` matches the projection's full name. Raises ArealError
    if `targets` matches no name in PROJECTIONS.
    """

    rank: int
    alpha: float
    targets: str = ".*"

    def __post_init__(self) -> None:
        if not self.names:
            raise ArealError(
                f"model.lora.targets={self.targets} matches no projection; give a regular expression that "
                "matches the full name of at least one of: " + ", ".join(PROJECTIONS)
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in PROJECTIONS if re.fullmatch(self.targets, name))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of `models.transformer.Transformer`; `width` is the length of a hidden state."""

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for contexts longer than in pretraining; None: not scaled."""
    norm_eps: float = 1e-5
    is_tied: bool = True
    """Whether the LM head uses the embedding matrix instead of a matrix of its own."""
    has_qkv_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen2."""
    has_qk_norm: bool = False
    """Whether each head of queries and keys has an RMSNorm, as in Qwen3."""
    is_qk_norm_joint: bool = False
    """Whether, with has_qk_norm, one RMSNorm is over all heads of the queries, and one over all of the keys,
    as in OLMoE.
    """
    clip_qkv: float | None = None
    """Largest absolute value of queries, keys and values, to which others are clipped; None: not clipped."""
    experts: int = 0
    """Number of experts of each layer's mixture (E); 0: each layer has an MLP of `mlp_width` instead."""
    experts_per_token: int = 0
    """Number of experts that a token is sent to (k)."""
    expert_width: int = 0
    """Width of an expert's MLP."""
    has_unit_weights: bool = False
    """Whether the weights of a token's experts are divided by their sum (`norm_topk_prob`)."""
    shared_width: int = 0
    """Width of the MLP that all tokens pass beside their experts, as in Qwen2-MoE; 0: there is none."""
    family: str | None = None
    """The `model_type` of its Hugging Face folder; None: that of the first family with its options."""
    dtype: str = "float32"
    """dtype of the operands of matrix products."""
    accumulate: str = "float32"  # float32 | float64
    """dtype of everything else that the trainer computes: residual stream, norms, rotary embeddings, softmax,
    sums of matrix products, log-probs and entropies.

    float64 is for tests: it needs dtype=float64, and JAX's option jax_enable_x64.
    """
    rounds_activations: bool = True
    """Whether the backward pass rounds what layers' products read and write to `dtype`, so that fewer bytes
    are moved: activations, and gradients with respect to them. The forward pass's values, the residual
    stream, logits and the gradients of weights stay in `accumulate`. Not with numerics=exact.
    """
    lora: Lora | None = None
    """LoRA adapters of the projections; None: the model has no adapters."""
    quantize: str = "none"  # none | int8 | int4 | nf4 | fp8
    """none: the blocks' projections are stored as floats; else as integer codes, which are not trained."""
    numerics: str = "bounded"  # bounded | exact
    """exact: generator and trainer compute bit-identical log-probs (`models.exact`).

    bounded: the log-probs of generator and trainer differ by rounding.
    """
    params_dtype: str = "float32"
    """dtype in which parameters are published; every forward pass rounds float32 parameters to this dtype."""

    @property
    def activations(self) -> str:
        """dtype of the activations that the backward pass reads, and of their gradients."""
        return self.dtype if self.rounds_activations and self.numerics == "bounded" else self.accumulate

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArealError(
                    f"model: {name}={size!r} is not a valid size; give a whole number of at least 1"
                )
        self._require_experts()
        if self.heads % self.kv_heads:
            raise ArealError(
                f"model: kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a divisor of "
                f"{self.heads}"
            )
        if self.head_dim % 2:
            raise ArealError(
                f"model: head_dim={self.head_dim} is odd, and rotary embeddings rotate pairs of elements; "
                "choose an even head_dim"
            )
        self._require_accumulate()
        if self.quantize in ("int4", "nf4"):
            names = ("expert_width", "shared_width") if self.experts else ("mlp_width",)
            odd = [f"{name}={getattr(self, name)}" for name in ("width", *names) if getattr(self, name) % 2]
            if odd:
                raise ArealError(
                    f"model.quantize={self.quantize} packs two codes into a byte, but {' and '.join(odd)} is "
                    "odd; use model.quantize=int8"
                )

    def _require_experts(self) -> None:
        """Raise ArealError if the sizes of the mixture of experts are invalid or contradict each other."""
        for name in ("experts", "experts_per_token", "expert_width", "shared_width"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ArealError(
                    f"model: {name}={size!r} is not a valid size; give a whole number of at least 0"
                )
            if size and not self.experts:
                raise ArealError(
                    f"model: {name}={size} with experts=0, a model without experts; set experts to their "
                    f"number, or {name} to 0"
                )
        if not self.experts:
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise ArealError(
                f"model: experts_per_token={self.experts_per_token} with experts={self.experts}; give 1 to "
                f"{self.experts}"
            )
        if self.expert_width < 1:
            raise ArealError(
                f"model: expert_width={self.expert_width} with experts={self.experts}; give the width of an "
                "expert's MLP"
            )
        if self.lora is not None and (adapted := set(self.lora.names) & {"gate", "up", "down"}):
            raise ArealError(
                f"model.lora.targets={self.lora.targets} matches {', '.join(sorted(adapted))}, which are "
                "matrices of experts in this model, and experts have no adapters; set "
                "model.lora.targets='q|k|v|out'"
            )

    def _require_accumulate(self) -> None:
        if self.accumulate not in ("float32", "float64"):
            raise ArealError(f"model: accumulate={self.accumulate!r} is unknown; use float32 or float64")
        if self.dtype == "float64" and self.accumulate == "float32":
            raise ArealError(
                "model: dtype=float64 with accumulate=float32 would round the sums of float64 products; set "
                "accumulate=float64"
            )
        if self.accumulate == "float32":
            return
        for name, needed in (
            ("dtype", "float64"), ("params_dtype", "float32"), ("numerics", "bounded"), ("quantize", "none")
        ):  # fmt: skip
            if (value := getattr(self, name)) != needed:
                raise ArealError(
                    f"model: accumulate=float64 with {name}={value} is not supported, because the code for "
                    f"{name}={value} rounds to float32 or less; set {name}={needed} or accumulate=float32"
                )


QWEN25 = dict(family="qwen2", rope_theta=1e6, norm_eps=1e-6, has_qkv_bias=True)
QWEN3 = dict(
    family="qwen3", rope_theta=1e6, norm_eps=1e-6, has_qk_norm=True, kv_heads=8, head_dim=128,
    vocab_size=151_936,
)  # fmt: skip
QWEN3_MOE = QWEN3 | dict(
    family="qwen3_moe", kv_heads=4, is_tied=False, experts=128, experts_per_token=8, has_unit_weights=True
)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(layers=2, width=64, heads=4, kv_heads=4, head_dim=16, mlp_width=256),
    "5m": dict(layers=6, width=256, heads=8, kv_heads=4, head_dim=32, mlp_width=704),
    "smollm2-135m": dict(
        family="llama", layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp_width=1536,
        rope_theta=100_000.0, vocab_size=49_152,
    ),
    "qwen2.5-0.5b": dict(
        layers=24, width=896, heads=14, kv_heads=2, head_dim=64, mlp_width=4864, vocab_size=151_936, **QWEN25
    ),
    "qwen2.5-1.5b": dict(
        layers=28, width=1536, heads=12, kv_heads=2, head_dim=128, mlp_width=8960, vocab_size=151_936,
        **QWEN25,
    ),
    "qwen2.5-7b": dict(
        layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, mlp_width=18_944, vocab_size=152_064,
        is_tied=False, **QWEN25,
    ),
    "qwen2.5-32b": dict(
        layers=64, width=5120, heads=40, kv_heads=8, head_dim=128, mlp_width=27_648, vocab_size=152_064,
        is_tied=False, **QWEN25,
    ),
    "qwen3-0.6b": dict(layers=28, width=1024, heads=16, mlp_width=3072, **QWEN3),
    "qwen3-1.7b": dict(layers=28, width=2048, heads=16, mlp_width=6144, **QWEN3),
    "qwen3-4b": dict(layers=36, width=2560, heads=32, mlp_width=9728, **QWEN3),
    "qwen3-8b": dict(layers=36, width=4096, heads=32, mlp_width=12_288, is_tied=False, **QWEN3),
    "qwen3-30b-a3b": dict(layers=48, width=2048, heads=32, mlp_width=6144, expert_width=768, **QWEN3_MOE),
    "qwen3-235b-a22b": dict(
        layers=94, width=4096, heads=64, mlp_width=12_288, expert_width=1536, **QWEN3_MOE
    ),
    "olmoe-1b-7b": dict(
        family="olmoe", layers=16, width=2048, heads=16, kv_heads=16, head_dim=128, mlp_width=1024,
        vocab_size=50_304, is_tied=False, has_qk_norm=True, is_qk_norm_joint=True, experts=64,
        experts_per_token=8, expert_width=1024,
    ),
}  # fmt: skip


NO_SIZES = {"dtype", "accumulate", "rope_scaling", "lora", "quantize", "numerics", "params_dtype"}


def model_config(shape: str, vocab_size: int, dtype: str = "float32", /, **overrides: Any) -> ModelConfig:
    """Returns the config of the built-in model size `shape`, with the fields in `overrides` replaced.

    `vocab_size`: fewest ids of the model's vocabulary. `dtype`: dtype of the operands of matrix products.
    Raises ArealError if `shape` or a key of `overrides` is unknown, or if a size is invalid.
    """
    if shape not in SHAPES:
        hint = did_you_mean(shape, SHAPES, f"choose one of: {', '.join(SHAPES)}")
        raise ArealError(f"model.shape={shape} is unknown; {hint}")
    known = sorted({field.name for field in dataclasses.fields(ModelConfig)} - NO_SIZES)
    for key in overrides:
        if key not in known:
            hint = did_you_mean(key, known, f"known keys are: {', '.join(known)}", "model.overrides.")
            raise ArealError(f"unknown key model.overrides.{key}; {hint}")
    config = ModelConfig(**{"vocab_size": vocab_size, "dtype": dtype, **SHAPES[shape], **overrides})
    return dataclasses.replace(config, vocab_size=max(vocab_size, config.vocab_size))
