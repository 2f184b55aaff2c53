"""Own tasks, losses and estimators by `module:name`, and the check of their settings."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from areal_jax.types import ArealError


def load_object(spec: str, builtin: Mapping[str, Any], what: str) -> Any:
    """The object named by `spec`: a key of `builtin` (an object or itself `module:name`), or `module:name`.

    Modules are searched where Python searches, the working folder included. Raises ArealError that names what
    is wrong.
    """
    if spec in builtin:
        found = builtin[spec]
        return load_object(found, {}, what) if isinstance(found, str) else found
    module_name, colon, name = spec.partition(":")
    if not colon:
        near = difflib.get_close_matches(spec, builtin, n=1)
        known = f"there are: {', '.join(builtin)}; or module:name of your own"
        raise ArealError(f"no {what} is called {spec!r}; {f'did you mean {near[0]}?' if near else known}")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ArealError(f"{what} {spec!r} is not of the form module:name, as in my_pkg.losses:my_clip")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        if os.getcwd() in sys.path:
            raise ArealError(
                f"{what} {spec!r}: there is no module {module_name}; is its folder on PYTHONPATH?"
            ) from None
        sys.path.insert(0, os.getcwd())
        return load_object(spec, builtin, what)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ArealError(f"{what} {spec!r}: module {module_name} has no {name}{hint}")
    return getattr(module, name)


def check_settings(function: Callable[..., Any], settings: Mapping[str, Any], key: str) -> None:
    """Raise ArealError unless `settings` are keyword arguments of `function`, and all its required ones.

    A function's annotations, such as Literal["token", "sequence"] or Annotated[float, Field(gt=0)], say what
    a value may be. `key` is the config key they were given under, for the message.
    """
    if not callable(function):
        raise ArealError(f"{key}: {function!r:.80} is not a function; name one by module:name")
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if inspect.isclass(function):
        named |= {p.name: p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for name in settings:
        if name not in named:
            near = difflib.get_close_matches(name, named, n=1)
            known = f"its settings are: {', '.join(named) or 'none'}"
            hint = f"did you mean {key}.{near[0]}?" if near else known
            raise ArealError(f"unknown key {key}.{name}; {hint}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in settings]
    if missing:
        raise ArealError(f"{key}.{missing[0]} is required; give it as {key}.{missing[0]}=VALUE")
    if not inspect.isclass(function):
        _check_values(function, settings, key)


def _check_values(function: Callable[..., Any], settings: Mapping[str, Any], key: str) -> None:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (
        NameError,
        TypeError,
    ):  # names that only a type checker imports, or a callable that is no function
        return
    for name in settings.keys() & hints.keys():
        try:
            TypeAdapter(hints[name]).validate_python(settings[name], strict=True)
        except PydanticSchemaGenerationError:
            continue  # a type of its own
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ArealError(f"{key}.{name}={settings[name]!r}: {reason[0].lower()}{reason[1:]}") from None
