"""transformers' LlamaForCausalLM under PyTorch: greedy decoding with its KV cache, as JSON.

python tests/peers/torch_decode.py SHAPE SLOTS DTYPE PROMPT TOKENS REPEATS

Seconds are of a decode step: of `TOKENS` tokens for every row, without the prompt's own.
"""

from __future__ import annotations

import sys
import time

import torch
from timing import report_seconds
from torch_model import make


def main(name: str, slots: int, dtype: str, prompt: int, tokens: int, repeats: int) -> None:
    model = make(name, dtype).eval()
    ids = torch.randint(0, model.config.vocab_size, (slots, prompt))

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
