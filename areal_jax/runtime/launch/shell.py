"""Words of a shell script, and what a launcher submits.

Scripts are made of words, never of text that somebody's path is pasted into: what stands in a config is
quoted, and what the script itself finds out (an address, a folder) is an `Expanded`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BASH = "#!/usr/bin/env bash\nset -euo pipefail"
"""A script's first lines: it ends at the first error."""

WIDTH = 100
"""Columns after which a command goes on in the next line."""


class Expanded(str):
    """A word in which the shell replaces $names; nothing else in it may need quoting."""


@dataclass(frozen=True)
class Submission:
    """What a launcher hands over. `files`: name -> text, written to launch/ in the run's folder."""

    files: dict[str, str]
    program: str
    """That must be installed: sbatch, gcloud, kubectl."""
    script: str = "submit.sh"
    """Which of the files is run."""
    after: str = ""
    """What to type next, for people."""


def quoted(word: str) -> str:
    return f'"{word}"' if isinstance(word, Expanded) else shlex.quote(word)


def command(words: Iterable[str], indent: str = "    ") -> str:
    """One command, over as many lines as it takes."""
    return " \\\n".join(_lines(words, indent))


def script(*parts: str) -> str:
    """The parts with an empty line between them."""
    body = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    return f"{body}\n"


def _lines(words: Iterable[str], indent: str) -> Iterator[str]:
    line = ""
    for word in map(quoted, words):
        if line and len(line) + 1 + len(word) > WIDTH:
            yield line
            line = f"{indent}{word}"
        else:
            line = f"{line} {word}" if line else word
    if line:
        yield line
