"""Members, lost ones, and processes that are lost too often."""

from __future__ import annotations

import pytest

from areal_jax.cluster.membership import LOST_S, MOST_LOSSES, WINDOW_S, Membership
from areal_jax.cluster.messages import Hello, Ready


def hello(name: str, incarnation: str = "a", role: str = "generate") -> Hello:
    return Hello(role, name, incarnation, "node-1", 7)


def answer(there: Membership, name: str, next_step: int = -1) -> None:
    """As when the process sends Ready."""
    there.members[name].ready = Ready(name, "a", "epoch", next_step=next_step)


def test_the_last_process_to_register_under_a_name_is_the_member():
    there = Membership()
    assert there.join(hello("host-0", "a"), 0.0) is None
    assert there.join(hello("host-0", "b"), 1.0) is None
    assert there.of("host-0", "a") is None
    member = there.of("host-0", "b")
    assert member is not None and member.mailbox == "host-0.b"


def test_registering_twice_changes_nothing():
    there = Membership()
    there.join(hello("host-0"), 0.0)
    answer(there, "host-0")
    assert there.join(hello("host-0"), 5.0) is None
    assert there.members["host-0"].is_ready and there.members["host-0"].since_s == 0.0


def test_a_process_has_time_for_its_first_heartbeat_from_its_hello_on():
    there = Membership()
    there.join(hello("host-0"), 0.0)
    there.join(hello("host-1"), 10.0)
    assert there.without_heartbeat({"host-1.a"}, LOST_S) == []
    assert there.without_heartbeat({"host-1.a"}, LOST_S + 0.1) == ["host-0"]
    assert there.without_heartbeat({"host-0.a"}, LOST_S + 10.1) == ["host-1"]
    of_another_incarnation = {"host-0.b", "host-1.a"}
    assert there.without_heartbeat(of_another_incarnation, LOST_S + 0.1) == ["host-0"]


def test_a_process_that_is_heard_again_was_not_lost():
    """It may be paused as often as it likes; and one that ended, or was replaced, does not come back."""
    there, silent = Membership(), hello("host-0")
    there.join(hello("host-1"), 0.0)
    answer(there, "host-1")
    for number in range(2 * MOST_LOSSES):
        assert there.join(silent, float(number)) is None
        assert there.silence("host-0", float(number)) is not None
        assert "host-0" not in there.members and there.heard_again({"host-1.a", "host-0.b"}) == []
        assert there.heard_again({"host-0.a"}) == [silent]
    assert there.heard_again({"host-0.a"}) == []
    for end in (lambda: there.forget("host-0", "a"), lambda: there.join(hello("host-0", "b"), 50.0)):
        assert there.join(silent, 40.0) is None
        there.silence("host-0", 40.0)
        there.forget("host-0", "of another start")
        end()
        assert there.heard_again({"host-0.a"}) == []


def test_a_process_lost_too_often_is_refused_for_the_window_while_another_does_its_work():
    there = Membership()
    there.join(hello("host-1"), 0.0)
    answer(there, "host-1")
    for number in range(MOST_LOSSES):
        assert there.join(hello("host-0", str(number)), float(number)) is None
        there.lose("host-0", float(number))
    refused = there.join(hello("host-0", "again"), 20.0)
    assert refused is not None and "host-0 on node-1 was lost 5 times" in refused
    assert "host-0" not in there.members
    assert there.join(hello("host-2", "a"), 20.0) is None
    there.lose("host-1", 21.0)  # and the one that came is not ready
    assert there.join(hello("host-0", "needed"), 22.0) is None
    there.lose("host-0", 23.0)
    assert there.join(hello("host-0", "later"), WINDOW_S + 24.0) is None


@pytest.mark.parametrize("role", ["trainer", "evaluate"])
def test_one_that_no_other_replaces_is_never_refused(role: str):
    there = Membership()
    there.join(hello("other", role=role), 0.0)
    answer(there, "other")
    for number in range(2 * MOST_LOSSES):
        assert there.join(hello("one", str(number), role), float(number)) is None
        there.lose("one", float(number))


def test_who_leaves_as_told_is_not_lost():
    there = Membership()
    for number in range(2 * MOST_LOSSES):
        assert there.join(hello("host-0", str(number)), float(number)) is None
        there.leave("host-0")


def test_those_of_a_role_that_work_by_name():
    there = Membership()
    for name, role in (("host-1", "generate"), ("host-0", "generate"), ("trainer-0", "trainer")):
        there.join(hello(name, role=role), 0.0)
    answer(there, "host-1")
    answer(there, "trainer-0")
    assert [member.hello.name for member in there.ready("generate")] == ["host-1"]
    answer(there, "host-0")
    assert [member.hello.name for member in there.ready("generate")] == ["host-0", "host-1"]
    answer(there, "trainer-0", next_step=3)  # it still has to catch up
    assert there.ready("trainer") == []
