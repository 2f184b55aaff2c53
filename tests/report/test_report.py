"""report.html: whole, self-contained, escaped, and with the figures of the run in it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas

from areal_jax.observe.metrics import REQUIRED
from areal_jax.observe.waits import Interval
from areal_jax.report import curves, figures, lanes, svg
from areal_jax.report.report import FailedReward, ReportData, drops_by_reason, mean_share, page_css, render
from areal_jax.report.report_samples import FIRST, LAST, sample_groups
from areal_jax.report.report_staleness import reward_by_age
from areal_jax.report.sample import SampleView, TokenView
from areal_jax.report.staleness import Trained, study
from areal_jax.report.svg import PAGE_COLOURS
from areal_jax.types import NOT_SAMPLED

VOID = {"meta", "br", "link", "img", "input", "hr"}


def row(step: int, **more: object) -> dict:
    usual = {"step": step, "version": step + 1, "wall_s": step + 1.0, "reward_mean": step / 20}
    counts = {
        "interruptions": 3,
        "dropped": 1,
        "dropped_by_reason": {"failed_reward": 1},
        "failed_rewards": 0,
    }
    return {**dict.fromkeys(REQUIRED, 0.25), "truncated_share": 0.25, **usual, **counts, **more}


def of_tasks(step: int) -> dict:
    """A row of a run with two tasks, whose third batch lacks one of them."""
    own = {f"{field}/sums": 0.5 for field in curves.BY_TASK} | {"failed_rewards/sums": step % 2}
    other = {f"{field}/<b>": step / 20 for field in curves.BY_TASK} | {"failed_rewards/<b>": 0}
    return row(step, **own, **({} if step == 2 else other), failed_rewards=step % 2)


def evaluated(version: int, accuracy: float, split: str | None = None) -> dict:
    share = {"value": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
    one = {"split": split, "prompts": 64, "greedy": {"accuracy": share}, "sampled": {"pass@1": share}}
    return {"version": version, "tasks": {"sums": one}}


INTERVALS = [
    Interval(component, activity, start, start + span)
    for begin in range(10)
    for component, activity, start, span in (
        ("trainer", "update", begin, 0.75),
        ("trainer", "wait: a batch", begin + 0.75, 0.25),
        ("host-0", "decode", begin, 1.0),
    )
]

WHOLE = ReportData(
    title="a <run> & its name",
    command="areal-jax run configs/quickstart.yaml run.name='<x>'",
    config_yaml="run:\n  name: <x>\n",
    rows=[row(step) for step in range(20)],
    intervals=INTERVALS,
    token_ages={0: 30, 1: 60, 2: 10},
    head_ages={0: 1, 2: 3},
    lengths=[1, 2, 3, 4, 5] * 20,
    samples=[("Best", [
        SampleView(
            "17.3.0",
            "<script>alert(1)</script>",
            [
                TokenView("<b>", 3, -0.5),
                TokenView("x\n", 3, -4.0),
                TokenView("tool", NOT_SAMPLED, 0.0),
                TokenView("y", 4, 0.0),
            ],
            0.75,
            {"prefix": 0.5},
            "length",
            task="<task>",
            reward_note="found <i>1</i>, wanted 2",
            truncated=True,
            interruptions=2,
        )
    ])],
)  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    return render(WHOLE)


class Balanced(HTMLParser):
    """Every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_well_formed_and_holds_every_section(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "Learning",
        "Answers",
        "Samples",
        "Asynchrony",
        "Reproduce",
    ]
    assert page.count("<svg ") == 12


def test_rows_of_older_versions_have_no_effective_sizes():
    """25 % of the tokens as in `row`, half of the sequences; no figure without the fields."""
    rows = [row(step, effective_sequence_share=0.5) for step in range(20)]
    page = render(ReportData("r", "c", "y", rows=rows))
    assert "over the last tenth of the steps: 25% of the tokens, 50% of the sequences." in page
    old = [{name: value for name, value in each.items() if "effective" not in name} for each in rows]
    assert "Effective sample size" not in render(ReportData("r", "c", "y", rows=old))


