#!/usr/bin/env python3
"""Counts the code lines of the package in FOLDER (default: this checkout), by room and by group of rooms.

A line counts if it holds code besides brackets and commas. Blank lines, comments and docstrings do not count,
nor does any other string that is a statement of its own; modules made by protoc are left out. All lines of a
string that is a value count.
"""

from __future__ import annotations

import argparse
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOMS = {
    "core": (
        "types secret file_errors plugin config control observe parallel sandbox algorithms tasks "
        "trajectories models episodes weights trainer trees generation assembly runtime"
    ),
    "wings": "__init__ report evaluation replay serving plan cluster launch jobs cli",
    "lab": "lab bench simulation",
}
"""Group -> its rooms, which are the folders and modules directly below the package. `__init__` is the module
that offers names of many rooms; launch, bench and simulation are rooms of checkouts that have no lab/.
"""

GENERATED = "*_pb2*.py"
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
BRACKETS = frozenset("()[]{},")


class CountError(Exception):
    """The folder has no package, or the package has a room that belongs to no group."""


def statements(source: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Yields the tokens of each statement, or of its head if it has a body, without comments and layout."""
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            yield statement
            statement = []


def code_lines(source: str) -> int:
    """Returns the number of lines of `source` that hold code."""
    lines: set[int] = set()
    for statement in statements(source):
        if all(token.type == tokenize.STRING for token in statement):
            continue  # a docstring
        for token in statement:
            if token.string not in BRACKETS:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def lines_of_rooms(folder: Path) -> dict[str, Counter[str]]:
    """Returns group -> room -> code lines of the package areal_jax in `folder`.

    Raises CountError if there is no package, or for a room that ROOMS does not name.
    """
    package = folder / "areal_jax"
    if not package.is_dir():
        raise CountError(f"{folder} has no folder areal_jax; name the root folder of a checkout")
    group_of = {room: group for group, rooms in ROOMS.items() for room in rooms.split()}
    lines: dict[str, Counter[str]] = {group: Counter() for group in ROOMS}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).with_suffix("").parts[0]
        if room not in group_of:
            raise CountError(f"the room {room} ({path}) belongs to no group; add it to ROOMS in {__file__}")
        if not path.match(GENERATED):
            lines[group_of[room]][room] += code_lines(path.read_text(encoding="utf-8"))
    return lines


def table(lines: dict[str, Counter[str]]) -> str:
    """Returns a text with a line for each group and, below it, for each of its rooms; the largest first."""
    rows = []
    for group, rooms in lines.items():
        rows += [f"{group:<16}{rooms.total():>8,}"]
        rows += [f"  {room:<14}{count:>8,}" for room, count in rooms.most_common()]
    return "\n".join([*rows, f"{'all':<16}{sum(rooms.total() for rooms in lines.values()):>8,}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    try:
        sys.stdout.write(table(lines_of_rooms(parser.parse_args().folder)) + "\n")
    except CountError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
