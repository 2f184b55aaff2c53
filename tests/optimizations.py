"""Which tests compile as users do, and which with few optimizations: compiling takes most of their time.

Without most of XLA's optimizations a program is compiled in half the time, and its results differ by
rounding. So a file of tests whose text speaks of bits, digests, small tolerances, memory or compiled programs
compiles as users do; all others, and the processes that they start, do not. The markers `all_optimizations`
(a program that runs long) and `few_optimizations` (bits of something that is not compiled) decide otherwise.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

SPEAKS_OF_BITS = re.compile(
    r"(?<![a-z])bits?(?![a-z])|identical|digest|array_equal|trees_all_equal|tobytes|bitwise", re.IGNORECASE
)
SPEAKS_OF_PROGRAMS = re.compile(
    r"memory_analysis|cost_analysis|forecast|flops|as_text|compiled_programs|\bhlo\b|mark\.accelerators",
    re.IGNORECASE,
)
TOLERANCE = re.compile(r"\b(?:rtol|atol|rel|abs)=(\d[\d.e+-]*)")
LEAST_TOLERANCE = 1e-4
"""Rounding in float32 stays below it with few optimizations, too."""

T = TypeVar("T")

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


def has_few_optimizations(module: ModuleType) -> bool:
    """Whether the tests of a module compile with few optimizations."""
    marks = getattr(module, "pytestmark", [])
    names = {mark.name for mark in (marks if isinstance(marks, list) else [marks])}
    if names & {"few_optimizations", "all_optimizations"}:
        return "few_optimizations" in names
    return not _text_needs_all_optimizations(module.__file__)


@cache
def _text_needs_all_optimizations(path: str) -> bool:
    return needs_all_optimizations(Path(path).read_text())


def needs_all_optimizations(source: str) -> bool:
    """Whether what the source asserts may depend on how programs are compiled."""
    tolerances = [float(number) for number in TOLERANCE.findall(source)]
    return bool(
        SPEAKS_OF_BITS.search(source)
        or SPEAKS_OF_PROGRAMS.search(source)
        or any(tolerance < LEAST_TOLERANCE for tolerance in tolerances)
    )


CACHED: list[Any] = []


def cached(make: Callable[..., T]) -> Callable[..., T]:
    """`functools.cache` for what files share; emptied when programs compile the other way from then on."""
    kept = cache(make)
    CACHED.append(kept)
    return kept


def compile_with(is_few: bool) -> None:
    """Compile programs with few optimizations or as users do, here and in processes that start later."""
    if is_few == (os.environ.get(VARIABLE) == "1"):
        return
    if is_few:
        os.environ[VARIABLE] = "1"
    else:
        del os.environ[VARIABLE]
    if jax := sys.modules.get("jax"):
        jax.config.update(VARIABLE.lower(), is_few)
        jax.clear_caches()  # of programs that were compiled the other way
    for kept in CACHED:
        kept.cache_clear()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give the test's fixture `few_optimizations` the setting of its module.

    A parameter of the session: pytest runs all tests of one setting, then those of the other, and makes
    session fixtures that ask for it anew between them. The tests' names do not show it.
    """
    is_few = has_few_optimizations(metafunc.module)
    metafunc.parametrize(
        "few_optimizations", [is_few], ids=[pytest.HIDDEN_PARAM], indirect=True, scope="session"
    )
