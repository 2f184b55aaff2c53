"""docs/algorithms.md: every preset with its paper and keys that load, every piece with its settings."""

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
from areal_jax.config.presets import PRESETS, preset_settings

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()
PRESET_ROWS = dict(
    re.findall(r"^\| `(\w+)` \|(.*)$", PAGE.split("\n## Presets\n")[1].split("\n## ")[0], re.MULTILINE)
)
"""The cells after the name: loss, advantage, reduction, keys, source."""


def test_the_page_has_the_presets_in_their_order():
    assert list(PRESET_ROWS) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_row_has_its_reduction_its_paper_and_keys_that_load(name: str):
    _, _, reduction, keys, source, _ = (cell.strip() for cell in PRESET_ROWS[name].split("|"))
    assert reduction == f"`{preset_settings({'preset': name})['reduction']}`"
    for paper in re.findall(r"arXiv:([\d.]+)", PRESETS[name].paper):
        assert f"arxiv.org/abs/{paper}" in source
    assert source and re.sub(r"`[^`]+`", "", keys).strip(" ,") == ""
    algorithm: dict[str, Any] = {"preset": name}
    for text in re.findall(r"`([^`]+)`", keys):
        algorithm |= yaml.safe_load(text)
    long = {"generation": {"max_tokens": 16384, "length": 20480}}
    config = load_config(long, {"algorithm": algorithm}).algorithm
    assert config.preset == name


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
