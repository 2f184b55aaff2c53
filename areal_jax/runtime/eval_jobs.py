"""`areal-jax eval`: from a model's name or a run's folder to its figures.

A model is evaluated with the defaults below, a run with its own config and its newest committed version,
also while it trains: nothing of it is locked or written but a line in its evals.jsonl.
"""

from __future__ import annotations

import difflib
import inspect
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from areal_jax.config import Config, load_config
from areal_jax.models.config import SHAPES
from areal_jax.models.model import Model
from areal_jax.observe.evals import append_eval
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.plugin import load_object
from areal_jax.runtime.committed import committed_params
from areal_jax.runtime.devices import use_virtual_cpus
from areal_jax.runtime.eval_result import RIGHT, EvalResult, task_figures
from areal_jax.runtime.evaluation import EvalSettings, Progress, evaluate
from areal_jax.runtime.jobs import JOURNAL, use_compilation_cache
from areal_jax.runtime.sources import RANDOM, open_source
from areal_jax.tasks.source import BUILTIN, WeightedTask, load_tasks
from areal_jax.tasks.task import Task
from areal_jax.trajectories.lock import holder
from areal_jax.types import ArealError, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import dtype_in, wire_copy

DEFAULTS: dict[str, Any] = {
    "generation": {"slots": 16, "length": 1024, "max_tokens": 512, "decode_steps": 8, "prefill_chunk": 128}
}
"""What a model is evaluated with; a run is evaluated with its own config."""

NICE = 19
"""The lowest priority: what an evaluation beside a run in progress gives itself."""

HELD_OUT = "test"


def eval_model_or_run(
    name: str,
    words: Sequence[str] = (),
    limit: int | None = None,
    samples: int = 4,
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
    settings = _settings(config, limit, samples)
    tasks, splits = _held_out(config.tasks)
    use_compilation_cache()
    source = open_source(config, tasks)
    model = source.model.base
    mesh, shardings = _place(config, model)
    params = source.load(shardings)
    value = as_served(VersionedParams(0, params, ""), config)
    result = evaluate(model, value, tasks, settings, mesh, progress)
    return {"model": name, "run": None, "refused": []} | _figures(value, config, settings, splits, result)


def _eval_run(
    folder: Path, words: Sequence[str], limit: int | None, samples: int, progress: Progress
) -> dict[str, Any]:
    if holder(folder / JOURNAL) is not None:
        os.nice(NICE)  # before jax makes its threads: they inherit it
    trained = load_config(folder / "config.yaml")
    config = load_config(_base_of(trained), *words)
    settings = _settings(config, limit, samples)
    tasks, splits = _held_out(config.tasks)
    use_compilation_cache()
    is_tasks_own = config.model.source == RANDOM and config.model.tokenizer == "auto"
    source = open_source(config, load_tasks(trained.tasks) if is_tasks_own else tasks)
    _require_tokenizer(tasks, source.model.tokenizer, folder)
    mesh, shardings = _place(config, source.model)
    found = committed_params(folder, trained, source.model, shardings, config.weights.wire_dtype)
    value = as_served(found.value, config)
    result = evaluate(source.model, value, tasks, settings, mesh, progress)
    named = {"model": None, "run": str(folder), "refused": list(found.refused)}
    return named | _figures(value, config, settings, splits, result)


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
    tree["tasks"] = {
        name: {key: value for key, value in settings.items() if key != "split"}
        for name, settings in tree["tasks"].items()
    }
    tree["trainer"]["length"] = None
    tree["generation"]["page_tokens"] = None
    return tree


def _settings(config: Config, limit: int | None, samples: int) -> EvalSettings:
    r = config.runtime
    return EvalSettings(
        config.generation,
        limit,
        samples,
        config.run.seed,
        r.reward_workers,
        r.reward_timeout_s,
        r.deadline_s,
    )


# --- tasks --------------------------------------------------------------------------------------------------


def _held_out(
    given: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, WeightedTask], dict[str, str | None]]:
    """The tasks with split=test where they have a split that was not given, and the split of each.

    None: a task without splits, evaluated as it is.
    """
    if not given:
        raise ArealError(f"eval needs a task; give tasks=NAME: {', '.join(BUILTIN)}, or module:Name")
    settings, splits = {}, {}
    for name, own in given.items():
        own = dict(own or {})
        make = load_object(name, {known: path for known, (path, _) in BUILTIN.items()}, "task")
        if not isinstance(make, Task) and callable(make) and "split" in inspect.signature(make).parameters:
            own.setdefault("split", HELD_OUT)
        settings[name], splits[name] = own, own.get("split")
    return load_tasks(settings), splits


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


# --- parameters and figures ---------------------------------------------------------------------------------


def _place(config: Config, model: Model) -> tuple[Any, Any]:
    """The mesh of one generation host, and the parameters' shardings on it."""
    use_virtual_cpus(config.runtime.host_tensor)
    mesh = make_mesh({"tensor": config.runtime.host_tensor}, jax.devices(), "the evaluation")
    return mesh, param_shardings(model.logical_axes, model.abstract_params, mesh)


def as_served(value: VersionedParams, config: Config) -> VersionedParams:
    """In weights.wire_dtype, as a run's hosts decode with them, with the digest of that."""
    dtype = config.weights.wire_dtype
    if any(leaf.dtype != dtype_in(leaf.dtype, dtype) for leaf in jax.tree.leaves(value.params)):
        return wire_copy(value, dtype)
    return value._replace(digest=value.digest or digest(value.params))


def _figures(
    value: VersionedParams,
    config: Config,
    settings: EvalSettings,
    splits: Mapping[str, str | None],
    result: EvalResult,
) -> dict[str, Any]:
    overall = task_figures(result.overall)
    passes = [overall[way] for way in ("greedy", "sampled") if way in overall]
    seconds = sum(one["seconds"] for one in passes)
    return {
        "version": value.version,
        "digest": value.digest,
        "limit": settings.limit,
        "samples": settings.samples,
        "threshold": RIGHT,
        "seed": settings.seed,
        "max_tokens": config.generation.max_tokens,
        "evaluated_s": time.time(),
        "tasks": {name: {"split": splits[name]} | task_figures(one) for name, one in result.tasks.items()},
        "overall": overall,
        "seconds": seconds,
        "tokens_per_s": sum(one["tokens"] for one in passes) / seconds,
    }
