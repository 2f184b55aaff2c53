"""The page's table of the metrics row: a line for each figure, and none for a figure that no code makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_jax.config.sections import ControlConfig
from areal_jax.observe.metrics import REQUIRED, read_rows
from areal_jax.runtime.rows import BY_TASK, HOST_COUNTS, RowMaker
from areal_jax.trainer.update_metrics import OF_MINIBATCHES
from tests.runtime.test_rows import BATCH, TRAINED, make

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "cli.md").read_text().split("\n## The metrics row\n")[1].split("\n### ")[0]
FIELDS = [name for line in re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE) for name in line.split(", ")]
MADE_IN = ("runtime", "trainer", "trajectories", "algorithms", "models")
"""The rooms that make figures of a row."""


def names(keys) -> set[str]:
    """The fields of a row in the page's form: `name/task` and `name/age_0` are `name`."""
    return {f"`{key.split('/')[0]}`" for key in keys}


def test_each_field_of_the_table_has_one_line():
    assert len(FIELDS) == len(set(FIELDS)) > 70
    assert all(re.fullmatch(r"`\w+`", name) for name in FIELDS)


@pytest.mark.slow
def test_every_figure_of_a_trained_row_has_a_line(trained: Path):
    rows = read_rows(trained)
    assert len(rows) == 3
    assert set().union(*(names(row) for row in rows)) - set(FIELDS) == set()


@pytest.mark.parametrize("over_age", ["restart", "hold", "mask"])
def test_every_figure_of_a_batch_has_a_line(over_age: str):
    control = ControlConfig(over_age=over_age, max_token_age=4)
    row = make(control=control).make(5, BATCH, TRAINED, "0" * 16, gates=(("extra", False),))
    fixed = {*REQUIRED, *BY_TASK, *HOST_COUNTS, *RowMaker.COUNTED, *OF_MINIBATCHES}
    assert names({*row, *fixed}) - set(FIELDS) == set()


def test_no_line_is_of_a_figure_that_no_code_makes():
    sources = "".join(
        file.read_text() for room in MADE_IN for file in sorted((ROOT / "areal_jax" / room).glob("*.py"))
    )
    assert [name for name in FIELDS if f'"{name.strip("`")}"' not in sources] == []
