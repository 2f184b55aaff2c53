"""Waits: a component's seconds add up, the file keeps its shares, and no wait outlives its deadline."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.observe import waits
from areal_jax.observe.waits import (
    CONTROL_ALONE,
    Interval,
    Timeline,
    WaitTimeout,
    idle_share,
    is_idle,
    read_intervals,
    read_timelines,
)
from tests.hangs import HANG_S

MS = 1_000_000
SECOND = 1000 * MS


class FakeTime:
    def __init__(self) -> None:
        self.now = 17

    def __call__(self) -> int:
        return self.now


def seconds_by_activity(intervals, component: str) -> dict[str, float]:
    spans: Counter = Counter()
    for each in intervals:
        if each.component == component:
            spans[each.activity] += each.end_s - each.start_s
    return dict(spans)


def assert_tiles(intervals: list[Interval], end_s: float) -> None:
    """From 0 to the end, in order, without gap or overlap."""
    assert intervals[0].start_s == 0.0
    assert intervals[-1].end_s == pytest.approx(end_s, abs=1e-6)
    for one, other in pairwise(intervals):
        assert one.end_s == other.start_s
        assert one.end_s > one.start_s


moves = st.lists(
    st.tuples(
        st.sampled_from(["trainer", "host"]),
        st.sampled_from(["update", "decode", "wait: a batch"]),
        st.integers(0, 3 * SECOND),
        st.sampled_from(["switch", "take", "flush"]),
    ),
    max_size=40,
)


@given(moves)
def test_an_actors_seconds_add_up_to_the_elapsed_time(moves):
    now = FakeTime()
    timeline = Timeline(None, now)
    clocks = {name: timeline.clock(name) for name in ("trainer", "host")}
    began, taken_ns = now.now, Counter()

    def take():
        for component, totals in timeline.take_totals().items():
            taken_ns[component] += sum(round(span * SECOND) for span in totals.values())
        assert taken_ns["trainer"] == taken_ns["host"] == now.now - began

    for component, activity, passed, action in moves:
        clocks[component].switch(activity)
        now.now += passed
        if action == "take":
            take()
    take()


@given(moves)
def test_the_control_planes_time_alone_is_counted_exactly(moves):
    """Against a sum over every moment of the same moves."""
    now, began = FakeTime(), 0
    timeline = Timeline(None, now)
    components = {"trainer": "host-0", "host": "control"}  # the names that `moves` has
    clocks = {name: timeline.clock(component) for name, component in components.items()}
    timeline.clock("host-1")  # idle throughout
    began, alone_ns, taken_ns = now.now, 0, Counter()
    for component, activity, passed, action in moves:
        clocks[component].switch(activity)
        is_alone = is_idle(clocks["trainer"].activity) and not is_idle(clocks["host"].activity)
        now.now += passed
        alone_ns += passed * is_alone
        if action == "take":
            taken_ns.update({k: round(v * SECOND) for k, v in timeline.take_totals()[CONTROL_ALONE].items()})
    taken_ns.update({k: round(v * SECOND) for k, v in timeline.take_totals()[CONTROL_ALONE].items()})
    assert taken_ns["decide"] == alone_ns and taken_ns.total() == now.now - began


def test_the_control_planes_time_alone_needs_devices_on_the_same_timeline():
    timeline = Timeline(None)
    timeline.clock("control", "decide")
    assert set(timeline.take_totals()) == {"control"}


def test_totals_by_activity_and_idle_share():
    now = FakeTime()
    timeline = Timeline(None, now)
    trainer = timeline.clock("trainer")
    now.now += 2 * SECOND
    with trainer.doing("update"):
        now.now += 5 * SECOND
        with trainer.doing("wait: weights"):
            now.now += SECOND
        assert trainer.activity == "update"
    now.now += 2 * SECOND
    totals = timeline.take_totals()["trainer"]
    assert totals == {"wait: start": 4.0, "update": 5.0, "wait: weights": 1.0}
    assert idle_share(totals) == 0.5
    assert timeline.take_totals()["trainer"] == {}
    assert idle_share({}) == 0.0


def test_doing_restores_the_former_activity_when_the_work_raises():
    clock = Timeline(None, FakeTime()).clock("host", "decode")
    with pytest.raises(ZeroDivisionError), clock.doing("swap"):
        raise ZeroDivisionError
    assert clock.activity == "decode"
    assert clock.switch("prefill") == "decode"


def test_one_name_is_one_clock():
    timeline = Timeline(None, FakeTime())
    assert timeline.clock("host") is timeline.clock("host", "another")
    assert timeline.clock("host").activity == "wait: start"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1000, 900 * MS)), min_size=1, max_size=60))
def test_the_file_tiles_the_time_and_keeps_every_share(tmp_path_factory, stretches):
    path = tmp_path_factory.mktemp("logs") / "timeline.jsonl"
    now = FakeTime()
    timeline = Timeline(path, now)
    clock = timeline.clock("host", stretches[0][0])
    expected: Counter = Counter()
    for activity, span in stretches:
        clock.switch(activity)
        now.now += span
        expected[activity] += span / SECOND
        timeline.flush()
    timeline.close()
    intervals = read_intervals(path)
    assert_tiles(intervals, sum(expected.values()))
    got = seconds_by_activity(intervals, "host")
    assert got == pytest.approx(dict(expected), abs=1e-6 * len(intervals))


def test_a_busy_minute_stays_small_and_its_last_seconds_stay_exact(tmp_path):
    now = FakeTime()
    timeline = Timeline(tmp_path / "timeline.jsonl", now)
    clock = timeline.clock("host", "decode")
    for _ in range(10_000):  # two minutes of 9 ms of work and 3 ms of waiting
        clock.switch("decode")
        now.now += 9 * MS
        clock.switch("wait: weights")
        now.now += 3 * MS
    timeline.close()
    intervals = read_intervals(tmp_path / "timeline.jsonl")
    assert_tiles(intervals, 120.0)
    old = [each for each in intervals if each.end_s < 114.0]
    assert len(old) <= 2 * 1000
    assert seconds_by_activity(old, "host")["decode"] == pytest.approx(0.75 * old[-1].end_s, abs=0.1)
    assert {round(each.end_s - each.start_s, 6) for each in intervals if each.start_s > 116.0} == {
        0.009,
        0.003,
    }


def test_long_work_of_one_kind_is_one_interval(tmp_path):
    now = FakeTime()
    timeline = Timeline(tmp_path / "timeline.jsonl", now)
    clock = timeline.clock("trainer", "update")
    for _ in range(100):
        now.now += 100 * MS
        clock.switch("update")
        timeline.flush()
    now.now += 60 * SECOND
    timeline.close()
    intervals = read_intervals(tmp_path / "timeline.jsonl")
    assert_tiles(intervals, 70.0)
    assert len(intervals) <= 30  # what is recent stays in pieces of a window


def test_a_resumed_timeline_goes_on_where_the_file_ends(tmp_path):
    path, now = tmp_path / "logs" / "timeline.jsonl", FakeTime()
    for _ in range(2):
        timeline = Timeline(path, now)
        timeline.clock("trainer", "update")
        now.now += 3 * SECOND
        timeline.close()
        now.now += 1000 * SECOND  # no process ran
    with path.open("a") as file:
        file.write('{"component": "trainer", "acti')
    assert [(each.start_s, each.end_s) for each in read_intervals(path)] == [(0.0, 3.0), (3.0, 6.0)]


def test_a_clock_switched_by_many_threads_loses_no_time():
    timeline = Timeline(None)
    clock = timeline.clock("pool")
    timeline.take_totals()

    def flip(name: str) -> None:
        for _ in range(500):
            clock.switch(name)

    threads = [threading.Thread(target=flip, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    first = sum(timeline.take_totals()["pool"].values())
    assert first > 0
    assert clock.activity in "abcd"


def test_get_returns_the_item_and_counts_the_wait():
    timeline = Timeline(None)
    clock = timeline.clock("trainer", "update")
    source: queue.Queue[int] = queue.Queue()
    source.put(7)
    assert waits.get(source, waiter="trainer", what="a batch", deadline_s=1, clock=clock) == 7
    assert clock.activity == "update"
    assert "wait: a batch" in timeline.take_totals()["trainer"]


def test_a_passed_deadline_names_who_waited_for_what():
    never: queue.Queue[int] = queue.Queue()
    with pytest.raises(WaitTimeout) as error:
        waits.get(never, waiter="trainer", what="a batch from the control plane", deadline_s=0.01)
    assert str(error.value).startswith(
        "trainer ends, because it waited 0.01 s for a batch from the control plane; "
    )
    assert "runtime.deadline_s" in str(error.value)


def test_a_follower_hears_every_activity_but_none_after_an_error():
    clock, heard = Timeline(None).clock("trainer", "wait: start"), []
    clock.follow(heard.append)
    with clock.doing("update"):
        with clock.doing("pack"):
            pass
        clock.switch("publish")
    assert heard == ["update", "pack", "update", "publish", "wait: start"]
    with pytest.raises(ValueError, match="lost"), clock.doing("update"), clock.doing("pack"):
        raise ValueError("lost")
    assert heard[5:] == ["update", "pack"]
    assert clock.activity == "wait: start"


def test_timelines_of_processes_are_read_as_one_without_the_time_in_which_none_ran(tmp_path):
    """Two processes, of which one starts again 1,000 s after both had ended."""
    (tmp_path / "logs").mkdir()
    now = FakeTime()
    now.now = 5_000_000 * SECOND
    for name, pause_s, span_s in (("trainer-0", 0, 4), ("generate-0", -3, 6), ("trainer-0", 1000, 2)):
        now.now += pause_s * SECOND
        path = tmp_path / "logs" / f"timeline-{name}.jsonl"
        timeline = Timeline(path, now, zero_ns=0)
        timeline.clock(name, "work")
        now.now += span_s * SECOND
        timeline.close()
    assert [tuple(each) for each in read_timelines(tmp_path)] == [
        ("trainer-0", "work", 0.0, 4.0),
        ("generate-0", "work", 1.0, 7.0),
        ("trainer-0", "work", 7.0, 9.0),
    ]
    (tmp_path / "logs" / "timeline.jsonl").write_text("")
    assert read_timelines(tmp_path) == []  # a run of threads has one file
