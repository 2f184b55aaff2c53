"""`areal-jax eval`: from a model's name or a run's folder to its figures.

A model is evaluated with the defaults below, a run with its own config and its newest committed version,
also while it trains: nothing of it is locked or written but a line in its evals.jsonl.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from areal_jax.config import Config, load_config
from areal_jax.models.config import SHAPES
from areal_jax.observe.evals import append_eval
from areal_jax.parallel.mesh import make_mesh
from areal_jax.runtime.committed import committed_params
from areal_jax.runtime.devices import use_virtual_cpus
from areal_jax.runtime.evaluation import Progress
from areal_jax.runtime.evaluator import SAMPLES, Evaluator, settings_of
from areal_jax.runtime.jobs import JOURNAL, use_compilation_cache
from areal_jax.runtime.sources import RANDOM, open_source
from areal_jax.tasks.held_out import held_out, without_splits
from areal_jax.tasks.source import WeightedTask, load_tasks
from areal_jax.trajectories.lock import holder
from areal_jax.types import ArealError, VersionedParams

DEFAULTS: dict[str, Any] = {
    "generation": {"slots": 16, "length": 1024, "max_tokens": 512, "decode_steps": 8, "prefill_chunk": 128}
}
"""What a model is evaluated with; a run is evaluated with its own config."""

NICE = 19
"""The lowest priority: what an evaluation beside a run in progress gives itself."""


def eval_model_or_run(
    name: str,
    words: Sequence[str] = (),
    limit: int | None = None,
    samples: int = SAMPLES,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """The figures of MODEL_OR_RUN as plain values; of a run they are also kept in its evals.jsonl.

    A model is a `model.source`, a folder, a file, or the name of a shape with random parameters. Raises
    ArealError.
    """
    folder = Path(name)
    if (folder / JOURNAL).exists():
        figures = _eval_run(folder, words, limit, samples, progress)
        append_eval(folder, figures)
        return figures
    return _eval_model(name, words, limit, samples, progress)


def _eval_model(
    name: str, words: Sequence[str], limit: int | None, samples: int, progress: Progress
) -> dict[str, Any]:
    config = load_config(DEFAULTS, *words, {"model": model_section(name)})  # whatever they say
    settings, asked = settings_of(config, limit, samples), held_out(config.tasks)
    use_compilation_cache()
    source = open_source(config, asked.tasks)
    evaluator = Evaluator(config, source.model.base, asked, settings, _mesh(config))
    value = VersionedParams(0, source.load(evaluator.shardings), "")
    return {"model": name, "run": None, "refused": []} | evaluator.figures(value, progress)


def _eval_run(
    folder: Path, words: Sequence[str], limit: int | None, samples: int, progress: Progress
) -> dict[str, Any]:
    if holder(folder / JOURNAL) is not None:
        os.nice(NICE)  # before jax makes its threads: they inherit it
    trained = load_config(folder / "config.yaml")
    config = load_config(_base_of(trained), *words)
    settings, asked = settings_of(config, limit, samples), held_out(config.tasks)
    use_compilation_cache()
    is_tasks_own = config.model.source == RANDOM and config.model.tokenizer == "auto"
    source = open_source(config, load_tasks(trained.tasks) if is_tasks_own else asked.tasks)
    _require_tokenizer(asked.tasks, source.model.tokenizer, folder)
    evaluator = Evaluator(config, source.model, asked, settings, _mesh(config))
    dtype = config.weights.wire_dtype
    found = committed_params(folder, trained, source.model, evaluator.shardings, dtype)
    named = {"model": None, "run": str(folder), "refused": list(found.refused)}
    return named | evaluator.figures(found.value, progress)


# --- config -------------------------------------------------------------------------------------------------


def model_section(name: str) -> dict[str, str]:
    """The `model` section that the first word stands for. Raises ArealError for a name of nothing."""
    if name in SHAPES:
        return {"source": "random", "shape": name}
    known = ["random", "smollm2"]
    if name in known or Path(name).exists():
        return {"source": name}
    runs = [str(path) for path in Path("runs").glob("*") if (path / JOURNAL).exists()]
    near = difflib.get_close_matches(name, [*known, *SHAPES, *runs], n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join([*known, *SHAPES])}"
    raise ArealError(f"there is no model or run {name}; {hint}; or give a model's folder, a GGUF file, a run")


def _base_of(config: Config) -> dict[str, Any]:
    """The run's own config without what it says of training alone: its splits, and lengths it resolved."""
    tree = config.model_dump(mode="json")
    tree["tasks"] = without_splits(tree["tasks"])
    tree["trainer"]["length"] = None
    tree["generation"]["page_tokens"] = None
    return tree


def _require_tokenizer(tasks: Mapping[str, WeightedTask], tokenizer: Any, folder: Path) -> None:
    """A task with a tokenizer of its own scores that tokenizer's ids: the run's has to be the same."""
    for name, weighted in tasks.items():
        own = weighted.task.tokenizer
        if own is not None and (type(own), own.vocab_size) != (type(tokenizer), tokenizer.vocab_size):
            raise ArealError(
                f"tasks.{name} brings a {type(own).__name__} of {own.vocab_size} ids, and {folder} was "
                f"trained with a {type(tokenizer).__name__} of {tokenizer.vocab_size}; evaluate the run on a "
                "task of its own tokenizer"
            )


def _mesh(config: Config) -> Mesh:
    """That of one generation host."""
    use_virtual_cpus(config.runtime.host_tensor)
    return make_mesh({"tensor": config.runtime.host_tensor}, jax.devices(), "the evaluation")
