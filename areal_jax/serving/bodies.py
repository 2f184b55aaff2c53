"""What the bodies of all HTTP requests have in common: their check, and fields with the same rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    StringConstraints,
    ValidationError,
)
from pydantic_core import core_schema

from areal_jax.serving.requests import invalid

B = TypeVar("B", bound=BaseModel)


def validated(kind: type[B], data: Any) -> B:
    """Returns a body as `kind`; a field of null counts as absent.

    Raises RequestError, with the name of the field, if the body is not valid.
    """
    if not isinstance(data, dict):
        raise invalid(f"the body is {data!r:.40}, but must be a JSON object")
    try:
        return kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        found = "" if first["type"] == "missing" else f", but is {first['input']!r:.80}"
        raise invalid(f"{name}: {first['msg']}{found}; see docs/serving.md for the fields", name) from None


Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]

StopTexts = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]],
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
"""Texts that end a completion, given as one text or a list."""


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: _Function


Tool = Annotated[
    dict[str, Any],
    GetPydanticSchema(
        lambda _, schema_of: core_schema.no_info_wrap_validator_function(
            lambda sent, check: (check(sent), sent)[1], schema_of(_Tool)
        )
    ),
]
"""A tool's schema: checked, and kept as it was sent, because chat templates write it into the prompt."""
