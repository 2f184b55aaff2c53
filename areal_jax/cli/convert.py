"""The command `convert`, which writes a model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from areal_jax.cli.shell import AsJson, show


def convert(
    source: Annotated[
        str, typer.Argument(help="A run's folder, a GGUF file, a Hugging Face folder, or smollm2.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    dtype: Annotated[
        str, typer.Option(help="Type of the written weights: float32, bfloat16 or float16.")
    ] = "float32",
    form: Annotated[
        str,
        typer.Option(
            "--as", help="What to write of a run with adapters: merged, adapter (peft's files) or base."
        ),
    ] = "merged",
    json: AsJson = False,
) -> None:
    """Write a model as a Hugging Face folder that transformers loads, or its adapter in peft's format."""
    from areal_jax.assembly.conversion import convert as write

    figures = write(source, target, dtype, form)
    tokenizer = "with its tokenizer" if figures["has_tokenizer"] else "without a tokenizer"
    beside = f"for {figures['base']}" if "base" in figures else tokenizer
    show(figures, json, [f"{target}: {figures['parameters']:,} parameters in {dtype}, {beside}"])
