#!/usr/bin/env python3
"""Draws and counts the functions that a tiny run calls on each path of PATHS.

A path has a tree for each function that it begins with. All calls of that function are put together: below
each function stand those that it called, once each, in the order of their calls, with the number of calls; a
generator is called again each time it goes on. Special methods (`__init__`), lambdas and comprehensions are
left out, and what they call stands below their caller.

What runs is drawn apart from what jax traces. A program is traced at its first call; later calls run the
compiled program, in which no function of Python is called. The trees of what runs are those of calls that
traced nothing.

The table counts distinct files and functions; hops, which are the pairs of functions in two files of which
one calls the other; and edges, which are the lines of the trees except those that a path begins with. Only
the run's own process is watched, without its reward workers. The clocks of observe/ close their records as
time passes, so counts differ by a few between runs.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "areal_jax"

PATHS = {
    "decode": ("generation Host.step",),
    "gradient": (
        *("runtime Driver.handle", "generation Host.take_commands", "generation Host.step"),
        "runtime Trainer.train",
    ),
    "event": ("runtime DriverCore.record",),
}
"""Path -> the functions that it begins with, each as the room and the function's name in its module.

decode: a decode step of a host; gradient: from the prompts that the driver asks for to the update; event: an
event, from the thread that decides on it to the journal.
"""

RUN = (
    *("run.steps=4", "runtime.placement=shared", "observe.report=false", "observe.tensorboard=false"),
    "model.overrides={width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    *("algorithm.group_size=4", "generation.slots=4", "generation.length=24", "generation.max_tokens=18"),
    *("trainer.batch_size=4", "trainer.rows=8", "trainer.length=24", "trainer.supervised.steps=0"),
)
"""Settings of the run that is watched, beside those of the quickstart."""

TRACER = os.path.join("jax", "_src", "interpreters", "partial_eval.py")
"""The module that jax calls a function from to trace it."""


class PathError(Exception):
    """A path begins with a function that the package does not have, or that the run never calls."""


class Function(NamedTuple):
    file: str
    """Path below the package."""
    name: str
    """With the classes and functions that it is defined in."""

    @property
    def room(self) -> str:
        return Path(self.file).with_suffix("").parts[0]

    def __str__(self) -> str:
        return f"{self.file} {self.name}"


@dataclass(slots=True)
class Node:
    """Calls of one function by one caller, and what they called: in the order of their first calls."""

    function: Function
    is_traced: bool
    calls: int = 0
    called: dict[tuple[Function, bool], Node] = field(default_factory=dict)

    def walk(self) -> Iterator[tuple[Node | None, Node]]:
        """Yields each node with its caller, which is None for this one."""
        yield None, self
        for node in self.called.values():
            for caller, found in node.walk():
                yield caller or self, found


# --- recording ----------------------------------------------------------------------------------------------


def find(package: Path, entry: str) -> Function:
    """Returns the function that `entry` names by its room and its name in its module.

    Raises PathError if the room has no such function, or several.
    """
    room, name = entry.split()
    files = [package / f"{room}.py", *sorted((package / room).rglob("*.py"))]
    found = [
        Function(path.relative_to(package).as_posix(), name)
        for path in files
        if path.is_file() and name in defined(ast.parse(path.read_text(encoding="utf-8")))
    ]
    if len(found) != 1:
        raise PathError(
            f"{package / room} has {len(found)} functions {name}, so that no path can begin there; correct "
            f"PATHS in {__file__}"
        )
    return found[0]


def defined(module: ast.Module) -> set[str]:
    """Returns the names of a module's functions, and of its classes' methods as Class.method."""
    scopes = [("", module)] + [
        (f"{node.name}.", node) for node in module.body if isinstance(node, ast.ClassDef)
    ]
    return {
        scope + node.name
        for scope, of in scopes
        for node in of.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


class Recorder:
    """Records the calls of `roots`: `calls` has a tree for each, in the order in which the calls began.

    A root that another one calls is in the tree of that one. Only functions in `package` are recorded.
    `before_first` is called before the first call of each root, in the thread of that call.
    """

    def __init__(self, package: Path, roots: Sequence[Function], before_first: Callable[[], None]) -> None:
        self.calls: list[Node] = []
        self._before_first, self._begun = before_first, set[Function]()
        self._folder, self._roots = f"{package}{os.sep}", frozenset(roots)
        self._functions: dict[CodeType, Function | None] = {}
        self._of_thread = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records what this thread calls in the block, and what the threads call that begin in it."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or (function := self._function(frame.f_code)) is None:
            return
        stack = self._of_thread.__dict__.setdefault("stack", [])
        if event == "return":
            if stack and stack[-1][0] is frame:
                stack.pop()
        elif stack:
            stack.append((frame, self._called(frame, function, stack[-1][1])))
        elif function in self._roots:
            if function not in self._begun:
                self._begun.add(function)
                self._before_first()
            self.calls.append(Node(function, False, calls=1))
            stack.append((frame, self.calls[-1]))

    def _function(self, code: CodeType) -> Function | None:
        """Returns the function of `code`; None if it is not the package's."""
        if code not in self._functions:
            is_own = code.co_filename.startswith(self._folder)
            file = code.co_filename.removeprefix(self._folder).replace(os.sep, "/")
            name = code.co_qualname.replace(".<locals>", "")
            self._functions[code] = Function(file, name) if is_own else None
        return self._functions[code]

    def _called(self, frame: FrameType, function: Function, caller: Node) -> Node:
        """Counts a call by `caller`; returns its node, which is the caller's own for what is left out."""
        is_traced = caller.is_traced or self._begins_trace(frame)
        name = frame.f_code.co_name
        is_left_out = name.startswith("<") or (name.startswith("__") and name.endswith("__"))
        if is_traced == caller.is_traced and (is_left_out or function == caller.function):
            return caller
        node = caller.called.setdefault((function, is_traced), Node(function, is_traced))
        node.calls += 1
        return node

    def _begins_trace(self, frame: FrameType) -> bool:
        """Returns whether jax's tracer is among the callers of `frame`, up to the next one in the package."""
        caller = frame.f_back
        while caller is not None and self._function(caller.f_code) is None:
            if caller.f_code.co_filename.endswith(TRACER):
                return True
            caller = caller.f_back
        return False


