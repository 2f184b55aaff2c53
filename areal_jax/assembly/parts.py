"""Builds the parts of a run from its config: tasks, model, learner, engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from jax.sharding import Mesh

from areal_jax.algorithms.sampling import require_support_fits
from areal_jax.assembly.devices import Devices, overwrites_serving, params_bytes, place, usable_cores
from areal_jax.assembly.sources import Source, open_source, open_teacher
from areal_jax.config.sections import GenerationConfig
from areal_jax.config.tree import Config
from areal_jax.episodes.agent import workflows_of
from areal_jax.episodes.follow_up import follow_ups_of
from areal_jax.generation.engine import Engine
from areal_jax.generation.fastest_layout import fastest_layout
from areal_jax.generation.rollout import completion_of
from areal_jax.models.config import ModelConfig
from areal_jax.models.experts import NO_EXPERT
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import param_shardings, platform_of
from areal_jax.tasks.errors import USERS, PromptError, TooLongError, raised
from areal_jax.tasks.held_out import held_out, without_splits
from areal_jax.tasks.reference_answers import reference_trajectory
from areal_jax.tasks.source import PromptStream, WeightedTask, load_tasks
from areal_jax.tasks.task import Task, Workflow
from areal_jax.trainer.learner import Learner, Teacher
from areal_jax.trainer.scorer import Executor
from areal_jax.trainer.state import TrainState, depends_on_steps, make_optimizer
from areal_jax.trainer.supervised import supervised_start
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import ArealError, Completion, Prompt, SampleId, Trajectory
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.publishing import PublisherSettings
from areal_jax.weights.store import ParamStore, Probe
from areal_jax.weights.writer import OnFailure

CHECKED_PROMPTS = 256
"""Number of prompts, from ordinal 0 on, that are read and encoded before a run starts.

A bad one among them is refused at once; a later one is dropped (`control.max_failed_prompts`).
"""


@dataclass(frozen=True)
class Inputs:
    """The tasks, prompts and model of a run, opened without using a device or reading a parameter."""

    config: Config
    tasks: dict[str, WeightedTask]
    prompts: PromptStream
    source: Source
    held_out: dict[str, WeightedTask] | None
    """The held-out prompts for evaluation; None unless observe.evaluate is set."""
    supervised: dict[str, WeightedTask]
    """The tasks of the supervised steps."""

    @property
    def model(self) -> Model:
        return self.source.model

    def prompt(self, ordinal: int) -> Prompt:
        return self.prompts.prompt(ordinal)

    def completion(self, trajectory: Trajectory) -> Completion:
        """Returns what the reward function gets of a finished sample: the completion as tokens and text.

        Raises PromptError if the tokenizer raises an error.
        """
        name, _ = self.prompts.place(trajectory.sample.ordinal)
        try:
            return completion_of(trajectory, self.model.tokenizer, self.tasks[name].task)
        except USERS as error:
            raise PromptError(
                f"the tokenizer cannot decode a completion of the prompt at ordinal "
                f"{trajectory.sample.ordinal} (task {name}): {raised(error)}; correct the tokenizer"
            ) from error

    def has_workflow(self, ordinal: int) -> bool:
        """Returns whether the samples of prompt number `ordinal` are episodes of a workflow."""
        return self.prompts.place(ordinal)[0] in self.workflows

    @cached_property
    def workflows(self) -> dict[str, Workflow]:
        """Task name -> the workflow that conducts its samples."""
        return workflows_of(self.config.episode.agent, self.tasks)

    def reference(self, sample: SampleId) -> Trajectory:
        """Returns, as the trajectory of `sample`, the reference answer of its prompt instead of a completion.

        Raises TaskError if the task has no reference answers.
        """
        prompt = self.prompts.prompt(sample.ordinal)
        return reference_trajectory(sample, prompt, self.tasks[prompt.task].task, self.model.tokenizer)

    def prompt_tokens(self, ordinal: int) -> tuple[int, ...]:
        """Returns the tokens of prompt number `ordinal` in the run's order, counted from 0.

        Raises PromptError if the prompt cannot be read or encoded, if it has no tokens, or so many that
        generation.length leaves no token for the completion.
        """
        prompt, length = self.prompts.prompt(ordinal), self.config.generation.length
        what, count, tokens = f"the prompt at ordinal {ordinal} (task {prompt.task})", "", ()
        try:
            tokens = tuple(self.model.tokenizer.render(prompt, length - 1))
            count = str(len(tokens)) if len(tokens) >= length else ""
        except TooLongError as error:
            count = f"at least {error.fewest}"
        except USERS as error:
            raise PromptError(
                f"{what} cannot be encoded: {raised(error)}; leave such prompts out of the task"
            ) from error
        if count:
            raise PromptError(
                f"{what} has {count} tokens, but prompt and completion together must fit "
                f"generation.length={length}; raise generation.length, or leave such prompts out of the task"
            )
        if not tokens:
            raise PromptError(
                f"{what} has no tokens, and a completion needs at least one before it; leave such prompts "
                "out of the task"
            )
        return tokens


@dataclass(frozen=True)
class Parts(Inputs):
    """A run's inputs, and what one process needs to train on them: devices, learner, teacher (or None)."""

    devices: Devices
    learner: Learner
    teacher: Source | None = None

    def engine(self, host: int) -> Engine:
        """Returns a new decoding engine, without weights, for the host with index `host`, on its mesh."""
        g = with_layout(self.config, self.devices)
        return training_engine(g, self.config, self.model, self.devices.hosts[host])

    def store(self, probe: Probe, folder: Path, on_failure: OnFailure) -> ParamStore:
        """Returns the store of weights versions for a run of one process in `folder`.

        `probe`: the canary of its hosts' engines. `on_failure` is called with the error of a failed commit.
        """
        c, dtype = self.config, self.config.wire_dtype
        if c.weights_backend == "memory":
            return MemoryStore(probe, dtype, overwrites_serving(c, self.devices.placement))
        settings = PublisherSettings(probe, dtype, c.runtime.deadline_s, on_failure)
        return OrbaxStore.of_run(c, folder, settings, params_bytes(self.model, dtype))

    def first_state(self) -> TrainState:
        """Returns the trainer's state at version 0, after supervised steps.

        The config alone decides it, except for rounding: supervised steps on another mesh add in another
        order (`first_params`).
        """
        return self.learner.init(first_params(self), donate=True)


