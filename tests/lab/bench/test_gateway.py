"""The measurement of agents' chats: every request is a turn of its episode, and none begins a branch."""

from __future__ import annotations

from areal_jax.lab.bench.gateway import gateway


def test_every_request_continues_its_episode():
    found = gateway(episodes=4, turns=5, tokens=7, at_once=2)
    assert (found["requests"], found["branches"]) == (20, 0)
    assert found["cpu_ms_per_request"] > 0 and found["p50_ms"] <= found["p99_ms"]
