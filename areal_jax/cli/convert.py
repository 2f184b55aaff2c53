"""Verbs that turn one form of a model into another: convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import plain_errors, print_json
from areal_jax.cli.train import AsJson


def register(app: typer.Typer) -> None:
    app.command()(convert)


@plain_errors
def convert(
    source: Annotated[
        str, typer.Argument(help="A run's folder, a GGUF file, a Hugging Face folder, smollm2.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    form: Annotated[
        str, typer.Option("--as", help="Of a run with adapters: merged, adapter (peft's files), base.")
    ] = "merged",
    json: AsJson = False,
) -> None:
    """Write a model as a Hugging Face folder that transformers loads, or its adapter as peft does."""
    from areal_jax.runtime.convert import convert as write

    figures = write(source, target, dtype, form)
    if json:
        print_json(figures)
        return
    tokenizer = "with its tokenizer" if figures["has_tokenizer"] else "without a tokenizer"
    beside = f"for {figures['base']}" if "base" in figures else tokenizer
    typer.echo(f"{target}: {figures['parameters']:,} parameters in {dtype}, {beside}")
