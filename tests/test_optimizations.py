"""Tests that speak of bits compile as users do; others, and the processes that they start, do not."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import jax
import pytest

from tests.optimizations import VARIABLE, cached, compile_with, has_few_optimizations, needs_all_optimizations

SHOW = "import jax; print(jax.config.values['jax_disable_most_optimizations'])"


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("assert first == pytest.approx(second, rel=1e-4)", False),
        ("np.testing.assert_allclose(first, second, rtol=1e-3, atol=0.01)", False),
        ("assert habit == orbit", False),
        ("np.testing.assert_allclose(first, second, rtol=1e-3, atol=0)", True),
        ("assert first == pytest.approx(second, rel=2e-5)", True),
        ("np.testing.assert_array_equal(first, second)", True),
        ("assert rows[-1]['params_digest'] == last", True),
        ("# equal in every bit", True),
        ("assert same_bits(first, second)", True),
        ("pytestmark = pytest.mark.accelerators", True),
        ("jitted.lower(x).compile().memory_analysis()", True),
    ],
)
def test_a_file_that_speaks_of_bits_or_programs_needs_all_optimizations(source: str, needs: bool):
    assert needs_all_optimizations(source) == needs


def test_a_marker_decides_otherwise():
    module = ModuleType("module")
    module.__file__ = __file__
    assert not has_few_optimizations(module)  # this file names what it looks for
    module.pytestmark = [pytest.mark.slow, pytest.mark.few_optimizations]
    assert has_few_optimizations(module)
    module.pytestmark = pytest.mark.all_optimizations
    assert not has_few_optimizations(module)


def test_these_tests_compile_as_users_do(few_optimizations: bool):
    assert not few_optimizations and VARIABLE not in os.environ
    assert not jax.config.values["jax_disable_most_optimizations"]


def test_a_change_reaches_jax_its_compiled_programs_and_processes_that_start_later():
    made: list[int] = []
    shared = cached(lambda: made.append(1))
    twice = jax.jit(lambda x: 2 * x)
    assert twice(1) == 2 and twice._cache_size() == 1
    for is_few in (True, False):
        compile_with(is_few)
        assert jax.config.values["jax_disable_most_optimizations"] == is_few
        assert twice._cache_size() == 0 and twice(1) == 2
        shared(), shared()
        done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
        assert done.stdout == f"{is_few}\n"
    assert made == [1, 1]
