"""Processes of one machine that need the same program at the same time compile it once.

jax stores compiled programs in a folder and looks there first. Processes that start together find nothing,
and each compiles. Here a process that finds nothing takes a lock that belongs to the program's key, and looks
again before it compiles. The lock only saves time: a process that cannot have it compiles without it.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jax

from areal_jax.parallel.private_jax import Compiles, Reads, replace_compiling

WAIT_S = 300.0
"""Longest wait for another process's lock. Programs compile in seconds to minutes; and after the default of
runtime.deadline_s, twice as long, other parts of a run give up waiting for this process.
"""
POLL_S = 0.02


def compile_once() -> None:
    """Makes this process wait while another one compiles the program that it needs, and load the result.

    Calling it again changes nothing. Processes of a jax.distributed world take no locks, because they also
    wait for each other.
    """
    replace_compiling(_unless_stored)


def _unless_stored(compiles: Compiles, reads: Reads) -> Compiles:
    """Returns a `compiles` that loads the program if another process stored it while this one waited.

    Returns `compiles` itself if its arguments are not those of the jax versions that are known here.
    """
    signature, read_names = inspect.signature(compiles), inspect.signature(reads).parameters
    # jax 0.12 reads with one argument more than jax 0.10; both read with some of those of `compiles`. What is
    # returned below does not name its arguments, so it is never replaced in its turn.
    if not {"cache_key", *read_names} <= signature.parameters.keys():
        return compiles

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        if not folder or jax.process_count() > 1:
            return compiles(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        with locked(Path(folder) / f"{given['cache_key']}-lock", WAIT_S):
            stored, _ = reads(**{name: given[name] for name in read_names})
            if stored is None:
                # A file that cannot be read was cut short by a full disk, and jax replaces no file.
                (Path(folder) / f"{given['cache_key']}-cache").unlink(missing_ok=True)
                return compiles(*args, **kwargs)
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return stored

    return in_turn


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Runs the block while no other process runs one with this lock file, and deletes the file afterwards.

    The block runs without the lock if the lock is not free within `wait_s` seconds, if files cannot be locked
    here, and if another process has completed its block meanwhile: what that one has not stored, because it
    was too small or compiling failed, this one has no reason to wait for again.
    """
    with ExitStack() as held:
        with suppress(ImportError, OSError):
            file = held.enter_context(path.open("w"))
            held.callback(_delete, path)  # before the file is closed: see _lock
            if not _lock(file, wait_s):
                file.close()
        yield


def _lock(file: IO[str], wait_s: float) -> bool:
    """Whether this process now holds the lock of `file`, and no process that held it has deleted the file.

    The system releases the lock of a process that dies. Its file remains, and the next process takes it.
    """
    import fcntl  # only on Unix

    end_s = time.monotonic() + wait_s
    while time.monotonic() < end_s:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(file.fileno()).st_nlink > 0
        time.sleep(POLL_S)
    return False


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
