"""Tiny GGUF files, written by llama.cpp's own package from a golden fixture's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.models.golden import GOLDEN

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"Ġ0123456789!'", *LETTERS]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "' s"]
TOKENS += [merge.replace(" ", "") for merge in MERGES]
TOKENS += [f"filler{n}" for n in range(96 - len(TOKENS))]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
Q8_0, Q4_1, Q4_0, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "Q4_0", "F16"))

NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}


def llama_cpp_name(name: str) -> str:
    """Its name for a Hugging Face tensor."""
    part, kind = name.rsplit(".", 1)
    ours = next(new for old, new in NAMES.items() if f".{part}".endswith(f".{old}"))
    return f"blk.{name.split('.')[2]}.{ours}.{kind}" if ".layers." in name else f"{ours}.{kind}"


def interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in llama.cpp's order: 0, half, 1, half + 1, ..."""
    rows = value.reshape(heads, -1, value.shape[1])
    half = rows.shape[1] // 2
    out = np.empty_like(rows)
    out[:, 0::2], out[:, 1::2] = rows[:, :half], rows[:, half:]
    return out.reshape(value.shape)


def write(
    path: Path,
    *,
    fixture: str = "llama-tied",
    arch: str = "llama",
    fields: dict[str, Any] | None = None,
    quantized: dict[str, Any] | None = None,
    left_out: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """`fields` replace or add to what is written (None: left out); `quantized` maps tensors to types."""
    values: dict[str, Any] = {
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": 32,
        f"{arch}.block_count": 2,
        f"{arch}.feed_forward_length": 48,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT,
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        kind = gguf.GGUFValueType.get_type(value) if value is not None else None
        if kind is gguf.GGUFValueType.INT32:
            kind = gguf.GGUFValueType.UINT32
        if kind is not None:
            writer.add_key_value(key, value, kind)
    tensors: dict[str, np.ndarray] = {}
    for file in (GOLDEN / fixture).glob("*.safetensors"):
        tensors |= load_file(file)
    heads = {"attn_q.weight": 4, "attn_k.weight": 2}
    named = {llama_cpp_name(name): value for name, value in tensors.items()} | (extra or {})
    for name, value in named.items():
        value = value.astype(np.float32)
        if arch == "llama" and (count := heads.get(".".join(name.split(".")[2:]))):
            value = interleaved(value, count)
        kind = (quantized or {}).get(name, gguf.GGMLQuantizationType.F32)
        if name not in left_out:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