# --- a path -------------------------------------------------------------------------------------------------


class CallPath(NamedTuple):
    """The trees of a path. Those of `traced` are programs, each with the function that called it."""

    running: list[Node]
    traced: list[tuple[Function, Node]]


def path_of(calls: Sequence[Node], roots: Sequence[Function]) -> CallPath:
    """Returns the path that begins with `roots`, of all recorded calls.

    Raises PathError for a root that was never called, or of which each call traced a program.
    """
    running, traced = [], []
    for root in roots:
        of_root = [node for tree in calls for _, node in tree.walk() if node.function == root]
        warm = [node for node in of_root if not any(found.is_traced for _, found in node.walk())]
        if not warm:
            raise PathError(
                f"the run called {root} {len(of_root)} times, and never without tracing a program; correct "
                f"PATHS, or raise run.steps of RUN, in {__file__}"
            )
        running.append(merged(warm))
        traced += [
            (caller.function, node)
            for tree in of_root
            for caller, node in tree.walk()
            if node.is_traced and caller is not None and not caller.is_traced
        ]
    by_edge: dict[tuple[Function, Function], list[Node]] = {}
    for caller, node in traced:
        by_edge.setdefault((caller, node.function), []).append(node)
    return CallPath(running, [(caller, merged(nodes)) for (caller, _), nodes in by_edge.items()])


