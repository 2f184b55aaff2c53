"""Shared by all commands: errors without tracebacks, results as one JSON object, and common options."""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import update_wrapper
from pathlib import Path
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
        "--allow-code", help="Import tasks, losses and agents that files of others name, or start them."
    ),
]
ALLOWED = "AREAL_JAX_ALLOW_CODE"
"""The variable with which --allow-code reaches the processes of a launched run; 1: as if it was given."""

CONFIG = "config.yaml"
OWN = ("config", "folder", "run", "words")
"""Names of the arguments that hold a user's own config files, the folders of such runs, and settings."""
RunFolder = Annotated[Path, typer.Argument(help="The run's folder.")]
AnyModel = Annotated[
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

    return _guarded(command, lambda given: given.get("words") or ())


def reading_configs(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command whose config files are the user's own, with the option --allow-code.

    What they name may be loaded, but without the option nothing that only another file names, such as the
    config of the run in model.source.
    """
    return _guarded(command, lambda given: written(*(given.get(name) for name in OWN)))


def written(*given: str | Path | Sequence[str] | None) -> Iterator[str]:
    """Yields these arguments of a command, and the text of each that is a config file, or a run's folder."""
    for one in given:
        if isinstance(one, str | Path):
            yield str(one)
            # As `config.loading` does, look among the packaged recipes, too.
            places = (Path(one), Path(one) / CONFIG, Path(__file__).parents[1] / one)
            yield from (place.read_text(errors="replace") for place in places if os.path.isfile(place))
        else:
            yield from written(*(one or ()))


def guarded_by(typed: Iterable[str]) -> AbstractContextManager[None]:
    """Returns `without_code(typed)`, or a context that does nothing where --allow-code has been given."""
    return nullcontext() if os.environ.get(ALLOWED) == "1" else without_code(typed)


@contextmanager
def _allowed() -> Iterator[None]:
    """Context manager: in its block, --allow-code holds, in processes that start there, too."""
    before = os.environ.get(ALLOWED, "")
    os.environ[ALLOWED] = "1"
    try:
        yield
    finally:
        os.environ[ALLOWED] = before


def _guarded(
    command: Callable[..., None], typed: Callable[[Mapping[str, Any]], Iterable[str]]
) -> Callable[..., None]:
    def guarded(allow_code: AllowCode = False, **given: Any) -> None:
        with _allowed() if allow_code else nullcontext(), guarded_by(typed(given)):
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


def show(
    figures: Mapping[str, Any], is_json: bool, text: Iterable[str] | Callable[[], None] | None = None
) -> None:
    """Prints a command's results: as one JSON object if `is_json`, else `text`.

    `text`: lines, or a function that prints the results; None: a line `name: value` for each of `figures`.
    """
    if is_json:
        print_json(figures)
    elif callable(text):
        text()
    else:
        for line in (f"{name}: {value}" for name, value in figures.items()) if text is None else text:
            typer.echo(line)


def progress(said: str) -> None:
    """Prints a line about a command's progress to standard error."""
    typer.echo(said, err=True)


def print_table(
    columns: Sequence[Any], rows: Iterable[Sequence[str]], width: int | None = None, **style: Any
) -> None:
    """Prints a table of at most `width` characters (None: those of the terminal).

    `columns`: the headers, or rich's Columns. `style`: options of rich's Table.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, **{"box": SIMPLE, **style})
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def print_memory(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a memory table: rows of `assembly.memory_table` as dicts with owner, content, bytes."""
    from rich.box import HEAVY_HEAD

    shown = ((row["owner"], row["content"], f"{row['bytes'] / 2**20:,.2f}") for row in rows)
    print_table(("owner", "content", "MiB"), shown, box=HEAVY_HEAD)


def print_json(figures: Mapping[str, Any]) -> None:
    """Prints `figures` to standard output as one JSON object on one line."""
    typer.echo(json.dumps(figures, ensure_ascii=False))
