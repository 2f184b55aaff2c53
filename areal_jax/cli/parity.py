"""The verb that compares both sides of a run: parity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import plain_errors, print_json
from areal_jax.cli.train import AsJson


def register(app: typer.Typer) -> None:
    app.command()(parity)


@plain_errors
def parity(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="smollm2, a Hugging Face folder, a GGUF file, a shape (random), or a run's folder.",
        ),
    ],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts asked.")] = 8,
    members: Annotated[int, typer.Option(min=1, help="Completions of each.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Of sampling, and of a shape's parameters.")] = 0,
    json: AsJson = False,
) -> None:
    """How far generator and trainer log-probs differ, in bits."""
    from areal_jax.runtime.parity import parity as compare

    figures = compare(
        name,
        prompts=prompts,
        members=members,
        max_tokens=max_tokens,
        seed=seed,
        progress=lambda said: typer.echo(said, err=True),
    )
    if json:
        print_json(figures)
    else:
        _print_table(figures)


def _print_table(figures: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    columns = ("mean", "p999", "max", "mismatch_kl")
    table = Table("dtype", "numerics", "tokens", *columns, "unequal bits", box=SIMPLE, padding=0)
    for row in figures["rows"]:
        gaps = (f"{row[name]:.2g}" for name in columns)
        unequal = f"{row['unequal']} ({1 - row['equal_share']:.1%})"
        table.add_row(row["dtype"], row["numerics"], str(row["tokens"]), *gaps, unequal)
    typer.echo(f"{figures['model']}: |generator - trainer| log-prob of sampled tokens, in nats")
    Console().print(table)
