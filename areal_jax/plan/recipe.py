"""The programs of a recipe with abstract arguments, by role, to be compiled for devices that are not there.

Times are those of samples of full length: every prompt has generation.length - generation.max_tokens tokens,
and every completion generation.max_tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.algorithms.shapes import AXES, map_batch
from areal_jax.assembly.devices import Devices, overwrites_serving, place
from areal_jax.assembly.parts import make_learner, training_engine, with_layout
from areal_jax.assembly.sources import Source, open_source, open_teacher
from areal_jax.assembly.tokenizer_source import RANDOM
from areal_jax.config.tree import Config
from areal_jax.models.attention import BLOCK, KV_BLOCK
from areal_jax.models.config import SHAPES
from areal_jax.models.experts import expected_blocks, window_size
from areal_jax.models.model import Model
from areal_jax.parallel.mesh import param_shardings, replicated, row_parts, rows_over, spec_of
from areal_jax.plan.costs import Assumed
from areal_jax.tasks.source import load_tasks
from areal_jax.trainer.compiled import bytes_on_one_device
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.leaf_order import depth_first
from areal_jax.trajectories.prefix_tree import prefix_tree
from areal_jax.trajectories.train_cost import Work, work_of_calls
from areal_jax.trajectories.walk import POP, PUSH, Call, calls_of
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import Batch, PreparedBatch
from areal_jax.weights.digest import leaf_sums
from areal_jax.weights.store import copy_with_sums, dtypes_in

TRAINER, HOST = "trainer", "host"
STATE, POOL = "train state", "KV pages and slots"
CONVERTED = "a version as published, while it is converted"
"""The contents of a device (`Side.resident`) that settings change most."""


@dataclass(frozen=True, kw_only=True)
class RecipeProgram:
    """A jitted function with abstract arguments, and how often a run calls it."""

    role: str  # trainer | host
    name: str
    function: Any
    """Has `lower(*arguments)`: a jitted function, or a `trainer.compiled.Program`."""
    arguments: tuple
    calls: float
    """Number of calls per batch; for a host's program, on each host."""
    tokens: int = 0
    """Tokens that one call trains, scores or samples."""
    beyond: Any = ()
    """Those arguments that are not in memory all the time (`Side.resident`)."""
    assumed: Assumed
    """Trips of loops and other quantities that depend on data, for samples of full length."""

    def lower(self) -> Any:
        return self.function.lower(*self.arguments)


@dataclass(frozen=True)
class Side:
    """One role of a recipe: its mesh, its programs, and what stays in the memory of each of its devices."""

    role: str
    mesh: jax.sharding.Mesh
    programs: tuple[RecipeProgram, ...]
    resident: Mapping[str, int]
    """Content -> bytes on one device."""
    attention: str
    """The attention path: the name of a kernel, or blocks (JAX code)."""
    products: str
    """The same of the products of a mixture's experts."""


@dataclass(frozen=True)
class Recipe:
    config: Config
    model: Model
    devices: Devices
    sides: tuple[Side, Side]
    """The trainer and one host."""
    wire_bytes: int
    """Bytes of a published version."""

    @property
    def is_shared(self) -> bool:
        """Whether trainer and host use the same device."""
        return self.devices.placement == "shared"


def open_recipe(config: Config, devices: Sequence[Any]) -> Recipe:
    """Returns the recipe's programs on `devices`, which may be absent. Nothing runs and no parameter is read.

    Raises ArealError if there are too few devices, or the model cannot be opened.
    """
    placed = place(config, devices)
    source, teacher = recipe_source(config)
    learner = make_learner(config, source.model, placed, teacher)
    sides = _trainer(config, learner, placed, teacher), _host(config, source.model, placed)
    return Recipe(config, source.model, placed, sides, _total_bytes(_wire(config, source.model)))


def recipe_source(config: Config) -> tuple[Source, Source | None]:
    """Returns the sources of the recipe's model and of its teacher; tasks are opened only if they must be."""
    tasks = {} if _has_own_vocabulary(config) else load_tasks(config.tasks)
    source = open_source(config, tasks)
    teacher = open_teacher(config, tasks, source.model) if config.algorithm.teacher else None
    return source, teacher


