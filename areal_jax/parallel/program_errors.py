"""Names for compiled programs in the errors of the device that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""A device's error has this in its message if memory was exhausted."""
_NOTE = "program: "


@contextmanager
def running(name: str) -> Iterator[None]:
    """Adds the program's name to an error of the device that the `with` block raises."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error.add_note(_NOTE + name)
        raise


def program_of(error: BaseException) -> str | None:
    """Returns the name that `running` added to the error, or None.

    None also if the device reported the error later, when a result was read.
    """
    notes = getattr(error, "__notes__", ())
    return next((note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)), None)
