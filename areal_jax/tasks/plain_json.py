"""JSON and text that every program can read, made of what a policy or an agent wrote."""

from __future__ import annotations

import json
import math
from typing import Any

MOST_LEVELS = 100
"""Deepest nesting of a JSON value; other programs, and Python's own recursion, end soon after a thousand."""


def readable(text: str) -> str:
    """Returns the text with U+FFFD in place of lone surrogates, which no encoding can write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_plain(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Returns whether a value of `json` is JSON to others: finite, of valid text, of at most MOST_LEVELS."""
    if isinstance(value, str):
        return value.isascii() or value == readable(value)
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, dict | list):
        return True
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return levels > 0 and all(is_plain(item, levels - 1) for item in items)


def loads(text: str | bytes) -> Any:
    """Returns the value of a JSON text; raises ValueError also for what `is_plain` calls no JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    if not is_plain(value):
        raise ValueError(
            f"it has numbers beyond those of JSON, broken Unicode, or more than {MOST_LEVELS} levels"
        )
    return value
