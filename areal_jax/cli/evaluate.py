"""The command `eval`, which measures a model's accuracy on tasks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from areal_jax.cli.shell import AsJson, Model, print_json


def evaluate(
    model: Model,
    words: Annotated[
        list[str] | None, typer.Argument(help="Settings: tasks=NAME, YAML files and section.key=value.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Evaluate only this many prompts of each task, from the first on; all by default."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Completions sampled per prompt for pass@k; 0 evaluates greedily only.")
    ] = 4,
    json: AsJson = False,
) -> None:
    """Measure greedy accuracy and pass@k on a held-out split, with 95 % confidence intervals."""
    from areal_jax.evaluation.command import eval_model_or_run
    from areal_jax.observe.evals import eval_progress, print_eval
    from areal_jax.serving.run_services import make_gateway

    with eval_progress(sys.stderr) as progress:
        own = model, words or [], limit, samples, progress
        figures = eval_model_or_run(*own, make_gateway=make_gateway)
    if json:
        print_json(figures)
    else:
        print_eval(figures, sys.stdout)
