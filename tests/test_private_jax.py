"""Private names of jax are used in one module only, and this jax has each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import areal_jax
from areal_jax.parallel import private_jax
from areal_jax.parallel.private_jax import Private
from areal_jax.types import ArealError

PACKAGE = Path(areal_jax.__file__).parent


def private_names(source: str) -> Iterator[str]:
    """Private modules and names of jax and jaxlib that the source imports, or reads as an attribute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [dotted(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found = [node.value]
        else:
            continue
        for name in found:
            first, *rest = name.split(".")
            is_private = any(part.startswith("_") and not part.startswith("__") for part in rest)
            if first in ("jax", "jaxlib") and is_private:
                yield name


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute of a name; "" for an attribute of anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import distributed",
        "import jax._src.cudnn",
        "jax._src.distributed.global_state",
        "from jax.experimental.layout import _secret",
        "importlib.import_module('jaxlib._jax')",
    ],
)
def test_private_names_are_found(line: str):
    assert list(private_names(line))


def test_public_names_are_not_private():
    assert not list(
        private_names("import jax\njax.numpy.ones(3)\nfrom jax.experimental import pallas\njax.__version__")
    )


def test_only_one_module_uses_private_names_of_jax():
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := sorted(private_names(path.read_text())))
    }
    assert found == {"parallel/private_jax.py": sorted(each.module for each in private_jax.NAMES.values())}


@pytest.mark.parametrize("purpose", list(private_jax.NAMES))
def test_this_jax_has_each_name(purpose: str):
    module, names, since = private_jax.NAMES[purpose]
    found = private_jax._private(purpose)
    if jax.__version_info__[:2] < since:
        assert found is None
    else:
        assert found.__name__ == module and all(hasattr(found, name) for name in names)


@pytest.mark.parametrize("gone", [("jax._src.gone", ("a",)), ("jax._src.distributed", ("gone",))])
def test_a_jax_without_a_name_is_an_error_that_names_it(gone: tuple, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(private_jax.NAMES, "barriers", Private(*gone))
    with pytest.raises(ArealError, match=rf"barriers: jax \d.* has no {gone[0]}.{gone[1][0]}"):
        private_jax._private("barriers")
    monkeypatch.setitem(private_jax.NAMES, "barriers", Private(*gone, since=(99, 0)))
    assert private_jax._private("barriers") is None
