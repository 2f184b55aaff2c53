"""Make the fixtures of tests/models/golden with transformers and torch; run by hand, never by a test.

    python -m tests.models.make_golden             # all
    python -m tests.models.make_golden olmoe ...   # some of MODELS

A fixture is a tiny random model as a Hugging Face folder, its config in the forms of transformers 4 and 5,
and what transformers computes of it in float32: logits, hidden states after the last norm, greedy tokens, the
mean cross entropy of the segments' next tokens, and the norm of its gradient with respect to each tensor of
the folder, sorted by name. The script also loads what `export_folder` writes of each and demands the same
logits.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_jax.models.io.gguf import cached_folder, smollm2_gguf
from areal_jax.models.io.huggingface import export_folder, open_folder
from tests.models.golden import abstract_of

GOLDEN = Path(__file__).parent / "golden"
SIZES: dict[str, Any] = dict(
    vocab_size=96, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=64,
)  # fmt: skip
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
NARROW = {**SIZES, "intermediate_size": 12}
"""Sizes for families in which `intermediate_size` is the width of an expert."""
MODELS: dict[str, tuple[Any, torch.dtype, int]] = {
    "llama-tied": (
        LlamaConfig(
            **SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=dict(rope_theta=500.0)
        ),
        torch.float32,
        10**9,
    ),
    "llama3-scaled": (
        LlamaConfig(
            **SIZES, head_dim=16, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_parameters=LLAMA3
        ),
        torch.float32,
        10**9,
    ),
    "qwen2-sharded": (
        Qwen2Config(
            **SIZES, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=dict(rope_theta=500.0)
        ),
        torch.bfloat16,
        30_000,
    ),
    "qwen3-untied": (
        Qwen3Config(
            **{**SIZES, "num_key_value_heads": 1}, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-6,
            rope_parameters=dict(rope_theta=500.0),
        ),
        torch.float16,
        10**9,
    ),
    "qwen3-moe": (
        Qwen3MoeConfig(
            **{**SIZES, "head_dim": 12}, tie_word_embeddings=False, rms_norm_eps=1e-6, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=6, norm_topk_prob=True,
            rope_parameters=dict(rope_theta=500.0),
        ),
        torch.bfloat16,
        30_000,
    ),
    "qwen3-moe-single": (  # one expert a token, its weight below 1, and no head_dim in the file
        Qwen3MoeConfig(
            **SIZES, tie_word_embeddings=True, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=1,
            moe_intermediate_size=16, norm_topk_prob=False, rope_parameters=dict(rope_theta=500.0),
        ),
        torch.float16,
        10**9,
    ),
    "qwen2-moe": (
        Qwen2MoeConfig(
            **SIZES, tie_word_embeddings=False, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, shared_expert_intermediate_size=24,
            rope_parameters=dict(rope_theta=500.0),
        ),
        torch.bfloat16,
        10**9,
    ),
    "olmoe": (
        OlmoeConfig(
            **NARROW, tie_word_embeddings=False, rms_norm_eps=1e-5, num_experts=4, num_experts_per_tok=2,
            clip_qkv=0.8, rope_parameters=dict(rope_theta=500.0),
        ),
        torch.float16,
        10**9,
    ),
    "mixtral": (  # all experts for each token
        MixtralConfig(
            **NARROW, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-5, num_local_experts=4,
            num_experts_per_tok=4, rope_parameters=dict(rope_theta=500.0),
        ),
        torch.bfloat16,
        10**9,
    ),
}  # fmt: skip
SEGMENTS = (9, 5, 14)
PROMPT, NEW = 7, 16
CLEAR = 0.02
"""Least lead of a greedy token over the next one, in logits: far beyond float32's rounding."""
NO_TIE = 1e-3
"""Least lead of a token's k-th expert over the next one, in probability."""


def randomise(model: Any, generator: torch.Generator) -> None:
    """No scale is 1, no bias 0; embeddings so small that the first norm's epsilon counts."""
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight"):
            scale = 5.0 if name == "model.norm.weight" else 1.0
            value.data = scale * (1 + 0.3 * noise)
        elif name.endswith("embed_tokens.weight"):
            value.data = 0.03 * noise
        elif name.endswith("bias"):
            value.data = 0.5 * noise
        elif "q_proj" in name or "k_proj" in name:
            value.data = 0.35 * noise
        else:
            value.data = 0.15 * noise


def load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    return model(torch.tensor(tokens[None])).logits[0].numpy()


@torch.no_grad()
def greedy(model: Any, prompt: np.ndarray, new: int) -> tuple[np.ndarray, float]:
    """The continuation, and its least lead."""
    tokens, lead = prompt, np.inf
    for _ in range(new):
        last = logits_of(model, tokens)[-1]
        best = np.sort(last)[-2:]
        lead = min(lead, best[1] - best[0])
        tokens = np.append(tokens, last.argmax())
    return tokens[len(prompt) :], float(lead)


