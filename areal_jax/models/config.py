"""The sizes of a decoder-only transformer, and the named sets of them."""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import Any

from areal_jax.models.rope import RopeScaling
from areal_jax.types import ArealError

PROJECTIONS = ("q", "k", "v", "out", "gate", "up", "down")
"""The matrices of a block, each of which may have an adapter."""


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `rank`, times alpha / rank (LoRA, Hu et al., arXiv:2106.09685), beside the projections
    whose whole names `targets` matches. Raises ArealError for targets that match none.
    """

    rank: int
    alpha: float
    targets: str = ".*"

    def __post_init__(self) -> None:
        if not self.names:
            raise ArealError(
                f"model.lora.targets={self.targets} matches no projection's name; there are: "
                + ", ".join(PROJECTIONS)
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in PROJECTIONS if re.fullmatch(self.targets, name))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of `models.transformer.Transformer`; widths in elements."""

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched beyond the context of pretraining."""
    norm_eps: float = 1e-5
    is_tied: bool = True
    """The LM head is the embedding."""
    has_qkv_bias: bool = False
    """Qwen2's biases on queries, keys and values."""
    has_qk_norm: bool = False
    """Qwen3's RMSNorm over each head of queries and keys."""
    dtype: str = "float32"
    """What matrix products read; they accumulate in float32."""
    lora: Lora | None = None
    """Trainable adapters beside the projections."""
    quantize: str = "none"  # none | int8 | int4 | nf4
    """How the blocks' projections, frozen then, are held."""
    numerics: str = "bounded"  # bounded | exact
    """exact: generator and trainer compute log-probs equal in every bit (`models.exact`)."""
    params_dtype: str = "float32"
    """What parameters are published in, and so rounded to wherever they are read."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArealError(f"model: {name}={size!r} is no size; give a whole number from 1 on")
        if self.heads % self.kv_heads:
            raise ArealError(
                f"model: kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise ArealError(
                f"model: head_dim={self.head_dim} is odd; rotary embeddings turn pairs, choose an even one"
            )
        if self.quantize in ("int4", "nf4") and (self.width % 2 or self.mlp_width % 2):
            raise ArealError(
                f"model.quantize={self.quantize} holds two codes a byte, which width={self.width} and "
                f"mlp_width={self.mlp_width} do not both fill; use model.quantize=int8"
            )


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(layers=2, width=64, heads=4, kv_heads=4, head_dim=16, mlp_width=256),
    "5m": dict(layers=6, width=256, heads=8, kv_heads=4, head_dim=32, mlp_width=704),
    "smollm2-135m": dict(
        layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp_width=1536, rope_theta=100_000.0,
        vocab_size=49_152,
    ),
    "qwen2.5-1.5b": dict(
        layers=28, width=1536, heads=12, kv_heads=2, head_dim=128, mlp_width=8960, rope_theta=1e6,
        norm_eps=1e-6, has_qkv_bias=True, vocab_size=151_936,
    ),
}  # fmt: skip


NO_SIZES = {"dtype", "rope_scaling", "lora", "quantize", "numerics", "params_dtype"}


def model_config(shape: str, vocab_size: int, dtype: str = "float32", /, **overrides: Any) -> ModelConfig:
    """The sizes of `shape` for a tokenizer of `vocab_size` ids; a shape's own larger vocabulary stays.

    Raises ArealError for a shape or a size that does not exist.
    """
    if shape not in SHAPES:
        near = difflib.get_close_matches(shape, SHAPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(SHAPES)}"
        raise ArealError(f"no model.shape={shape}; {hint}")
    known = sorted({field.name for field in dataclasses.fields(ModelConfig)} - NO_SIZES)
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean model.overrides.{near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ArealError(f"unknown key model.overrides.{key}; {hint}")
    config = ModelConfig(**{"vocab_size": vocab_size, "dtype": dtype, **SHAPES[shape], **overrides})
    return dataclasses.replace(config, vocab_size=max(vocab_size, config.vocab_size))
