"""transformers' LlamaForCausalLM of a compared shape, with random weights."""

from __future__ import annotations

import torch
from shapes import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM


def make(name: str, dtype: str) -> LlamaForCausalLM:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    s = SHAPES[name]
    config = LlamaConfig(
        vocab_size=s["vocab"],
        hidden_size=s["width"],
        intermediate_size=s["mlp"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        rope_theta=s["theta"],
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype))
