"""The verb that asks how good a model is: eval."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from areal_jax.cli.shell import INTERRUPTED, plain_errors, print_json
from areal_jax.cli.train import AsJson


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


@plain_errors
def evaluate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="smollm2, a Hugging Face folder, a GGUF file, a shape (random), or a run's folder.",
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(help="tasks=NAME, YAML files and section.key=value.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="The first so many prompts of each task; all unless given.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Completions a prompt for pass@k; 0: greedy only.")] = 4,
    json: AsJson = False,
) -> None:
    """Greedy accuracy and pass@k on a held-out split, with 95 % intervals."""
    from areal_jax.observe.evals import EvalProgress, print_eval
    from areal_jax.runtime.eval_jobs import eval_model_or_run

    try:
        with EvalProgress(sys.stderr) as progress:
            figures = eval_model_or_run(name, words or [], limit, samples, progress.show)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json(figures)
    else:
        print_eval(figures, sys.stdout)
