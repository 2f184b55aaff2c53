"""The config tree: one frozen pydantic model for each section, with the same keys as the YAML file.

A combination of keys that cannot work is refused when the config is made, before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from areal_jax.config.presets import preset_settings
from areal_jax.config.refusals import (
    FIXED_STALENESS,
    ON_UPDATE,
    control_refusals,
    exact_refusals,
    executor_refusals,
    quantized_refusals,
    refusals,
)
from areal_jax.config.sections import (
    ADAPTERS,
    AlgorithmConfig,
    ControlConfig,
    EpisodeConfig,
    GenerationConfig,
    ModelSettings,
    ObserveConfig,
    RunConfig,
    RuntimeConfig,
    Section,
    TrainerConfig,
    WeightsConfig,
)


class LaunchConfig(Section):
    """On which machines the processes of a launched run are placed.

    No key of this section changes what is trained, so a resumed run may change them all. What only a
    scheduler needs, such as a partition or a time limit, is no key: it is given to `areal-jax launch` beside
    the config.
    """

    accelerator: Literal["auto", "gpu", "tpu", "cpu"] = "auto"
    """Device type of trainer and hosts. auto: GPUs, or the CPUs for a run on one machine without GPUs."""
    machine_devices: int = Field(default=8, ge=1)
    """Number of accelerators in one machine. A run that needs more gets separate machines for trainer and
    hosts.
    """
    port: int = Field(default=7600, ge=1024, le=65534)
    """slurm, gcloud, gke: port of Redis on the first machine; the trainer's processes use port + 1. Not read
    by local, which chooses free ports.
    """
    restarts: int = Field(default=3, ge=0)
    """Number of times that a failed process is restarted; ten minutes without a failure reset the count."""


class Config(Section):
    run: RunConfig = RunConfig()
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Tasks to train on: name or module:Name -> settings. With several tasks, `weight` sets a task's fraction
    of the prompts.
    """
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    generation: GenerationConfig = GenerationConfig()
    episode: EpisodeConfig = EpisodeConfig()
    control: ControlConfig = ControlConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def max_staleness(self) -> int | None:
        """Bound on staleness (η) in versions: control.max_staleness or its default; None: unbounded."""
        if self.control.max_staleness is None:
            return FIXED_STALENESS.get(self.control.strategy, 2)
        return None if self.control.max_staleness == "unbounded" else self.control.max_staleness

    @property
    def promises_bits(self) -> bool:
        """Whether the run promises equal bits: of log-probs, or of the parameters if it is repeated."""
        return self.trainer.numerics == "exact" or self.max_staleness == 0

    @property
    def on_update(self) -> str:
        return self.generation.on_update or ON_UPDATE[self.control.strategy][0]

    @property
    def is_one_version(self) -> bool:
        """Whether all tokens of a sample have one version, although a newer one may commit meanwhile."""
        return self.on_update in ("pinned", "drain") and self.control.strategy != "sync"

    @property
    def places_versions(self) -> bool:
        """Whether each host decodes for one version, as far as possible (`control.orchestrator`)."""
        is_one_version = self.control.strategy == self.on_update == "pinned"
        return is_one_version and self.algorithm.samples == "policy"

    @property
    def parameter_sets(self) -> int:
        """Maximum number of versions of the parameters on a host: 2, the current one and the next one.

        With on_update=pinned: max_staleness + 1, at least 2, because live samples keep their versions.
        """
        return max(2, 1 + (self.max_staleness or 0)) if self.on_update == "pinned" else 2

    @property
    def weights_backend(self) -> str:
        if self.weights.backend != "auto":
            return self.weights.backend
        return "orbax" if self.runtime.redis else "memory"

    @property
    def wire_dtype(self) -> str:
        """dtype of published parameters."""
        return self.model.dtype if self.weights.wire_dtype == "auto" else self.weights.wire_dtype

    @property
    def trainer_devices(self) -> int:
        """Devices of the trainer's processes: its mesh, and those that reference and teacher have alone."""
        return self.trainer.mesh.devices + self.runtime.reference.devices + self.runtime.teacher.devices

    @property
    def row_length(self) -> int:
        return self.trainer.length or self.generation.length

    @property
    def tree_block(self) -> int:
        """Tokens that each of the trainer's devices computes at once over prefix trees."""
        t = self.trainer
        return t.tree_block or t.rows * self.row_length // t.mesh.row_parts

    @property
    def logp_chunk(self) -> int:
        """Tokens, over all devices, for which the trainer has logits in memory at once."""
        t = self.trainer
        large = 2048 * t.mesh.row_parts
        return t.logp_chunk or (large if self.activations == "bfloat16" else 1024)

    @property
    def activations(self) -> str:
        """dtype of the activations that the backward pass reads, and of their gradients."""
        if self.model.activations != "auto":
            return self.model.activations
        return self.model.dtype if self.trainer.numerics == "bounded" else "float32"

    @property
    def trainable(self) -> str | None:
        """Regular expression that the path of a trained parameter must match; None: train all parameters."""
        return self.trainer.trainable or (ADAPTERS if self.model.lora.rank else None)

    def with_values(self, section: str, **values: Any) -> Config:
        """Returns the config with other values of keys of one section, which are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

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
    """Yields a message with a remedy for each combination of values that are valid alone but cannot work."""
    g, a = c.generation, c.algorithm
    yield from _impossible_control(c)
    if c.weights.backend == "memory" and c.runtime.redis:
        yield (
            f"weights.backend=memory with runtime.redis={c.runtime.redis}: no other "
            "process can read one process's memory; set weights.backend=auto, or orbax"
        )
    if c.weights.dir is not None:
        if c.weights.backend in ("memory", "transfer"):
            yield (
                f"weights.dir={c.weights.dir} with weights.backend={c.weights.backend}: only orbax writes "
                "versions to files; set weights.backend=orbax, or do not set weights.dir"
            )
        if not c.weights.dir.startswith("/"):
            yield (
                f"weights.dir={c.weights.dir} is a relative path, which each process would resolve against "
                "its own working directory; give an absolute path"
            )
    yield from _impossible_layout(c)
    yield from refusals(a, g.max_tokens)
    yield from quantized_refusals(g, c.model, c.trainer.numerics, a)
    yield from _impossible_trainer(c)
    if g.max_tokens >= g.length:
        yield (
            f"generation.max_tokens={g.max_tokens} leaves no room for a prompt in "
            f"generation.length={g.length}; raise generation.length or lower generation.max_tokens"
        )
    if g.rollout_slots < 1:
        yield (
            f"generation.serve_slots={g.serve_slots} leaves no slot for rollouts, because "
            f"generation.slots={g.slots}; raise generation.slots or lower generation.serve_slots"
        )
    if g.serve_http_port is not None and g.serve_port is None:
        yield (
            f"generation.serve_http_port={g.serve_http_port} needs generation.serve_port, the port of gRPC; "
            "set both"
        )
    if g.serve_port is not None and a.samples == "reference":
        yield "hosts answer no requests with algorithm.samples=reference; leave generation.serve_port out"
    if g.kv_tokens is not None and g.kv_tokens < g.length * (1 + g.reserved_slots):
        yield (
            f"generation.kv_tokens={g.kv_tokens} is too small for one rollout of "
            f"generation.length={g.length}{' and serve_slots' * bool(g.reserved_slots)}; set "
            f"generation.kv_tokens to at least {g.length * (1 + g.reserved_slots)}"
        )
    if g.page_tokens is not None and g.length % g.page_tokens:
        yield f"generation.page_tokens={g.page_tokens} must divide generation.length={g.length}; change one"
    if g.sampling.is_truncated and not 1 <= g.top_k <= g.support_size:
        yield (
            "top_k, top_p and min_p need 1 <= generation.top_k <= generation.support_size: the trainer reads "
            f"all kept ids; got top_k={g.top_k}, support_size={g.support_size}, top_p={g.top_p}, "
            f"min_p={g.min_p}. Set generation.top_k=256 generation.support_size=256, or top_p=1 min_p=0"
        )


def _impossible_trainer(c: Config) -> Iterator[str]:
    g, a, t = c.generation, c.algorithm, c.trainer
    if c.model.activations == "bfloat16" and (c.model.dtype == "float32" or t.numerics == "exact"):
        yield (
            f"model.activations=bfloat16 with model.dtype={c.model.dtype}, trainer.numerics={t.numerics}: it "
            "needs model.dtype=bfloat16 and trainer.numerics=bounded; set model.activations=float32"
        )
    if a.routes == "replay" and (t.numerics == "exact" or t.compute != "packed"):
        yield (
            f"algorithm.routes=replay with trainer.numerics={t.numerics}, trainer.compute={t.compute}: with "
            "exact numerics trainer and hosts choose the same experts anyway, and a token of a prefix tree "
            "has the routes of several samples; set algorithm.routes=own, or trainer.numerics=bounded and "
            "trainer.compute=packed"
        )
    if t.numerics == "exact":
        yield from exact_refusals(t.mesh.shape, c.runtime.host_tensor, c.on_update)
        if t.compute != "packed":
            yield (
                f"trainer.compute={t.compute} with trainer.numerics=exact: hosts compute in other blocks of "
                "tokens, so log-probs would differ in their last bits; set trainer.compute=packed, or "
                "trainer.numerics=bounded"
            )
    if t.batch_size % a.minibatches:
        yield (
            f"algorithm.minibatches={a.minibatches} does not divide trainer.batch_size={t.batch_size} "
            "groups; choose a divisor of it"
        )
    yield from executor_refusals(c.runtime, a, t)
    if c.row_length < g.length:
        yield (
            f"trainer.length={t.length} is shorter than generation.length={g.length}, so the longest "
            f"trajectory would not fit into a packed row; raise trainer.length to at least {g.length}"
        )


def _impossible_layout(c: Config) -> Iterator[str]:
    layout = c.generation.weight_layout
    if c.trainer.numerics == "exact" and layout not in ("auto", "stacked"):
        yield (
            f"generation.weight_layout={layout} with trainer.numerics=exact: hosts must run the "
            "trainer's matrix products, so weights must lie as in the trainer; set "
            "generation.weight_layout=auto"
        )
    if layout == "feature_major" and c.runtime.host_tensor > 1:
        yield (
            f"generation.weight_layout=feature_major with runtime.host_tensor={c.runtime.host_tensor}: a "
            "feature-major matrix cannot be split over devices; set generation.weight_layout=split, or auto"
        )


def _impossible_control(c: Config) -> Iterator[str]:
    eta, control, slots = c.max_staleness, c.control, c.generation.rollout_slots
    named = f"control.max_staleness={'unbounded' if eta is None else eta}"
    yield from control_refusals(control, eta, c.on_update)
    if eta is None and control.max_concurrent is None:
        yield (
            f"{named} needs a bound on the groups in flight; set control.max_concurrent="
            f"{max(1, 2 * c.runtime.hosts * slots // c.algorithm.group_size)}, or another number"
        )
    if control.max_token_age is not None and (eta is None or control.max_token_age < eta):
        yield (
            f"control.max_token_age={control.max_token_age} is below {named}: groups as old as "
            "max_staleness allows would be discarded and generated again; raise control.max_token_age"
        )
    if control.over_age != "restart" and control.max_token_age is None:
        yield (
            f"control.over_age={control.over_age} needs a bound on the age of tokens; set "
            f"control.max_token_age={1 if eta is None else eta + 1}, or another number, or leave "
            "control.over_age out"
        )
