"""docs/algorithms.md: every preset with its paper and a config that loads, every piece with its settings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_jax.algorithms.advantages import ADVANTAGES
from areal_jax.algorithms.losses import LOSSES
from areal_jax.algorithms.off_policy import OFF_POLICY
from areal_jax.config.loading import load_config
from areal_jax.config.presets import PRESETS

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_has_the_presets_in_their_order():
    assert list(SECTIONS) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_section_has_its_paper_and_a_config_that_loads(name: str):
    section = SECTIONS[name]
    for paper in re.findall(r"arXiv:([\d.]+)", PRESETS[name].paper):
        assert f"arxiv.org/abs/{paper}" in section
    text = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert text, "no config lines"
    tree = yaml.safe_load(text[1])
    assert tree["algorithm"]["preset"] == name
    long = {"generation": {"max_tokens": 16384, "length": 20480}}
    load_config(long, tree)


@pytest.mark.parametrize(
    ("heading", "table"), [("Losses", LOSSES), ("Advantages", ADVANTAGES), ("Off-policy weights", OFF_POLICY)]
)
def test_every_piece_has_a_row_with_its_settings(heading: str, table: dict[str, Any]):
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", section, re.MULTILINE))
    assert list(rows) == list(table)
    for name, function in table.items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                assert f"`{parameter.name}`" in rows[name], f"{name}: {parameter.name}"


def test_the_tests_that_the_page_names_are_there():
    for path, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", PAGE):
        source = (Path(__file__).parents[1] / path).read_text()
        assert not test or f"def {test}(" in source
