"""A kernel's self-test runs in a process of its own, whose crash is a result like any other."""

from __future__ import annotations

import os
from typing import Any

import pytest

from areal_jax.models.kernels import trials
from areal_jax.models.kernels.trials import Trial, tried_apart
from tests.models.kernels import trial_functions as functions


def test_the_result_comes_from_another_process():
    assert tried_apart(functions.a_self_test, functions.kernel, 4, problem=None) == Trial(None, 1.0)
    assert tried_apart(functions.a_self_test, functions.kernel, 2, problem="leaks") == Trial("leaks", 0.5)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    assert tried_apart(functions.an_environment_test, functions.kernel) == Trial("false", None)


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (functions.reads_out_of_bounds, "its self-test was killed by SIGSEGV"),
        (functions.raises, "its self-test ended with status 1: ValueError: no such device"),
    ],
)
def test_a_crash_is_a_problem_of_the_kernel(kernel: Any, problem: str):
    assert tried_apart(functions.a_self_test, kernel, 4, problem=None) == Trial(problem)


def test_a_self_test_that_hangs_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "TIMEOUT_S", 0.5)
    found = tried_apart(functions.a_self_test, functions.hangs, 4, problem=None)
    assert found == Trial("its self-test did not end within 0.5 s")