class Leads:
    """Records the least lead of a k-th expert over the next one in all calls of a model's routers."""

    def __init__(self, model: Any) -> None:
        self.least = np.inf
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self.record)

    def record(self, router: Any, inputs: Any, outputs: Any) -> None:
        ordered = outputs[0].detach().softmax(-1).sort(-1, descending=True).values
        if router.top_k < router.num_experts:
            leads = ordered[:, router.top_k - 1] - ordered[:, router.top_k]
            self.least = min(self.least, leads.min().item())


def loss_and_gradients(model: Any, segments: list[np.ndarray]) -> tuple[float, list[float]]:
    """The mean cross entropy of all next tokens, and the norm of its gradient for each tensor by name."""
    losses = []
    for tokens in map(torch.tensor, segments):
        logits = model(tokens[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    stored = revert_weight_conversion(model, gradients)
    return loss.item(), [stored[name].norm().item() for name in sorted(stored)]


def form_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 writes it."""
    rope = dict(config.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    scaling = rope if rope.get("rope_type", "default") != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config and config["model_type"] != "mixtral":
        config["num_experts"] = config.pop("num_local_experts")
    return {**config, "rope_theta": theta, "rope_scaling": scaling, "transformers_version": "4.51.3"}


def make(name: str, seed: int) -> bool:
    """Write one fixture; False if a greedy token of it or an expert of a token leads too little."""
    config, dtype, shard_bytes = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, generator)
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.v4.json").write_text(json.dumps(form_4(written), indent=2) + "\n")
    model = load(folder)
    leads = Leads(model)
    rng = np.random.default_rng(seed)
    segments = [rng.integers(3, SIZES["vocab_size"], length) for length in SEGMENTS]
    prompt = rng.integers(3, SIZES["vocab_size"], PROMPT)
    tokens, lead = greedy(model, prompt, NEW)
    with torch.no_grad():
        hidden = [model.model(torch.tensor(one[None])).last_hidden_state[0].numpy() for one in segments]
    loss, gradients = loss_and_gradients(model, segments)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=np.concatenate(segments).astype(np.int32),
        logits=np.concatenate([logits_of(model, one) for one in segments]),
        hidden=np.concatenate(hidden),
        prompt=prompt.astype(np.int32),
        greedy=tokens.astype(np.int32),
        loss=np.float32(loss),
        gradients=np.array(gradients, np.float32),
    )
    check_export(folder, model, segments[0])
    return lead > CLEAR and leads.least > NO_TIE and len(set(tokens.tolist())) > NEW // 2


def check_export(folder: Path, model: Any, tokens: np.ndarray) -> None:
    """transformers computes the same of what we write; its config is kept as what transformers accepted."""
    pretrained = open_folder(folder)
    params = pretrained.load(abstract_of(pretrained.config))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        export_folder(out, pretrained.config, params, "float32", folder)
        np.testing.assert_array_equal(logits_of(load(out), tokens), logits_of(model, tokens))
        shutil.copy(out / "config.json", folder / "exported.json")


def make_frequencies() -> None:
    """Rotary frequencies of published sizes: Llama 3.1 8B, Llama 3.2 1B, and linear scaling."""
    long = dict(original_max_position_embeddings=8192)
    cases = {
        "llama-3.1-8b": (128, dict(LLAMA3, rope_theta=5e5, factor=8.0, **long)),
        "llama-3.2-1b": (64, dict(LLAMA3, rope_theta=5e5, factor=32.0, **long)),
        "llama-3-narrow": (8, dict(LLAMA3, rope_theta=5e5, factor=32.0, **long)),
        "linear": (64, dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    }  # fmt: skip
    out = {}
    for name, (head_dim, rope) in cases.items():
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=rope)
        value, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        out[name] = {"head_dim": head_dim, "rope_parameters": rope, "frequencies": value.double().tolist()}
    (GOLDEN / "frequencies.json").write_text(json.dumps(out, indent=1) + "\n")


def make_smollm2() -> None:
    """Every 384th logit of a chat prompt, and the greedy answer, of the converted GGUF file."""
    from transformers import AutoTokenizer

    source = cached_folder(smollm2_gguf())
    model, tokenizer = load(source), AutoTokenizer.from_pretrained(source)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens, lead = greedy(model, np.array(prompt), 9)
    assert lead > CLEAR and tokenizer.decode(tokens).startswith("The capital of France is Paris")
    (GOLDEN / "smollm2").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        GOLDEN / "smollm2" / "expected.npz",
        prompt=np.array(prompt, np.int32),
        logits=logits_of(model, np.array(prompt))[:, ::384],
        greedy=tokens.astype(np.int32),
    )


def main(names: list[str]) -> None:
    for name in names or MODELS:
        next(seed for seed in range(1000) if make(name, seed))
    if not names:
        make_frequencies()
        make_smollm2()


if __name__ == "__main__":
    main(sys.argv[1:])
