"""Programs say which shapes they met, and what memory they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.model import Model
from areal_jax.runtime.device_memory import MemoryWatch
from areal_jax.trainer.compiled import Compiled, Program, bytes_on_one_device
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.update import Objective
from areal_jax.trajectories.packing import pack
from areal_jax.types import Group, Trajectory
from tests.trainer.conftest import LENGTH, MakeLearner, make_groups


def test_a_new_shape_is_reported_once_with_what_is_new():
    met: list[Compiled] = []
    double = Program("double", lambda x, y: (2 * x["a"], y), met.append)
    for _ in range(2):
        double({"a": jnp.ones((2, 3))}, np.int32(1))
    assert met == [Compiled("double", ("[0]['a'] float32[2, 3]", "[1] int32[]"))]
    double({"a": jnp.ones((4, 3))}, np.int32(7))
    assert met[1:] == [Compiled("double", ("[0]['a'] float32[4, 3]",))]


def test_memory_is_the_compilers_account():
    """A product of two 64 x 64 matrices: two arguments in, one out, which lies in a donated argument."""
    square = Program("square", lambda x, y: x @ y, lambda _: None, donate_argnums=0)
    shapes = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    of = square.lower(*shapes).compile().memory_analysis()
    size = 64 * 64 * 4
    assert (of.argument_size_in_bytes, of.output_size_in_bytes) == (2 * size, size)
    assert square.beyond_arguments(*shapes) == of.temp_size_in_bytes


@pytest.mark.slow
def test_a_learner_compiles_each_program_once_for_any_number_of_micro_batches(
    params: Any, learner: MakeLearner
):
    of = learner(loss_settings={"low": 0.11, "high": 0.2})  # its own, whose programs nobody has compiled
    assert of.compiled == []

    def turns(_: Any) -> None:
        """Somebody else has the device between two programs."""

    state = of.init(params)
    batch = pack(make_groups(), 2, LENGTH)
    state, _ = of.update(state, of.prepare(state, batch), turns)
    first = [program for program, _ in of.compiled]
    assert [first.count(name) for name in ("accumulate", "apply", "zero_sums", "finish")] == [1] * 4
    twice = batch._replace(
        **{
            name: np.concatenate([x, np.full_like(x, -1 if name == "previous" else 0)])
            for name, x in batch._asdict().items()
            if x is not None and x.shape[:1] == batch.tokens.shape[:1] and x.ndim > 1
        }
    )
    before = len(of.compiled)
    of.update(state, of.prepare(state, twice), turns)
    later = {program for program, _ in of.compiled[before:]}
    assert "accumulate" not in later and "apply" not in later


def programs_compiled(call: Callable[[], Any]) -> list[str]:
    """Returns the names of the functions that jax compiled during the call."""
    found: list[str] = []

    def listen(event: str, _: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(more["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return found


def shortened(group: Group, tokens: int) -> Group:
    """Returns the group with so many tokens of each trajectory."""

    def cut(one: Trajectory) -> Trajectory:
        arrays = {name: x[:tokens] for name, x in vars(one).items() if isinstance(x, np.ndarray)}
        return replace(one, **arrays)

    return replace(group, trajectories=tuple(map(cut, group.trajectories)))


BATCHES = {f"jit({name})" for name in ("_has_tokens", "_split", "finish", "concatenate")}
"""Programs over a whole batch, without the model: they depend on its number of rows."""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_a_new_number_of_micro_batches_compiles_no_program_with_the_model(
    params: Any, model: Model, platform: str, monkeypatch: pytest.MonkeyPatch
):
    """A compilation takes minutes there; on a CPU all micro-batches of a step are one program."""
    monkeypatch.setattr("areal_jax.trainer.learner.platform_of", lambda mesh: platform)
    algorithm = AlgorithmConfig.model_validate(preset_settings({"preset": "grpo", "group_size": 4}))
    of = Learner(model, algorithm, optax.sgd(0.5), rows=2, length=LENGTH)
    state = of.init(params)

    watch, counts = MemoryWatch(of, lambda _: None), []

    def step(groups: Sequence[Group]) -> None:
        """As a step of a run; notes the number of micro-batches."""
        nonlocal state
        prepared = of.prepare(state, pack(groups, 2, LENGTH, layout="repeated"))
        counts.append(len(prepared.tokens) // 2)
        watch.before(of, state, prepared, is_alone=True)
        state, _ = of.update(state, prepared)

    step([shortened(group, 5) for group in make_groups()])
    later = programs_compiled(lambda: step(make_groups()))
    assert counts == [4, 8]
    assert ("jit(_step)" in later) is (platform == "cpu")
    if platform == "gpu":
        assert set(later) <= BATCHES


@pytest.mark.slow
def test_the_forecast_holds_the_state_and_the_largest_program(params: Any, learner: MakeLearner):
    of = learner()
    state = of.init(params)
    prepared = of.prepare(state, pack(make_groups(), 2, LENGTH))
    assert set(of.forecast(state, prepared).needs) == {"step"}
    forecast = of.forecast(state, prepared, is_alone=False)
    assert set(forecast.needs) == {"accumulate", "apply"}
    assert forecast.resident > bytes_on_one_device(state)
    gradients = bytes_on_one_device(state.params)
    assert min(forecast.needs.values()) > gradients
    assert forecast.peak == forecast.resident + max(forecast.needs.values())


@pytest.mark.slow
def test_a_single_micro_batch_begins_with_the_bits_that_adding_to_nothing_gives(
    params: Any, learner: MakeLearner
):
    of = learner()
    state = of.init(params)
    micro = of.micro_batches(of.prepare(state, pack(make_groups(), 2, LENGTH)))[0][0]
    added = of.programs.accumulate(state, of.programs.zero_sums(), micro)
    begun = of.programs.begin(state, micro)
    chex.assert_trees_all_equal(begun, added)
    memory = of.programs.begin.lower(state, micro).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 0
    assert memory.output_size_in_bytes > bytes_on_one_device(state.params)


MINIBATCHES: dict[str, Any] = {"preset": "decoupled_ppo", "minibatches": 2, "entropy_coef": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, MINIBATCHES])
def test_one_program_a_minibatch_has_the_bits_of_a_program_a_micro_batch(
    params: Any, learner: MakeLearner, settings: dict[str, Any]
):
    """Also where the last micro-batches are padding that is never computed."""
    of = learner(**settings)
    batch = pack(make_groups(), 2, LENGTH, of.algorithm.minibatches)
    seen: list[Any] = []
    states = []
    for between in (None, seen.append):
        state = of.init(params)
        for _ in range(2):
            state, metrics = of.update(state, of.prepare(state, batch, between), between)
        states.append((state, metrics))
    assert len(seen) > 4 and "step" in {program for program, _ in of.compiled}
    chex.assert_trees_all_equal(*states)


@pytest.mark.slow
def test_batches_of_one_shape_trace_the_gradient_once(
    params: Any, learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
):
    """Neither other rewards nor another version nor fewer live micro-batches trace it again."""
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(Objective.gradient, n=1)
    monkeypatch.setattr(Objective, "gradient", lambda *args: traced_once(*args))
    of = learner(loss_settings={"low": 0.13, "high": 0.2})  # its own, so that no test traced it before
    state = of.init(params)
    for reward in (1.0, -2.0):
        batch = pack(make_groups(), 2, LENGTH)
        batch.reward[0] = reward
        state, _ = of.update(state, of.prepare(state, batch))
    assert int(state.version) == 2
