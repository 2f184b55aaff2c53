"""Parts that all benchmarks share: models with random weights, timing, peak FLOP/s and bandwidth."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from areal_jax.assembly.api import preset
from areal_jax.config.loading import load_config
from areal_jax.models.config import model_config
from areal_jax.models.model import Model, Params
from areal_jax.models.transformer import Remat
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState, make_optimizer
from areal_jax.trajectories.leaf_order import Blocks
from areal_jax.trajectories.packing import pack
from areal_jax.trees.tree_learner import TreeLearner
from areal_jax.types import Batch, Group, PreparedBatch, Prompt, SampleId, Sampling, Trajectory

T = TypeVar("T")


GROUP = 8
"""Samples of each group of `skewed_groups`."""

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""The event that jax records for each program that it compiles or loads from its persistent cache."""


def random_model(shape: str, dtype: str) -> Model:
    """Returns a model of the built-in size named `shape`; `dtype` is that of its matrix products.

    It holds no weights. Its byte tokenizer is given the model's vocabulary size, so that sampling and
    log-probs cover every logit.
    """
    tokenizer = ByteTokenizer()
    config = model_config(shape, tokenizer.vocab_size, dtype)
    tokenizer.vocab_size = config.vocab_size
    return Model(config, tokenizer)


def random_params(model: Model, dtype: str) -> Params:
    """Returns random parameters in `dtype`; one jitted program makes them, so no float32 copy remains."""
    return jax.jit(lambda: jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(0)))()


def bench_learner(
    shape: str, rows: int, length: int, dtype: str, remat: Remat = "none", tree_block: int | None = None
) -> tuple[TreeLearner, TrainState]:
    """Returns a learner with micro-batches of `rows` x `length` tokens, and its state with random weights.

    It trains by GRPO without KL penalty, with AdamW, and recomputes the log-probs of a batch before the
    update. `remat`: what the backward pass recomputes to save memory, as trainer.remat; `tree_block` is
    trainer.tree_block.
    """
    model = random_model(shape, dtype)
    config = load_config("trainer.learning_rate=1e-5", f"model.dtype={dtype}")
    learner = TreeLearner(
        model,
        preset("grpo", group_size=rows, kl={"coef": 0}, proximal="recompute"),
        make_optimizer(config.trainer, 1000),
        rows=rows,
        length=length,
        logp_chunk=config.logp_chunk,
        remat=remat,
        tree_blocks=Blocks(tree_block) if tree_block else None,
    )
    return learner, learner.init(model.init(0))


def packed_for(learner: Learner, groups: Sequence[Group]) -> Batch:
    """Returns the batch of these groups in the layout in which a run gives this learner its batches."""
    layout = "shared" if learner.takes_shared_prompts else "repeated"
    return pack(groups, learner.rows, learner.length, layout=layout)


def random_trajectory(
    sample: SampleId, size: int, numbers: np.random.Generator, vocab_size: int
) -> Trajectory:
    """Returns a trajectory of `size` random tokens: one prompt token, then sampled tokens.

    Its reward is 1 if `sample.member`, its number within the group, is odd, and 0 if it is even.
    """
    is_sampled = np.arange(size) > 0
    return Trajectory(
        sample,
        numbers.integers(0, vocab_size, size).astype(np.int32),
        is_sampled,
        np.where(is_sampled, -10.0, 0.0).astype(np.float32),
        np.where(is_sampled, 0, -1).astype(np.int32),
        np.where(is_sampled, 0, -1).astype(np.int32),
        Sampling(),
        "stop",
        reward=float(sample.member % 2),
    )


