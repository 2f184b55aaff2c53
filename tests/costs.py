"""What each test costs: its CPU seconds, those of its fixtures and of its ended child processes included."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BEGUN = pytest.StashKey[tuple[float, float]]()


def _cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class Costs:
    """Appends a line a test to a file: CPU seconds, wall seconds and the test's name, parted by tabs.

    A shared fixture is part of the first test that asks for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[BEGUN] = (_cpu_s(), time.monotonic())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.when == "teardown":
            cpu_s, wall_s = item.stash[BEGUN]
            with self._path.open("a") as file:  # workers append whole lines to one file
                file.write(f"{_cpu_s() - cpu_s:.2f}\t{time.monotonic() - wall_s:.2f}\t{item.nodeid}\n")
        return (yield)
