"""Runs with control.over_age: the bound, its cost in the rows; the bits of a crash, a replay and a bundle."""

from __future__ import annotations

import io
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.tree import Config
from areal_jax.control import drops
from areal_jax.control.events import BatchTrained, Hold, Reissue, RunResumed
from areal_jax.generation.host import Host
from areal_jax.jobs.local import resume, run
from areal_jax.observe.waits import HELD, read_timelines
from areal_jax.replay.bundle import make_bundle, verify_bundle
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.replay import replay
from areal_jax.report.reading import find
from areal_jax.runtime import compute_choice
from areal_jax.tasks.datasets.countdown import Countdown
from areal_jax.types import ArealError
from tests.small_run import killed_at, small

pytestmark = pytest.mark.slow

WORDS = (
    "run.steps=12",
    "runtime.hosts=2",
    "runtime.placement=split",
    "control.max_staleness=1",
    "control.max_token_age=1",
    "generation.slots=12",
    "generation.decode_steps=1",
    "tasks.countdown.sigma=1.5",
)
"""Slots for more samples than a batch has."""


@pytest.fixture
def a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host decodes about three tokens a version: its samples live through several versions.

    Before each further token it waits for the next version, for twice as long as the last one took and for
    at most a second, since the trainer may be waiting for its samples.
    """
    step, decoded, tokens, newest_s, update_s = Host.step, -1, 0, time.monotonic(), 0.1

    def slow(self: Host) -> None:
        nonlocal decoded, tokens, newest_s, update_s
        step(self)
        if self.name != "host-1":
            time.sleep(0.006)
            return
        if (version := max(self._held, default=-1)) > decoded:
            update_s, newest_s = time.monotonic() - newest_s, time.monotonic()
            decoded, tokens = version, 0
        tokens += 1
        ends_s = time.monotonic() + min(1.0, 2 * update_s)
        while tokens >= 3 and (self._store.latest() or 0) <= decoded and time.monotonic() < ends_s:
            time.sleep(0.005)

    monkeypatch.setattr(Host, "step", slow)


def bounded(folder: Path, over_age: str, *words: str) -> Config:
    return small(folder, *WORDS, f"control.over_age={over_age}", *words)


def started(config: Config, **kwargs: Any) -> list[dict[str, Any]]:
    return run(config, stream=io.StringIO(), **kwargs).metrics


def digests(folder: Path) -> list[str]:
    with open_journal(folder) as journal:
        return [row.event.digest for row in journal.rows() if isinstance(row.event, BatchTrained)]


def reissued(folder: Path) -> set[str]:
    with open_journal(folder) as journal:
        return {a.reason for row in journal.rows() for a in row.actions if isinstance(a, Reissue)}


def test_a_run_masks_old_tokens_and_a_crash_a_replay_and_a_bundle_give_its_bits(
    tmp_path, monkeypatch, a_slow_host
):
    """Batches are computed packed and over trees in turn, with a critic."""
    ways = itertools.cycle(["packed", "tree"])
    monkeypatch.setattr(compute_choice, "cheaper", lambda _: next(ways))
    folder, steps = tmp_path / "run", 20
    own = (
        f"run.steps={steps}",
        "algorithm.preset=ppo",
        "algorithm.minibatches=2",
        "trainer.compute=auto",
        "trainer.tree_block=32",  # the programs of a walk compile for one number of tokens
        "trainer.checkpoint_every=4",
    )
    with killed_at(monkeypatch, lambda event: isinstance(event, BatchTrained) and event.step == 14):
        started(bounded(folder, "mask", *own))
    rows = resume(folder, [], stream=io.StringIO()).metrics
    assert len(rows) == steps and audit_run(folder).ok
    assert max(row["token_age_max"] for row in rows) <= 1
    for way in ("packed", "tree"):
        assert sum(row["masked_token_share"] for row in rows if row["compute"] == way) > 0
    with open_journal(folder) as journal:
        ages = find(journal).token_ages
        assert any(isinstance(row.event, RunResumed) for row in journal.rows())
    old = sum(count for age, count in ages.items() if age > 1)
    trained = sum(row["trained_tokens"] for row in rows)
    assert (trained, old > 0) == (sum(ages.values()) - old, True)
    assert "over_age" not in reissued(folder)
    found = replay(folder)
    assert (found.difference, found.steps) == ("", steps)
    bundle = make_bundle(folder, steps - 1, tmp_path / "step.bundle")
    found = verify_bundle(tmp_path / "step.bundle")
    assert (found.difference, found.digest) == ("", digests(folder)[-1])
    assert any("state.critic" in name for name in bundle.tensors)


def test_a_run_holds_its_trainer_and_the_wait_is_a_cause_of_its_own(tmp_path, a_slow_host):
    folder = tmp_path / "run"
    rows = started(bounded(folder, "hold"))
    assert audit_run(folder).ok and "over_age" not in reissued(folder)
    assert max(row["token_age_max"] for row in rows) <= 1
    with open_journal(folder) as journal:
        holds = sum(isinstance(a, Hold) for row in journal.rows() for a in row.actions)
    assert holds > 0 and sum(row["hold_share"] for row in rows) > 0
    assert all(row["hold_share"] <= row["trainer_wait_share"] for row in rows)
    own = [each for each in read_timelines(folder) if each.component == "trainer"]
    held = sum(each.end_s - each.start_s for each in own if each.activity == f"wait: {HELD}")
    whole = max(each.end_s for each in own) - min(each.start_s for each in own)
    assert 0 < held < whole
    assert sum(each.end_s - each.start_s for each in own) == pytest.approx(whole, rel=0.01)


AT_ETA_0 = ("control.max_staleness=0", "run.steps=3")


@pytest.fixture(scope="module")
def without_bound(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of a run at eta = 0 without a bound on ages."""
    folder = tmp_path_factory.mktemp("free") / "run"
    started(small(folder, *WORDS, *AT_ETA_0, "control.max_token_age=null"))
    return digests(folder)


