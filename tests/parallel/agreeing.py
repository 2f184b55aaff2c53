"""One of two processes that do things together, for test_agreement; prints what came of each.

`python -m tests.parallel.agreeing INDEX PORT`
"""

from __future__ import annotations

import sys

from areal_jax.cluster.trainer_group import joined
from areal_jax.parallel.agreement import leads, together


def attempt(what: str, deadline_s: float, fails: bool = False) -> str:
    try:
        with together(what, deadline_s):
            if fails:
                raise OSError("the disk is full")
    except Exception as error:  # noqa: BLE001 - printed
        return f"{type(error).__name__}: {error}"
    return "well"


def say(what: object) -> None:
    sys.stdout.write(f"said: {what}\n")


def main(index: int, port: int) -> None:
    with joined(f"127.0.0.1:{port}", 2, index, deadline_s=300):
        say(leads())
        say(attempt("write", 300))
        say(attempt("write", 300, fails=index == 1))
        say(attempt("write", 300))
        if index == 0:
            say(attempt("read", 1.0))  # the other process waits meanwhile at the last step, and is not lost
        say(attempt("end", 300))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
