"""Names for compiled programs in the errors of the device that runs them."""

from __future__ import annotations

from typing import Any

import jax

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""A device's error has this in its message if memory was exhausted."""
_NOTE = "program: "


class Running:
    """Adds the program's name to an error of the device that the `with` block raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error, jax.errors.JaxRuntimeError):
            error.add_note(_NOTE + self._name)


def program_of(error: BaseException) -> str | None:
    """Returns the name that `Running` added to the error, or None.

    None also if the device reported the error later, when a result was read.
    """
    notes = getattr(error, "__notes__", ())
    return next((note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)), None)
