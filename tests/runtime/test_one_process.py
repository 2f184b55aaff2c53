"""The local driver end to end: what would break is the whole point of the system."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_jax.assembly import parts
from areal_jax.assembly.parts import assemble
from areal_jax.assembly.run_folder import open_journal
from areal_jax.config.tree import Config
from areal_jax.control import drops
from areal_jax.control.events import BatchTrained, SampleFinished, VersionCommitted
from areal_jax.generation import engine
from areal_jax.generation.rollout import rollout
from areal_jax.jobs.local import resume, run
from areal_jax.observe.metrics import REQUIRED
from areal_jax.replay.folder_audit import audit_run
from areal_jax.replay.replay import replay
from areal_jax.report.reading import groups_trained, view_sample
from areal_jax.runtime.resuming import read_config
from areal_jax.tasks.datasets.countdown import Countdown
from areal_jax.tasks.source import PromptStream, WeightedTask
from areal_jax.trajectories.packing import pack
from areal_jax.types import ArealError, Prompt
from areal_jax.weights.digest import digest
from tests.small_run import killed_at, small

SYNC = ("control.strategy=sync", "control.max_staleness=0")


def start(config: Config, **kwargs):
    return run(config, stream=io.StringIO(), **kwargs)


def plain_loop(config: Config) -> list[str]:
    """The synchronous loop of the extension page: what η = 0 has to reproduce bit for bit."""
    parts = assemble(config)
    engine, learner, state = parts.engine(0), parts.learner, parts.first_state()
    digests = []
    size = config.trainer.batch_size
    for step in range(config.run.steps):
        groups = rollout(
            engine,
            learner.publish(state),
            parts.tasks,
            range(step * size, (step + 1) * size),
            config.algorithm.group_size,
            config.run.seed,
            sampling=config.generation.sampling,
        )
        batch = pack(groups, config.trainer.rows, config.row_length, config.algorithm.minibatches)
        state, _ = learner.update(state, learner.prepare(state, batch))
        digests.append(digest(state.params))
    return digests


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> list[str]:
    return plain_loop(small(tmp_path_factory.mktemp("plain"), *SYNC, "algorithm.minibatches=2"))


@pytest.mark.parametrize(
    ("strategy", "placement", "calls_ahead"),
    [
        ("sync", "shared", 0),
        ("interruptible", "split", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sync", "split", 0),
                ("sync", "split", 1),
                ("interruptible", "split", 0),
                ("interruptible", "shared", 0),
            )
        ),
    ],
)
def test_eta_0_is_bit_identical_to_the_plain_loop(tmp_path, oracle, strategy, placement, calls_ahead):
    config = small(
        tmp_path / "run",
        f"control.strategy={strategy}",
        "control.max_staleness=0",
        "algorithm.minibatches=2",
        f"runtime.placement={placement}",
        f"generation.calls_ahead={calls_ahead}",
    )
    rows = start(config).metrics
    assert [row["params_digest"] for row in rows] == oracle
    assert len(set(oracle)) == config.run.steps
    assert {row["token_age_max"] for row in rows} == {0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """An asynchronous run with long answers and few slots, so that samples are interrupted."""
    folder = tmp_path_factory.mktemp("async") / "run"
    start(small(folder, "run.steps=8", "control.max_staleness=2", "runtime.placement=split"))
    return folder


def test_an_asynchronous_run_interrupts_mixes_ages_and_audits_clean(finished):
    from areal_jax.observe.metrics import read_rows

    rows = read_rows(finished)
    assert [row["step"] for row in rows] == list(range(8))
    assert all(name in row for row in rows for name in REQUIRED)
    assert sum(row["interruptions"] for row in rows) > 0
    for name in ("effective_token_share", "effective_sequence_share"):
        assert 1 / 200 < min(row[name] for row in rows) < 1 - 1e-9
        assert max(row[name] for row in rows) <= 1 + 1e-5  # float32 sums over up to a thousand tokens
    selection = groups_trained(finished)
    assert [(each.fate, each.finished, each.unfinished) for each in selection.fates] == [("trained", 32, 0)]
    assert (selection.gaps, selection.alarms) == ((), ())
    assert max(row["token_age_max"] for row in rows) >= 1
    assert (
        max(row["head_age_mean"] for row in rows) <= 2 + 1
    )  # the gate bounds the mean, a step may lie above it
    assert len({row["params_digest"] for row in rows}) == 8
    assert vars(audit_run(finished)) == {
        "ok": True, "trained": 32, "dropped": {}, "in_flight": 0, "violations": [],
    }  # fmt: skip


def test_every_recorded_log_prob_is_the_one_of_its_version(finished, tmp_path):
    """Checked for version 0, whose parameters are known from the seed."""
    import jax.numpy as jnp
    import numpy as np

    from areal_jax.algorithms.logprobs import PackedTokens, packed_stats
    from areal_jax.models.attention import PackedAttention

    parts = assemble(small(tmp_path / "x"))
    params = parts.first_state().params
    seen = 0
    with open_journal(finished) as journal:
        for t in journal.group(0, 0, 4):
            length = parts.config.row_length
            tokens = np.zeros((1, length), np.int32)
            tokens[0, : len(t.tokens)] = t.tokens
            positions = np.arange(length)[None]
            hidden, _ = parts.model.hidden(
                params, tokens, positions, PackedAttention(jnp.ones_like(jnp.asarray(tokens)))
            )
            ids, at = jnp.asarray(tokens), jnp.asarray(positions)
            asked = PackedTokens(ids, at - 1, at > 0, jnp.ones(tokens.shape))
            weight = parts.model.head_weight(params)
            stats = packed_stats(parts.model.head, weight, hidden, asked, length)
            of_version_0 = t.versions == 0
            seen += int(of_version_0.sum())
            gap = np.abs(np.asarray(stats.logp)[0, : len(t.tokens)] - t.behavior_logp)[of_version_0]
            assert gap.max() <= 1e-4
    assert seen > 0


def test_a_finished_run_that_is_resumed_says_that_nothing_is_left_to_train(finished):
    out = io.StringIO()
    result = resume(finished, stream=out)
    assert "all 8 steps of this run (run.steps) are trained already; to train more" in out.getvalue()
    assert len(result.metrics) == 8


@pytest.mark.slow
def test_a_finished_run_goes_on_when_asked_for_more_steps(finished):
    out = io.StringIO()
    result = resume(finished, ["run.steps=10"], stream=out)
    assert "trained already" not in out.getvalue()
    assert [row["step"] for row in result.metrics] == list(range(10))
    assert audit_run(finished).trained == 40
    assert audit_run(finished).ok


def test_a_folder_is_never_used_twice(finished):
    with pytest.raises(ArealError, match=r"exists; choose another run\.name"):
        start(small(finished))


def test_resume_refuses_a_key_that_can_only_be_set_on_a_new_run(finished):
    with pytest.raises(ArealError, match=r"trainer\.learning_rate=1 can only be set on a new run"):
        resume(finished, ["trainer.learning_rate=1"])
    with pytest.raises(ArealError, match="is not a run's folder"):
        resume(finished / "logs")


def test_a_run_that_ended_before_its_journal_cannot_be_resumed(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {steps: 1}\n")
    with pytest.raises(ArealError, match=r"ended before its journal was made.*remove the folder"):
        resume(tmp_path)


class HalfFails(Countdown):
    """Every second prompt cannot be scored."""

    def score(self, prompt, completion):
        if ord(prompt.text[0]) % 2:
            raise ValueError("no verdict")
        return super().score(prompt, completion)


@pytest.mark.slow
def test_eta_0_with_half_of_all_groups_dropped_does_not_stall(tmp_path):
    config = small(tmp_path / "run", "control.max_staleness=0", "run.steps=3")
    rows = start(config, tasks=[HalfFails()]).metrics
    result = audit_run(tmp_path / "run")
    assert result.ok and result.trained == 12 and result.dropped["failed_reward"] >= 4
    assert sum(row["failed_rewards"] for row in rows) >= 2 * sum(row["dropped"] for row in rows) >= 8
    assert {row["token_age_max"] for row in rows} == {0}


class AlwaysFails(Countdown):
    def score(self, prompt, completion):
        return float("nan")


@pytest.mark.slow
def test_a_run_that_only_drops_stops_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(drops, "MOST", 8)
    monkeypatch.setattr(drops, "MOST_BATCHES", 2)
    with pytest.raises(
        ArealError, match=r"9 groups in a row were dropped .*whole run: \d+ failed_reward.*correct the score"
    ):
        start(small(tmp_path / "run", "run.steps=3"), tasks=[AlwaysFails()])
    assert audit_run(tmp_path / "run").ok


class LateBadRows(Countdown):
    """Some rows raise an error, are too long or have an unknown letter."""

    bad: ClassVar[Mapping[int, Any]] = {}

    def __getitem__(self, i: int) -> Prompt:
        match self.bad.get(i):
            case None:
                return super().__getitem__(i)
            case BaseException() as error:
                raise error
            case text:
                return Prompt(text)


@pytest.mark.slow
def test_rows_that_cannot_be_used_are_dropped_counted_and_shown(tmp_path, monkeypatch):
    """Also over a kill and a resume; a replay drops the same ones, and every bit of the others is equal."""
    monkeypatch.setattr(parts, "CHECKED_PROMPTS", 2)
    folder, place = tmp_path / "run", PromptStream({"own": WeightedTask(LateBadRows())}, 0).place
    rows: list[Any] = [KeyError("text"), SystemExit(2), "a" * 24, "?"]
    bad = {place(ordinal)[1]: row for ordinal, row in zip((5, 6, 9, 14), rows, strict=True)}
    monkeypatch.setattr(LateBadRows, "bad", bad)
    words = "run.steps=4", "observe.report=true", f"tasks={__name__}:LateBadRows"
    config = small(folder, *words)
    is_second = lambda event: isinstance(event, BatchTrained) and event.step == 2  # noqa: E731
    with killed_at(monkeypatch, is_second):
        start(config)
    metrics = resume(folder, stream=io.StringIO()).metrics
    result = audit_run(folder)
    assert (result.ok, result.trained, result.dropped["failed_prompt"]) == (True, 16, 4)
    assert sum(row["dropped_by_reason"].get("failed_prompt", 0) for row in metrics) == 4
    page = (folder / "report.html").read_text()
    for text in ("failed prompt", "KeyError: &#x27;text&#x27;", "has 24 tokens", "SystemExit: 2"):
        assert text in page, text
    with pytest.raises(ArealError, match=r"group 6 was dropped \(failed_prompt: .*SystemExit: 2"):
        view_sample(folder, "6/0")
    with open_journal(folder) as journal:
        failed = {event.ordinal for event in journal.events("PromptFailed")}
    assert failed == {5, 6, 9, 14}
    replayed = replay(folder)
    assert (replayed.difference, replayed.steps) == ("", 4)


class Hangs(Countdown):
    def score(self, prompt, completion):
        while prompt.text[0] == "b":
            pass
        return super().score(prompt, completion)


@pytest.mark.slow
def test_a_reward_that_hangs_times_out_and_costs_only_its_group(tmp_path):
    config = small(
        tmp_path / "run", "run.steps=2", "runtime.reward_timeout_s=0.5", "runtime.reward_workers=2"
    )
    rows = start(config, tasks=[Hangs()]).metrics
    result = audit_run(tmp_path / "run")
    assert result.ok and result.trained == 8
    assert len(rows) == 2


@pytest.mark.slow
def test_truncated_sampling_trains_on_the_distribution_it_sampled_from(tmp_path):
    """On fresh weights the recomputed log-prob is the recorded one, at any temperature and support."""
    config = small(
        tmp_path / "run",
        *SYNC,
        "run.steps=2",
        "generation.temperature=0.7",
        "generation.top_k=6",
        "generation.top_p=0.8",
        "generation.min_p=0.05",
        "generation.support_size=8",
        "runtime.placement=split",
    )
    for row in start(config).metrics:
        assert row["logp_gap_max"] <= 1e-5
        assert 0.05 < row["support_mass_outside"] < 0.95
        assert row["off_policy_weight_mean"] == pytest.approx(1, abs=1e-5)
        assert row["effective_token_share"] == pytest.approx(1, abs=1e-5)
        assert row["effective_sequence_share"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_bfloat16_on_the_wire_is_checked_by_its_own_digest(tmp_path):
    config = small(tmp_path / "run", "run.steps=3", "weights.wire_dtype=bfloat16", "runtime.placement=shared")
    rows = start(config).metrics
    assert audit_run(tmp_path / "run").ok
    with open_journal(tmp_path / "run") as journal:
        events = [row.event for row in journal.rows()]
    committed = {event.version: event.digest for event in events if isinstance(event, VersionCommitted)}
    assert all(committed[row["version"]] != row["params_digest"] for row in rows)


@pytest.mark.slow
def test_a_run_keeps_the_layout_that_it_measured(monkeypatch, tmp_path):
    """A resumed run takes the layout from config.yaml: measured again, it could give other bits."""
    measured, served = [], []

    def fastest(model, slots, cores):
        measured.append(slots)
        return "split"

    def laid_out(model, params, layout, platform):
        served.append(layout)
        return original(model, params, layout, platform)

    original = engine.laid_out
    monkeypatch.setattr(parts, "fastest_layout", fastest)
    monkeypatch.setattr(engine, "laid_out", laid_out)
    folder = tmp_path / "run"
    start(small(folder, "run.steps=1"))
    resume(folder, ["run.steps=2"], stream=io.StringIO())
    with open_journal(folder) as journal:
        assert journal.header["weight_layout"] == "split"
    assert read_config(folder).generation.weight_layout == "split"
    assert len(measured) == 1 and set(served) == {"split"}


@pytest.mark.parametrize(
    "word", ["control.max_staleness=0", "trainer.numerics=exact", "generation.weight_layout=split"]
)
def test_nothing_is_measured_where_bits_are_promised_or_the_layout_is_given(monkeypatch, tmp_path, word):
    monkeypatch.setattr(parts, "fastest_layout", None)
    config = small(tmp_path / "run", word)
    whole = assemble(config)
    assert parts.with_measured_layout(whole) is whole


@pytest.mark.slow
def test_two_hosts_and_a_hard_bound_on_age(tmp_path):
    """Groups that grew too old start again, on whichever host has room, and no token older is trained."""
    config = small(
        tmp_path / "run",
        "run.steps=12",
        "runtime.hosts=2",
        "runtime.placement=split",
        "control.max_staleness=1",
        "control.max_token_age=1",
        "generation.slots=3",
        "generation.decode_steps=1",
        "tasks.countdown.sigma=1.5",
    )
    rows = start(config).metrics
    assert max(row["token_age_max"] for row in rows) <= 1
    assert audit_run(tmp_path / "run").ok
    with open_journal(tmp_path / "run") as journal:
        hosts = {row.event.host for row in journal.rows() if isinstance(row.event, SampleFinished)}
    assert hosts == {"host-0", "host-1"}
