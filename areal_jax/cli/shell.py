"""What all verbs share: errors without tracebacks, and figures as one JSON object."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import typer

from areal_jax.types import ArealError

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130


def plain_errors(verb: F) -> F:
    """Errors that a user can mend are printed as they are, and the exit code is 1."""

    @functools.wraps(verb)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except ArealError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None

    return wrapped  # type: ignore[return-value]


def print_json(figures: Mapping[str, Any]) -> None:
    """Exactly one JSON object on standard output."""
    json.dump(figures, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