def test_the_page_loads_nothing(page):
    """No address outside it, except the names of XML's namespaces."""
    addresses = set(re.findall(r"https?://[^\"' <)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<link|<img|@import|src=", page)


def test_what_users_wrote_is_escaped(page):
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "a &lt;run&gt; &amp; its name" in page
    assert "name: &lt;x&gt;" in page
    assert "run.name=&#x27;&lt;x&gt;&#x27;" in page


def test_tiles(page):
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert tiles == {
        "final reward": "0.925",  # mean of steps 18 and 19
        "steps": "20",
        "wall time": "0:20",
        "trainer waits": "25%",
        "generator idle": "25%",
        "interruptions": "60",
        "dropped": "20",
    }
    assert "failed reward 20" in page


def test_tokens_say_their_version_and_log_prob(page):
    shown = page[page.index('class="completion"') :]
    assert (
        'class="v v3" style="--rare:0.39" title="version 3, log-prob -0.500, p 0.607">&lt;b&gt;</span>'
        in shown
    )
    assert (
        'class="v v3" style="--rare:0.98" title="version 3, log-prob -4.000, p 0.0183">x↵\n</span>' in shown
    )
    assert '<span class="given" title="not sampled">tool</span>' in shown
    assert 'class="v v4" style="--rare:0.00" title="version 4, log-prob 0.000, p 1">y</span>' in shown
    assert "v3: 2 tokens" in shown


def test_a_sample_says_its_task_how_it_was_judged_and_how_it_went(page):
    assert "<h3>Best</h3>" in page and "<h4>sample 17.3.0 of &lt;task&gt;</h4>" in page
    assert "judged: found &lt;i&gt;1&lt;/i&gt;, wanted 2" in page
    assert "cut off by its length limit · interrupted 2 times" in page


def test_a_long_completion_is_shown_in_part():
    pieces = [TokenView(f"{number} ", 1, -0.1) for number in range(2000)]
    shown = sample_groups([("Worst", [SampleView("1/2", "p", pieces, 0.0)]), ("Best", [])])
    assert shown.count('class="v v1" style') == FIRST + LAST
    assert f">{FIRST - 1} </span>" in shown and f">{FIRST} </span>" not in shown
    assert f"… {2000 - FIRST - LAST} tokens; areal-jax inspect shows them …" in shown
    assert f">{2000 - LAST - 1} </span>" not in shown and f">{2000 - LAST} </span>" in shown
    assert '<div class="wide">' in shown and "Best" not in shown


def blocks_of(html: str) -> list[tuple[str, str]]:
    """(class, text of the tokens) of each element around the tokens of a completion."""
    completion = re.search(r'<p class="completion">(.*?)</p>', html, re.DOTALL)
    assert completion is not None
    found = re.findall(r'<span class="(think|answer)">((?:<span class="v .*?</span>)*)</span>', completion[1])
    return [(kind, re.sub("<.*?>", "", tokens)) for kind, tokens in found]


def test_thoughts_and_answers_are_marked_and_named_in_the_legend():
    pieces = [
        TokenView("<think>", 1, -0.1, "think"),
        TokenView("2<3", 1, -0.1, "think"),
        TokenView(" ", 1, -0.1),
        TokenView("<answer>", 2, -0.1, "answer"),
        TokenView("4", 2, -0.1, "answer"),
    ]
    shown = sample_groups([("Best", [SampleView("1/2", "p", pieces, 0.0)])])
    Balanced().feed(shown)
    assert blocks_of(shown) == [("think", "&lt;think&gt;2&lt;3"), ("answer", "&lt;answer&gt;4")]
    legend = re.search(r'<p class="legend">(.*?)</p>', shown)
    assert legend is not None
    assert re.findall(r'<span class="(.*?)">(.*?)</span>', legend[1]) == [
        ("v v1", "v1: 3 tokens"), ("v v2", "v2: 2 tokens"), ("think", "thought"), ("answer", "answer"),
    ]  # fmt: skip
    thought = sample_groups([("Best", [SampleView("1/2", "p", pieces[:2], 0.0)])])
    assert '<span class="think">thought</span>' in thought and ">answer<" not in thought
    assert all(f".{kind} {{" in page_css() for kind in ("think", "answer"))


def test_samples_without_blocks_have_no_block_in_the_legend(page):
    assert 'class="think"' not in page and 'class="answer"' not in page


def test_a_long_thought_is_a_thought_on_both_sides_of_the_gap():
    pieces = [TokenView("a", 1, -0.1, "think")] * (FIRST + LAST + 10)
    shown = sample_groups([("Worst", [SampleView("1/2", "p", pieces, 0.0)])])
    assert blocks_of(shown) == [("think", "a" * FIRST), ("think", "a" * LAST)]


def test_tasks_are_drawn_apart_and_failures_are_counted_up():
    rows = [of_tasks(step) for step in range(20)]
    failures = [FailedReward(number, "sums", "timed_out", "too <slow>") for number in (9, 9, 7, 5, 3)]
    page = render(
        ReportData("t", "c", "y", rows=rows, failures=[*failures, FailedReward(1, "", "failed", "x")])
    )
    Balanced().feed(page)
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert titles[:5] == ["Reward", *curves.BY_TASK.values()]
    assert "Reward by task; over the last tenth: &lt;b&gt; 0.93, sums 0.50." in page
    assert "Groups that could not be scored: &lt;b&gt; 0, sums 10." in page
    listed = re.findall(
        r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td class=message>(.*?)</td></tr>", page
    )
    assert listed == [
        ("sums", "timed out", "9, 7, 5 and 1 more", "too &lt;slow&gt;"),
        ("", "failed", "1", "x"),
    ]
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))["failed rewards"] == "10"


