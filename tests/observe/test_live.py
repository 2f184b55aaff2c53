"""What a run shows: the figures of the rows, in a line or in a panel."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from areal_jax.observe import live
from areal_jax.observe.metrics import REQUIRED


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, **more: object) -> dict:
    usual = {
        "step": step,
        "version": step + 1,
        "wall_s": 2.0 * step,
        "reward_mean": step / 10,
        "signal_share": 0.5,
        "generate_tokens_per_s": 8123.4,
        "train_tokens_per_s": 7000.0,
        "trainer_wait_share": 0.14,
        "generator_idle_share": 0.12,
        "token_age_min": 0,
        "token_age_median": 1,
        "token_age_max": 2,
        "interruptions": 3,
        "dropped_by_reason": {"filtered": 2, "lost": 0},
    }
    return {**dict.fromkeys(REQUIRED, 0), **usual, **more}


def plain(rows: list[dict], total: int = 10, **settings) -> list[str]:
    stream = io.StringIO()
    view = live.make_view(stream, True, total, **settings)
    for each in rows:
        view.show(each)
    view.close()
    return stream.getvalue().splitlines()


def drawn(tally: live.Tally) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(live.panel(tally))
    return stream.getvalue()


def test_a_plain_line_holds_every_figure():
    assert plain([row(0), row(1, dropped_by_reason={"filtered": 1}, failed_rewards=4)])[1] == (
        "step 2/10  reward 0.100  signal 50%  tokens/s generated 8123 trained 7000  trainer waits 14%"
        "  generator idle 12%  age 0 / 1 / 2  interrupted 6  dropped filtered 3, failed rewards 4  0:02"
    )


def test_rows_before_a_resume_count():
    line = plain([row(4)], earlier=[row(step) for step in range(4)])[0]
    assert line.startswith("step 5/10 ")
    assert "interrupted 15" in line
    assert "dropped filtered 10" in line


def test_a_row_with_null_reward_no_median_and_a_plain_drop_count_still_shows():
    bare = row(0, reward_mean=None, dropped=3, dropped_by_reason={})
    del bare["token_age_median"]
    line = plain([bare])[0]
    assert "reward nan" in line
    assert "age 0 / - / 2" in line
    assert "dropped dropped 3" in line


@pytest.mark.parametrize(
    ("stream", "is_live", "kind"),
    [
        (Terminal(), True, live.LiveView),
        (Terminal(), False, live.PlainView),
        (io.StringIO(), True, live.PlainView),
    ],
)
def test_the_live_view_needs_a_terminal_and_the_setting(stream, is_live, kind):
    view = live.make_view(stream, is_live, 10)
    view.close()
    assert type(view) is kind


def test_the_live_view_ends_with_the_last_figures_and_keeps_notes():
    stream = Terminal()
    view = live.make_view(stream, True, 3)
    for step in range(3):
        view.show(row(step))
    view.note("host-0 joined [again]")
    view.close()
    shown = stream.getvalue()
    assert "step 3/3" in shown
    assert "host-0 joined [again]" in shown


def test_the_panel_shows_every_figure():
    now = [100.0]
    tally = live.Tally(10, lambda: now[0])
    for step in range(5):
        tally.add(row(step))
    now[0] += 3.0
    shown = drawn(tally)
    for figure in (
        "step 5/10",
        "0.400",
        "▁▃▅▆█",
        "50%",
        "8,123 tokens/s",
        "7,000 tokens/s",
        "14%",
        "12%",
        "0 / 1 / 2",
        "filtered 10",
        "0:11, 0:07 left",  # 8 s at the last row and 3 since; 5 steps of 2 s less 3
    ):
        assert figure in shown, figure


def test_a_panel_before_the_first_step_has_dashes_for_what_is_not_known():
    shown = drawn(live.Tally(10))
    assert "step 0/10" in shown and "- / - / - (min / median / max)" in shown and "- tokens/s" in shown
    assert "nan" not in shown and "0%" not in shown


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 1.0], "▁█"),
        ([0.0, 0.5, 1.0], "▁▅█"),
    ],
)
def test_sparkline(values, line):
    assert live.sparkline(values) == line


def test_a_long_sparkline_has_its_width_and_keeps_a_rise():
    line = live.sparkline([index / 1000 for index in range(1000)], width=24)
    assert len(line) == 24
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (63.9, "1:03"), (3723, "1:02:03")])
def test_clock(seconds, text):
    assert live.clock(seconds) == text