def merged(nodes: Sequence[Node]) -> Node:
    """Returns nodes of one function as one; what they called is in an order that keeps each one's order."""
    order: list[tuple[Function, bool]] = []
    for node in nodes:
        at = 0
        for key in node.called:
            if key not in order:
                order.insert(at, key)
            at = order.index(key) + 1
    called = {key: merged([node.called[key] for node in nodes if key in node.called]) for key in order}
    first = nodes[0]
    return Node(first.function, first.is_traced, sum(node.calls for node in nodes), called)


def drawn(tree: Node, depth: int | None) -> list[str]:
    """Returns the lines of a tree, without what lies more than `depth` calls below its root."""
    lines = [f"{tree.function}  x{tree.calls}"]
    for node in tree.called.values():
        if depth != 0:
            lines += [f"  {line}" for line in drawn(node, depth and depth - 1)]
    return lines


def counts(path: CallPath, is_counted: Callable[[Function], bool] = lambda _: True) -> list[int]:
    """Returns the numbers of files, functions, hops and edges, among the functions that are counted."""
    begins = [tree.function for tree in path.running]
    pairs = [
        (caller.function, node.function) for tree in path.running for caller, node in tree.walk() if caller
    ]
    pairs += [
        (caller.function if caller else of_program, node.function)
        for of_program, tree in path.traced
        for caller, node in tree.walk()
    ]
    functions = set(filter(is_counted, [*begins, *(called for _, called in pairs)]))
    edges = [pair for pair in pairs if all(map(is_counted, pair))]
    hops = {(caller, called) for caller, called in edges if caller.file != called.file}
    return [len({function.file for function in functions}), len(functions), len(hops), len(edges)]


def table(path: CallPath) -> list[str]:
    """Returns the lines of a table of counts: what runs, what is traced, both, and both within each room."""
    rows = {
        "runs": counts(CallPath(path.running, [])),
        "is traced": counts(CallPath([], path.traced)),
        "both": counts(path),
    }
    trees = [*path.running, *(tree for _, tree in path.traced)]
    for room in sorted({node.function.room for tree in trees for _, node in tree.walk()}):
        rows[f"  within {room}"] = counts(path, lambda function, room=room: function.room == room)
    lines = [f"{'':<24}{'files':>10}{'functions':>10}{'hops':>10}{'edges':>10}"]
    return lines + [f"{name:<24}" + "".join(f"{count:>10}" for count in row) for name, row in rows.items()]


def text(name: str, path: CallPath, depth: int | None) -> str:
    lines = [f"=== {name}", "", "--- runs"]
    for tree in path.running:
        lines += ["", *drawn(tree, depth)]
    lines += ["", "--- is traced"] if path.traced else []
    for caller, tree in path.traced:
        lines += ["", f"called by {caller}:", *drawn(tree, depth)]
    return "\n".join([*lines, "", "--- counts", "", *table(path), ""])


def recorded(roots: Sequence[Function]) -> list[Node]:
    """Returns the calls of `roots` by the run."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(PACKAGE.parent))
    import jax

    import areal_jax as aj

    # A program that was traced before, while the run was prepared, is traced again.
    recorder = Recorder(PACKAGE, roots, before_first=jax.clear_caches)
    with tempfile.TemporaryDirectory() as folder:
        config = aj.load_config(PACKAGE / "configs" / "quickstart.yaml", *RUN, f"run.dir={folder}/run")
        with recorder.watching():
            aj.run(config, stream=io.StringIO())
    return recorder.calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", choices=list(PATHS), help="the only path to draw; all unless given")
    parser.add_argument("--depth", type=int, help="draw so many calls below each root; all are counted")
    asked = parser.parse_args()
    if asked.depth is not None and asked.depth < 0:
        parser.error(f"--depth {asked.depth}: give 0 or more")
    names = [asked.path] if asked.path else list(PATHS)
    try:
        roots = {name: [find(PACKAGE, entry) for entry in PATHS[name]] for name in names}
        calls = recorded([root for of_path in roots.values() for root in of_path])
        for name in names:
            sys.stdout.write(text(name, path_of(calls, roots[name]), asked.depth) + "\n")
    except PathError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
