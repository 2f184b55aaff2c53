"""The config tree: one frozen pydantic model a section, mirrored one to one by YAML.

`load_config("a.yaml", "b.yaml", "control.max_staleness=2")` composes left to right. Unknown keys fail with the nearest
spelling, combinations that cannot work fail here, before anything starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from areal_jax.presets import preset_settings
from areal_jax.types import ArealError, Sampling


class ConfigError(ArealError):
    """A config that cannot run; the message names the key, the value and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = "run"
    """Name of the run; its folder is runs/<name> unless run.dir says otherwise."""
    dir: str | None = None
    """The run's folder. It must not exist yet."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Prompts, initial weights and every sampled token are functions of it."""
    steps: int = Field(200, ge=1)
    """Batches to train; every one makes a version."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) if self.dir else Path("runs") / self.name


class ModelSettings(Section):
    source: str = "random"
    """Where parameters come from: random (seeded, with the sizes below)."""
    shape: str = "tiny"
    """A named set of sizes (areal_jax.models.shapes): tiny, 5m, smollm2-135m, qwen2.5-1.5b."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Single sizes of the shape to change, such as {layers: 4}."""
    tokenizer: Literal["task", "byte"] = "task"
    """task: the task's own tokenizer where it has one, bytes otherwise."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrix products read; accumulation, norms and log-probs are float32 always."""


class AlgorithmConfig(Section):
    preset: str = "grpo"
    """Defaults for this section, by name (`areal-jax algorithms`); every key given beside it wins."""
    group_size: int = Field(8, ge=1)
    """Samples of one prompt (G)."""
    minibatches: int = Field(1, ge=1)
    """Optimiser steps a batch; they split its groups evenly."""
    loss: str = "ppo_clip"
    """A loss of areal_jax.algorithms, or module:name of your own."""
    loss_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the loss."""
    advantage: str = "group_normalized"
    """An advantage estimator of areal_jax.algorithms, or module:name of your own."""
    advantage_settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword-only arguments of the estimator."""
    reduction: Literal["token_mean", "token_mean_batch", "sequence_mean", "sequence_sum", "constant"] = "sequence_mean"
    """How token losses become one number; weights come from the minibatch's unrejected mask."""
    reduction_constant: float | None = Field(None, gt=0)
    """C of reduction=constant; generation.max_tokens unless given."""
    proximal: Literal["recompute", "behavior"] = "recompute"
    """Centre of the trust region: log-probs recomputed when the batch arrives, or those recorded at sampling."""
    off_policy: Literal["truncate", "mask", "none"] = "truncate"
    """What exp(proximal - behaviour) above off_policy_cap becomes: the cap, or 0; none: no weight at all."""
    off_policy_cap: float = Field(5.0, gt=1)
    """Upper bound of the off-policy weight."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term to the reference policy (version 0)."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL loss term; importance-weighted by the behaviour ratio."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    truncation: Literal["keep", "mask"] = "keep"
    """mask: a sample stopped by length trains no token; its reward still enters its group's statistics."""
    group_filter: Literal["none", "signal"] = "none"
    """signal: drop groups whose rewards are all equal; the drop is refunded."""


