"""The private names of jax that areal-jax uses. No other module may use one (`tests/test_private_jax.py`).

jax moves or removes private names without notice, so each is looked up here, and an error says which jax has
it. `tools/check_newest_jax.sh` tries them with the newest jax and sets the upper bound in pyproject.toml.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from areal_jax.types import ArealError

Compiles = Callable[..., Any]
"""Compiles a program that is not stored, stores it, and returns it."""
Reads = Callable[..., tuple[Any | None, int | None]]
"""Returns a stored program and the seconds that compiling it took; twice None if it is not stored."""


class Private(NamedTuple):
    module: str
    names: tuple[str, ...]
    since: tuple[int, int] = (0, 0)
    """The first jax (major, minor) that has them; an earlier one needs none."""


NAMES = {
    "cuDNN's packed attention": Private(
        "jax._src.cudnn.fused_attention_stablehlo",
        ("dot_product_attention", "MaskType", "check_compute_capability", "is_cuda_compute_capability_equal"),
    ),
    "the coordination service of jax.distributed": Private("jax._src.distributed", ("global_state",)),
    "compiling a program once for several processes": Private(
        "jax._src.compiler", ("_compile_and_write_cache", "_cache_read")
    ),
    "Pallas kernels for a GPU that is not there": Private(
        "jax._src.pallas.triton.gpu_info", ("GpuInfo", "registry"), since=(0, 11)
    ),
}
"""What areal-jax needs it for -> the private module, and the names in it."""


def cudnn_attention() -> Any:
    """Returns jax's module of fused attention by cuDNN, of which jax.nn offers no packed layout."""
    return _private("cuDNN's packed attention")


def coordination_client() -> Any:
    """Returns this process's client of the coordination service, which has keys, and barriers with deadlines.

    None before jax.distributed.initialize.
    """
    return _private("the coordination service of jax.distributed").global_state.client


def replace_compiling(by: Callable[[Compiles, Reads], Compiles]) -> None:
    """Replaces jax's function that compiles a program and stores it by what `by` makes of it.

    `by` also gets the function that looks for a stored program. Does nothing if this jax lacks one of them:
    without them areal-jax compiles more often, and all else is the same.
    """
    try:
        found = _private("compiling a program once for several processes")
    except ArealError:
        return
    found._compile_and_write_cache = by(found._compile_and_write_cache, found._cache_read)


def pallas_gpus() -> Any | None:
    """Returns jax's module that describes GPUs to Pallas; None before jax 0.11, which asks for none."""
    return _private("Pallas kernels for a GPU that is not there")


def _private(purpose: str) -> Any:
    """Returns the private module, or None if this jax is older than the names.

    Raises ArealError if this jax lacks the module or one of the names.
    """
    module, names, since = NAMES[purpose]
    if jax.__version_info__[:2] < since:
        return None
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = None
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise ArealError(
            f"{purpose}: jax {jax.__version__} has no {module}.{missing[0]}, which areal-jax uses; install a "
            "jax within the bounds of areal-jax's pyproject.toml"
        )
    return found
