"""The audit finds what is wrong with a journal, and names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from areal_jax.config.loading import make_config
from areal_jax.control import events as e
from areal_jax.control.audit import Row, audit
from areal_jax.types import SampleId, VersionSpan
from tests.control.play import Player, config_of

CONFIG = config_of(
    steps=5, batch_size=2, group_size=2, max_staleness=1, max_token_age=2, group_filter="signal"
)


def a_run() -> list[Row]:
    player = Player(CONFIG, Random(4), equal_rewards=0.3).start()
    for index in range(2):
        player.tell(e.HostAdopted(f"host{index}", 0, "d0"))
    return player.play().rows


def place_of(rows: list[Row], kind: type, nth: int = 0) -> tuple[int, int]:
    """Row and position among its actions (-1 = the event) of the nth record of this kind."""
    found = [
        (place, position)
        for place, event, actions in rows
        for position, record in enumerate([event, *actions], start=-1)
        if isinstance(record, kind)
    ]
    return found[nth]


def change(kind: type, nth: int = 0, **fields: object) -> Callable[[list[Row]], None]:
    """Overwrite fields of the nth record of this kind."""

    def corrupt(rows: list[Row]) -> None:
        place, position = place_of(rows, kind, nth)
        _, event, actions = rows[place]
        if position < 0:
            rows[place] = (place, replace(event, **fields), actions)
        else:
            changed = tuple(replace(a, **fields) if i == position else a for i, a in enumerate(actions))
            rows[place] = (place, event, changed)

    return corrupt


def remove(kind: type, nth: int = 0) -> Callable[[list[Row]], None]:
    """Take the nth action of this kind out of its row."""

    def corrupt(rows: list[Row]) -> None:
        place, position = place_of(rows, kind, nth)
        _, event, actions = rows[place]
        rows[place] = (place, event, actions[:position] + actions[position + 1 :])

    return corrupt


def insert(record: e.Action, after: type, nth: int = 0) -> Callable[[list[Row]], None]:
    """Put an action at the end of the row that holds the nth record of a kind."""

    def corrupt(rows: list[Row]) -> None:
        place, _ = place_of(rows, after, nth)
        _, event, actions = rows[place]
        rows[place] = (place, event, (*actions, record))

    return corrupt


def admit_early(rows: list[Row]) -> None:
    """Admissions of version 1 move to the start, before their version is committed."""
    place, _ = place_of(rows, e.VersionCommitted)
    _, event, actions = rows[place]
    early = tuple(replace(a, min_version=0) for a in actions if isinstance(a, e.Dispatch))
    assert early
    rows[place] = (place, event, ())
    joined, _ = place_of(rows, e.HostAdopted)
    rows[joined] = (joined, rows[joined][1], rows[joined][2] + early)


def train_twice(rows: list[Row]) -> None:
    """A second batch made of the first one's groups."""
    first = rows[place_of(rows, e.Train)[0]][2]
    ordinals = next(a for a in first if isinstance(a, e.Train)).ordinals
    for kind in (e.Train, e.BatchTrained):
        change(kind, 1, ordinals=ordinals)(rows)


def old_token(rows: list[Row]) -> None:
    """A sample of the last batch began under version 0."""
    last = [event for _, event, _ in rows if isinstance(event, e.BatchTrained)][-1].ordinals[-1]
    place = next(p for p, ev, _ in rows if isinstance(ev, e.SampleFinished) and ev.sample.ordinal == last)
    event = rows[place][1]
    assert isinstance(event, e.SampleFinished)
    rows[place] = (place, replace(event, spans=(VersionSpan(0, 0, 1), *event.spans)), rows[place][2])


def lose_a_member(rows: list[Row]) -> None:
    """A group of the first batch lacks a sample."""
    first = next(event for _, event, _ in rows if isinstance(event, e.BatchTrained)).ordinals[0]
    place = next(p for p, ev, _ in rows if isinstance(ev, e.SampleFinished) and ev.sample.ordinal == first)
    rows[place] = (place, replace(rows[place][1], host="nobody"), rows[place][2])  # type: ignore[type-var]