def open_inputs(config: Config, tasks: Sequence[Task] = ()) -> Inputs:
    """Loads the tasks and opens the model of a config, and checks the first 256 prompts.

    No parameter is read. `tasks`, if given, replace the config's tasks. Raises ArealError if a task or the
    model cannot be opened, or if one of the checked prompts cannot be read or encoded, is empty or too long.
    """
    loaded = load_tasks(config.tasks, tasks)
    config = _fitted_to_episodes(config, loaded)
    source, asked = open_source(config, loaded), None
    if config.observe.evaluate:
        asked = loaded if tasks else held_out(without_splits(config.tasks))
    require_support_fits(config.generation.support_size, source.model.config.vocab_size)
    if config.algorithm.routes == "replay":
        _require_routes(config, source.model.config, loaded)
    own = config.trainer.supervised.tasks
    supervised = load_tasks(own) if own else loaded
    inputs = Inputs(config, loaded, PromptStream(loaded, config.run.seed), source, asked, supervised)
    for ordinal in range(CHECKED_PROMPTS):
        inputs.prompt_tokens(ordinal)
    _require_chats_go_on(inputs)
    return inputs


def _require_routes(config: Config, c: ModelConfig, tasks: Mapping[str, WeightedTask]) -> None:
    """Raises ArealError if routes cannot be replayed, or may need more memory than algorithm.routes_gib."""
    setting, own = "algorithm.routes=replay", "set algorithm.routes=own"
    if not 0 < c.experts <= NO_EXPERT:
        what = "without experts" if not c.experts else f"with {c.experts} experts, of at most {NO_EXPERT}"
        raise ArealError(f"{setting} with a model {what}; {own}")
    if named := list(workflows_of(config.episode.agent, tasks)):
        raise ArealError(
            f"{setting} with tasks.{named[0]}, which has a workflow: routes are kept for samples of one turn "
            f"alone; {own}"
        )
    t, eta = config.trainer, config.max_staleness
    groups = config.control.max_concurrent or (1 + (eta or 0)) * t.batch_size
    tokens = groups * config.algorithm.group_size * config.generation.length
    needed, most = tokens * c.layers * c.experts_per_token / 2**30, config.algorithm.routes_gib
    if needed > most:
        raise ArealError(
            f"{setting} may need {needed:.1f} GiB for the routes of {groups} groups in flight, more than "
            f"algorithm.routes_gib={most:g}; raise it if Redis and the controller's machine have the memory, "
            f"lower control.max_staleness or trainer.batch_size, or {own}"
        )


