"""Tests that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path):
    for file, test in NAMED.findall(page.read_text()):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{page.name} names {file}::{test}"


def rows_of(table: str) -> list[str]:
    """The rows of the first table in the text, without those of its head."""
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def test_the_page_on_systems_holds_a_test_for_each_difference_and_each_system():
    page = (ROOT / "docs" / "systems.md").read_text()
    differences = page.split("\n## Differences from AReaL's public implementation\n")[1]
    assert [bool(NAMED.search(row)) for row in rows_of(differences)] == [True] * 23
    systems = rows_of(page.split("\n## ")[0])
    assert [bool(NAMED.search(row)) for row in systems] == [True] * 5


def tiers(source: str) -> str:
    """Tiers of a file's tests: fast (`make test`), slow (`.ci/run` beside it) and soak (`make soak`)."""
    is_whole = re.search(r"^pytestmark = .*mark\.(slow|soak)", source, re.MULTILINE)
    return ", ".join(
        [*([] if is_whole else ["fast"]), *(t for t in ("slow", "soak") if f"mark.{t}" in source)]
    )


def test_the_page_on_reliability_says_in_which_tiers_each_test_runs():
    page = (ROOT / "docs" / "reliability.md").read_text()
    said = re.findall(r"`(tests/[\w/]+\.py)`(?: \(([a-z, ]+)\))?", page)
    assert said == [(file, tiers((ROOT / file).read_text())) for file, _ in said] != []
