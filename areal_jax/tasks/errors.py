"""The errors of tasks, tokenizers and data sets, and the import of their optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from areal_jax.types import ArealError


class TaskError(ArealError):
    """A task, tokenizer or data set cannot be made or read; the message names the file, line or setting."""


class PromptError(TaskError):
    """A prompt cannot be read, encoded or scored, or is too long; other prompts may be usable."""


class TooLongError(PromptError):
    """A text has more ids than there is room for; it has at least `fewest`, and was not encoded."""

    def __init__(self, message: str, fewest: int) -> None:
        super().__init__(message)
        self.fewest = fewest


USERS = (Exception, SystemExit)
"""What users' code may raise without ending the process that calls it."""


def raised(error: BaseException) -> str:
    """Returns what users' code raised: the message of an ArealError; else its type, and the file and line."""
    if isinstance(error, ArealError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {error}{code}"


class VerifierError(Exception):
    """The process that compares answers gave no answer: the reward is unknown, and not 0."""


def import_extra(module: str, what: str, extra: str) -> Any:
    """Imports and returns `module`, which needs an optional package.

    Raises TaskError if the package is not installed. The message begins with `what`, a clause that says what
    needs the package, and names `extra`: installing areal-jax[extra] installs the package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        from areal_jax.plugin import install_extra  # imports pydantic, which reward workers do without

        raise TaskError(f"{what}, which is not installed ({error.name}): {install_extra(extra)}") from error