def test_the_updates_figures_are_drawn_where_rows_have_them():
    rows = [row(step, loss=step / 10, entropy=None, grad_norm=2.0) for step in range(20)]
    titles = re.findall("<figcaption>(.*?)</figcaption>", render(ReportData("t", "c", "y", rows=rows)))
    shown = [title for title in titles if title in curves.OF_UPDATES.values()]
    assert shown == [curves.OF_UPDATES[field] for field in ("loss", "grad_norm", "clip_share")]
    figure = curves.update_curve(rows, "loss", "Loss")
    assert figure is not None and figure.alt == "Loss by step: 1.85 in the last tenth; median 0.95."


def test_one_task_is_not_drawn_apart():
    assert curves.task_curve(WHOLE.rows, "reward_mean", "Reward by task") is None
    assert curves.failure_curve(WHOLE.rows) is None
    found = curves.failure_curve([row(0, failed_rewards=2), row(1, failed_rewards=1)])
    assert found is not None and found.alt == "Groups that could not be scored: all tasks 3."


def test_lengths_over_time_say_how_they_end():
    rows = [
        row(s, completion_tokens_mean=s, completion_tokens_p99=2 * s, truncated_share=0.5) for s in range(20)
    ]
    figure = curves.length_curve(rows)
    assert figure is not None and figure.alt == (
        "Completion length by step: mean 18 and 99th percentile 37 tokens in the last tenth, where 50% were "
        "cut off; median 50%."
    )


@pytest.mark.slow
def test_the_bubble_of_lengths_is_a_curve_and_a_tile():
    rows = [
        row(s, completion_bubble_share=s / 25, completion_tokens_max=100 * s, completion_tokens_p50=s or None)
        for s in range(20)
    ]
    figure = curves.bubble_curve(rows)
    assert figure is not None and figure.alt == (
        "Length bubble of the batches: mean 74.0% in the last tenth, where the longest completion has 100.0 "
        "times the tokens of the median one."
    )
    page = render(ReportData("t", "c", "y", rows=rows))
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))["length bubble"] == "38%"
    assert "<figcaption>Length bubble</figcaption>" in page
    assert curves.bubble_curve(WHOLE.rows) is None  # rows of an older version
    assert "ength bubble" not in render(WHOLE)


def test_evaluations_of_a_version_are_a_point_and_the_newest_counts():
    assert curves.eval_curve([]) is None
    lines = [evaluated(10, 0.2), evaluated(20, 0.4), evaluated(20, 0.5), evaluated(20, 0.9, "test")]
    series = curves._eval_series(lines)
    assert series["sums (64)", "greedy"] == {
        10: pytest.approx((0.2, 0.1, 0.3)), 20: pytest.approx((0.5, 0.4, 0.6)),
    }  # fmt: skip
    assert set(series["sums (64, test)", "pass@1"]) == {20}
    figure = curves.eval_curve(lines)
    assert figure is not None and "sums (64) greedy 0.500 at version 20" in figure.alt
    nothing = evaluated(10, 0.2)
    nothing["tasks"]["sums"]["greedy"]["accuracy"] = {"value": None, "low": None, "high": None}
    assert ("sums (64)", "greedy") not in curves._eval_series([nothing])


