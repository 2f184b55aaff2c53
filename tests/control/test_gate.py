"""The staleness gate: the paper's inequality, AReaL's capacity form, and what a whole run makes of them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.config.loading import make_config
from areal_jax.control.audit import audit
from areal_jax.control.events import Dispatch
from areal_jax.control.gate import may_admit
from areal_jax.control.state import State
from areal_jax.control.strategies import STRATEGIES, Ahead, Bounded
from tests.control.play import Player, config_of

ETAS = [0, 1, 2, 4, 8, None]


def capacity(accepted: int, running: int, version: int, size: int, eta: int | None, concurrent: int) -> float:
    """How many more groups may start, as AReaL counts; rejected groups are in neither count."""
    by_staleness = float("inf") if eta is None else (eta + version + 1) * size - (accepted + running)
    return min(concurrent - running, by_staleness)


@given(
    accepted=st.integers(0, 500),
    running=st.integers(0, 500),
    dropped=st.integers(0, 500),
    version=st.integers(0, 50),
    size=st.integers(1, 64),
    eta=st.sampled_from(ETAS),
)
def test_inequality_and_capacity_form_agree(accepted, running, dropped, version, size, eta):
    admitted = accepted + running + dropped
    unlimited = running + 1
    assert may_admit(admitted + 1, dropped, version, size, eta) == (
        capacity(accepted, running, version, size, eta, unlimited) > 0
    )


def test_first_and_last_admission_of_a_version():
    """Eta 1, batches of 4: at version 0 eight groups may start, the ninth waits, one drop lets it in."""
    assert may_admit(8, 0, 0, 4, 1)
    assert not may_admit(9, 0, 0, 4, 1)
    assert may_admit(9, 1, 0, 4, 1)
    assert may_admit(9, 0, 1, 4, 1)
    assert may_admit(10**9, 0, 0, 4, None)


def test_sync_is_the_gate_at_zero():
    states = [State(9, admitted=admitted, dropped={"end": 1}, version=2) for admitted in range(20)]
    assert [Bounded(4, 0).admits(s) for s in states] == [Ahead(4, 0).admits(s) for s in states]
    assert STRATEGIES["sync"](4, 7) == Bounded(4, 0)


class CapacityCounter(Player):
    """Counts accepted and running by itself, and compares with what the plane admits after every event."""

    def tell(self, event):
        version_before, known = self.plane.state.version, self.plane.state.admitted
        actions = super().tell(event)
        dropped = sum(self.plane.state.dropped.values())
        admitted = {a.samples[0].ordinal for a in actions if isinstance(a, Dispatch)} - set(range(known))
        assert admitted == set(range(known, self.plane.state.admitted))
        if admitted:
            assert self.plane.state.version >= version_before
            last = self.plane.state.admitted
            eta = self.config.max_staleness
            assert (
                eta is None
                or (last - dropped - 1) // self.config.trainer.batch_size <= self.plane.state.version + eta
            )
        if self.plane.state.hosts and not self.plane.state.is_finished:
            self.check_saturated(dropped)
        return actions

    def check_saturated(self, dropped: int) -> None:
        """Hosts have endless room here, so whatever capacity there is must have been used."""
        running = len({p.sample.ordinal for p in self.pending if hasattr(p, "sample")})
        running += sum(type(p).__name__ in ("RewardScored", "RewardFailed") for p in self.pending)
        accepted = self.plane.state.admitted - dropped - running
        free = capacity(
            accepted,
            running,
            self.plane.state.version,
            self.config.trainer.batch_size,
            self.config.max_staleness,
            self.limit,
        )
        is_at_end = (
            self.plane.state.admitted == self.config.run.steps * self.config.trainer.batch_size + dropped
        )
        assert free <= 0 or is_at_end, (free, self.plane.waits())

    @property
    def limit(self) -> int:
        return self.config.control.max_concurrent or 10**9


@pytest.mark.parametrize("eta", ETAS)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    group_size=st.integers(1, 3),
    concurrent=st.one_of(st.none(), st.integers(1, 12)),
    troubles=st.booleans(),
)
def test_any_completion_order_keeps_the_gate_and_comes_to_an_end(
    eta, seed, size, group_size, concurrent, troubles
):
    """A1: with drops, refunds and reissues, groups ending in any order."""
    config = config_of(
        steps=5,
        batch_size=size,
        group_size=group_size,
        max_staleness=eta,
        max_concurrent=concurrent,
        group_filter="signal" if group_size > 1 else "none",
    )
    share = 0.3 if troubles else 0.0
    player = CapacityCounter(config, Random(seed), share, share / 2, share / 3, slots=10**6, hosts=1)
    player.start().play()
    result = audit(config, player.rows)
    assert result.violations == []
    assert (result.trained, result.in_flight) == (5 * size, 0)
    if eta == 0:
        assert set(player.ages) == {0}


@pytest.mark.parametrize("eta", ETAS)
def test_half_of_all_groups_dropped_does_not_stall(eta):
    config = config_of(steps=30, batch_size=4, group_size=2, max_staleness=eta, group_filter="signal")
    player = Player(config, Random(0), equal_rewards=0.5).start().play()
    dropped = player.plane.state.dropped["no_signal"]
    assert 80 < dropped < 170
    assert player.plane.state.admitted == 120 + dropped
    assert audit(config, player.rows).ok


def test_sync_through_the_config():
    config = make_config({"control": {"strategy": "sync"}, "run": {"steps": 3}})
    assert (config.control.strategy, config.max_staleness, config.run.steps) == ("sync", 0, 3)
    player = Player(config, Random(1)).start().play()
    assert set(player.ages) == {0}
