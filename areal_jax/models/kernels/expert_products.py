"""The choice of the kernel for the products of a mixture's experts on GPUs, and the self-test behind it.

As for attention (`models.kernels.packed_attention`), no kernel is trusted untested. Without one, the products
are computed block by block (`models.experts`), on every device. Shapes: M rows, sorted by expert, E experts,
I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from areal_jax.models.config import ModelConfig
from areal_jax.models.experts import ExpertKernels
from areal_jax.models.kernels.packed_attention import (
    BLOCKS,
    HALF_TOLERANCE,
    KernelChoice,
    abstract_on,
    compiled_trial,
    first_passing,
)
from areal_jax.models.kernels.trials import Trial, failure, tried_apart
from areal_jax.parallel.mesh import absent_device, platform_of


def triton() -> ExpertKernels:
    """Returns the Triton kernels of `models.kernels.expert_triton`."""
    from areal_jax.models.kernels.expert_triton import rows_times_matrices, rows_times_rows, sums_of_rows

    return ExpertKernels(rows_times_matrices, rows_times_rows, sums_of_rows)


def tokamax() -> ExpertKernels:
    """Returns tokamax's products, and the sums of `models.kernels.expert_triton`."""
    from areal_jax.models.kernels import expert_tokamax

    return triton()._replace(rows=expert_tokamax.rows_times_matrices, matrices=expert_tokamax.rows_times_rows)


KERNELS: Mapping[str, Callable[[], ExpertKernels]] = (
    {"tokamax": tokamax} if find_spec("tokamax") else {}
) | {"triton": triton}
"""The kernels, in the order in which `choose` tries them: tokamax first, where it is installed."""


def choose_for(config: ModelConfig, mesh: Mesh) -> tuple[KernelChoice, Callable[[], ExpertKernels] | None]:
    """Returns the way of the experts' products of a model on this mesh, and its kernels (BLOCKS: None)."""
    if not config.experts:
        return _none("the model has no experts"), None
    if config.numerics == "exact":
        return _none("adds in another order than the tiles that trainer.numerics=exact requires"), None
    if config.quantize != "none":
        return _none(f"reads floats, but the experts' matrices are {config.quantize} codes"), None
    sizes = config.experts, config.width, config.expert_width
    choice = choose(platform_of(mesh), *sizes, config.dtype, absent_device(mesh))
    return choice, KERNELS.get(choice.path)


def _none(reason: str) -> KernelChoice:
    return KernelChoice(BLOCKS, dict.fromkeys(KERNELS, reason))


@lru_cache
def choose(
    platform: str, experts: int, inputs: int, outputs: int, dtype: str, absent: Any | None = None
) -> KernelChoice:
    """Returns the choice of the first kernel that passes `self_test`, or BLOCKS (JAX code) if none does.

    Each self-test runs in a process of its own. Off GPUs, or if `dtype` is not bfloat16, the choice is BLOCKS
    without a test. `absent`: a device of `platform` that is not there; the choice is then the first kernel
    that compiles for this device.
    """
    if platform not in ("gpu", "cuda"):
        return _none(f"needs CUDA; this device is {platform}")
    if dtype != "bfloat16":
        return _none(f"needs model.dtype=bfloat16; it is {dtype}")
    if absent is None:
        return first_passing(KERNELS, lambda each: tried_apart(self_test, each, experts, inputs, outputs))
    shapes = (256, inputs), (experts, inputs, outputs), (256, outputs)
    numbers = ((experts + 1,), "int32"), ((64, 4), "int32")
    arguments = abstract_on(absent, *[(shape, dtype) for shape in shapes], *numbers)
    return first_passing(KERNELS, lambda each: compiled_trial(partial(_forms, each), *arguments))


def _forms(of: Callable[[], ExpertKernels], x: Array, matrices: Array, slope: Array, *rest: Array) -> Any:
    """Returns RESULTS for the rows `x` and the results' gradient `slope`."""
    kernels, (starts, place) = of(), rest
    return [
        kernels.rows(x, matrices, starts, 0, jnp.float32),
        kernels.rows(slope, matrices, starts, 1, x.dtype),
        kernels.matrices(x, slope, starts),
        kernels.sums(x, place),
    ]


RESULTS = "output", "gradient of the rows", "gradient of the matrices", "sum of a token's rows"
WATCHED = 3
"""The expert of which no bit may change."""


def self_test(
    of: Callable[[], ExpertKernels], experts: int, inputs: int, outputs: int, dtype: str = "bfloat16"
) -> Trial:
    """Tests kernels on this device, with experts that have no, one and many rows.

    Results are compared with float32 products of each expert's rows. The rows without an expert are NaN, and
    must not be read. Changing the rows and matrices of all experts but one must not change a bit of that
    expert's results, nor of the sums of its rows.
    """
    numbers = np.random.default_rng(0)
    sizes = numbers.integers(0, 40, experts)
    sizes[0], sizes[experts // 2], sizes[-1] = 0, 1, 300
    starts = np.concatenate([[0], np.cumsum(sizes)])
    count, watched = starts[-1], min(WATCHED, experts - 1)
    own = slice(starts[watched], starts[watched + 1])

    def drawn(*shape: int) -> np.ndarray:
        return numbers.normal(size=shape).astype(np.float32)

    x, slope, matrices = drawn(count + 9, inputs), drawn(count + 9, outputs), drawn(experts, inputs, outputs)
    x[count:] = slope[count:] = np.nan
    moved = [-3 * array for array in (x, matrices, slope)]
    moved[0][own], moved[2][own], moved[1][watched] = x[own], slope[own], matrices[watched]
    # Tokens with two of the watched expert's rows, one or none.
    place = np.where(numbers.random((40, 3)) < 0.6, numbers.integers(own.start, own.stop, (40, 3)), -1)
    both = jax.jit(partial(_forms, of))

    def results(given: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = both(*(jnp.asarray(each, dtype) for each in given), starts, place)
        return [np.asarray(one, np.float32) for one in found]

    try:
        got, again = results((x, matrices, slope)), results(moved)
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run here may raise anything
        return Trial(failure(error))
    x, matrices, slope = (np.asarray(jnp.asarray(a, dtype), np.float32) for a in (x, matrices, slope))
    want = [np.zeros((count, outputs)), np.zeros((count, inputs)), np.zeros(matrices.shape)]
    for expert, (start, end) in enumerate(pairwise(starts.tolist())):
        want[0][start:end] = x[start:end] @ matrices[expert]
        want[1][start:end] = slope[start:end] @ matrices[expert].T
        want[2][expert] = x[start:end].T @ slope[start:end]
    want.append(np.where((place >= 0)[..., None], x[place], 0).sum(1))
    gaps = []
    for name, one, wanted in zip(RESULTS, got, want, strict=True):
        gaps.append(float(np.abs(one[: len(wanted)] - wanted).max() / np.abs(wanted).max()))
        if not gaps[-1] <= HALF_TOLERANCE:
            return Trial(
                f"its {name} differs from float32 by {gaps[-1]:.2g} of the largest value, more than the "
                f"tolerance {HALF_TOLERANCE:g}",
                gaps[-1],
            )
    places = own, own, watched, slice(None)
    for name, one, other, place in zip(RESULTS, got, again, places, strict=True):
        if one[place].tobytes() != other[place].tobytes():
            return Trial(f"its {name} of one expert depends on another expert's rows or matrix", max(gaps))
    return Trial(None, max(gaps))
