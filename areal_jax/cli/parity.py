"""The command `parity`, which compares the log-probs of generator and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from areal_jax.cli.shell import AsJson, Model, print_json


def parity(
    model: Model,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 8,
    members: Annotated[int, typer.Option(min=1, help="Number of completions per prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a completion, in tokens.")] = 64,
    seed: Annotated[
        int, typer.Option(help="Seed of sampling and, for a built-in model size, of the random parameters.")
    ] = 0,
    json: AsJson = False,
) -> None:
    """Measure how far generator and trainer log-probs differ, in nats and bit by bit."""
    from areal_jax.lab.bench.parity import parity as compare

    figures = compare(
        model,
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