def _fitted_to_episodes(config: Config, tasks: Mapping[str, WeightedTask]) -> Config:
    """Returns the config; if a task has a workflow, with algorithm.reduction_constant for episodes.

    Its default, generation.max_tokens, is the limit of a turn. An episode may have generation.length tokens
    in all its turns, so that is its budget, and the constant of all samples of the run. Raises ArealError if
    the config's other settings cannot conduct a workflow.
    """
    named, a = list(workflows_of(config.episode.agent, tasks)), config.algorithm
    if named and a.samples != "policy":
        raise ArealError(
            f"tasks.{named[0]} has a workflow, but algorithm.samples={a.samples} samples nothing; set "
            "algorithm.samples=policy"
        )
    if not named or a.reduction != "constant" or a.reduction_constant is not None:
        return config
    return config.with_values("algorithm", reduction_constant=float(config.generation.length))


def _require_chats_go_on(inputs: Inputs) -> None:
    """Raises ArealError if episode.history does not fit the chat template, or the checked prompts."""
    agent, history = inputs.config.episode.agent, inputs.config.episode.history
    prompts = [inputs.prompt(n) for n in range(CHECKED_PROMPTS) if inputs.has_workflow(n)]
    chats = [prompt for prompt in prompts if prompt.messages is not None]
    if history == "template" and prompts and not chats and agent is None:
        raise ArealError(
            f"episode.history=template: the prompts of tasks.{prompts[0].task} are texts, which no chat "
            "template renders; give messages as prompts, or leave episode.history out"
        )
    if history == "exact" and agent is not None:
        follow_ups_of(inputs.model.tokenizer)
    for prompt in chats if history == "exact" else ():
        follow_ups_of(inputs.model.tokenizer, prompt.tools)


def assemble(config: Config, tasks: Sequence[Task] = (), learner: Learner | None = None) -> Parts:
    """Builds a run's parts on this process's devices, after checking config, tasks and prompts.

    `tasks`, if given, replace the config's tasks. `learner`: another run's learner, which saves compiling its
    programs again; both runs must have the same model, run.steps, sections algorithm and trainer,
    generation.length and generation.max_tokens. None: a new learner. Raises ArealError if a check fails.
    """
    if config.weights_backend == "transfer":
        raise ArealError(
            "weights.backend=transfer is for the processes of a launched run, but this run is one process; "
            "use weights.backend=auto, or start the run with `areal-jax launch`"
        )
    return assemble_on(place(config), open_inputs(config, tasks), learner)


def assemble_on(devices: Devices, inputs: Inputs, learner: Learner | None = None) -> Parts:
    """Builds a run's parts on the given devices, with `learner` or, if it is None, a new one."""
    config = inputs.config
    teacher = open_teacher(config, inputs.tasks, inputs.model) if config.algorithm.teacher else None
    learner = learner or make_learner(config, inputs.model, devices, teacher)
    shared = {field.name: getattr(inputs, field.name) for field in fields(Inputs)}
    return Parts(**shared, devices=devices, learner=learner, teacher=teacher)


def make_learner(config: Config, model: Model, devices: Devices, teacher: Source | None) -> Learner:
    r, mesh = config.runtime, devices.trainer
    reference = Executor(devices.reference or mesh, r.reference.dtype) if r.reference.is_apart else None
    apart = Executor(devices.teacher or mesh, r.teacher.dtype) if r.teacher.is_apart else None
    over_trees = {"tree_blocks": Blocks(config.tree_block)} if config.trainer.compute != "packed" else {}
    make = TreeLearner if over_trees else Learner
    return make(
        model,
        config.algorithm,
        make_optimizer(config.trainer, config.run.steps * config.algorithm.minibatches),
        rows=config.trainer.rows,
        length=config.row_length,
        max_tokens=config.generation.max_tokens,
        mesh=mesh,
        logp_chunk=config.logp_chunk,
        remat=config.trainer.remat,
        optimizer_memory=config.trainer.optimizer_memory,
        teacher=Teacher(teacher.model, teacher.load, apart) if teacher else None,
        reference=reference,
        trainable=config.trainable,
        **over_trees,
    )


