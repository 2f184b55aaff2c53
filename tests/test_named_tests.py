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


def test_the_page_on_areal_holds_a_test_a_row():
    rows = [line for line in (ROOT / "docs" / "areal.md").read_text().splitlines() if line.startswith("| ")]
    assert [bool(NAMED.search(row)) for row in rows[1:]] == [True] * 23
