"""The container file names what there is in the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "launchers" / "Containerfile").read_text()


def test_what_it_copies_and_the_extras_that_it_installs_exist():
    copied = [path for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for path in line.split()]
    assert {"pyproject.toml", "constraints.txt", "areal_jax", "configs"} <= set(copied)
    assert [path for path in copied if not (ROOT / path).exists()] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r"\.\[([\w,-]+)\]", TEXT)
    assert set(installed.split(",")) <= set(extras) and "cluster" in installed


def test_every_name_after_which_python_is_chosen_is_one_that_the_package_takes():
    (version,) = re.findall(r"^ARG PYTHON=(\S+)$", TEXT, re.MULTILINE)
    assert version in ("3.11", "3.12", "3.13")