def with_steps(parts: Parts, steps: int) -> Parts:
    """Returns the parts of a run of so many batches, on which its schedules depend; 0: of the config's.

    The learner, and with it every compiled program, stays the same if no schedule depends on the number.
    """
    if steps in (0, parts.config.run.steps):
        return parts
    config = parts.config.with_values("run", steps=steps)
    return with_config(parts, config) if depends_on_steps(config.trainer) else replace(parts, config=config)


def with_config(parts: Parts, config: Config) -> Parts:
    """Returns the parts with a learner by another config, which has the same model and devices."""
    learner = make_learner(config, parts.model, parts.devices, parts.teacher)
    return replace(parts, config=config, learner=learner)


def with_layout(config: Config, devices: Devices) -> GenerationConfig:
    """Returns the config's section generation for hosts on `devices`.

    weight_layout=auto becomes stacked on an accelerator where publishing overwrites the host's weights in
    place: converted weights would be a second copy there.
    """
    g = config.generation
    is_in_place = overwrites_serving(config, devices.placement) and platform_of(devices.hosts[0]) != "cpu"
    return (
        g.model_copy(update={"weight_layout": "stacked"}) if g.weight_layout == "auto" and is_in_place else g
    )


def with_measured_layout(parts: Parts) -> Parts:
    """Returns the parts of a new run, with generation.weight_layout=auto replaced by a measured layout.

    Only on a CPU, where the fastest layout depends on the kind of CPU. The run's config.yaml and the
    journal's header name the layout, and a resumed run uses it. The parts stay as they are if the run
    promises equal bits, which must not depend on a measurement, if a host has several devices, or if it
    decodes with codes, which no layout changes.
    """
    c, mesh = parts.config, parts.devices.hosts[0]
    is_set = c.generation.weight_layout != "auto" or c.generation.quantize != "none"
    if is_set or c.promises_bits or platform_of(mesh) != "cpu" or mesh.size > 1:
        return parts
    layout = fastest_layout(parts.model, c.generation.slots, usable_cores())
    return replace(parts, config=c.with_values("generation", weight_layout=layout))


def first_params(parts: Parts) -> Params:
    """Returns the parameters of version 0, on the trainer's mesh.

    These are the parameters of model.source after trainer.supervised.steps, plus new adapters if the config
    has any. The supervised steps train all parameters; a run with adapters then freezes them. Random
    parameters and new adapters have the same bits on every mesh, supervised steps differ by rounding.
    """
    c, base, mesh = parts.config, parts.model.base, parts.devices.trainer
    rate = c.trainer.supervised.learning_rate or c.trainer.learning_rate
    params = supervised_start(
        base,
        parts.source.load(param_shardings(base.logical_axes, base.abstract_params, mesh)),
        make_optimizer(c.trainer.model_copy(update={"learning_rate": rate}), c.trainer.supervised.steps),
        parts.supervised,
        c.trainer,
        length=c.row_length,
        seed=c.run.seed,
        mesh=mesh,
    )
    return parts.model.from_base(params, c.run.seed)


def training_engine(g: GenerationConfig, config: Config, model: Model, mesh: Mesh) -> Engine:
    """Returns an engine, without weights, for a host of the run `config` on `mesh`; `g`: its settings."""
    return make_engine(
        g,
        model,
        mesh,
        keeps_routes=config.algorithm.routes == "replay",
        reserved_slots=config.generation.reserved_slots,
        seed=config.run.seed,
    )


def make_engine(
    g: GenerationConfig,
    model: Model,
    mesh: Mesh | None = None,
    *,
    has_penalties: bool = False,
    keeps_routes: bool = False,
    reserved_slots: int = 0,
    seed: int = 0,
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
        weight_layout=g.weight_layout,
        quantize=g.quantize,
        has_penalties=has_penalties,
        keeps_routes=keeps_routes,
        reserved_slots=reserved_slots,
        sampling=g.sampling,
        seed=seed,
        mesh=mesh,
    )