def test_a_report_says_why_it_has_no_samples():
    page = render(ReportData("t", "c", "y", samples_missing="no task is called <x>"))
    assert '<p class="note">no task is called &lt;x&gt;</p>' in page


def test_the_waits_table_adds_up(page):
    lines = re.findall(
        r"<tr.*?><th scope=row>(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", page
    )
    assert lines == [
        ("trainer", "update", "7.5 s", "75.0 %"),
        ("trainer", "wait: a batch", "2.5 s", "25.0 %"),
        ("host-0", "decode", "10.0 s", "100.0 %"),
    ]


def test_the_control_planes_work_is_told_apart_from_idle_devices(page):
    """Between the first update and the last; waits are no work, and overlapping work counts once."""
    intervals = [
        Interval("trainer", "update", 10.0, 12.0),
        Interval("trainer", "wait: a batch", 12.0, 18.0),
        Interval("trainer", "update", 18.0, 20.0),
        Interval("host-0", "decode", 5.0, 11.0),
        Interval("host-0", "decode", 13.0, 16.0),
        Interval("host-1", "prefill", 14.0, 15.0),
        Interval("host-1", "decode", 15.5, 17.0),
        Interval("host-1", "decode", 25.0, 26.0),
    ]
    always = Interval("control", "decide", 0.0, 30.0)
    assert lanes.orchestration([*intervals, always]) == pytest.approx((10.0, 10.0, 2.0, 2.0))
    times = [(9.0, 10.5), (11.5, 12.25), (12.5, 12.75), (16.5, 17.5), (19.0, 23.0)]
    control = [Interval("control", "decide", *time) for time in times]
    waits = [Interval("control", "wait: an event", 13.0, 16.0)]
    found = lanes.orchestration([*control, *intervals, *waits])
    assert found == pytest.approx((10.0, 0.5 + 0.75 + 0.25 + 1.0 + 1.0, 2.0, 0.25 + 0.25 + 0.5))
    assert lanes.orchestration([*intervals[3:], always]) == (0.0, 0.0, 0.0, 0.0)
    words = re.search(r'"note">(In the [^<]*)</p>', page)
    assert words is not None and re.fullmatch(
        r"In the [\d.]+ s from the first update to the last, the control plane worked for 0\.0 s \(0\.0 %\). "
        r"Every device was idle for 0\.0 s \(0\.0 %\); every device was idle and only the control plane was "
        r"busy for 0\.0 s \(0\.0 %\)\.",
        words[1],
    )


def test_a_run_without_a_step_renders():
    page = render(ReportData("empty", "areal-jax run x.yaml", "run: {}\n"))
    assert "No step was trained." in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["Reproduce"]


def test_the_environment_of_a_run_on_gpus_is_shown():
    page = render(ReportData("t", "c", "y", environment={"XLA_FLAGS": "--one=<1> --two", "OTHER": "0.92"}))
    assert "<pre>XLA_FLAGS=--one=&lt;1&gt; --two\nOTHER=0.92</pre>" in page
    assert "processes on GPUs" not in render(ReportData("t", "c", "y"))


def test_rows_of_nulls_render():
    """A metric that was not finite is null in metrics.jsonl."""
    nulls = {name: None for name in REQUIRED if name not in ("step", "version", "wall_s", "dropped")}
    page = render(
        ReportData("t", "c", "y", rows=[{**row(0), **nulls}, {**row(1), **nulls, "dropped_by_reason": {}}])
    )
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))["final reward"] == "–"


PARTS = [
    {**row(step), "reward_parts": {"correct": 0.5, "ttft_share": 0.25}, "gates": {"intermediate": step > 0}}
    for step in range(4)
]
"""Rows of a run with a gated part, withheld in the first step."""


