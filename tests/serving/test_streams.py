"""Streams without a socket: requests in, tokens out, and clients that misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager

import jax
import pytest

from areal_jax.generation.commands import Pause, Stop, Tokens, Unpause
from areal_jax.generation.host import Host
from areal_jax.generation.slots import Penalties
from areal_jax.serving.requests import Ask, RequestError
from areal_jax.serving.streams import Streams
from areal_jax.types import Sampling
from areal_jax.weights.memory import MemoryStore
from tests.hangs import HANG_S
from tests.serving.served import LENGTH, PROMPT, SLOTS, alone, asked, tiny_engine, tiny_params

# Log-probs are compared exactly, with values that tests/serving/served.py keeps for all files.
pytestmark = pytest.mark.all_optimizations

GREEDY = Sampling(temperature=0.0, max_tokens=20)
LONG = Sampling(temperature=0.0, max_tokens=LENGTH)
DEADLINE_S = HANG_S


@asynccontextmanager
async def serving(
    queue: int = 8, room_tokens: int = 4096, on_update: str = "recompute", calls_ahead: int = 0
) -> AsyncIterator[Streams]:
    """Streams over a host in its thread, in the running event loop."""
    engine = tiny_engine()
    store = MemoryStore(engine.canary)
    store.publish(tiny_params(0))
    streams = Streams(asyncio.get_running_loop(), slots=SLOTS, queue=queue, room_tokens=room_tokens)
    host = Host(
        "served",
        engine,
        store,
        streams.emit,
        seed=0,
        sampling=GREEDY,
        on_update=on_update,
        on_tokens=streams.hear,
        calls_ahead=calls_ahead,
    )
    streams.host = host
    host.step()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            streams.run()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield streams
    finally:
        streams.tell(Stop())
        await asyncio.to_thread(thread.join, DEADLINE_S)
        assert not thread.is_alive()


def drive(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


async def read(streams: Streams, ask: Ask) -> dict[int, list[int]]:
    """Each member's tokens; every one of them has to end."""
    found: dict[int, list[int]] = {member: [] for member in range(ask.n)}
    ended = set()
    with streams.submitted(ask) as stream:
        async for member, output in stream.items():
            assert member not in ended
            if isinstance(output, Tokens):
                found[member] += output.tokens
            else:
                ended.add(member)
    assert ended == set(found)
    return found


async def until(holds, what: str) -> None:
    for _ in range(DEADLINE_S * 100):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


async def paused(streams: Streams) -> None:
    streams.tell(Pause())
    await until(lambda: streams.host.statistics().is_paused, "paused")


def is_empty(streams: Streams) -> bool:
    now = streams.host.statistics()
    return (now.live, now.waiting, streams.open_samples) == (0, 0, 0)


@contextmanager
def refused(code: str, says: str):
    with pytest.raises(RequestError, match=says) as caught:
        yield
    assert caught.value.code == code


# --- what is served -----------------------------------------------------------------------------------------


def test_a_request_is_answered_with_the_tokens_log_probs_and_version_of_the_host():
    tokens, logp = alone(PROMPT)

    async def scenario():
        async with serving() as streams:
            with streams.submitted(asked(PROMPT, GREEDY)) as stream:
                items = [item async for item in stream.items()]
            assert {member for member, _ in items} == {0}
            *sampled, end = [output for _, output in items]
            assert sum((output.tokens for output in sampled), ()) == tokens
            assert sum((output.logp for output in sampled), ()) == logp
            assert {output.version for output in sampled} == {0}
            assert (end.stop_reason, end.interruptions, end.is_reproducible) == ("length", 0, True)

    drive(scenario)


def test_a_sample_with_a_seed_does_not_depend_on_when_it_was_asked_for():
    drawn = Sampling(temperature=1.0, max_tokens=12)

    async def scenario():
        async with serving() as streams:
            seeded = asked(PROMPT, drawn, n=3, seed=5)
            first = await read(streams, seeded)
            other, again = await asyncio.gather(
                read(streams, asked((9, 9), drawn, n=2)), read(streams, seeded)
            )
            assert first == again
            assert first == {member: list(alone(PROMPT, 0, drawn, member, 5)[0]) for member in range(3)}
            assert len({tuple(tokens) for tokens in (*first.values(), *other.values())}) == 5
            assert await read(streams, asked(PROMPT, drawn)) != await read(streams, asked(PROMPT, drawn))

    drive(scenario)


@pytest.mark.parametrize("calls_ahead", [0, 1])
def test_eos_stop_tokens_and_stop_texts_are_delivered_and_end_the_sample(calls_ahead):
    tokens, _ = alone(PROMPT)
    eos = tiny_engine().tokenizer.eos_id
    third = tokens[2]
    upto = list(tokens[: tokens.index(third) + 1])

    async def scenario():
        async with serving(calls_ahead=calls_ahead) as streams:
            biased = asked(PROMPT, GREEDY, Penalties(bias={eos: 100.0}))
            with streams.submitted(biased) as stream:
                sampled, end = [output async for _, output in stream.items()]
            assert sampled.tokens == (eos,) and end.stop_reason == "stop"
            assert await read(streams, asked(PROMPT, GREEDY, stop_tokens=(third,))) == {0: upto}
            texts = Sampling(0.0, max_tokens=20, stop=("!!",))
            shouting = await read(streams, asked(PROMPT, texts, Penalties(bias={ord("!"): 100.0})))
            assert shouting == {0: [33, 33]}
            await until(lambda: is_empty(streams), "slots free")

    drive(scenario)


