"""google-tunix's Llama of a compared shape, with random weights."""

from __future__ import annotations

from flax import nnx
from shapes import SHAPES
from tunix.models.llama3 import model as llama


def make(name: str) -> llama.Llama3:
    s = SHAPES[name]
    config = llama.ModelConfig(
        num_layers=s["layers"],
        vocab_size=s["vocab"],
        embed_dim=s["width"],
        hidden_dim=s["mlp"],
        num_heads=s["heads"],
        head_dim=s["head_dim"],
        num_kv_heads=s["kv_heads"],
        rope_theta=int(s["theta"]),
        norm_eps=1e-5,
        weight_tying=True,
    )
    return llama.Llama3(config, rngs=nnx.Rngs(0))
