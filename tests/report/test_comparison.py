"""The page of an ablation: its tables, and what its figures say in words."""

from __future__ import annotations

from typing import Any

from areal_jax.report.comparison import age_shares, by_label, idle_time, page, reward_bands, speeds


def run(value: str, seed: int, speed: float, rewards: list[float], arm: str = "default") -> dict[str, Any]:
    return {
        "value": value,
        "arm": arm,
        "seed": seed,
        "trained_tokens_per_s": speed,
        "trainer_waits_for_batch": 0.25 + 0.5 * seed,
        "curves": {"reward_mean": rewards},
        "token_ages": {"0": 30, "1": 10} if value == "keep" else {"0": 5},
    }


RUNS = [
    run("sync", 0, 100.0, [0.0, 0.2]),
    run("keep", 0, 150.0, [0.1, 0.4]),
    run("sync", 1, 120.0, [0.0, 0.4]),
    run("keep", 1, 170.0, [0.3, 0.8]),
]


def test_figures_say_in_words_what_they_draw():
    runs = by_label(RUNS)
    assert list(runs) == ["sync", "keep"] and [each["seed"] for each in runs["keep"]] == [0, 1]
    assert speeds(runs).alt == "Trained tokens per second, mean over seeds: sync 110; keep 160."
    assert idle_time(runs, ["trainer_waits_for_batch"]).alt == "trainer waits for batch: sync 50%, keep 50%."
    assert age_shares(runs).alt == "Mean age of the trained tokens: sync 0.00, keep 0.25 versions."
    assert reward_bands(runs).alt.endswith("at the last step: sync 0.30, keep 0.60.")


def test_labels_name_the_arm_where_there_are_several():
    runs = [*RUNS, run("keep", 0, 1.0, [0.0], arm="other")]
    assert list(by_label(runs)) == ["sync, default", "keep, default", "keep, other"]


def test_what_was_not_measured_is_not_drawn():
    bare = {"x": [{"value": "x", "arm": "default", "curves": {}, "token_ages": {}}]}
    assert (speeds(bare), idle_time(bare, []), age_shares(bare), reward_bands(bare)) == (None,) * 4


def test_a_page_has_every_table_and_verdict_and_escapes_what_it_shows():
    result = {
        "ablation": "strategies",
        "key": "control.strategy",
        "table": [{"value": "sync", "arm": "default", "trained_tokens_per_s": 110.0}],
        "runs": RUNS,
        "claims": {"a < b": True, "c": None},
    }
    text = page({"Results": result["table"], "More": [{"name": "<x>", "holds": False}]}, result, "run & see")
    assert text.count("<table>") == 3
    for shown in (
        "&lt;x&gt;",
        "<td>no</td>",
        "a &lt; b",
        "<td>not in this table</td>",
        "run &amp; see",
        "110",
        "<th>control.strategy</th><th>trained tokens per s</th>",
    ):
        assert shown in text


def test_a_table_has_a_column_of_arms_where_there_are_several():
    rows = [{"value": 0, "arm": arm, "reward": 0.5} for arm in ("aipo", "ppo_clip")]
    result = {"ablation": "lag", "key": "control.max_staleness", "table": rows, "runs": RUNS, "claims": {}}
    text = page({"Results": rows}, result, "run")
    assert "<th>control.max_staleness</th><th>arm</th><th>reward</th>" in text
    assert "<td>ppo_clip</td>" in text
