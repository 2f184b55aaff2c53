"""Loads users' tasks, losses and estimators by `module:name`, and checks their settings.

Also keeps commands that read other people's files from doing so, and explains the import error of an optional
package.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from areal_jax.types import ArealError

NOT_INSTALLED = "not installed"

MOVED = {
    "areal_jax.algorithms.weights": "areal_jax.algorithms.off_policy",
    "areal_jax.simulation.sleeping_task": "areal_jax.lab.published.sleeping_task",
    "areal_jax.tasks.datasets.multihop": "areal_jax.lab.multihop",
}
"""Modules of this package that run folders may name as `module:name`, and their names since they moved."""

_typed: tuple[str, ...] | None = None
"""In a block of `without_code`, what the user wrote; None: all code may be loaded."""

_OF_TASKS = re.compile(r"^(tasks|trainer\.supervised\.tasks)\.")
"""The beginning of a word with a setting of a task, as in tasks.my_pkg:Riddles.count=3."""


@contextmanager
def without_code(typed: Iterable[str] = ()) -> Iterator[None]:
    """Context manager: in its block, code that only a file names is neither imported nor started.

    `typed`: what the user wrote: words of the command line and texts of config files; what one of them names
    may be loaded.
    """
    global _typed
    outer, _typed = _typed, tuple(typed)
    try:
        yield
    finally:
        _typed = outer


def require_code_allowed(named: str, key: str) -> None:
    """Raises ArealError if only a file names `named`, a program or `module:name`, in a `without_code` block.

    `key`: what names it, for the message.
    """
    if _typed is None:
        return
    end = "" if re.fullmatch(r"[\w.]+:\w+", named) else "."  # after module:name, a dot begins a setting
    whole = rf"(?<![\w:./-]){re.escape(named)}(?![\w/{end}-])"
    if any(re.search(whole, _OF_TASKS.sub("", word)) for word in _typed):
        return
    raise ArealError(
        f"{key} {named!r} is code that this command would execute because a file names it; read the file's "
        "config and that code, and give --allow-code if you trust both"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the name in `known` that is most similar to `name`; "" if none is similar."""
    close = difflib.get_close_matches(name, known, n=3)
    # gpro is rather grpo than gspo: letters are swapped more often than replaced.
    return max(close, key=lambda one: sorted(one) == sorted(name), default="")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Returns a hint for messages: `prefix` + the nearest name in `known`; `otherwise` if none is similar."""
    near = nearest(name, known)
    return f"did you mean {prefix}{near}?" if near else otherwise


def load_object(spec: str, builtin: Mapping[str, Any], what: str) -> Any:
    """Returns the object that `spec` names: a key of `builtin`, or `module:name`.

    `builtin` maps a name to the object or to its `module:name`. Modules are searched on Python's path and in
    the working folder. Raises ArealError if the name, the module or its attribute is not found, or in a block
    of `without_code`; `what` names the kind of object in the message.
    """
    if spec in builtin:
        found = builtin[spec]
        return _imported(found, what) if isinstance(found, str) else found
    module_name, colon, name = spec.partition(":")
    if not colon:
        known = f"choose one of {', '.join(builtin)}, or give module:name of your own"
        raise ArealError(f"no {what} is called {spec!r}; {did_you_mean(spec, builtin, known)}")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ArealError(f"{what} {spec!r} is not of the form module:name, as in my_pkg.losses:my_clip")
    require_code_allowed(spec, what)
    return _imported(spec, what)


def _imported(spec: str, what: str) -> Any:
    module_name, _, name = spec.partition(":")
    module_name = MOVED.get(module_name, module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        if os.getcwd() in sys.path:
            raise ArealError(
                f"{what} {spec!r}: module {module_name} was not found; check that its folder is on PYTHONPATH"
            ) from None
        sys.path.insert(0, os.getcwd())
        return _imported(spec, what)
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module), "correct the name", prefix=f"{module_name}:")
        raise ArealError(f"{what} {spec!r}: module {module_name} has no {name}; {hint}")
    return getattr(module, name)


def version_of(package: str) -> str:
    """Returns a package's version; NOT_INSTALLED also for a checkout that is only on Python's path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def install_extra(extra: str) -> str:
    """Returns the shell command that installs the extra `extra` of areal-jax, for messages.

    The command installs from the repository, because areal-jax is not on a package index.
    """
    return f"pip install '.[{extra}]' in a checkout of areal-jax (or 'FILE.whl[{extra}]' from its wheel)"


@contextmanager
def needing(
    what: str, extra: str, packages: Collection[str] | None = None, instead: str = ""
) -> Iterator[None]:
    """Context manager: in its block, the import error of a missing package becomes an ArealError.

    The message says that `what` needs the package, and how to install the extra `extra`; it ends with
    `instead`, a text with another remedy. `packages`: the top-level modules for which the error is replaced;
    None: all modules.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if packages is not None and (error.name or "").partition(".")[0] not in packages:
            raise
        package = f"{what} needs the package {error.name}"
        raise ArealError(f"{package}: {install_extra(extra)}{instead}") from None


def check_settings(function: Callable[..., Any], settings: Mapping[str, Any], key: str) -> None:
    """Raises ArealError unless `settings` are keyword arguments of `function` and include all required ones.

    If `function` is not a class, each value must also match its argument's annotation, such as
    Literal["token", "sequence"]. `key` is the config key of the settings, for the message.
    """
    if not callable(function):
        raise ArealError(f"{key}: {function!r:.80} is not a function; give a function as module:name")
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if inspect.isclass(function):
        named |= {p.name: p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for name in settings:
        if name not in named:
            known = f"its settings are: {', '.join(named) or 'none'}"
            raise ArealError(f"unknown key {key}.{name}; {did_you_mean(name, named, known, f'{key}.')}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in settings]
    if missing:
        raise ArealError(f"{key}.{missing[0]} is required; give it as {key}.{missing[0]}=VALUE")
    if not inspect.isclass(function):
        _check_values(function, settings, key)


def _check_values(function: Callable[..., Any], settings: Mapping[str, Any], key: str) -> None:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return  # names that only a type checker imports, or a callable that is no function
    for name in settings.keys() & hints.keys():
        try:
            TypeAdapter(hints[name]).validate_python(settings[name], strict=True)
        except PydanticSchemaGenerationError:
            continue  # a type of its own
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ArealError(f"{key}.{name}={settings[name]!r}: {reason[0].lower()}{reason[1:]}") from None
