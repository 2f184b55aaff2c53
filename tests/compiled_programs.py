"""Where tests keep compiled programs between runs, and the bound of that folder."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from pathlib import Path

MAX_BYTES = 2_000_000_000
"""Several times what one run of all tests compiles."""

MAX_AGE_S = 30 * 86_400.0
"""Programs that no test has read or written for this long belong to code or a jax that is gone."""


def keep_compiled_programs(environ: MutableMapping[str, str]) -> Path:
    """Name the folder in the environment, for these tests and the processes that they start; returns it.

    JAX_COMPILATION_CACHE_DIR moves it. The default lies outside the checkout: a fresh clone finds what other
    checkouts compiled. jax's key holds the folder's path, so a copy of the folder elsewhere is of no use.
    jax's defaults would keep only programs that took a second to compile.
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-jax" / "tests"
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    return Path(environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache)))


def prune(folder: Path, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> None:
    """Delete compiled programs unused for `max_age_s`, then the least recently used beyond `max_bytes`.

    Lock files of processes that were killed while they compiled go the same way.

    jax's own bound (jax_compilation_cache_max_size) reads the whole folder under a lock for every program it
    adds, which takes longer than compiling the small programs of these tests.
    """
    entries = []
    for path in (*folder.glob("*-cache"), *folder.glob("*-lock")):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # another run prunes at the same time
        # Some file systems do not record reads: then the time of writing decides.
        entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    kept_bytes = 0
    for used_at, size, path in sorted(entries, key=lambda entry: entry[:2], reverse=True):
        kept_bytes += size
        if kept_bytes > max_bytes or time.time() - used_at > max_age_s:
            path.unlink(missing_ok=True)
