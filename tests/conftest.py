"""What every test shares: virtual devices, compiled programs, reproducible properties, the data sets."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import optimizations, whole_files
from tests.compiled_programs import keep_compiled_programs, prune
from tests.costs import Costs
from tests.ports import reserved_ports
from tests.programs import unavailable

if TYPE_CHECKING:
    from areal_jax.cluster.redis_server import RedisServer

# jax reads these when it is imported and when it first asks for devices: before any test's own imports.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
PROGRAMS = keep_compiled_programs(os.environ)

# Traced programs live to the end of the session: a collection visits all of them and frees little.
gc.set_threshold(10_000, 20, 50)

# No deadline: the first example may compile. Derandomised: a failure repeats on every machine.
settings.register_profile("areal", deadline=None, derandomize=True, database=None)
settings.load_profile("areal")


def pytest_sessionstart() -> None:
    """Bound the folder of compiled programs, once per run: worker processes leave it alone."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        prune(PROGRAMS)


class FailuresAtOnce:
    """Prints the name and the error of a failed test at once: tests that are cut off have shown theirs."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:  # xdist's workers have none
            return
        error = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        for line in ("", f"FAILED {report.nodeid} ({report.when})", *error[:5]):
            terminal.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))
    config.pluginmanager.register(whole_files)
    if path := os.environ.get("AREAL_JAX_TEST_COSTS"):
        config.pluginmanager.register(Costs(Path(path)))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns the number of workers of `-n auto`: one for each core, and 3 GiB of memory, that is there.

    One more without the slow tests: the others start few processes, and wait for a fifth of their time.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    workers = len(os.sched_getaffinity(0)) + ("not slow" in config.option.markexpr)
    return max(1, min(workers, memory_bytes // (3 << 30)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    optimizations.parametrize(metafunc)


@pytest.fixture(scope="session", autouse=True)
def few_optimizations(request: pytest.FixtureRequest) -> bool:
    """Whether the tests that run now compile with few optimizations: see tests/optimizations.py.

    A session fixture that holds numbers or programs asks for it, and is made anew when it changes.
    """
    optimizations.compile_with(request.param)
    return request.param


@pytest.fixture
def port() -> Iterator[int]:
    """A port for a server in another process, which no other process takes while the test runs."""
    with reserved_ports() as (port,):
        yield port


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets (gsm8k/, math500/) that no repository of ours may hold.

    AREAL_JAX_DATA names it; beside a checkout it is ../shared/data. In CI its absence is a failure.
    """
    folder = Path(os.environ.get("AREAL_JAX_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if (folder / "gsm8k").is_dir():
        return folder
    unavailable(f"no data sets in {folder}: set AREAL_JAX_DATA to the folder that holds gsm8k/ and math500/")


@pytest.fixture(scope="session")
def redis_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all; each test takes a run name of its own. In CI its absence is a failure."""
    from areal_jax.cluster.redis_server import redis_server
    from tests.redis_servers import SECRET, require_redis

    require_redis()
    with redis_server(tmp_path_factory.mktemp("redis"), secret=SECRET) as server:
        yield server


MAX_MAPPINGS = 30_000
"""A compiled program takes tens to hundreds of memory mappings, of which Linux allows a process 65,530."""

MAX_RESIDENT_BYTES = 1_500_000_000
"""Two workers, and the processes that their tests start, fit into 8 GB."""


def mappings_and_resident_bytes() -> tuple[int, int]:
    """Of this process; zeros where there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return 0, 0
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return maps.read_bytes().count(b"\n"), resident_pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> None:
    """The worker processes of pytest-xdist need the same programs at the same time."""
    if "jax" in sys.modules:
        from areal_jax.parallel.compile_once import compile_once

        compile_once()


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Beyond Linux's mappings jax's compiler crashes; beyond the machine's memory the kernel kills a process.

    Programs that are needed again come from the folder of compiled ones.
    """
    yield
    mappings, resident_bytes = mappings_and_resident_bytes()
    jax = sys.modules.get("jax")
    if jax is not None and (mappings > MAX_MAPPINGS or resident_bytes > MAX_RESIDENT_BYTES):
        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # else glibc keeps what was freed, and every later module would clear again


@pytest.fixture(scope="module", autouse=True)
def _same_environment() -> Iterator[None]:
    """A module leaves the working folder, the variables of jax and XLA and jax's settings as they were.

    With other settings all later programs would be compiled anew, or compute other bits.
    """

    def now() -> dict[str, Any]:
        variables = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))}
        return {"working folder": os.getcwd(), **variables}

    def settings_of_jax() -> dict[str, Any] | None:
        jax = sys.modules.get("jax")
        return None if jax is None else dict(jax.config.values)

    before, settings_before = now(), settings_of_jax()
    yield
    assert now() == before
    if settings_before is not None:
        assert settings_of_jax() == settings_before


@pytest.fixture(scope="session", autouse=True)
def _priority() -> Iterator[None]:
    """An evaluation beside a run lowers the priority of its process: here, that of all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda step: step)
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, few_optimizations: bool) -> Path:
    """A run of three steps; checkpoints of versions 2 and 3. Not to be written into."""
    from areal_jax.jobs.local import run
    from tests.small_run import small

    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small(folder, "run.steps=3"), stream=io.StringIO())
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy to evaluate, damage or lock."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skip where code cannot be sandboxed; in CI that is a failure."""
    from areal_jax.sandbox.errors import SandboxError
    from areal_jax.sandbox.runner import require_sandbox

    try:
        require_sandbox()
    except SandboxError as error:
        unavailable(str(error))
