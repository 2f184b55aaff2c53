"""What is wrong with a `module:name` or with its settings is said by name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_jax.plugin import MOVED, check_settings, load_object, needing
from areal_jax.types import ArealError

BUILTIN = {"ppo_clip": max, "by_name": "operator:add"}

SOURCE = """
from __future__ import annotations
from typing import Literal
def my_clip(now, batch, *, low=0.2, high): ...
def my_gate(now, batch, *, level: Literal["token", "sequence"] = "token", tau: float = 1.0): ...
def untyped(now: Missing, batch, *, tau: float = 1.0): ...
class Sums:
    def __init__(self, size, *, seed=0): ...
CONSTANT = 3
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with a module of one's own, which Python does not search by itself."""
    (tmp_path / "plugin_own.py").write_text(SOURCE)
    (tmp_path / "plugin_broken.py").write_text("import plugin_dependency_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("plugin_own", "plugin_broken"):
        sys.modules.pop(name, None)


def test_builtins_by_name_and_by_reference():
    assert load_object("ppo_clip", BUILTIN, "loss") is max
    assert load_object("by_name", BUILTIN, "loss")(2, 3) == 5


def test_a_name_in_a_run_folder_leads_to_where_its_module_moved():
    for old, new in MOVED.items():
        assert importlib.util.find_spec(new), f"{old} moved elsewhere"
    found = load_object("areal_jax.tasks.datasets.multihop:MultiHop", BUILTIN, "task")
    assert found.__module__ == "areal_jax.lab.multihop"


def test_own_objects_of_the_working_folder():
    assert load_object("plugin_own:my_clip", BUILTIN, "loss").__name__ == "my_clip"
    assert load_object("os.path:join", BUILTIN, "loss")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ppo_clop", "no loss is called 'ppo_clop'; did you mean ppo_clip?"),
        ("zzz", "choose one of ppo_clip, by_name, or give module:name of your own"),
        ("plugin_none:my_clip", "module plugin_none was not found; check that its folder is on PYTHONPATH"),
        ("plugin_none.losses:my_clip", "module plugin_none.losses was not found"),
        ("plugin_own.losses:my_clip", "module plugin_own.losses was not found"),
        ("plugin_own:my_clop", "module plugin_own has no my_clop; did you mean plugin_own:my_clip?"),
        ("plugin_own:zzz", "module plugin_own has no zzz"),
        (":my_clip", "is not of the form module:name"),
        ("plugin_own:", "is not of the form module:name"),
        (".plugin_own:my_clip", "is not of the form module:name"),
        ("my losses:clip", "is not of the form module:name"),
    ],
)
def test_what_is_not_there_is_named(spec: str, message: str):
    with pytest.raises(ArealError) as caught:
        load_object(spec, BUILTIN, "loss")
    assert message in str(caught.value)


def test_a_module_that_lacks_its_own_dependency_says_so():
    """Not "module plugin_broken was not found": it is there."""
    with pytest.raises(ModuleNotFoundError, match="plugin_dependency_that_is_not_there"):
        load_object("plugin_broken:my_clip", BUILTIN, "loss")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("my_clip", {"high": 1, "lwo": 1}, "unknown key algorithm.loss_settings.lwo; did you mean"),
        ("my_clip", {"high": 1, "zzz": 1}, "algorithm.loss_settings.zzz; its settings are: low, high"),
        ("my_clip", {"high": 1, "batch": 1}, "unknown key algorithm.loss_settings.batch"),
        ("my_clip", {}, "algorithm.loss_settings.high is required"),
        ("Sums", {}, "algorithm.loss_settings.size is required"),
        ("Sums", {"size": 1, "sed": 2}, "did you mean algorithm.loss_settings.seed?"),
        ("my_gate", {"level": "sequnce"}, "level='sequnce': input should be 'token' or 'sequence'"),
        ("my_gate", {"tau": "1"}, "algorithm.loss_settings.tau='1': input should be a valid number"),
        ("CONSTANT", {}, "algorithm.loss_settings: 3 is not a function"),
    ],
)
def test_settings_that_do_not_fit_are_named(name: str, settings: dict[str, Any], message: str):
    found = load_object(f"plugin_own:{name}", BUILTIN, "loss")
    with pytest.raises(ArealError) as caught:
        check_settings(found, settings, "algorithm.loss_settings")
    assert message in str(caught.value)


def test_settings_that_fit():
    check_settings(load_object("plugin_own:my_clip", BUILTIN, "loss"), {"high": 1}, "k")
    check_settings(load_object("plugin_own:Sums", BUILTIN, "task"), {"size": 1, "seed": 2}, "k")
    check_settings(load_object("plugin_own:my_gate", BUILTIN, "loss"), {"level": "sequence", "tau": 2}, "k")
    check_settings(load_object("plugin_own:untyped", BUILTIN, "loss"), {"tau": "unknown"}, "k")


def test_a_missing_package_is_named_with_its_extra_and_another_remedy():
    says = r"^a plot needs the package no_such: pip install '\.\[plots\]' .*, or leave it$"
    with pytest.raises(ArealError, match=says), needing("a plot", "plots", instead=", or leave it"):
        import no_such  # noqa: F401


def test_a_missing_package_that_is_not_of_the_extra_is_an_import_error():
    with pytest.raises(ModuleNotFoundError, match="no_such"), needing("plots", "plots", ("plotter",)):
        import no_such  # noqa: F401
