"""Roles: what a commanded batch means before and after the catch-up, and how samples move between hosts."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_jax.cluster import roles
from areal_jax.cluster.messages import Ready
from areal_jax.control.events import (
    Cancel,
    Continue,
    Dispatch,
    Fetch,
    HostAdopted,
    Move,
    MoveFailed,
    SampleFinished,
    SamplesMoved,
    SamplesOffered,
    Train,
)
from areal_jax.generation.commands import HandOver, Stop, TakeOver
from areal_jax.generation.moving.ticket import MoveError
from areal_jax.observe.waits import Timeline
from areal_jax.types import SampleId, Sampling, VersionedParams
from tests.hangs import HANG_S

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
    assert "peer closed" in str(training.failed.get(timeout=HANG_S))
    training.work._thread.join(HANG_S)
    training.work.take(Train(0, (0, 1), (0, 0)), {"plan": {}})
    assert training.work._trainer.inbox.get(timeout=HANG_S).step == 0
    training.work.begin(0)
    assert training.sent == [ready, ready]


# --- moves between hosts ------------------------------------------------------------------------------------

SAMPLES = SampleId(3, 0, 0), SampleId(3, 1, 0)


@pytest.fixture
def hosting() -> Any:
    """The generate role without its host's thread: what it queues for the host, reports and releases."""
    work = object.__new__(roles._Hosting)
    seen = SimpleNamespace(
        reports=[], notes=[], released=[], inbox=queue.SimpleQueue(), work=work, error=None
    )

    def carried(payload: Any) -> Any:
        if seen.error is not None:
            raise seen.error
        return [payload]

    work._unfinished, work._guard = dict.fromkeys(SAMPLES, True), threading.Lock()
    work._host = SimpleNamespace(inbox=seen.inbox)
    work._link = SimpleNamespace(
        report=lambda event, trajectory=None, ticket=b"": seen.reports.append((event, ticket)),
        note=seen.notes.append,
    )
    offer = lambda works: carried(b"ticket")[0]  # noqa: E731
    work._moves = SimpleNamespace(fetch=carried, offer=offer, release=seen.released.extend)
    return seen


def test_a_host_offers_samples_with_a_ticket_or_keeps_them_if_it_cannot(hosting):
    hosting.work.command(Move(SAMPLES, "generate-0", "generate-1"), None)
    command = hosting.inbox.get(timeout=HANG_S)
    assert isinstance(command, HandOver) and command.samples == SAMPLES
    works = [SimpleNamespace(sample=sample) for sample in SAMPLES]
    command.to(works)
    command.to([])  # all of them have ended
    hosting.error = MoveError("no space")
    command.to(works[:1])
    offered = SamplesOffered(SAMPLES, "generate-0", "generate-1")
    assert hosting.reports == [
        (offered, b"ticket"),
        (SamplesOffered(SAMPLES[:1], "generate-0", "generate-1"), b""),
    ]
    assert hosting.notes == ["no space"] and set(hosting.work._unfinished) == set(SAMPLES)
    hosting.work.command(Cancel(SAMPLES, "generate-0"), None)
    assert hosting.inbox.get(timeout=HANG_S) == Stop(SAMPLES)
    assert hosting.released == list(SAMPLES) and not hosting.work._unfinished


def test_a_host_that_comes_back_goes_on_with_what_only_it_can_have(hosting):
    """Not with what may have gone to another host, nor with episodes, of which the next turn may be due."""
    work, moved, turn, ended, taken, episode = (
        hosting.work,
        *(SampleId(5 + number, 0, 0) for number in range(5)),
    )
    work._unfinished, work._sampling, work._slots = {}, Sampling(), 4
    work._reader, work._adopted = None, HostAdopted("generate-0", 2, "d2")
    work._link.ready = lambda **fields: hosting.notes.append(fields)
    for ordinal in (*SAMPLES, moved, ended):
        work.command(Dispatch((ordinal,), "generate-0", 1), [1, 2])
    work.command(Move((moved,), "generate-0", "generate-1"), None)
    work.command(Dispatch((episode,), "generate-0", 1), None)
    work.command(Continue(turn, 0, 0, "generate-0", 1), [[1], 4, ()])
    work.command(Fetch((taken,), "generate-0", "generate-1"), b"ticket")
    work._report(SampleFinished(ended, "generate-0", (), "stop"), None)
    work._report(HostAdopted("generate-0", 3, "d3"), None)
    while not hosting.inbox.empty():
        hosting.inbox.get()
    work.begin("")
    left = {moved, turn, taken, episode}
    stop = hosting.inbox.get_nowait()
    assert isinstance(stop, Stop) and set(stop.samples) == left == set(hosting.released)
    assert hosting.notes == [dict(slots=4, version=3, digest="d3", samples=SAMPLES)]


def test_a_host_fetches_samples_or_says_why_not(hosting):
    hosting.work._unfinished = {}
    fetch = Fetch(SAMPLES, "generate-1", "generate-0")
    hosting.work.command(fetch, b"ticket")
    command = hosting.inbox.get(timeout=HANG_S)
    assert isinstance(command, TakeOver) and command.works == [b"ticket"]
    assert set(hosting.work._unfinished) == set(SAMPLES)  # a new epoch would stop them
    command.answer("")
    command.answer("another version")
    assert not hosting.work._unfinished
    hosting.error = MoveError("the source is gone")
    hosting.work.command(fetch, b"ticket")
    ends = SAMPLES, "generate-1", "generate-0"
    assert [event for event, _ in hosting.reports] == [
        SamplesMoved(*ends),
        MoveFailed(*ends, "another version"),
        MoveFailed(*ends, "the source is gone"),
    ]
    assert hosting.inbox.empty() and not hosting.work._unfinished
