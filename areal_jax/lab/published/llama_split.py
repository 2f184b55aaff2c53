"""Cost models for `device_split` of Llama 3 8B, 70B and 405B on H100 GPUs, and the table of speedups.

Each assumption is a field with its reason; none was fitted to a published speedup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_jax.lab.published.device_split import (
    CostModel,
    DeviceCosts,
    RoleCost,
    StepPlan,
    asynchronous,
    synchronous,
)

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
    published_s: tuple[float, float]
    """LlamaRL's seconds of a synchronous and an asynchronous step: shown beside the model's, never used."""
    kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128_000


SIZES = (
    ModelSize(name="8B", parameters=8e9, layers=32, width=4096, gpus=256, published_s=(22.45, 8.90)),
    ModelSize(name="70B", parameters=70e9, layers=80, width=8192, gpus=256, published_s=(82.32, 20.67)),
    ModelSize(name="405B", parameters=405e9, layers=126, width=16_384, gpus=1024, published_s=(635.8, 59.5)),
)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the cost models assume about devices, software and samples, besides the model's sizes."""

    memory_bytes: float = 0.92 * 79.1 * 2**30
    """Memory of an H100 of 80 GB, of which jax allocates 0.92 in a run (docs/methods.md)."""
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
    """Latency of a tree all-reduce in NCCL's own model: up and down the tree, through a node's devices and
    then through the nodes (baseLat, and hwLat of NVLink and network, for LL in src/graph/tuning.cc)."""
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
    """Share of the GPUs that divide the optimiser state (ZeRO-1), in either design. A quarter leaves the
    other three quarters to generation, if that is best. 0: the devices of one replica, as in the theory."""
    split_weights: float = BF16
    """Bytes per parameter of a generator on devices of its own. 1: fp8, which LlamaRL allows there."""
    is_static: bool = False
    """Whether the synchronous generator decodes static batches, as DeepSpeed-Chat does: each batch until its
    longest completion has ended, in KV reserved for that length. Otherwise slots are refilled and KV has
    pages, as in the asynchronous generator. Samples that have ended cost no time in either case.
    """
    block_bytes: float = 34.0
    """Bytes per token and width of the activations in the block that is being differentiated, without
    attention scores (Korthikanti et al., https://arxiv.org/abs/2205.05198). Other blocks keep inputs."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


THEORY = Assumptions()
LONGEST = replace(THEORY, longest=4.0)
STATIC = replace(LONGEST, is_static=True)
FP8 = replace(STATIC, split_weights=1)

ASSUMPTIONS: Mapping[str, Assumptions] = {
    "completions equally long": THEORY,
    "the longest is 4 times the mean": LONGEST,
    "and the synchronous batches are static": STATIC,
    "and the split generator has fp8 weights": FP8,
    "all of this, the longest 2 times the mean": replace(FP8, longest=2.0),
    "all of this, the longest 8 times the mean": replace(FP8, longest=8.0),
    "all of this, mean 2,048 tokens, longest 8,192": replace(FP8, completion_tokens=2048),
}
"""Description -> assumptions, from the theory's to those that favour the split most.

A mean of 1,024 tokens and a limit of 4,096, which the longest of 2,048 samples reach, give the ratio 4.
"""


def split_table(
    sizes: Sequence[ModelSize] = SIZES, assumptions: Mapping[str, Assumptions] = ASSUMPTIONS
) -> list[dict[str, Any]]:
    """Return a row for each set of assumptions and size, as plain values; names end with units.

    Raises ArealError if a model fits at no degree.
    """
    return [
        _row(size, name, synchronous(model), asynchronous(model))
        for name, assumed in assumptions.items()
        for size in sizes
        for model in [cost_model(size, assumed)]
    ]


def _row(size: ModelSize, name: str, shared: StepPlan, split: StepPlan) -> dict[str, Any]:
    published_sync_s, published_async_s = size.published_s
    return {
        "model": size.name,
        "gpus": size.gpus,
        "assumptions": name,
        "sync_s": shared.step_s,
        "sync_degree": shared.trainer.degree,
        "sync_trainer_s": shared.trainer.step_s,
        "sync_train_samples": shared.trainer.samples,
        "sync_generate_samples": shared.generator.samples,
        "sync_memory_bound": shared.is_memory_bound,
        "async_s": split.step_s,
        "theta": split.theta,
        "trainer_degree": split.trainer.degree,
        "generator_degree": split.generator.degree,
        "train_samples": split.trainer.samples,
        "generate_samples": split.generator.samples,
        "speedup": shared.step_s / split.step_s,
        "published_sync_s": published_sync_s,
        "published_async_s": published_async_s,
        "published_speedup": published_sync_s / published_async_s,
    }


def cost_model(size: ModelSize, assumed: Assumptions | None = None) -> CostModel:
    """Return the cost model of RL with this model on H100 GPUs."""
    assumed = assumed or Assumptions()
    devices = DeviceCosts(
        count=size.gpus,
        memory_bytes=assumed.memory_bytes,
        link=assumed.link,
        network=assumed.network_card * assumed.network_cards,
        start_s=assumed.start_s,
        device_s=assumed.device_s,
        doubling_s=assumed.doubling_s,
    )
    shared = _generator(size, assumed, BF16)
    return CostModel(
        devices=devices,
        trainer=_trainer(size, assumed),
        generator=_generator(size, assumed, assumed.split_weights),
        shared_generator=_static(shared, assumed) if assumed.is_static else shared,
        samples=assumed.samples,
        longest=1.0 if assumed.is_static else assumed.longest,  # a static batch has its own wait
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


def _generator(size: ModelSize, assumed: Assumptions, weight_bytes: float) -> RoleCost:
    steps, weights = assumed.completion_tokens, weight_bytes * size.parameters
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


def _static(generator: RoleCost, assumed: Assumptions) -> RoleCost:
    """Return the generator's cost with static batches."""
    reserved_tokens = assumed.prompt_tokens + assumed.longest * assumed.completion_tokens
    return replace(
        generator,
        fixed_s=assumed.longest * generator.fixed_s,
        messages=assumed.longest * generator.messages,
        sample_bytes=generator.sample_bytes * reserved_tokens / assumed.tokens,
    )
