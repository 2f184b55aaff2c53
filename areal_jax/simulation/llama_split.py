"""Cost models of Llama 3 of 8B, 70B and 405B on H100 GPUs for `device_split`, and the table of their speedups.

Each assumption is a field with its reason; none was fitted to a published speedup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_jax.simulation.device_split import CostModel, Devices, RoleCost, Step, asynchronous, synchronous

BF16, FLOAT32 = 2, 4
"""Bytes of a number."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a Llama 3 model (Llama Team, https://arxiv.org/abs/2407.21783, table 3) and its devices."""

    name: str
    parameters: float
    layers: int
    width: int
    gpus: int
    """Number of GPUs in LlamaRL's experiments."""
    published: float
    """LlamaRL's speedup of a step; only printed beside ours."""
    kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128_000


SIZES = (
    ModelSize(name="8B", parameters=8e9, layers=32, width=4096, gpus=256, published=2.52),
    ModelSize(name="70B", parameters=70e9, layers=80, width=8192, gpus=256, published=3.98),
    ModelSize(name="405B", parameters=405e9, layers=126, width=16_384, gpus=1024, published=10.7),
)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the cost models assume about devices, software and samples, besides the model's sizes."""

    memory_bytes: float = 0.92 * 79.1 * 2**30
    """Memory of an H100 of 80 GB, of which jax allocates 0.92 in a run (docs/gpu.md)."""
    bandwidth: float = 0.8 * 3.352e12
    """Bytes/s of device memory: NVIDIA's 3.352 TB/s, of which kernels that only read reach about 0.8."""
    flops: float = 0.5 * 989.4e12
    """FLOP/s of bfloat16 products: half of NVIDIA's peak. Llama 3's pretraining reached 0.38 to 0.43 of it,
    communication included, which is counted apart here."""
    link: float = 450e9
    """NVLink of Hopper, bytes/s in one direction."""
    network_card: float = 50e9
    """Bytes/s of the network card of each GPU: 400 Gbit/s (Llama 3 paper, section 3.3.1)."""
    network_cards: int = 8
    """Cards of a node that one all-reduce uses. 8: NCCL's rings leave a node through all of them."""
    start_s: float = 4.4e-6
    device_s: float = 2 * 0.52e-6
    doubling_s: float = 2 * 5.0e-6
    """Latency of a tree all-reduce in NCCL's own model (baseLat, and hwLat of NVLink and network, for protocol
    LL in src/graph/tuning.cc): up and down the tree, through a node's devices and then through the nodes."""
    samples: int = 2048
    """Samples of a batch: the order of large RL runs."""
    prompt_tokens: int = 256
    completion_tokens: int = 1024
    """Mean lengths of a worded mathematics problem and of a solution with its steps."""
    longest: float = 1.0
    """Longest completion over the mean. 1: the theory's, which does not consider lengths."""
    trainer_flops: float = 8.0
    """FLOPs per parameter and token: 2 forward, 2 forward again for the backward pass, 4 backward."""
    trainer_state: float = BF16 + FLOAT32
    """Bytes per parameter that a replica's devices divide: weights, and gradients that are added up."""
    optimizer_state: float = 3 * FLOAT32
    """Bytes per parameter of AdamW: float32 weights and two moments."""
    optimizer_parts: float = 1 / 4
    """Share of the GPUs that divide the optimiser state (ZeRO-1), in either design. A quarter leaves the other
    three quarters to generation, if that is best. 0: a replica's devices alone, as in the theory."""
    generator_state: float = BF16
    """Bytes per parameter of a generator that shares its devices."""
    split_generator_state: float = BF16
    """Bytes per parameter of a generator on devices of its own; 1: fp8, as LlamaRL allows there."""
    block_bytes: float = 34.0
    """Bytes per token and width of the activations within the block that is being differentiated (Korthikanti et
    al., https://arxiv.org/abs/2205.05198, without attention scores); of other blocks only inputs are kept."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def cost_model(size: ModelSize, assumed: Assumptions | None = None) -> CostModel:
    """Return the cost model of RL with this model on H100 GPUs."""
    assumed = assumed or Assumptions()
    devices = Devices(
        count=size.gpus,
        memory_bytes=assumed.memory_bytes,
        link=assumed.link,
        network=assumed.network_card * assumed.network_cards,
        start_s=assumed.start_s,
        device_s=assumed.device_s,
        doubling_s=assumed.doubling_s,
    )
    return CostModel(
        devices=devices,
        trainer=_trainer(size, assumed),
        generator=_generator(size, assumed),
        samples=assumed.samples,
        longest=assumed.longest,
    )


def _trainer(size: ModelSize, assumed: Assumptions) -> RoleCost:
    activations = BF16 * size.layers * size.width + assumed.block_bytes * size.width
    logits = (BF16 + FLOAT32) * size.vocab_size
    parts = assumed.optimizer_parts * size.gpus
    optimizer_bytes = assumed.optimizer_state * size.parameters
    # Weights are read in four passes; float32 gradients are read and written.
    traffic = 4 * BF16 + 2 * FLOAT32
    all_reduces = 6 * size.layers  # two in each of: forward, forward again, backward
    return RoleCost(
        fixed_s=traffic * size.parameters / assumed.bandwidth,
        sample_s=assumed.trainer_flops * size.parameters * assumed.tokens / assumed.flops,
        messages=all_reduces,
        sent_bytes=all_reduces * BF16 * size.width * assumed.tokens,
        state_bytes=assumed.trainer_state * size.parameters + (0 if parts else optimizer_bytes),
        device_bytes=optimizer_bytes / parts if parts else 0.0,
        sample_bytes=assumed.tokens * (activations + logits),
    )


def _generator(size: ModelSize, assumed: Assumptions) -> RoleCost:
    steps, weights = assumed.completion_tokens, assumed.generator_state * size.parameters
    kv_bytes = BF16 * 2 * size.layers * size.kv_heads * size.head_dim  # of a token
    context = assumed.prompt_tokens + steps / 2
    all_reduces = 2 * size.layers  # in each decode step
    return RoleCost(
        fixed_s=steps * weights / assumed.bandwidth,
        sample_s=2 * size.parameters * assumed.tokens / assumed.flops,
        sample_read_s=steps * context * kv_bytes / assumed.bandwidth,
        messages=steps * all_reduces,
        sent_bytes=all_reduces * BF16 * size.width * assumed.tokens,
        state_bytes=weights,
        sample_bytes=assumed.tokens * kv_bytes,
        # Beyond one KV head a device, devices hold copies of heads, as in vLLM and TensorRT-LLM.
        sample_split=size.kv_heads,
    )
