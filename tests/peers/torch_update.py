"""transformers' LlamaForCausalLM with PyTorch's fused AdamW: the same update and log-prob pass, as JSON.

python tests/peers/torch_update.py {update,logprob} SHAPE REPEATS
"""

from __future__ import annotations

import sys

import torch
from shapes import LENGTH, SHAPES
from timing import report
from torch_model import make
from transformers import LlamaForCausalLM


def log_probs(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """log p of each token from the second on, (B, T - 1)."""
    logits = model(tokens, use_cache=False).logits[:, :-1]
    rows, length = tokens[:, 1:].shape
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(rows * length, -1), tokens[:, 1:].reshape(-1), reduction="none"
    )
    return -losses.view(rows, length)


def main(what: str, name: str, repeats: int) -> None:
    s = SHAPES[name]
    model = make(name, "float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0, fused=True)
    tokens = torch.randint(0, s["vocab"], (s["rows"], LENGTH))
    advantages = torch.where(torch.arange(s["rows"]) % 2 == 0, -1.0, 1.0)[:, None]
    with torch.no_grad():
        behavior = log_probs(model, tokens)

    def update() -> None:
        ratio = torch.exp(log_probs(model, tokens) - behavior)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def logprob() -> None:
        with torch.no_grad():
            log_probs(model, tokens)

    report({"update": update, "logprob": logprob}[what], repeats)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
