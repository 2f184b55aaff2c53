"""The objective's gradient with `accumulate=float64`: right to float64's rounding, and no step is float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.config import Lora, ModelConfig
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.update import Objective
from areal_jax.trajectories.packing import pack
from areal_jax.types import Batch
from tests.algorithms.sequences import wide
from tests.trainer.conftest import LENGTH, VOCAB, make_groups, random_params

SIZES = dict(vocab_size=VOCAB, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
ROWS = 8
MODELS = {
    "grpo": dict(has_qk_norm=True, norm_eps=1e-3),
    "ppo": dict(has_qkv_bias=True, is_tied=False, lora=Lora(2, 4.0)),
    "experts": dict(experts=6, experts_per_token=2, expert_width=12, has_unit_weights=True, shared_width=8),
}
KL_TO_REFERENCE = {"coef": 0.1, "place": "loss", "estimator": "k3"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": dict(kl=KL_TO_REFERENCE, entropy_coef=0.02, truncation="soft_penalty", proximal="recompute"),
    "ppo": dict(critic={"kind": "shared", "coef": 0.3}, proximal="recompute"),
    "experts": dict(kl={"coef": 0.0}, proximal="recompute"),
}
WIDE = dict(dtype="float64", accumulate="float64")


compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""jax.jit without XLA's optimisations: compiling takes most of the time of these tests."""


class Case(NamedTuple):
    """A learner, its state, and a prepared batch of one micro-batch."""

    name: str
    learner: Learner
    state: TrainState
    micro: Batch

    def gradient(self, state: TrainState, micro: Batch) -> Any:
        return self.learner.objective.gradient(state.params, state.critic, micro, state.kl_control)[0]

    def value(self, state: TrainState, micro: Batch) -> jax.Array:
        objective = self.learner.objective
        return objective.loss(*objective.outputs(state.params, state.critic, micro), micro, state.kl_control)[
            0
        ]


def learner_of(name: str, **options: Any) -> Learner:
    letters = "".join(map(chr, range(97, 97 + VOCAB - 2)))
    model = Model(ModelConfig(**SIZES, **MODELS[name], **options), CharTokenizer(letters))
    preset = "ppo" if name == "ppo" else "grpo"
    settings = preset_settings({"preset": preset, "group_size": 4, "minibatches": 1, **ALGORITHMS[name]})
    algorithm = AlgorithmConfig.model_validate(settings)
    sizes: dict[str, Any] = dict(rows=ROWS, length=LENGTH, logp_chunk=8, remat="none")  # compiles fastest
    return Learner(model, algorithm, optax.sgd(0.5), **sizes)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "experts")]


@pytest.fixture(scope="module", params=["grpo", *SLOW])
def case(request: pytest.FixtureRequest) -> Case:
    """Numpy arrays in float64, computed with jax_enable_x64; the batch has float32 values."""
    with jax.enable_x64(True):
        learner = learner_of(request.param, **WIDE)
        state = jax.device_get(learner.init(random_params(learner.model, 0)))
        rng = np.random.default_rng(3)

        def moved(leaf: np.ndarray) -> np.ndarray:
            return np.float64(np.float32(leaf + 0.1 * rng.normal(size=leaf.shape)))

        # Neither the critic's head nor the KL to the reference is 0.
        state = state.replace(
            critic=jax.tree.map(moved, state.critic), reference=jax.tree.map(moved, state.reference)
        )
        batch = wide(pack(make_groups(2), ROWS, LENGTH))
        micro = jax.device_get(compiled(partial(prepared, learner.objective))(state, batch))
    return Case(request.param, learner, state, micro)


def prepared(of: Objective, state: TrainState, batch: Batch) -> Batch:
    scores = of.arrive(state.params, state.critic, batch)
    if of.algorithm.has_reference:
        scores |= {"ref_logp": of.forward.logp(state.reference, batch)}
    return of.finish(batch, state.version, state.kl_control, scores)


def norm(tree: Any) -> float:
    return float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))))


@pytest.mark.slow
def test_state_batch_and_gradient_are_float64(case: Case):
    with jax.enable_x64(True):
        gradient = jax.eval_shape(case.gradient, case.state, case.micro)
    found = {leaf.dtype for leaf in jax.tree.leaves((case.state, case.micro, gradient))}
    assert {dtype for dtype in found if jnp.issubdtype(dtype, jnp.floating)} == {np.dtype(np.float64)}


@pytest.mark.slow
def test_the_gradient_is_the_objectives_slope_and_float32s_is_close(case: Case):
    """Along random directions, against central differences.

    The distance of the float32 gradient shows that the float64 one is computed otherwise.
    """
    state, micro, step = case.state, case.micro, 2e-6
    with jax.enable_x64(True):
        # One program, because compiling is most of the test's time.
        both = compiled(lambda state, micro: (case.gradient(state, micro), case.value(state, micro)))
        gradient, rng = jax.device_get(both(state, micro)[0]), np.random.default_rng(0)
        for _ in range(3):
            of_params, of_critic = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), gradient)

            def along(times: float, of_params: Any = of_params, of_critic: Any = of_critic) -> float:
                moved = partial(jax.tree.map, lambda x, direction: x + times * direction)
                params, critic = moved(state.params, of_params), moved(state.critic, of_critic)
                return float(both(state.replace(params=params, critic=critic), micro)[1])

            quotient = (along(step) - along(-step)) / (2 * step)
            products = jax.tree.map(lambda g, d: float((g * d).sum()), gradient, (of_params, of_critic))
            slope = sum(jax.tree.leaves(products))
            assert slope == pytest.approx(quotient, rel=1e-7)

    narrow = case._replace(learner=learner_of(case.name))
    as_float32 = partial(jax.tree.map, lambda x: np.asarray(x, np.float32 if x.dtype == float else x.dtype))
    single = compiled(narrow.gradient)(as_float32(state), as_float32(micro))
    gap = norm(jax.tree.map(lambda one, other: np.asarray(one, float) - other, single, gradient))
    assert 1e-9 < gap / norm(gradient) < 1e-4


def arrays_of(jaxpr: Any) -> Iterator[Any]:
    """Every variable and literal of a jaxpr, and of the jaxprs inside its equations."""
    yield from (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)
    for equation in jaxpr.eqns:
        yield from (*equation.invars, *equation.outvars)
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(leaf):
                yield from arrays_of(getattr(leaf, "jaxpr", leaf))


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def dtypes_in(function: Callable[..., Any], *args: Any) -> set[str]:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return {str(x.aval.dtype) for x in arrays_of(jaxpr) if hasattr(x.aval, "dtype")}


def test_no_step_of_preparation_and_gradient_is_float32(case: Case):
    state, micro = case.state, case.micro
    kinds = {"float64", "int32", "int64", "uint32", "bool"}
    with jax.enable_x64(True):
        assert dtypes_in(case.gradient, state, micro) <= kinds
        assert dtypes_in(partial(prepared, case.learner.objective), state, micro) <= kinds


def test_an_update_in_float64_leaves_the_state_float64(case: Case):
    with jax.enable_x64(True):
        after = jax.eval_shape(case.learner.programs._step, case.state, [case.micro] * 2, 2, np.bool_(True))
    before = jax.tree.map(lambda leaf: leaf.dtype, case.state)
    assert jax.tree.map(lambda leaf: leaf.dtype, after[0]) == before
