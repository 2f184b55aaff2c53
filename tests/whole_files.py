"""Whole test files to each of pytest-xdist's worker processes, also after one of them has crashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling
    from xdist.workermanage import WorkerController


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """The scheduler of --dist loadfile."""
    return whole_files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: at the end, no worker waits long for another one's file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    if error:
        node.config.stash[CRASHED] = True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A worker that crashed between two tests, or after its last one, has failed none; the session has."""
    if exitstatus == 0 and session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def whole_files(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """xdist's own scheduler, corrected for crashed workers.

    xdist 3.8.0 puts back into the queue every file that the crashed worker ever had. The worker that gets a
    finished one of these runs nothing, and so asks for no other file: the run never ends. xdist also starts
    the test that crashed a worker again, and so crashes the next worker.
    """
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def remove_node(self, node: WorkerController) -> str | None:
            files, crashed = self.assigned_work.pop(node), None
            for file, tests in files.items():
                left = [test for test, is_done in tests.items() if not is_done]
                if left and crashed is None:
                    crashed = left.pop(0)  # the caller reports it as failed
                    tests[crashed] = True
                if left:
                    self.workqueue[file] = tests
            for other in self.nodes:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node: WorkerController) -> None:
            if node not in self.registered_collections:
                return  # it still collects, and gets its files when it has
            super()._reschedule(node)
            # A worker starts a test only when it knows the next one, or that there is none.
            own = self.assigned_work[node]
            while self.workqueue and not node.shutting_down and self._pending_of(own) < 2:
                self._assign_work_unit(node)
            if not self.workqueue:
                node.shutdown()

    return WholeFiles(config, log)