@pytest.mark.parametrize("over_age", [pytest.param("hold", marks=pytest.mark.soak), "mask"])
def test_at_eta_0_nothing_is_old_and_the_bits_are_those_of_a_run_without_a_bound(
    tmp_path, without_bound, over_age
):
    rows = started(bounded(tmp_path / over_age, over_age, *AT_ETA_0, "control.max_token_age=0"))
    assert {row.get("masked_token_share", 0) for row in rows} == {0}
    assert {row.get("hold_share", 0) for row in rows} == {0}
    assert digests(tmp_path / over_age) == without_bound


class Equal(Countdown):
    """Every answer has the same reward, unless `is_open`."""

    def __init__(self, is_open: bool = False) -> None:
        super().__init__()
        self.is_open = is_open

    def score(self, prompt, completion):
        return float(sum(completion.tokens)) if self.is_open else 0.5


def test_a_run_whose_groups_are_all_filtered_ends_and_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(drops, "MOST", 10)
    monkeypatch.setattr(drops, "MOST_BATCHES", 2)
    folder = tmp_path / "run"
    config = small(folder, "run.steps=2", "algorithm.group_filter=signal", "runtime.reward_workers=1")
    with pytest.raises(
        ArealError,
        match=r"11 groups in a row were dropped \(11 no_signal\).*drops of the whole run: \d+ no_signal"
        r".*algorithm\.group_size.*algorithm\.group_filter=none.*areal-jax resume",
    ):
        started(config, tasks=[Equal()])
    result = audit_run(folder)
    assert result.ok and result.dropped["no_signal"] >= 11 and result.trained == 0
    rows = resume(folder, [], tasks=[Equal(is_open=True)], stream=io.StringIO()).metrics
    assert len(rows) == 2 and audit_run(folder).ok