def skewed_groups(
    sequences: int, length: int, median: float, sigma: float, shortest: int, vocab_size: int
) -> list[Group]:
    """Returns groups of GROUP random samples with one-token prompts, `sequences` samples in all.

    Their lengths in tokens are lognormal with the median `median` and the standard deviation `sigma` of the
    logarithm, clipped to `shortest`..`length`; token ids are below `vocab_size`.
    """
    rng = np.random.default_rng(0)
    sizes = np.clip(np.round(rng.lognormal(np.log(median), sigma, sequences)), shortest, length).astype(int)
    flat = [
        random_trajectory(SampleId(i // GROUP, i % GROUP), int(size), rng, vocab_size)
        for i, size in enumerate(sizes)
    ]
    starts = range(0, sequences, GROUP)
    return [Group(start // GROUP, Prompt(tokens=[0]), tuple(flat[start : start + GROUP])) for start in starts]


def full_batch(learner: Learner) -> Batch:
    """Returns one micro-batch of `learner`, with rows full of random tokens."""
    length, vocab_size = learner.length, learner.model.config.vocab_size
    return packed_for(learner, skewed_groups(learner.rows, length, length, 0.0, length, vocab_size))


def compile_s(call: Callable[[], Any]) -> dict[str, float]:
    """Returns XLA's compile seconds in `call`, with an empty and with a filled compilation cache on disk.

    The keys are `compile_s` and `compile_cached_s`. Runs `call` twice, and before each run discards every
    program that this process has compiled.
    """
    settings = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    totals = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            _use_cache(settings | {"jax_compilation_cache_dir": folder})
            for _ in range(2):
                jax.clear_caches()
                with compile_seconds() as seconds:
                    jax.block_until_ready(call())
                totals.append(sum(seconds))
    finally:
        _use_cache(before)
    return dict(zip(("compile_s", "compile_cached_s"), totals, strict=True))


@contextmanager
def compile_seconds() -> Iterator[list[float]]:
    """Gives a list to which the seconds of each compilation in the block are appended.

    A program that is loaded from the compilation cache counts with the seconds that loading takes.
    """
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _use_cache(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax opens its cache folder only once, unless it is reset


def timed_s(call: Callable[[], Any]) -> float:
    """Returns the seconds of one call, including the time until the arrays that it returns are computed."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def in_turn(arms: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Calls each function of `arms` (name -> function) once per round; returns each one's results.

    `repeats` rounds count; one more comes first and is discarded, because the functions compile in it. As the
    functions take turns, other load on the machine slows all of them alike.
    """
    rounds = [{name: arm() for name, arm in arms.items()} for _ in range(repeats + 1)]
    return {name: [one[name] for one in rounds[1:]] for name in arms}


def updates(learner: Learner, state: TrainState) -> Callable[[PreparedBatch], Params]:
    """Returns a function that trains on a batch from `learner.prepare` and returns the new parameters.

    Its first call continues from `state`, every later one from the state that the previous call left.
    """
    states = [state]

    def update(batch: PreparedBatch) -> Params:
        states.append(learner.update(states.pop(), batch)[0])
        return states[0].params

    return update


QUEUED = 10
"""Calls that `median_s` gives an accelerator at once."""


def median_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the seconds of one call, the median of `repeats` measurements after an uncounted call.

    On an accelerator each measurement has QUEUED calls, which the device computes one after the other: to
    start a single call and to await it took 0.4 to 0.8 ms on an H200, more than many kernels need.
    """
    calls = 1 if jax.default_backend() == "cpu" else QUEUED

    def queued() -> Any:
        for _ in range(calls - 1):
            call()
        return call()

    timed_s(call)
    return statistics.median(timed_s(queued) / calls for _ in range(repeats))


@jax.jit
def matrix_product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the float32 product at XLA's default precision, whatever jax's default is set to.

    On a GPU, float32 operands are then read as TF32.
    """
    return jnp.dot(left, right, precision="default", preferred_element_type=jnp.float32)


@cache
def matrix_peak(dtype: str) -> float:
    """Returns the FLOP/s measured for a large square `matrix_product` in `dtype`."""
    size = 2048 if jax.default_backend() == "cpu" else 8192  # large enough to hide the overhead of a call
    left = jnp.ones((size, size), dtype)
    return 2 * size**3 / median_s(lambda: matrix_product(left, left))


def _large() -> jax.Array:
    """Returns an array that no cache of this device holds."""
    return jnp.ones(2**26 if jax.default_backend() == "cpu" else 2**28, jnp.float32)


@cache
def copy_bandwidth() -> float:
    """Returns the measured bytes per second, read and written, at which the device copies a large array."""
    values, negated = _large(), jax.jit(jnp.negative)
    return 2 * values.nbytes / median_s(lambda: negated(values))


@cache
def read_bandwidth() -> float:
    """Returns the measured bytes per second at which the device reads one large array."""
    values, total = _large(), jax.jit(jnp.sum)
    return values.nbytes / median_s(lambda: total(values))
