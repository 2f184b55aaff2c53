"""`areal-jax eval`: evaluates a model or a run on held-out tasks.

A model is evaluated with the config DEFAULTS (below); a run is evaluated with the run's config, at its newest
complete version. Settings on the command line override the config. A run may be in progress: the evaluation
does not lock the run's folder, and only appends a line to evals.jsonl in that folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_jax.assembly.committed import committed_params
from areal_jax.assembly.devices import host_mesh, use_compilation_cache
from areal_jax.assembly.gpus import use_gpu_environment
from areal_jax.assembly.run_folder import JOURNAL, run_config
from areal_jax.assembly.sources import open_source
from areal_jax.assembly.tokenizer_source import RANDOM
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.episodes.workflow_runner import Gateway
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.evaluation.run import EvalSettings, OnProgress
from areal_jax.models.config import SHAPES
from areal_jax.observe.evals import append_eval
from areal_jax.plugin import did_you_mean
from areal_jax.tasks.held_out import held_out, without_splits
from areal_jax.tasks.source import WeightedTask, load_tasks
from areal_jax.trajectories.lock import holder
from areal_jax.types import ArealError, VersionedParams

DEFAULTS: dict[str, Any] = {
    "generation": {"slots": 16, "length": 1024, "decode_steps": 8, "prefill_chunk": 128}
}
"""The config for evaluating a model; a run is evaluated with its own config."""

NICE = 19
"""The lowest process priority (`nice`), used to evaluate a run that is in progress."""


def eval_model_or_run(
    name: str,
    words: Sequence[str] = (),
    limit: int | None = None,
    samples: int = EvalSettings.samples,
    progress: OnProgress = lambda *_: None,
    *,
    make_gateway: Callable[[], Gateway] | None = None,
) -> dict[str, Any]:
    """Evaluates a model or a run; returns the figures, and appends a run's figures to its evals.jsonl.

    `name` is a run's folder, a value of `model.source`, a model's folder or file, or a built-in model size,
    which gets random parameters. `words`: settings that override the config, each `section.key=value`.
    `limit`: number of each task's prompts, None: all; `samples`: sampled completions per prompt, besides a
    greedy one. `progress`: see `evaluation.run.OnProgress`; `make_gateway`: see `EvalSettings`. Raises
    ArealError if there is no such model or run, or the evaluation is impossible.
    """
    folder = Path(name)
    settings = partial(EvalSettings, limit=limit, samples=samples, make_gateway=make_gateway)
    if (folder / JOURNAL).exists():
        figures = _eval_run(folder, words, settings, progress)
        append_eval(folder, figures)
        return figures
    return _eval_model(name, words, settings, progress)


def _eval_model(
    name: str, words: Sequence[str], make_settings: Callable[[Config], EvalSettings], progress: OnProgress
) -> dict[str, Any]:
    # Last: the model named on the command line wins.
    config = load_config(DEFAULTS, *words, {"model": model_section(name)})
    settings, asked = make_settings(config), held_out(config.tasks)
    use_gpu_environment(config)
    use_compilation_cache()
    source = open_source(config, asked)
    evaluator = Evaluator(source.model.base, asked, settings, host_mesh(config, "the evaluation"))
    value = VersionedParams(0, source.load(evaluator.shardings), "")
    return {"model": name, "run": None, "refused": []} | evaluator.figures(value, progress)


def _eval_run(
    folder: Path, words: Sequence[str], make_settings: Callable[[Config], EvalSettings], progress: OnProgress
) -> dict[str, Any]:
    if holder(folder / JOURNAL) is not None:
        os.nice(NICE)  # before jax makes its threads: they inherit it
    trained = run_config(folder)
    config = load_config(_base_of(trained), *words)
    settings, asked = make_settings(config), held_out(config.tasks)
    use_gpu_environment(config)
    use_compilation_cache()
    is_tasks_own = config.model.source == RANDOM and config.model.tokenizer == "auto"
    source = open_source(config, load_tasks(trained.tasks) if is_tasks_own else asked)
    _require_tokenizer(asked, source.model.tokenizer, folder)
    evaluator = Evaluator(source.model, asked, settings, host_mesh(config, "the evaluation"))
    dtype = config.wire_dtype
    found = committed_params(folder, trained, source.model, evaluator.shardings, dtype)
    named = {"model": None, "run": str(folder), "refused": list(found.refused)}
    return named | evaluator.figures(found.value, progress)


# --- config -------------------------------------------------------------------------------------------------


def model_section(name: str) -> dict[str, str]:
    """Returns the config's `model` section for `name`, the model given on the command line.

    Raises ArealError if `name` is neither an existing path, nor random, smollm2 or a built-in model size.
    """
    if name in SHAPES:
        return {"source": "random", "shape": name}
    known = ["random", "smollm2"]
    if name in known or Path(name).exists():
        return {"source": name}
    runs = [str(path) for path in Path("runs").glob("*") if (path / JOURNAL).exists()]
    names = [*known, *SHAPES]
    hint = did_you_mean(name, [*names, *runs], f"choose one of {', '.join(names)}")
    raise ArealError(f"no model or run {name}; {hint}; or give a model's folder, a GGUF file or a run")


def _base_of(config: Config) -> dict[str, Any]:
    """Returns a run's config as a dict, with task splits, trainer.length and generation.page_tokens unset."""
    tree = config.model_dump(mode="json")
    tree["tasks"] = without_splits(tree["tasks"])
    # None: resolved again, because the words may change what they depend on.
    tree["trainer"]["length"] = None
    tree["generation"]["page_tokens"] = None
    return tree


def _require_tokenizer(tasks: Mapping[str, WeightedTask], tokenizer: Any, folder: Path) -> None:
    """Raises ArealError if a task's own tokenizer differs from `tokenizer`, the run's, in type or size.

    Size is the number of ids. A task without its own tokenizer passes. `folder`: the run's folder, for the
    message.
    """
    for name, weighted in tasks.items():
        own = weighted.task.tokenizer
        if own is not None and (type(own), own.vocab_size) != (type(tokenizer), tokenizer.vocab_size):
            raise ArealError(
                f"tasks.{name} has its own {type(own).__name__} of {own.vocab_size} ids, but {folder} was "
                f"trained with a {type(tokenizer).__name__} of {tokenizer.vocab_size}; evaluate the run on a "
                "task that uses the run's tokenizer"
            )
