"""The program of `math_process`: for each JSON line [gold, answer, cpu_s] on stdin it writes a reply.

A reply is {"found": whether an answer can be read, "written": its text, "is_right": whether it equals the
gold answer}, {"problem": why the answer cannot be compared}, or {"gold": what is wrong with the gold answer}.
Only the standard library and math-verify are imported.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 1 << 30
"""How much a comparison may add to this process's address space."""


@lru_cache(maxsize=64)
def gold_of(gold: str) -> tuple[list[Any], str]:
    """Returns the parsed gold answer, and "" or what is wrong with it."""
    try:
        return _parsed(f"\\boxed{{{gold}}}"), ""
    except Exception as error:  # noqa: BLE001 - math-verify raises anything
        return [], f"{type(error).__name__}: {error}"


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]


def _compared(wanted: list[Any], answer: str) -> dict[str, Any]:
    """Runs in a fork."""
    from math_verify import verify

    try:
        found = _parsed(answer)
        written = next((part for part in found if isinstance(part, str)), None)
        is_right = bool(found) and verify(wanted, found, timeout_seconds=None, raise_on_error=True)
        return {"found": bool(found), "written": written, "is_right": bool(is_right)}
    except Exception as error:  # noqa: BLE001 - whatever the policy wrote
        return {"problem": type(error).__name__}


def _limit(cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY_BYTES, own + MEMORY_BYTES))


def in_fork(wanted: list[Any], answer: str, cpu_s: int) -> dict[str, Any]:
    """Returns the reply to a question with a gold answer that could be read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _limit(cpu_s)
            os.write(writing, json.dumps(_compared(wanted, answer)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if said:
        return json.loads(said)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"problem": f"it takes more than {cpu_s} s of CPU time"}
    return {"problem": "it ended the process that compared it"}


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C concerns the process that asks
    logging.disable()  # math-verify warns of each call without its own limit on wall time
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # a reward worker's own limit is inherited
    for line in sys.stdin:
        gold, answer, cpu_s = json.loads(line)
        wanted, problem = gold_of(gold)
        reply = in_fork(wanted, answer, cpu_s) if wanted else {"gold": problem or "nothing can be read in it"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