CASES = {
    "gate": (admit_early, "gate: ordinal"),
    "trained twice": (train_twice, "was trained in batch 1, but its state was trained"),
    "dropped twice": (insert(e.Drop(0, "end"), e.Finish), "was dropped (end), but its state was"),
    "trained and dropped": (
        insert(e.Drop(0, "no_signal"), e.BatchTrained, 2),
        "was dropped (no_signal), but its state was trained",
    ),
    "drop not recorded": (remove(e.Drop), "replaying the journal gives"),
    "batch out of order": (change(e.Train, ordinals=(1, 0)), "but the lowest complete ordinals are"),
    "old attempt": (change(e.Train, attempts=(1, 0)), "with attempt 1 and finished members"),
    "step skipped": (change(e.Train, 1, step=7), "asked for batch 7, but the next batch is 1"),
    "another batch trained": (
        change(e.BatchTrained, ordinals=(8, 9)),
        "was trained, but the trainer was asked for",
    ),
    "versions fall": (
        change(e.SampleFinished, 12, spans=(VersionSpan(1, 0, 1), VersionSpan(0, 1, 2))),
        "decrease: [1, 0]",
    ),
    "uncommitted version": (
        change(e.SampleFinished, spans=(VersionSpan(3, 0, 1),)),
        "has tokens of version 3",
    ),
    "old token": (old_token, "at token age 4, above the bound 2"),
    "missing member": (lose_a_member, "but needs attempt"),
    "version from nowhere": (change(e.VersionCommitted, version=4), "version 4 was committed, but"),
    "other digest adopted": (
        change(e.HostAdopted, digest="x"),
        "with digest x, but it was committed with digest d0",
    ),
    "lost admission": (remove(e.Dispatch, 2), "was admitted, but the next ordinal is 2"),
    "half a group": (
        lambda rows: change(e.Dispatch, samples=rows[place_of(rows, e.Dispatch)[0]][2][0].samples[:1])(rows),
        "unfinished members [0, 1]) was dispatched as",
    ),
    "no such host": (
        change(e.Dispatch, host="nobody"),
        "dispatched to host nobody, which is not part of the run",
    ),
    "dispatched too old": (
        change(e.Dispatch, -1, min_version=0),
        "dispatched for version 0, but the newest committed",
    ),
    "early end": (insert(e.Finish(), e.BatchTrained), "the run finished after 1 of 5 batches"),
    "left over at the end": (insert(e.Finish(), e.BatchTrained), "neither trained nor dropped"),
    "reissue skips": (insert(e.Reissue(0, 5, "x"), e.RunStarted), "contradicts the state of its group"),
    "other actions": (change(e.Score, attempt=3), "replaying the journal gives"),
}


def test_a_good_run_is_ok():
    result = audit(CONFIG, a_run())
    assert result.violations == []
    assert (result.ok, result.trained, result.in_flight) == (True, 10, 0)
    assert set(result.dropped) == {"no_signal"}


@pytest.mark.parametrize("name", CASES)
def test_a_seeded_violation_is_named(name):
    corrupt, message = CASES[name]
    rows = a_run()
    corrupt(rows)
    result = audit(CONFIG, rows)
    assert not result.ok
    assert [said for said in result.violations if message in said], result.violations


def after_a_return(*samples: SampleId) -> tuple[list[Row], int]:
    """Rows of a run in which host0 is lost, and comes back with these samples; and the row of its return."""
    player = Player(CONFIG, Random(4), slots=20, hosts=1).start()
    player.tell(e.HostLost("host0", "silent"))
    player.tell(e.HostJoined("host1", 1))  # takes group 0 of groups 0 to 3, and group 1
    player.tell(e.HostJoined("host0", 20, samples))
    return player.rows, len(player.rows) - 1


def test_a_host_that_comes_back_is_audited():
    """What it must not go on with is cancelled in the same row; what it goes on with is not dispatched."""
    other, own = SampleId(0, 1), SampleId(3, 1)
    rows, place = after_a_return(other, own)
    assert audit(CONFIG, rows).violations == []
    _, event, actions = rows[place]
    assert actions[:2] == (e.Cancel((other,), "host0"), e.Dispatch((SampleId(3, 0),), "host0", 0))
    for wrong, message in {
        actions[1:]: f"row {place}: host host0 came back with {other}, which is not its own any more",
        (e.Cancel((other,), "host1"), *actions[1:]): f"host host0 came back with {other}",
        (actions[0], e.Dispatch((SampleId(3, 0), own), "host0", 0), *actions[2:]): "was dispatched as",
        (actions[0], *actions): "",
    }.items():
        said = audit(CONFIG, [*rows[:place], (place, event, wrong)]).violations
        assert [one for one in said if message in one], said


def test_rows_out_of_order_are_named():
    rows = a_run()
    rows[3], rows[4] = rows[4], rows[3]
    assert any("rows must ascend" in said for said in audit(CONFIG, rows).violations)


def test_a_journal_cut_short_anywhere_is_ok():
    rows = a_run()
    for length in range(0, len(rows), 5):
        result = audit(CONFIG, rows[:length])
        assert result.violations == []
        admitted = sum(
            action.samples[0].attempt == 0 for _, _, actions in rows[:length] for action in actions
            if isinstance(action, e.Dispatch)
        )  # fmt: skip
        assert result.trained + result.in_flight + sum(result.dropped.values()) == admitted


def test_json_has_exactly_the_promised_keys():
    config = make_config({"run": {"steps": 1}})
    printed = json.loads(json.dumps(vars(audit(config, []))))
    assert printed == {"ok": True, "trained": 0, "dropped": {}, "in_flight": 0, "violations": []}
