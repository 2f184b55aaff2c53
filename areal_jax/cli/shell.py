"""Shared by all commands: errors without tracebacks, results as one JSON object, and common options."""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import update_wrapper
from typing import Annotated, Any

import typer
from typer import Context
from typer.core import TyperGroup

from areal_jax.file_errors import explained
from areal_jax.plugin import without_code
from areal_jax.types import ArealError

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Import tasks, losses and agents of your own that the files name, or start them."
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        help="smollm2, a Hugging Face folder, a GGUF file, a built-in model size (random parameters), or a "
        "run's folder."
    ),
]


POINTER = (
    "`areal-jax plan CONFIG --target h100xN` compiles every program for devices that need not be there, and "
    "says whether the run fits."
)
"""Shown with dry runs, whose memory table has no temporaries."""


class Verbs(TyperGroup):
    """Prints an error that a user can mend without a traceback, and then exits with code 1."""

    def invoke(self, ctx: Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ArealError, OSError) as error:
            if (shown := explained(error)) is None:
                raise
            typer.echo(f"error: {shown}", err=True)
            raise typer.Exit(1) from None


def reading_files(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that reads files which others may have made, with the option --allow-code.

    Without it, code that only such a file names is neither imported nor started (`plugin.without_code`).
    """

    def guarded(allow_code: AllowCode = False, **given: Any) -> None:
        with nullcontext() if allow_code else without_code(given.get("words") or ()):
            command(**given)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.signature(guarded, eval_str=True).parameters["allow_code"]
    parameters = [one.replace(kind=option.KEYWORD_ONLY) for one in (*signature.parameters.values(), option)]
    update_wrapper(guarded, command)
    guarded.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    guarded.__annotations__ = {one.name: one.annotation for one in parameters}
    return guarded


def stop_on_sigterm() -> None:
    """From now on SIGTERM stops the command as cleanly as Ctrl-C; typer ends both with exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def show(figures: Mapping[str, Any], is_json: bool, lines: Iterable[str] | None = None) -> None:
    """Prints a command's results: as one JSON object if `is_json`, else the text `lines`.

    If `lines` is None, prints a line `name: value` for each of `figures`.
    """
    if is_json:
        print_json(figures)
        return
    for line in (f"{name}: {value}" for name, value in figures.items()) if lines is None else lines:
        typer.echo(line)


def print_memory(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a memory table: rows of `assembly.memory_table` as dicts with owner, content, bytes."""
    from rich.console import Console
    from rich.table import Table

    table = Table("owner", "content", "MiB")
    for row in rows:
        table.add_row(row["owner"], row["content"], f"{row['bytes'] / 2**20:,.2f}")
    Console().print(table)


def print_json(figures: Mapping[str, Any]) -> None:
    """Prints `figures` to standard output as one JSON object on one line."""
    typer.echo(json.dumps(figures, ensure_ascii=False))
