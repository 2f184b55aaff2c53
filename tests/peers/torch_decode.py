"""transformers' LlamaForCausalLM under PyTorch: greedy decoding with its KV cache, as JSON.

python tests/peers/torch_decode.py SHAPE SLOTS DTYPE PROMPT TOKENS REPEATS

Seconds are of a decode step: of `TOKENS` tokens for every row, without the prompt's own.
"""

from __future__ import annotations

import sys
import time

import torch
from shapes import SHAPES
from timing import report_seconds
from transformers import LlamaConfig, LlamaForCausalLM


def main(name: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> None:
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
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    ids = torch.randint(0, s["vocab"], (slots, prompt))

    def seconds_of(count: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape == (slots, prompt + count)
        return time.perf_counter() - started

    seconds_of(2)
    runs = [(seconds_of(1), seconds_of(tokens + 1)) for _ in range(repeats)]
    report_seconds([(whole - first) / tokens for first, whole in runs], [whole for _, whole in runs])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
