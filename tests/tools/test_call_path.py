"""The drawer of call paths: on a small package with known calls, and on a run."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.call_path import (
    PACKAGE,
    PATHS,
    CallPath,
    Function,
    PathError,
    Recorder,
    counts,
    drawn,
    find,
    path_of,
)

ROOT = Path(__file__).parents[2]

LOOP = """
    import threading
    from small_package.store import Store, close, twice
    from small_package.maths import double, half

    class Host:
        def step(self, times):
            store = Store()
            self._refill(store, times)
            double(1.0)
            with close():
                half(2)

        def _refill(self, store, times):
            for item in [twice(n) for n in range(times)]:
                store.put(item)
            if times == 2:
                store.rare()

    def in_a_thread(times):
        Host().step(times)
"""
STORE = """
    from contextlib import contextmanager

    class Store:
        def __init__(self):
            self.kept = []
            self._open()

        def _open(self):
            pass

        def put(self, item):
            try:
                self._fail()
            except ValueError:
                self.kept.append((lambda: twice(item))())

        def _fail(self):
            raise ValueError

        def rare(self):
            pass

    def twice(n):
        return 2 * n

    @contextmanager
    def close():
        yield
"""
MATHS = """
    import jax

    def half(n, depth=2):
        return half(n, depth - 1) if depth else n / 2

    def double(x):
        return _double(x)

    @jax.jit
    def _double(x):
        return _sum(x, x)

    def _sum(x, y):
        return x + y
"""

RUNS = """
loop/host.py Host.step  x2
  store.py Store._open  x2
  loop/host.py Host._refill  x2
    store.py twice  x5
    store.py Store.put  x5
      store.py Store._fail  x5
      store.py twice  x5
    store.py Store.rare  x1
  maths.py double  x2
  store.py close  x4
  maths.py half  x2
"""
"""By hand: each `close` begins and goes on once, and `half`, which calls itself, counts once."""

TRACED = """
maths.py _double  x1
  maths.py _sum  x1
"""


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module small_package.loop.host."""
    sources = {
        "loop/host.py": LOOP,
        "store.py": STORE,
        "maths.py": MATHS,
        "__init__.py": "",
        "loop/__init__.py": "",
    }
    for name, source in sources.items():
        path = tmp_path / "small_package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("small_package.loop.host")
    for name in [name for name in sys.modules if name.startswith("small_package")]:
        del sys.modules[name]


def path_through(module: ModuleType, *calls: int) -> tuple[CallPath, list[Function]]:
    """The path that begins with Host.step, called once for each of `calls`, the last time in a thread."""
    package, begun = Path(module.__file__ or "").parents[1], []
    root = find(package, "loop Host.step")
    recorder = Recorder(package, [root], before_first=lambda: begun.append(root))
    with recorder.watching():
        for times in calls[:-1]:
            module.Host().step(times)
        thread = threading.Thread(target=module.in_a_thread, args=calls[-1:])
        thread.start()
        thread.join()
    return path_of(recorder.calls, [root]), begun


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def test_a_path_is_drawn_and_counted(small_package: ModuleType):
    path, begun = path_through(small_package, 1, 3, 2)
    assert drawn(path.running[0], None) == lines(RUNS)
    assert drawn(path.running[0], 1) == [line for line in lines(RUNS) if not line.startswith("    ")]
    assert [(caller.name, drawn(tree, None)) for caller, tree in path.traced] == [("double", lines(TRACED))]
    # Of what runs: 10 functions, of which 6 in the store, 2 in maths and 2 in the loop; 7 hops, from step to
    # _open, double, close and half, and from _refill to twice, put and rare; an edge for each line but one.
    assert counts(CallPath(path.running, [])) == [3, 10, 7, 10]
    assert counts(CallPath([], path.traced)) == [1, 2, 0, 2]
    assert counts(path) == [3, 12, 7, 12]
    assert counts(path, lambda function: function.room == "store") == [1, 6, 0, 2]
    assert len(begun) == 1


def test_the_order_of_calls_is_kept_where_a_first_call_left_some_out(small_package: ModuleType):
    path, _ = path_through(small_package, 1, 0, 2)
    assert drawn(path.running[0], 2) == [
        line for line in lines(RUNS.replace("x5", "x2")) if line[:6] != " " * 6
    ]


def test_a_path_of_which_every_call_traces_is_an_error(small_package: ModuleType):
    with pytest.raises(PathError, match=r"called loop/host.py Host.step 1 times, and never without tracing"):
        path_through(small_package, 1)


@pytest.mark.parametrize("entry", ["loop Host.stop", "store Host.step", "attic Host.step"])
def test_an_unknown_function_is_an_error_that_names_it(small_package: ModuleType, entry: str):
    room, name = entry.split()
    with pytest.raises(PathError, match=rf"{room} has 0 functions {name}.*correct PATHS"):
        find(Path(small_package.__file__ or "").parents[1], entry)


def test_each_path_begins_with_functions_of_the_package():
    found = {name: [find(PACKAGE, entry).name for entry in entries] for name, entries in PATHS.items()}
    assert found == {name: [entry.split()[1] for entry in entries] for name, entries in PATHS.items()}


def parsed(output: str) -> dict[str, dict[str, Any]]:
    """Path -> its functions that run, those that are traced, and the table, each as lists of words."""
    paths = {}
    for part in output.split("=== ")[1:]:
        name, drawing = part.split("\n", 1)
        trees, table = drawing.split("--- counts")
        runs, _, traced = trees.partition("--- is traced")
        of = lambda text: [line.split() for line in text.splitlines() if line.endswith(tuple("0123456789"))]  # noqa: E731
        rows = {
            line[:24].strip(): [int(n) for n in line[24:].split()] for line in table.strip().splitlines()[1:]
        }
        paths[name] = {"runs": of(runs), "is traced": of(traced), "counts": rows}
    return paths


@pytest.mark.slow
def test_the_paths_of_a_run():
    command = [sys.executable, ROOT / "tools" / "call_path.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    paths = parsed(done.stdout)
    assert list(paths) == list(PATHS)
    for name, path in paths.items():
        roots = {"runs": len(PATHS[name]), "is traced": 0}
        for part in roots:
            functions = {tuple(words[:2]) for words in path[part]}
            files, count, hops, edges = path["counts"][part]
            assert (files, count) == (len({file for file, _ in functions}), len(functions)), name
            assert len(path[part]) == edges + roots[part], name
            assert hops <= edges, name
        both = path["counts"]["both"]
        assert both[3] == path["counts"]["runs"][3] + path["counts"]["is traced"][3]
        assert both[0] == sum(row[0] for key, row in path["counts"].items() if key.startswith("within"))
    reached = {
        (name, part, file.split("/")[0], function)
        for name, path in paths.items()
        for part in ("runs", "is traced")
        for file, function, _ in path[part]
    }
    assert reached >= {
        ("decode", "runs", "generation", "Engine.generate"),
        ("decode", "is traced", "generation", "Programs.generate"),
        ("gradient", "runs", "trainer", "Learner.update"),
        ("gradient", "is traced", "trainer", "Objective.gradient"),
        ("event", "runs", "control", "ControlPlane.handle"),
        ("event", "runs", "trajectories", "SqliteQueue.append"),
    }
    assert ("event", "runs", "runtime", "DriverCore.act") not in reached
    assert paths["event"]["is traced"] == []