def _has_own_vocabulary(config: Config) -> bool:
    """Whether the model's vocabulary does not depend on the tasks, which then need not be opened."""
    sizes = SHAPES.get(config.model.shape, {}) | config.model.overrides
    return config.model.source != RANDOM or "vocab_size" in sizes


def _wire(config: Config, model: Model) -> Any:
    kinds = dtypes_in(model.abstract_params, config.wire_dtype)
    return jax.tree.map(
        lambda leaf, kind: jax.ShapeDtypeStruct(leaf.shape, kind), model.abstract_params, kinds
    )


def _total_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# --- the trainer --------------------------------------------------------------------------------------------


def _trainer(config: Config, learner: Learner, devices: Devices, teacher: Source | None) -> Side:
    # A reference policy on devices of its own is no part of what the trainer's programs take.
    state, compute = learner.on_mesh(learner.abstract_state()), config.trainer.compute
    batches = {"packed": _abstract_batch(config, learner), "tree": _abstract_tree_batch(config, learner)}
    if compute != "auto":
        batches = {compute: batches[compute]}
    found = []
    if compute != "tree":
        found += _packed_programs(config, learner, batches["packed"], state)
    if compute != "packed":
        assert isinstance(learner, TreeLearner)
        found += _tree_programs(config, learner, batches["tree"], state)
    if compute == "auto" and isinstance(learner, TreeLearner):
        found = _of_one_way(config, learner, batches["packed"], found)
    sums, flag = learner.programs.abstract_sums(), np.bool_(True)
    add = partial(RecipeProgram, role=TRAINER, assumed=_assumed_training(config, learner))
    found += [
        add(
            name="apply", function=learner.programs.apply, arguments=(state, sums, flag), beyond=sums,
            calls=config.algorithm.minibatches,
        ),
        add(
            name="wire copy", function=jax.jit(copy_with_sums, static_argnums=1),
            arguments=(state.params, config.wire_dtype), calls=1,
        ),
    ]  # fmt: skip
    resident = {
        STATE: bytes_on_one_device(state),
        "batch, and its micro-batches": 2 * max(map(bytes_on_one_device, batches.values())),
    }
    if not overwrites_serving(config, devices.placement):
        copies = 2 if config.weights_backend == "orbax" else 1
        wire = _on(_wire(config, learner.model), learner.state_shardings.params)
        resident["published weights"] = copies * bytes_on_one_device(wire)
    if teacher is not None and not config.runtime.teacher.is_apart:
        model = teacher.model
        shardings = param_shardings(model.logical_axes, model.abstract_params, learner.mesh)
        resident["teacher"] = bytes_on_one_device(_on(model.abstract_params, shardings))
    forward = learner.objective.forward
    return Side(TRAINER, learner.mesh, tuple(found), resident, forward.attention.path, forward.products.path)


def _packed_programs(
    config: Config, learner: Learner, batch: PreparedBatch, state: Any
) -> list[RecipeProgram]:
    programs = learner.programs
    micro, micros = _micro(batch, learner.rows, learner), batch.tokens.shape[0] // learner.rows
    sums = programs.abstract_sums()
    arrived = Batch(*micro[: len(Batch._fields)])
    add = partial(
        RecipeProgram, role=TRAINER, tokens=micro.tokens.size, assumed=_assumed_training(config, learner)
    )
    found = []
    if learner.objective.on_arrival:
        arguments = (state.params, state.critic, arrived)
        found.append(add(name="arrive", function=programs.arrive, arguments=arguments, calls=micros))
    if learner.algorithm.has_reference and not config.runtime.reference.is_apart:
        arguments = (learner.trainable.whole(state.reference, state.params), arrived)
        found.append(add(name="score", function=programs.score, arguments=arguments, calls=micros))
    is_single = micros == config.algorithm.minibatches
    return [
        *found,
        add(name="begin", function=programs.begin, arguments=(state, micro), calls=micros * is_single),
        add(
            name="accumulate", function=programs.accumulate, arguments=(state, sums, micro), beyond=sums,
            calls=micros * (not is_single),
        ),
    ]  # fmt: skip


