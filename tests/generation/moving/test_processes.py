"""DORA's D5 between two processes: half-decoded samples go on elsewhere with their KV, without a prefill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_jax.generation.commands import HostSample, TakeOver
from areal_jax.generation.host import Host
from areal_jax.generation.moving.receiver import Receiver
from areal_jax.generation.moving.ticket import MoveError, decode
from areal_jax.types import SampleId
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import LENGTH, STEPS
from tests.generation.decoding import Asked, Heard, make_host, start
from tests.generation.decoding import decode as decode_alone
from tests.generation.moving.source import CALLS, DEADLINE_S, OFFERS, PROMPT, SECRET
from tests.hangs import HANG_S, ends

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moves")


@pytest.fixture(scope="module")
def source(folder: Path) -> Iterator[subprocess.Popen]:
    """The other process, once it has offered its samples."""
    command = [sys.executable, "-m", "tests.generation.moving.source", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    end_s = time.monotonic() + DEADLINE_S
    while not all((folder / way).exists() for way in OFFERS):
        assert process.poll() is None and time.monotonic() < end_s, "no ticket came"
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def target(engine, store: MemoryStore) -> Host:
    """A host that has adopted the store's version and prefilled one prompt of its own."""
    host = make_host(engine, store, Heard())
    host.inbox.put(start(7, 1, PROMPT[:2]))
    host.take_commands()
    host.step()
    return host


def taken_over(host: Host, works: list[HostSample]) -> list[str]:
    """Reasons of refusals, after a command for each sample."""
    answers: list[str] = []
    for work in works:
        host.inbox.put(TakeOver([work], answers.append))
    host.take_commands()
    return [reason for reason in answers if reason]


def finished(host: Host) -> Callable[[SampleId], object]:
    while host.has_work:
        host.step()
    return host._emit.done


@pytest.mark.parametrize("way", OFFERS)
def test_samples_go_on_in_another_process_to_the_bit_without_a_prefill(
    source, folder, engine, store, versions, way
):
    works = Receiver(engine, folder, SECRET, DEADLINE_S).fetch((folder / way).read_bytes())
    assert [len(work.so_far.rows) for work in works] == [len(PROMPT) + CALLS * STEPS] * 2
    host = target(engine, store)
    prefills = host.statistics().prefills
    assert taken_over(host, works) == []
    done = finished(host)
    assert host.statistics().prefills == prefills == 1
    assert host.statistics().recomputed_tokens == 0
    for work in works:
        alone = decode_alone(engine, versions(0), {0: Asked(PROMPT, work.sample)})[0]
        assert len(alone.tokens) == LENGTH
        np.testing.assert_array_equal(done[work.sample].tokens, alone.tokens)
        np.testing.assert_array_equal(done[work.sample].behavior_logp, alone.behavior_logp)
        assert done[work.sample].interruptions == 0


def test_damaged_kv_would_be_seen(source, folder, engine, store, versions):
    """The negative control: with one page of the KV zero, the log-probs are others."""
    works = Receiver(engine, folder, SECRET, DEADLINE_S).fetch((folder / "direct").read_bytes())
    so_far = works[0].so_far
    cache = so_far.kv.cache.replace(k=so_far.kv.cache.k.at[:, 2].set(0))
    damaged = replace(works[0], so_far=replace(so_far, kv=so_far.kv.replace(cache=cache)))
    host = target(engine, store)
    assert taken_over(host, [damaged]) == []
    sample = works[0].sample
    alone = decode_alone(engine, versions(0), {0: Asked(PROMPT, sample)})[0]
    assert not np.array_equal(finished(host)[sample].behavior_logp, alone.behavior_logp)


@pytest.mark.parametrize("way", OFFERS)
def test_a_host_with_another_version_refuses_before_any_kv_moves(source, folder, engine, versions, way):
    other = MemoryStore(engine.canary)
    other.publish(versions(1))
    host = target(engine, other)
    ticket = (folder / way).read_bytes()
    receiver = Receiver(engine, folder, SECRET, DEADLINE_S)
    for works in decode(ticket).works, receiver.fetch(ticket):
        reasons = taken_over(host, list(works))
        assert len(reasons) == 2 and host.statistics().waiting == 0
        assert all("move the sample to a host with that version" in reason for reason in reasons)


def test_samples_whose_kv_is_recomputed_have_the_same_tokens(source, folder, engine, store, versions):
    """Where a prefill is cheaper than the move: the same tokens, and log-probs up to rounding."""
    works = Receiver(engine, folder).without_kv((folder / "direct").read_bytes())
    host = target(engine, store)
    assert taken_over(host, works) == []
    done = finished(host)
    assert host.statistics().recomputed_tokens == 2 * (len(PROMPT) + CALLS * STEPS - 1)
    for work in works:
        alone = decode_alone(engine, versions(0), {0: Asked(PROMPT, work.sample)})[0]
        np.testing.assert_array_equal(done[work.sample].tokens, alone.tokens)
        np.testing.assert_allclose(done[work.sample].behavior_logp, alone.behavior_logp, atol=1e-5)


def test_a_killed_source_is_an_error_at_once_and_its_files_can_still_be_fetched(source, folder, engine):
    source.kill()
    source.wait()
    receiver = Receiver(engine, folder, SECRET, deadline_s=10 * HANG_S)
    with pytest.raises(MoveError, match=r"samples 0/0\.0, 0/1\.0 could not be fetched from host-0 .*start"):
        ends(lambda: receiver.fetch((folder / "direct").read_bytes()))
    assert len(receiver.fetch((folder / "staged").read_bytes())) == 2