def test_the_parts_of_rewards_are_drawn_with_the_steps_of_a_closed_gate():
    found = curves.parts_curve(PARTS)
    assert found is not None
    assert found.alt == (
        "Means of the reward's parts as they were scored; over the last tenth: correct 0.50, ttft_share "
        "0.25; intermediate was withheld in 1 of 4 steps (marks)."
    )
    without = curves.parts_curve([{**row(0), "reward_parts": {"correct": 1.0}}])
    assert without is not None and without.alt.endswith("correct 1.00.")
    assert curves.parts_curve(WHOLE.rows) is None
    assert "Parts of the reward" in render(replace(WHOLE, rows=PARTS))


ARMS = [
    {"value": value, "arm": arm, "curves": {"reward_mean": rewards, "gates/intermediate": [open_, True]}}
    for value, arm, rewards, open_ in [
        ("grpo", "old", [0.0, 1.0], None),
        ("grpo", "new", [1.0, 2.0], True),
        ("grpo", "new", [2.0, 4.0], False),
        ("ppo", "new", [0.5, 0.5], True),
    ]
]
"""Runs of an ablation: two seeds of new under grpo, one of each other arm; old has no gate at first."""


def test_an_ablations_arms_are_drawn_as_means_over_their_seeds(monkeypatch):
    drawn = Canvas()
    monkeypatch.setattr(curves, "draw_svg", lambda name, draw, size, alt: draw(drawn) or alt)
    found = curves.arm_curves(ARMS, "algorithm.preset")
    assert found.alt == (
        "Means over seeds, by step, of reward_mean, gates/intermediate: one line for each of old, new."
    )
    lines = [
        {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()} for axes in drawn.axes
    ]
    assert lines[:2] == [{"old": [0, 1], "new": [1.5, 3]}, {"new": [0.5, 0.5]}]
    assert lines[2]["new"] == [0.5, 1] and np.isnan(lines[2]["old"][0])
    assert [axes.get_title() for axes in drawn.axes[:2]] == ["algorithm.preset=grpo", "algorithm.preset=ppo"]
    assert [axes.get_ylabel() for axes in drawn.axes] == ["reward mean", "", "gates: intermediate", ""]


@pytest.mark.slow
def test_every_figure_is_valid_xml_with_alt_text_and_the_pages_colours():
    by_age = study([Trained(i, (i + k) % 3 / 2, i % 2, 9) for i in range(60) for k in range(4)])
    assert by_age is not None
    drawn = [
        figures.reward_curve(WHOLE.rows),
        figures.ages(WHOLE.token_ages, WHOLE.head_ages),
        figures.lengths(WHOLE.lengths),
        figures.throughput(WHOLE.rows),
        figures.logp_gap(WHOLE.rows),
        curves.length_curve(WHOLE.rows),
        curves.bubble_curve([row(0, completion_bubble_share=0.5, completion_tokens_max=9)]),
        reward_by_age(by_age),
        curves.failure_curve([of_tasks(step) for step in range(4)]),
        curves.eval_curve([evaluated(1, 0.5)]),
        curves.parts_curve(PARTS),
        curves.arm_curves(ARMS, "algorithm.preset"),
        *(curves.task_curve([of_tasks(0), of_tasks(1)], field, "t") for field in curves.BY_TASK),
        *(
            curves.update_curve([row(0, **{field: 0.5}), row(1, **{field: 1.5})], field, "t")
            for field in curves.OF_UPDATES
        ),
        lanes.timeline(INTERVALS),
        lanes.timeline_zoom(INTERVALS),
    ]
    ids: list[str] = []
    for figure in drawn:
        assert figure is not None
        root = ElementTree.fromstring(figure.svg)
        assert root.get("aria-label") == figure.alt
        assert root.get("role") == "img"
        assert "var(--ink)" in figure.svg
        assert not re.search("|".join(PAGE_COLOURS), figure.svg)
        own = set(re.findall(r'\bid="([^"]+)"', figure.svg))
        assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', figure.svg)) <= own
        ids += own
    assert len(ids) == len(set(ids))  # one page, so one name space