def _of_one_way(
    config: Config, learner: TreeLearner, packed: PreparedBatch, found: Sequence[RecipeProgram]
) -> list[RecipeProgram]:
    """Returns the programs of compute=auto; those of the way that costs more tokens are never called."""
    a, shards = config.algorithm, row_parts(learner.mesh)
    passes = bool(learner.objective.on_arrival) + a.has_reference + (a.teacher is not None)
    micros, tokens = packed.tokens.shape[0] // learner.rows, packed.tokens.size / shards
    call_tokens = learner.tree_blocks.call_tokens
    in_rows = Work((1 + passes) * micros, tokens, passes * tokens).tokens(call_tokens)
    is_tree = full_length_work(config, learner, passes).tokens(call_tokens) < in_rows
    return [one if (one.name in TREE_PROGRAMS) == is_tree else replace(one, calls=0.0) for one in found]


def _assumed_training(config: Config, learner: Learner) -> Assumed:
    g, forward = config.generation, learner.objective.forward
    shards = row_parts(learner.mesh)
    # As packed_stats divides a row into chunks, and attention a sample into blocks.
    width = max(1, forward.chunk // shards // (learner.rows // shards))
    trained = learner.length * g.max_tokens / g.length
    trips = {
        "head_chunks": math.ceil(trained / min(width, learner.length)),
        "key_blocks": math.ceil((g.length / BLOCK + 1) / 2),
    }
    assumed = Assumed(trips, keys=g.length / 2)
    return _with_experts(assumed, learner.model, learner.mesh, learner.rows // shards * learner.length)


def _with_experts(assumed: Assumed, model: Model, mesh: Mesh, tokens: int) -> Assumed:
    """Returns what is assumed of a call of `tokens` tokens a device, that of the experts' products added.

    Each expert is as likely as any other.
    """
    c = model.config
    if not c.experts:
        return assumed
    axis = spec_of(["experts"], [c.experts], mesh)[0]
    parts = 1 if axis is None else mesh.shape[axis]
    tokens *= mesh.shape.get("expert", 1)  # a device computes those of all devices that split the experts
    blocks = expected_blocks(tokens, c.experts_per_token, c.experts, c.experts // parts)
    rows = tokens * c.experts_per_token
    return replace(
        assumed,
        trips={**assumed.trips, "expert_blocks": blocks, "more_windows": 0},
        expert_rows=rows / parts / window_size(rows, parts),
        experts_read=1 - (1 - c.experts_per_token / c.experts) ** tokens,
    )


def _on(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on), tree, shardings
    )


def _abstract_batch(config: Config, learner: Learner) -> PreparedBatch:
    """Returns a prepared batch of samples of full length, as abstract arrays on the trainer's mesh."""
    a, g, length = config.algorithm, config.generation, learner.length
    samples = config.trainer.batch_size * a.group_size
    rows = -(-samples // a.minibatches // (length // g.length))
    micros = -(-rows // learner.rows)
    # A minibatch has a power of two of micro-batches (trajectories.packing).
    rows = a.minibatches * learner.rows * 2 ** (micros - 1).bit_length()
    return _micro(_abstract_prepared(config, learner, rows, learner.takes_shared_prompts), rows, learner)


def _abstract_tree_batch(config: Config, learner: Learner) -> PreparedBatch:
    """Returns the same for an update over prefix trees: one sample per row, whole on every device."""
    samples, whole = config.trainer.batch_size * config.algorithm.group_size, replicated(learner.mesh)
    batch = _abstract_prepared(config, learner, samples, shares_prompts=False)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), batch)


def _abstract_prepared(config: Config, learner: Learner, rows: int, shares_prompts: bool) -> PreparedBatch:
    a, g = config.algorithm, config.generation
    sizes = {"B": rows, "T": learner.length, "S": config.trainer.batch_size * a.group_size}
    c = learner.model.config
    sizes |= {"K": g.support_size, "E": c.layers * c.experts_per_token}
    given = set(Batch._fields[: Batch._fields.index("support")])
    given |= {"support"} if g.support_size else set()
    given |= {"subtree_ends"} if shares_prompts else set()
    given |= {"experts"} if a.routes == "replay" else set()
    kinds = {int: jnp.int32, float: jnp.float32, bool: jnp.bool_}

    def one(name: str) -> jax.ShapeDtypeStruct | None:
        axes, kind = AXES[name]
        shape = tuple(sizes[axis] for axis in axes)
        dtype = jnp.uint8 if name == "experts" else kinds[kind]
        return jax.ShapeDtypeStruct(shape, dtype) if name in given else None

    batch = Batch(*map(one, Batch._fields))
    score = jax.ShapeDtypeStruct((rows, learner.length), jnp.float32)
    names = [*learner.objective.on_arrival]
    names += ["ref_logp"] if a.has_reference else []
    names += ["teacher_logp"] if a.teacher is not None else []
    state = learner.abstract_state()
    finish = learner.objective.finish
    return jax.eval_shape(finish, batch, state.version, state.kl_control, dict.fromkeys(names, score))


def _micro(batch: PreparedBatch, rows: int, learner: Learner) -> PreparedBatch:
    """Returns the first `rows` rows of an abstract batch, laid out over the trainer's mesh."""

    def put(on: Any, leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=on)

    by_row, whole = rows_over(learner.mesh), replicated(learner.mesh)
    return map_batch(
        lambda leaf: put(by_row, leaf, (rows, *leaf.shape[1:])),
        lambda leaf: put(whole, leaf, leaf.shape),
        batch,
    )


# --- a host -------------------------------------------------------------------------------------------------


def _host(config: Config, model: Model, devices: Devices) -> Side:
    g, a, mesh = config.generation, config.algorithm, devices.hosts[0]
    engine = training_engine(with_layout(config, devices), config, model, mesh)
    functions = engine.abstract_calls(config.wire_dtype)
    published, state = engine.abstract_params(config.wire_dtype), functions["decode"][1][2]
    cache = functions["prefill"][1][1]
    prompt = g.length - g.max_tokens
    rows, width, rebuilt = engine.prefill_rows, engine.prefill_width, engine.recompute_chunk
    prompts = config.trainer.batch_size / config.runtime.hosts
    samples = prompts * a.group_size
    mean = g.length - g.max_tokens / 2  # tokens of a live sample, over its life
    step = max(KV_BLOCK, g.tokens_per_page)

    def blocks(tokens: float) -> int:
        return max(1, math.ceil(tokens / step))

    chunks = math.ceil(g.length / rebuilt)
    calls = {
        "prefill": prompts * engine.prefill_rows_for(prompt + 1) / rows,
        "insert": samples,
        "decode": samples * g.max_tokens / (g.rollout_slots * g.decode_steps),
        "recompute": chunks * float(config.on_update == "recompute"),
        "extract": 0.0,
    }
    sizes = {
        "prefill": ((prompt + width) / 2, rows * width),
        "decode": (mean, g.rollout_slots),
        "recompute": (g.length / 2, g.slots * rebuilt),
    }

    def assumed(name: str) -> Assumed:
        keys, tokens = sizes.get(name, (0, 0))
        trips = {"kv_blocks": blocks(keys)} if tokens else {}
        found = Assumed(trips, g.sampling.is_truncated, *read.get(name, (mean, mean)))
        return _with_experts(found, model, mesh, tokens) if tokens else found

    read = {"prefill": _by_chunks(prompt, width), "recompute": _by_chunks(g.length, rebuilt)}
    tokens = {"prefill": rows * width, "decode": g.rollout_slots * g.decode_steps}
    beyond = {"prefill": cache, "insert": functions["insert"][1][1].cache}
    programs = [
        RecipeProgram(
            role=HOST, name=name, function=function, arguments=arguments, calls=calls[name],
            tokens=tokens.get(name, 0), beyond=beyond.get(name, ()),
            assumed=assumed(name),
        )
        for name, (function, arguments) in functions.items()
    ]  # fmt: skip
    programs.append(
        RecipeProgram(
            role=HOST, name="digest", function=jax.jit(leaf_sums), arguments=(published,), calls=1,
            assumed=Assumed(),
        )
    )  # fmt: skip
    sets = 1 if overwrites_serving(config, devices.placement) else config.parameter_sets
    weights = bytes_on_one_device(published)
    is_as_published = engine.quantize == "none"
    served = weights if is_as_published else bytes_on_one_device(engine.abstract_served(config.wire_dtype))
    resident = {
        f"weights of {sets} version{'s' * (sets > 1)}": sets * served,
        POOL: bytes_on_one_device(state),
    }
    if engine.weight_layout != "stacked" or not is_as_published:
        resident[CONVERTED] = weights
    return Side(HOST, mesh, tuple(programs), resident, engine.attention.path, engine.products.path)


def _by_chunks(tokens: int, chunk: int) -> tuple[float, float]:
    """Returns two means over the chunks of a sample: keys that a query sees, and tokens that a chunk reads.

    A query at position p sees p + 1 keys; the last chunk's padding queries see none, and count.
    """
    ends = [min(start + chunk, tokens) for start in range(0, tokens, chunk)]
    return tokens * (tokens + 1) / 2 / (len(ends) * chunk), sum(ends) / len(ends)


# --- an update over prefix trees ---------------------------------------------------------------------------


TREE_PROGRAMS = ("push", "pop", "push with scores", "tree score")
"""Names of the programs that `_tree_programs` returns."""


def full_length_calls(config: Config, learner: TreeLearner, *, with_gradients: bool) -> list[Call]:
    """Returns the steps over the prefix tree of a minibatch of samples of full length."""
    a, g = config.algorithm, config.generation
    prompt = g.length - g.max_tokens
    keys = []
    for group in range(config.trainer.batch_size // a.minibatches):
        for member in range(a.group_size):
            key = np.full(g.length, group)
            key[prompt:] = 1_000_000 + group * a.group_size + member
            keys.append(key)
    blocks = learner.tree_blocks
    tree = depth_first(prefix_tree(keys), blocks)
    return calls_of(tree, row_parts(learner.mesh), blocks, with_gradients=with_gradients)


def _tree_programs(
    config: Config, learner: TreeLearner, batch: PreparedBatch, state: Any
) -> list[RecipeProgram]:
    """Returns the programs over prefix trees; their calls count each step as one of a full block.

    `batch`, `state`: abstract, as `TreeUpdate.abstract_calls` needs them.
    """
    minibatches, most = config.algorithm.minibatches, learner.tree_blocks.most
    training = full_length_calls(config, learner, with_gradients=True)
    scoring = full_length_calls(config, learner, with_gradients=False)
    times = {
        "push": _blocks(training, PUSH, most),
        "pop": _blocks(training, POP, most),
        "push with scores": _blocks(scoring, PUSH, most),
        "tree score": _blocks(scoring, PUSH, most),
    }
    trips = {
        "head_chunks": math.ceil(most / learner.objective.forward.chunk),
        "key_blocks": math.ceil((config.generation.length / BLOCK + 1) / 2),
    }
    computed = learner.tree_blocks.call_tokens or most
    assumed = Assumed(trips, keys=config.generation.length / 2)
    assumed = _with_experts(assumed, learner.model, learner.mesh, computed)
    walks = row_parts(learner.mesh)
    found = []
    for name, (function, arguments) in learner.tree.abstract_calls(state, batch, minibatches).items():
        # What is in memory only during prepare or update: path, gradients and scores.
        beyond = arguments[1:3] if name == "pop" else arguments[2:4]
        found.append(
            RecipeProgram(
                role=TRAINER,
                name=name,
                function=function,
                arguments=arguments,
                calls=minibatches * times[name],
                tokens=most * walks,
                beyond=beyond,
                assumed=assumed,
            )
        )
    return found


def _blocks(calls: Sequence[Call], kind: int, most: int) -> float:
    """Returns how many steps of `most` tokens compute as many as the steps of this kind."""
    return sum(call.bucket for call in calls if call.kind == kind) / most


def full_length_work(config: Config, learner: TreeLearner, passes: int) -> Work:
    """Returns the work of a batch of samples of full length over its prefix trees, scored `passes` times."""
    parts = [
        (passes, full_length_calls(config, learner, with_gradients=False)),
        (1, full_length_calls(config, learner, with_gradients=True)),
    ]
    total = np.sum([times * np.array(work_of_calls(calls)) for times, calls in parts], axis=0)
    return Work(*(config.algorithm.minibatches * total).tolist())
