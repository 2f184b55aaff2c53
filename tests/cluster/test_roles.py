"""The trainer role: what a commanded batch means before and after the catch-up."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_jax.cluster import roles
from areal_jax.cluster.messages import Ready
from areal_jax.control.events import Train
from areal_jax.observe.waits import Timeline
from areal_jax.types import VersionedParams

PLAN = SimpleNamespace(samples=())


class LostPeer:
    """A trainer whose thread fails at once, as one does in a collective with a process that was killed."""

    def __init__(self, parts: Any, state: Any, *others: Any, **named: Any) -> None:
        self.state, self.inbox = state, queue.SimpleQueue()

    def run(self) -> None:
        raise ConnectionError("peer closed the connection")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer role of a new run, with weights of version 0, and what it sends and reports as failed."""
    state = SimpleNamespace(version=0)
    store = SimpleNamespace(publish=lambda params: params, wait=lambda deadline_s: None, address="h:1")
    monkeypatch.setattr(roles, "start_state", lambda *args: (state, None))
    monkeypatch.setattr(roles, "_publisher", lambda *args: store)
    monkeypatch.setattr(roles, "Checkpointer", lambda *args: None)
    monkeypatch.setattr(roles, "Trainer", LostPeer)
    monkeypatch.setattr(roles.BatchPlan, "from_wire", lambda plain: PLAN)
    learner = SimpleNamespace(versioned=lambda state: VersionedParams(0, {}, "d0"), takes_shared_prompts=True)
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(runtime=SimpleNamespace(deadline_s=5.0)), learner=learner
    )
    sent: list[Any] = []
    failed: queue.SimpleQueue = queue.SimpleQueue()
    link: Any = SimpleNamespace(
        name="trainer-0",
        incarnation="a",
        epoch="1",
        ready=lambda **fields: sent.append(Ready("trainer-0", "a", "1", **fields)),
        fail=failed.put,
        note=None,
        report=None,
    )
    work = roles._Training(parts, Path("run"), 0, Timeline(None), link)
    return SimpleNamespace(work=work, sent=sent, failed=failed)


def test_a_batch_that_arrives_after_the_trainers_thread_has_failed_is_no_batch_of_the_catch_up(training):
    """Only the batches of a catch-up carry a digest; the thread's error is the one to report."""
    training.work.begin(0)
    (ready,) = training.sent
    assert (ready.next_step, ready.version, ready.digest) == (-1, 0, "d0")
    assert "peer closed" in str(training.failed.get(timeout=5))
    training.work._thread.join(5)
    training.work.take(Train(0, (0, 1), (0, 0)), {"plan": {}})
    assert training.work._trainer.inbox.get(timeout=5).step == 0
    training.work.begin(0)
    assert training.sent == [ready, ready]
