"""Decode programs that are compiled while the host decodes with others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from areal_jax.algorithms.sampling import EVERY, Truncation
from areal_jax.control import events as e
from areal_jax.generation.admission import Preparing
from areal_jax.generation.commands import Start, Stop, Wake
from areal_jax.generation.host import Host
from areal_jax.generation.programs import Jitted
from areal_jax.types import SampleId, Sampling
from areal_jax.weights.memory import MemoryStore
from tests.generation.decoding import Heard, make_host
from tests.hangs import HANG_S
from tests.serving.served import PROMPT, alone, tiny_engine, tiny_params

PLAIN, TOP_P, TOP_K, MIN_P = (
    Sampling(max_tokens=9, **one) for one in ({}, {"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.1})
)


class Compiling:
    """An engine whose compilations wait until `let`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = tiny_engine()
        self.begun: list[Truncation] = []
        self.let, self.failure = threading.Event(), None
        compiler = Jitted.compiler

        def own(jitted: Jitted, truncation: Truncation, *arguments: Any) -> Callable[[], None]:
            compile_ = compiler(jitted, truncation, *arguments)
            self.begun.append(truncation)

            def waiting() -> None:
                assert self.let.wait(HANG_S)
                if self.failure is not None:
                    raise self.failure
                compile_()

            return waiting

        monkeypatch.setattr(Jitted, "compiler", own)
        self.wanted = {}
        for sampling in (PLAIN, TOP_P, TOP_K, MIN_P):
            # So that each runs the program for it alone.
            monkeypatch.setattr(self.engine.jitted, "compiled", {})
            self.wanted[sampling] = alone(PROMPT, sampling=sampling)
        monkeypatch.setattr(self.engine.jitted, "compiled", {Truncation(): None})
        self.heard, store = Heard(), MemoryStore(self.engine.canary)
        store.publish(tiny_params(0))
        self.host: Host = make_host(self.engine, store, self.heard, stops=(self.engine.tokenizer.eos_id,))
        self.host.step()

    def ask(self, ordinal: int, sampling: Sampling, is_request: bool = True) -> SampleId:
        sample = SampleId(ordinal, 0)
        own: Any = dict(sampling=sampling, drawn_as=0, is_request=is_request)
        self.host.inbox.put(Start((sample,), PROMPT, 0, **own))
        return sample

    def decode(self) -> None:
        """Steps until the host has nothing to decode."""
        self.host.take_commands()
        self.host.step()
        while self.host.has_work:
            self.host.take_commands()
            self.host.step()

    def compiled(self) -> None:
        """Waits until a compilation has ended and the host knows it."""
        self.let.set()
        command = self.host.inbox.get(timeout=HANG_S)
        assert isinstance(command, Wake)
        self.host.take_commands(command)
        self.let.clear()

    def is_right(self, sample: SampleId, sampling: Sampling) -> bool:
        """Whether the sample has the tokens and log-probs that the program for it alone gives it."""
        found = self.heard.done[sample]
        own = found.tokens[found.loss_mask], found.behavior_logp[found.loss_mask]
        return tuple(tuple(array.tolist()) for array in own) == self.wanted[sampling]


@pytest.fixture
def made(monkeypatch):
    made = Compiling(monkeypatch)
    yield made
    made.let.set()


@pytest.mark.slow
def test_others_go_on_while_the_program_of_a_request_is_compiled(made):
    late, first = made.ask(-1, TOP_P), made.ask(-2, PLAIN)
    made.decode()
    assert made.begun == [Truncation(True, False, True)] and made.host.statistics().waiting == 1
    assert made.is_right(first, PLAIN) and late not in made.heard.done
    made.compiled()
    made.decode()
    assert made.is_right(late, TOP_P) and made.host.statistics().waiting == 0


def test_programs_are_compiled_one_at_a_time_and_each_has_what_those_before_it_had(made):
    asked = {made.ask(-1, TOP_P): TOP_P}
    made.decode()
    asked |= {made.ask(-2, TOP_K): TOP_K, made.ask(-3, MIN_P): MIN_P}
    made.decode()
    assert made.begun == [Truncation(True, False, True)]
    made.compiled()
    made.decode()
    assert set(made.heard.done) == {SampleId(-1, 0), SampleId(-3, 0)}, "its program has min_p, too"
    assert made.begun == [Truncation(True, False, True), EVERY]
    made.compiled()
    made.decode()
    for sampling in (PLAIN, TOP_P, TOP_K, MIN_P):
        asked[made.ask(-4 - len(asked), sampling)] = sampling
    made.decode()
    assert len(made.begun) == 2
    for sample, sampling in asked.items():
        assert made.is_right(sample, sampling), sampling


def test_a_compilation_that_fails_ends_the_requests_that_need_it(made):
    made.failure = MemoryError("no memory for the program")
    failed, other = made.ask(-1, TOP_P), made.ask(-2, PLAIN)
    made.decode()
    made.compiled()
    made.decode()
    reason = "its decode program could not be compiled: no memory for the program"
    assert made.heard.of(e.SampleFailed) == [e.SampleFailed(failed, "host-0", reason)]
    assert other in made.heard.done
    made.failure = None
    again = made.ask(-3, TOP_P)
    made.decode()
    made.compiled()
    made.decode()
    assert made.is_right(again, TOP_P)


def test_a_request_that_is_cancelled_meanwhile_is_not_decoded(made):
    sample = made.ask(-1, TOP_P)
    made.decode()
    made.host.inbox.put(Stop((sample,)))
    made.decode()
    assert made.host.statistics().waiting == 0
    made.compiled()
    made.decode()
    assert made.heard.events[1:] == [] and not made.heard.done


def test_the_host_is_woken_once_it_can_go_on(made):
    """It looks once, perhaps before the thread that wakes it has ended."""
    ready: list[SampleId] = []
    woken = threading.Event()

    def wake() -> None:
        ready.extend(work.sample for work in preparing.step(made.host._current, made.host._slots.state)[0])
        woken.set()

    preparing = Preparing(made.engine, wake)
    start = Start((SampleId(-1, 0),), PROMPT, 0, sampling=TOP_P, is_request=True)
    preparing.waiting += start.works(TOP_P, 0, ())
    preparing.step(made.host._current, made.host._slots.state)
    made.let.set()
    assert woken.wait(HANG_S) and ready == [SampleId(-1, 0)]


def test_a_runs_own_samples_do_not_wait(made):
    own = made.ask(1, TOP_P, is_request=False)
    made.decode()
    assert made.begun == [] and made.is_right(own, TOP_P)