def test_alt_texts_hold_the_figures():
    assert figures.ages({0: 30, 1: 60, 2: 10}, {}).alt == (  # pyright: ignore[reportOptionalMemberAccess]
        "Age of 100 trained tokens: mean 0.80 versions, at most 2 versions."
    )
    lane = lanes.timeline(INTERVALS)
    assert lane is not None
    assert lane.alt == "Share of the time that each component worked: trainer 75%, host-0 100%."
    zoom = lanes.timeline_zoom(INTERVALS)
    assert zoom is not None
    assert zoom.alt.startswith("Each activity of each component from 7.0 s to 10.0 s")


def test_nothing_to_draw_is_no_figure():
    assert figures.reward_curve([]) is None
    assert figures.ages({}, {}) is None
    assert figures.lengths([]) is None
    assert lanes.timeline([]) is None
    assert lanes.timeline_zoom(INTERVALS[:6]) is None  # 2 s have no close-up


def test_more_activities_than_colours_share_one():
    many = [Interval("host-0", f"work {index}", index, index + 1.0) for index in range(12)]
    lane = lanes.timeline(many)
    assert lane is not None
    assert ">other<" in lane.svg
    assert "var(--other)" in lane.svg
    assert ">work 11<" not in lane.svg


@given(st.lists(st.floats(0.001, 3.0), min_size=1, max_size=30), st.integers(1, 50))
def test_shares_of_columns_are_the_covered_time(cuts, bins):
    """Alternate stretches belong to one activity: its share of each column, against sums over a fine grid."""
    edges_of = np.concatenate([[0.0], np.cumsum(cuts)])
    spans = [(edges_of[i], edges_of[i + 1]) for i in range(0, len(cuts), 2)]
    edges = np.linspace(0.0, edges_of[-1], bins + 1)
    got = lanes._shares(spans, edges)
    expected = [
        sum(max(min(stop, high) - max(start, low), 0.0) for start, stop in spans) / (high - low)
        for low, high in pairwise(edges)
    ]
    assert got == pytest.approx(expected, abs=1e-9)


def test_bars_too_close_to_tell_apart_are_one():
    spans = [(0.0, 1.0), (1.0001, 2.0), (3.0, 5.0), (4.6, 4.8)]
    assert lanes._merged(spans, (0.5, 4.5), 0.005) == [(0.5, 2.0), (3.0, 4.5)]
    assert lanes._merged(spans, (0.5, 4.5)) == [(0.5, 1.0), (1.0001, 2.0), (3.0, 4.5)]


def test_shares_are_weighted_by_the_steps_time_and_drops_by_reason():
    rows = [row(0, wall_s=1.0, trainer_wait_share=1.0), row(1, wall_s=4.0, trainer_wait_share=0.0)]
    assert mean_share(rows, "trainer_wait_share") == 0.25
    assert mean_share([], "trainer_wait_share") == 0.0
    rows = [row(0), row(1, dropped_by_reason={"lost": 2, "end": 0}), row(2, dropped=3, dropped_by_reason={})]
    assert drops_by_reason(rows) == {"failed_reward": 1, "lost": 2, "dropped": 3}


@pytest.mark.slow
def test_tiles_say_what_the_bound_on_age_costs():
    def tiles(rows):
        page = render(ReportData("run", "", "", rows=rows))
        return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))

    held = [row(0, wall_s=1.0, hold_share=0.5), row(1, wall_s=4.0, hold_share=0.1)]
    assert tiles(held)["held"] == "20.0%"
    masked = [row(step, masked_token_share=share) for step, share in enumerate((0.0, 0.05))]
    assert tiles(masked)["masked tokens"] == "2.50%"
    again = [row(step, reissued_by_reason={"over_age": 2, "failed_reward": 1}) for step in range(3)]
    assert tiles(again)["restarts for age"] == "6"
    assert not {"held", "masked tokens", "restarts for age"} & tiles([row(0)]).keys()


def test_a_timeline_of_its_own_holds_the_colours_of_the_page():
    drawn = lanes.timeline(INTERVALS)
    assert drawn is not None
    text = svg.standalone(drawn, page_css())
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert {"--ink", "--idle", "--c0"} <= used
    for scheme in text.split("@media (prefers-color-scheme: dark)"):
        assert used <= set(re.findall(r"(--\w+):", scheme))