@pytest.mark.parametrize("calls_ahead", [0, 1])
def test_more_requests_than_slots_are_all_answered_alike(calls_ahead):
    """Short ones that end together: the stock Driver dies of that within seconds."""

    async def scenario():
        async with serving(queue=400, calls_ahead=calls_ahead) as streams:
            asks = [asked((1 + i % 7, 3), Sampling(0.0, max_tokens=1 + i % 3)) for i in range(200)]
            for ask, found in zip(
                asks, await asyncio.gather(*(read(streams, ask) for ask in asks)), strict=True
            ):
                expected, _ = alone(ask.start.prompt, 0, ask.start.sampling)
                assert found == {0: list(expected)}
            await until(lambda: is_empty(streams), "slots free")

    drive(scenario)


# --- clients that misbehave ---------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_what_waits_is_answered_later():
    async def scenario():
        async with serving(queue=2) as streams:
            await paused(streams)
            waiting = [asyncio.create_task(read(streams, asked(PROMPT, GREEDY, n=2))) for _ in range(3)]
            await asyncio.sleep(0)
            with refused("RESOURCE_EXHAUSTED", "leave space for 0 in 4 slots and a queue of 2.*retry later"):
                await read(streams, asked(PROMPT, GREEDY))
            streams.tell(Unpause())
            expected = list(alone(PROMPT)[0])
            assert await asyncio.gather(*waiting) == [{0: expected, 1: expected}] * 3

    drive(scenario)


def test_leaving_frees_slot_and_queue_also_while_paused():
    async def scenario():
        async with serving() as streams:
            await paused(streams)
            tasks = [asyncio.create_task(read(streams, asked(PROMPT, LONG))) for _ in range(SLOTS + 2)]
            streams.tell(Unpause())
            await until(lambda: streams.host.statistics().live == SLOTS, "slots taken")
            await paused(streams)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: is_empty(streams), "slots free")

    drive(scenario)


def test_a_reader_that_falls_behind_is_cut_off_and_its_neighbour_is_not():
    async def scenario():
        async with serving(room_tokens=10) as streams:
            with streams.submitted(asked(PROMPT, LONG)) as slow:
                # As long as there is room for: on a busy machine every reader may fall behind.
                neighbour = await read(streams, asked(PROMPT, Sampling(temperature=0.0, max_tokens=10)))
                await until(lambda: is_empty(streams), "the slow one's slot is free before it reads on")
                with refused("RESOURCE_EXHAUSTED", "more than 10 of its tokens were unread"):
                    _ = [item async for item in slow.items()]
            assert neighbour == {0: list(alone(PROMPT)[0])[:10]}

    drive(scenario)


def test_a_request_is_cancelled_by_its_name():
    async def scenario():
        async with serving() as streams:
            await paused(streams)
            with streams.submitted(asked(PROMPT, LONG, request_id="mine")) as stream:
                with refused("INVALID_ARGUMENT", "request_id='mine' is in use"):
                    await read(streams, asked(PROMPT, GREEDY, request_id="mine"))
                assert not streams.cancel("yours")
                assert streams.cancel("mine")
                with refused("CANCELLED", "'mine' was cancelled"):
                    _ = [item async for item in stream.items()]
            await until(lambda: is_empty(streams), "slots free")
            assert not streams.cancel("mine")

    drive(scenario)


def test_a_version_that_is_not_there_yet_is_refused_and_not_waited_for():
    async def scenario():
        async with serving() as streams:
            with refused(
                "FAILED_PRECONDITION", "min_version=3 is not served yet, because the host has version 0"
            ):
                await read(streams, asked(PROMPT, GREEDY, min_version=3))

    drive(scenario)


# --- hosts that fail ----------------------------------------------------------------------------------------


def test_out_of_memory_in_prefill_ends_that_request_only(monkeypatch):
    engine = tiny_engine()
    compute = engine.prefill_next

    def full(params, prefilling):
        if prefilling.prompts[0].tokens[0] == 77:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
        return compute(params, prefilling)

    monkeypatch.setattr(engine, "prefill_next", full)

    async def scenario():
        async with serving() as streams:
            well = asyncio.create_task(read(streams, asked(PROMPT, GREEDY)))
            with refused("RESOURCE_EXHAUSTED", "a prompt of 3 tokens exceeds device memory; shorten it"):
                await read(streams, asked((77, 1, 2), GREEDY, n=2))
            assert await well == {0: list(alone(PROMPT)[0])}
            await until(lambda: is_empty(streams), "slots free")

    drive(scenario)


def test_a_host_that_ends_tells_everybody(monkeypatch):
    engine = tiny_engine()

    def broken(*_):
        raise RuntimeError("the device is gone")

    async def scenario():
        async with serving() as streams:
            await paused(streams)
            waiting = asyncio.create_task(read(streams, asked(PROMPT, GREEDY, n=2)))
            await asyncio.sleep(0)
            monkeypatch.setattr(engine, "generate", broken)
            streams.tell(Unpause())
            with refused("UNAVAILABLE", "the generation host has ended"):
                await waiting
            assert not streams.is_live
            with refused("UNAVAILABLE", "the generation host has ended"):
                await read(streams, asked(PROMPT, GREEDY))

    drive(scenario)
