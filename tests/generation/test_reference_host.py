"""Reference answers instead of samples: an answer that raises an error costs its sample, not the host."""

from __future__ import annotations

import numpy as np

from areal_jax.control.events import SampleFailed, SampleFinished
from areal_jax.generation.commands import Start, Stop
from areal_jax.generation.reference_host import ReferenceHost
from areal_jax.observe.waits import Timeline
from areal_jax.types import SampleId, Sampling, Trajectory
from tests.hangs import HANG_S


def answer(sample: SampleId) -> Trajectory:
    if sample.ordinal == 0:
        raise KeyError("solution")
    zeros = np.zeros(2, np.int32)
    return Trajectory(sample, zeros, zeros > 0, zeros, zeros, zeros, Sampling(), "stop")


def test_an_answer_that_raises_fails_its_sample_and_the_host_goes_on():
    seen: list[tuple] = []
    clock = Timeline(None).clock("host-0")
    own = dict(length=8, clock=clock, deadline_s=HANG_S)
    host = ReferenceHost("host-0", answer, lambda *event: seen.append(event), **own)
    for ordinal in range(2):
        host.inbox.put(Start((SampleId(ordinal, 0),), (1,), 0))
    host.inbox.put(Stop())
    host.run()
    (failed, _), (finished, _) = seen
    assert isinstance(failed, SampleFailed) and failed.reason.startswith("KeyError: 'solution' (")
    assert finished == SampleFinished(SampleId(1, 0), "host-0", (), "stop")