class GenerationConfig(Section):
    slots: int = Field(8, ge=1)
    """Samples decoded at once by one host (N); static."""
    length: int = Field(64, ge=2)
    """Longest prompt + completion, in tokens; static."""
    max_tokens: int = Field(32, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training samples."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest ids; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest ids up to this mass; needs top_k, so that the support is an array."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Keep ids at least this likely relative to the likeliest; needs top_k."""
    support_size: int = Field(0, ge=0, le=4096)
    """K: room for the ids kept at each token, carried to the trainer; 0 unless sampling is truncated."""
    decode_steps: int = Field(4, ge=1)
    """Tokens decoded a jitted call; weights change between calls."""
    page_tokens: int | None = Field(None, ge=1)
    """KV tokens a page holds; generation.length (one page a slot) unless given."""
    prefill_chunk: int = Field(32, ge=1)
    """Prompt tokens a prefill call takes, and a recompute pass takes per slot."""
    on_update: Literal["recompute", "drain"] | None = None
    """What a host does with live slots when a newer version commits: rebuild their KV under it, or let them end
    first. By strategy unless given: interruptible recomputes, sync drains."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.max_tokens)


class ControlConfig(Section):
    strategy: Literal["sync", "interruptible"] = "interruptible"
    """Who is admitted and under which version: sync (staleness 0) or AReaL's interruptible generation."""
    max_staleness: int | None = Field(None, ge=0)
    """η: a group may start if (admitted - dropped - 1) // batch_size <= version + η. 2 unless given; 0 for sync."""
    max_token_age: int | None = Field(None, ge=0)
    """Hard bound on a trained token's age in versions; a group beyond it starts again."""
    max_concurrent: int | None = Field(None, ge=1)
    """Groups in flight at most; bounded by the hosts' slots and the staleness gate unless given."""


class MeshConfig(Section):
    data: int = Field(1, ge=1)
    """Replicas of the parameters."""
    fsdp: int = Field(1, ge=1)
    """Shards of the parameters and optimiser state."""
    tensor: int = Field(1, ge=1)
    """Shards of heads and MLP width."""
    context: Literal[1] = 1
    """Reserved: shards of the sequence."""
    expert: Literal[1] = 1
    """Reserved: shards of the experts."""

    @property
    def shape(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in type(self).model_fields}

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor


class TrainerConfig(Section):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimiser steps of linear warm-up."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; cosine falls to a tenth at the run's end."""
    adam_b1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_b2: float = Field(0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Global norm above which the gradient is scaled down."""
    batch_size: int = Field(16, ge=1)
    """Groups a batch (B): one batch, one version."""
    rows: int = Field(8, ge=1)
    """Rows of a micro-batch; packing makes as many micro-batches as needed."""
    length: int | None = Field(None, ge=2)
    """Tokens of a row (T); generation.length unless given."""
    logp_chunk: int = Field(1024, ge=1)
    """Tokens whose logits exist at once in the LM head."""
    remat: bool = True
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    supervised_steps: int = Field(0, ge=0)
    """Supervised updates on the task's reference answers before version 0."""
    supervised_batch: int = Field(128, ge=1)
    """Reference answers a supervised update."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between checkpoints; the last step is always one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints kept; trained trajectories are kept from the oldest of them on."""
    numerics: Literal["bounded"] = "bounded"
    """How closely sampled and recomputed log-probs agree: to float rounding."""
    mesh: MeshConfig = MeshConfig()
    """Axes of the trainer's mesh."""


class WeightsConfig(Section):
    backend: Literal["memory"] = "memory"
    """How parameters reach the hosts: memory (same process)."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """What is published, and so what hosts decode with."""


class RuntimeConfig(Section):
    placement: Literal["auto", "split", "shared"] = "auto"
    """split: trainer and hosts on disjoint devices; shared: they take turns on one. auto: split where devices suffice,
    and on CPU, where virtual devices are made."""
    hosts: int = Field(1, ge=1)
    """Generation hosts."""
    host_tensor: int = Field(1, ge=1)
    """Devices one host spreads its heads over."""
    decode_calls_per_micro_batch: int = Field(2, ge=0)
    """Shared placement: decode calls between two micro-batches of an update."""
    reward_workers: int = Field(1, ge=1)
    """Processes that score."""
    reward_timeout_s: float = Field(30.0, gt=0)
    """Deadline for scoring a group; the worker is killed at it and the group counts as timed out."""
    deadline_s: float = Field(600.0, gt=0)
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
    keep_groups: int = Field(4096, ge=0)
    """Trained groups whose trajectories stay in the journal for inspection."""


class Config(Section):
    run: RunConfig = RunConfig()
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """name or module:Name -> its settings, and `weight` where several tasks mix."""
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    generation: GenerationConfig = GenerationConfig()
    control: ControlConfig = ControlConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def max_staleness(self) -> int:
        if self.control.max_staleness is not None:
            return self.control.max_staleness
        return 0 if self.control.strategy == "sync" else 2

    @property
    def on_update(self) -> str:
        return self.generation.on_update or ("drain" if self.control.strategy == "sync" else "recompute")

    @property
    def row_length(self) -> int:
        return self.trainer.length or self.generation.length

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = data.get("algorithm") or {}
        if not isinstance(given, Mapping):
            return data
        return {**data, "algorithm": preset_settings(given)}

    @model_validator(mode="after")
    def _can_work(self) -> Config:
        for problem in _impossible(self):
            raise ValueError(problem)
        return self


def _impossible(c: Config) -> Iterator[str]:
    """Combinations that type-check and still cannot work, each with its remedy."""
    g, a, t = c.generation, c.algorithm, c.trainer
    if c.control.strategy == "sync" and c.max_staleness > 0:
        yield f"control.max_staleness={c.max_staleness} contradicts control.strategy=sync; use interruptible, or 0"
    if c.control.max_token_age is not None and c.control.max_token_age < c.max_staleness:
        yield (
            f"control.max_token_age={c.control.max_token_age} is below control.max_staleness={c.max_staleness}: groups "
            "admitted in time would start again and again; lower max_staleness or raise max_token_age"
        )
    if a.group_filter == "signal" and a.group_size == 1:
        yield "algorithm.group_filter=signal drops every group of algorithm.group_size=1; use none, or larger groups"
    if t.batch_size % a.minibatches:
        yield (
            f"algorithm.minibatches={a.minibatches} does not divide trainer.batch_size={t.batch_size} groups; choose a "
            "divisor"
        )
    if g.max_tokens >= g.length:
        yield (
            f"generation.max_tokens={g.max_tokens} leaves no room for a prompt in generation.length={g.length}; raise "
            "length or lower max_tokens"
        )
    if c.row_length < g.length:
        yield (
            f"trainer.length={t.length} is shorter than generation.length={g.length}: the longest trajectory would fit "
            "no row; raise trainer.length"
        )
    if g.page_tokens is not None and g.length % g.page_tokens:
        yield f"generation.page_tokens={g.page_tokens} does not divide generation.length={g.length}; choose a divisor"
    if g.sampling.is_truncated and not 1 <= g.top_k <= g.support_size:
        yield (
            f"truncated sampling for training needs 1 <= generation.top_k <= generation.support_size, so that the "
            f"support is an array; got top_k={g.top_k}, support_size={g.support_size} with top_p={g.top_p}, "
            f"min_p={g.min_p}. Set generation.top_k=256 generation.support_size=256, or top_p=1 min_p=0"
        )
    if a.reduction_constant is not None and a.reduction != "constant":
        yield f"algorithm.reduction_constant={a.reduction_constant} needs algorithm.reduction=constant"
    if a.preset == "dr_grpo" and a.advantage_settings.get("scale", "none") != "none":
        yield (
            f"algorithm.preset=dr_grpo with advantage_settings.scale={a.advantage_settings['scale']}: dividing by the "
            "standard deviation undoes Dr.GRPO; use preset grpo, or scale none"
        )


# --- composing ------------------------------------------------------------------------------------------------------


def load_config(*sources: str | Path | Mapping[str, Any]) -> Config:
    """Compose YAML files, mappings and `section.key=value` words, left to right. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for source in sources:
        if isinstance(source, Mapping):
            tree = _merge(tree, source)
        elif isinstance(source, str) and re.match(r"^[A-Za-z_][\w.:-]*=", source):
            tree = _merge(tree, _from_word(source))
        else:
            tree = _merge(tree, _from_file(Path(source)))
    return make_config(tree)


def make_config(tree: Mapping[str, Any]) -> Config:
    """The typed tree of a plain one. Raises ConfigError that names every bad key."""
    tree = _merge({}, tree)
    _refuse_unknown(tree, Config, "")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def to_yaml(config: Config) -> str:
    """The resolved tree; loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=110)


def leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """(key, type, default, doc) of every key of the tree."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind, field.get_default(call_default_factory=True), field.description or ""


def _from_file(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no config file {path}; give a YAML file, or an override in the form section.key=value")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a config is a mapping of sections")
    return tree


def _from_word(word: str) -> Mapping[str, Any]:
    key, _, text = word.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{word}: the value is not YAML: {error}") from None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-5 as text
    first, *rest = key.split(".")
    if first == "tasks" and len(rest) > 2:  # a module path in tasks.pkg.module:Name.key has dots of its own
        rest = [".".join(rest[:-1]), rest[-1]]
    for part in reversed([first, *rest]):
        value = {part: value}
    return value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if key == "tasks" and isinstance(value, (str, list)):
            merged[key] = _tasks(value)  # a name or a list replaces the tasks, a mapping adds to them
            continue
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _tasks(value: str | list[Any]) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else value
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"tasks: {name!r} is not a task's name; write tasks=[name, module:Name]")
    return {name: {} for name in names}


def _refuse_unknown(tree: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    names = section.model_fields
    for key, value in tree.items():
        if key not in names:
            everywhere = {leaf.split(".")[-1]: leaf for leaf, *_ in leaves()}
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = prefix + near[0] if near else None
            if hint is None and (far := difflib.get_close_matches(str(key), everywhere, n=1)):
                hint = everywhere[far[0]]
            known = f"known here: {', '.join(names)}"
            raise ConfigError(f"unknown key {prefix}{key}; {f'did you mean {hint}?' if hint else known}")
        kind = names[key].annotation
        if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
            _refuse_unknown(value, kind, f"{prefix}{key}.")


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error" and not key:
        return str(item["ctx"]["error"])
    value = f" (got {item['input']!r})" if not isinstance(item["input"], Mapping) else ""
    return f"{key}: {item['msg']}{value}; `areal-jax config {key}` explains it"
