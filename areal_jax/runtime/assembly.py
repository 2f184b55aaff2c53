"""From a config to the parts of a run: tasks, model, learner, engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from areal_jax.config import Config, GenerationConfig
from areal_jax.generation.engine import Engine
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import param_shardings
from areal_jax.runtime.devices import Devices, place
from areal_jax.runtime.sources import Source, open_source, open_teacher
from areal_jax.tasks.held_out import HeldOut, held_out, without_splits
from areal_jax.tasks.reference import reference_trajectory
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.trainer.learner import Learner, Teacher
from areal_jax.trainer.state import TrainState, make_optimizer
from areal_jax.trainer.supervised import supervised_start
from areal_jax.types import ArealError, SampleId, Trajectory

CHECKED_PROMPTS = 256
"""Prompts whose length is checked before anything starts."""


@dataclass(frozen=True)
class Inputs:
    """What a run asks, and whom: no device, no parameter yet."""

    config: Config
    tasks: dict[str, WeightedTask]
    prompts: PromptStream
    source: Source
    held_out: HeldOut | None
    """Where observe.evaluate asks for it."""

    @property
    def model(self) -> Model:
        return self.source.model

    def reference(self, sample: SampleId) -> Trajectory:
        """The reference answer at that place, as a sample. Raises TaskError where the task has none."""
        prompt = self.prompts.prompt(sample.ordinal)
        return reference_trajectory(sample, prompt, self.tasks[prompt.task].task, self.model.tokenizer)

    def prompt_tokens(self, ordinal: int) -> tuple[int, ...]:
        """The exact prompt at that place. Raises ArealError for one that leaves no room for an answer."""
        prompt = self.prompts.prompt(ordinal)
        tokens = tuple(self.model.tokenizer.render(prompt))
        length = self.config.generation.length
        if not 1 <= len(tokens) < length:
            raise ArealError(
                f"the prompt at ordinal {ordinal} (task {prompt.task}) has {len(tokens)} tokens; prompt and "
                "completion "
                f"share generation.length={length}. Raise generation.length, or leave such prompts out of "
                "the task"
            )
        return tokens


@dataclass(frozen=True)
class Parts(Inputs):
    """And on which devices: all that one process needs."""

    devices: Devices
    learner: Learner
    teacher: Source | None = None

    def engine(self, host: int) -> Engine:
        """The engine of the host at that place."""
        return make_engine(self.config.generation, self.model, self.devices.hosts[host])

    def first_state(self) -> TrainState:
        """Version 0: seeded parameters after the supervised start; a function of the config alone."""
        return self.learner.init(first_params(self), self.config.run.seed, donate=True)


def open_inputs(config: Config, tasks: Sequence[Task] = ()) -> Inputs:
    """The config's tasks, or those that stand in for them, and its model; the first prompts are checked.

    Raises ArealError.
    """
    loaded = load_tasks(config.tasks, tasks)
    source, asked = open_source(config, loaded), None
    if config.observe.evaluate:
        asked = HeldOut(loaded, dict.fromkeys(loaded)) if tasks else held_out(without_splits(config.tasks))
    inputs = Inputs(config, loaded, PromptStream(loaded, config.run.seed), source, asked)
    for ordinal in range(CHECKED_PROMPTS):
        inputs.prompt_tokens(ordinal)
    return inputs


def assemble(config: Config, tasks: Sequence[Task] = (), learner: Learner | None = None) -> Parts:
    """Everything that can be checked before a run is checked here. Raises ArealError.

    `tasks` stand in for the config's. `learner`: that of a run with the same model, algorithm, trainer and
    lengths, whose compiled programs this one shares.
    """
    return assemble_on(place(config), open_inputs(config, tasks), learner)


def assemble_on(devices: Devices, inputs: Inputs, learner: Learner | None = None) -> Parts:
    """The same, on these devices."""
    config = inputs.config
    teacher = open_teacher(config, inputs.tasks, inputs.model) if config.algorithm.teacher else None
    learner = learner or make_learner(config, inputs.model, devices.trainer, teacher)
    own = (config, inputs.tasks, inputs.prompts, inputs.source, inputs.held_out)
    return Parts(*own, devices, learner, teacher)


def make_learner(config: Config, model: Model, mesh: Mesh, teacher: Source | None) -> Learner:
    return Learner(
        model,
        config.algorithm,
        make_optimizer(config.trainer, config.run.steps * config.algorithm.minibatches),
        rows=config.trainer.rows,
        length=config.row_length,
        max_tokens=config.generation.max_tokens,
        mesh=mesh,
        logp_chunk=config.trainer.logp_chunk,
        remat=config.trainer.remat,
        optimizer_memory=config.trainer.optimizer_memory,
        teacher=Teacher(teacher.model, teacher.load) if teacher else None,
        trainable=config.trainable,
    )


def first_params(parts: Parts) -> Params:
    """The source's parameters on the trainer's mesh, after the supervised start, and the adapters.

    The supervised start trains all of them: it makes the base, which the run then freezes.
    """
    c, base, mesh = parts.config, parts.model.base, parts.devices.trainer
    params = supervised_start(
        base,
        parts.source.load(param_shardings(base.logical_axes, base.abstract_params, mesh)),
        make_optimizer(c.trainer, c.trainer.supervised_steps),
        parts.tasks,
        c.trainer,
        length=c.row_length,
        seed=c.run.seed,
        mesh=mesh,
    )
    return parts.model.from_base(params, c.run.seed)


def make_engine(
    g: GenerationConfig, model: Model, mesh: Mesh | None = None, has_penalties: bool = False
) -> Engine:
    return Engine(
        model,
        slots=g.slots,
        length=g.length,
        decode_steps=g.decode_steps,
        page_tokens=g.tokens_per_page,
        kv_tokens=g.kv_tokens,
        kv_dtype=g.kv_dtype,
        prefill_chunk=g.prefill_chunk,
        support_size=g.support_size,
        has_penalties=has_penalties,
        mesh=mesh,
    )
