"""The measurement of slots while episodes wait for their tools."""

from __future__ import annotations

import pytest

from areal_jax.lab.bench.episode_slots import Span, episodes, live_share


def test_the_share_is_of_the_windows_slot_seconds():
    spans = [Span(0.0, 3.0), Span(2.5, 4.0), Span(5.0, 9.0), Span(0.0, 1.0), Span(7.0, 9.0)]
    # Of 2 slots from 2 to 6: 1 + 1.5 + 1 seconds.
    assert live_share(spans, 2.0, 6.0, 2) == pytest.approx(3.5 / 8)


@pytest.mark.soak
def test_slots_that_are_freed_during_tool_calls_decode_more():
    found = episodes(
        slots=2, episodes=8, turns=2, tokens=8, tool_s=0.1, seconds=0.6, prefill_chunk=32, repeats=1
    )
    assert 0 < found["blocking_live_share"] < found["live_share"] <= 1
    assert found["over_blocking"] > 1 and 0 < found["turn_s"] < 0.1 + found["blocking_turn_s"] * 8
    assert found["live_share_runs"] == [found["live_share"]]
