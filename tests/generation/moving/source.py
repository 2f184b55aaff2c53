"""A generation host in a process of its own: `python -m tests.generation.moving.source FOLDER`.

Decodes four samples halfway and offers each: FOLDER/NAME is the ticket of the samples in `OFFERS`. Ends when
FOLDER/done exists, after a release of them all.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from areal_jax.generation.commands import HandOver, HostSample
from areal_jax.generation.moving.sender import Sender, make_sender
from areal_jax.types import SampleId
from areal_jax.weights.memory import MemoryStore
from tests.generation.conftest import make_engine, make_model, version_of
from tests.generation.decoding import Heard, make_host, start
from tests.hangs import HANG_S

NAME, SECRET, DEADLINE_S = "host-0", "of this test", HANG_S
PROMPT, CALLS = (5, 9, 2, 14, 3), 5
OFFERS = {"direct": [0, 1], "staged": [2, 3]}
"""Way -> the members that go that way."""


def make_senders(folder: Path) -> dict[str, Sender]:
    return {
        "direct": make_sender(NAME, folder, is_direct=True, secret=SECRET),
        "staged": make_sender(NAME, folder, is_direct=False),
    }


def halfway() -> dict[SampleId, HostSample]:
    """The samples of one group after CALLS decode calls, handed over."""
    engine, found = make_engine(make_model()), {}
    store = MemoryStore(engine.canary)
    store.publish(version_of(engine, 0))
    host = make_host(engine, store, Heard())
    host.inbox.put(start(0, 4, PROMPT))
    host.take_commands()
    for _ in range(CALLS):
        host.step()
    samples = tuple(SampleId(0, member) for member in range(4))
    host.inbox.put(HandOver(samples, lambda works: found.update({work.sample: work for work in works})))
    host.take_commands()
    return found


def main(folder: Path) -> None:
    works, senders = halfway(), make_senders(folder)
    for way, members in OFFERS.items():
        ticket = senders[way].offer([works[SampleId(0, member)] for member in members])
        (folder / f".{way}").write_bytes(ticket)
        (folder / f".{way}").rename(folder / way)
    end_s = time.monotonic() + DEADLINE_S
    while not (folder / "done").exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    for sender in senders.values():
        sender.release(works)
        sender.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
