"""Shows a run's progress: a live view in a terminal, elsewhere one plain line per step."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TextIO

BARS = "▁▂▃▄▅▆▇█"
REFRESH_PER_S = 4
RECENT = 20
"""Number of most recent steps over which throughputs, fractions and the remaining time are averaged."""


def make_view(
    stream: TextIO, is_live: bool, total_steps: int, earlier: Iterable[Mapping[str, Any]] = ()
) -> View:
    """Returns a live view if `is_live` and the stream is a terminal, otherwise a plain view.

    `earlier`: metrics rows of the steps trained before a resume, which the totals include.
    """
    tally = Tally(total_steps)
    for row in earlier:
        tally.add(row)
    if is_live and stream.isatty():
        return LiveView(stream, tally)
    return PlainView(stream, tally)


class Tally:
    """The figures that a live or plain view shows, computed from the metrics rows added so far."""

    def __init__(self, total_steps: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.steps = 0
        self.rewards: list[float] = []
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self.interruptions = 0
        self.failed_rewards = 0
        self.dropped: Counter[str] = Counter()
        self._now_s = now_s
        self._seen_s = now_s()

    def add(self, row: Mapping[str, Any]) -> None:
        self.recent.append(row)
        self.steps = int(row["step"]) + 1
        if row["reward_mean"] is not None:
            self.rewards.append(float(row["reward_mean"]))
        self.interruptions += int(row["interruptions"])
        self.failed_rewards += int(row["failed_rewards"])
        self.dropped.update(row.get("dropped_by_reason") or {"dropped": row["dropped"]})
        self._seen_s = self._now_s()

    def mean(self, name: str, form: str) -> str:
        """Returns the mean of the field `name` over the last RECENT rows without nulls; - if all are null."""
        values = [row[name] for row in self.recent if row.get(name) is not None]
        return format(statistics.fmean(values), form) if values else "-"

    def last(self, name: str) -> Any:
        return self.recent[-1].get(name) if self.recent else None

    @property
    def elapsed_s(self) -> float:
        """The run's wall time in seconds: `wall_s` of the last row, plus the time since the row was added."""
        return float(self.last("wall_s") or 0.0) + self._now_s() - self._seen_s

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds to the run's end at the pace of recent steps; None before the second row."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        pace = (last["wall_s"] - first["wall_s"]) / max(last["step"] - first["step"], 1)
        return max(pace * (self.total_steps - self.steps) - (self._now_s() - self._seen_s), 0.0)

    @property
    def ages(self) -> str:
        """The last batch's token ages in versions, as text: min / median / max."""
        ages = (self.last(f"token_age_{name}") for name in ("min", "median", "max"))
        return " / ".join("-" if age is None else f"{age:.0f}" for age in ages)

    @property
    def drops(self) -> str:
        counted = [f"{reason} {count}" for reason, count in self.dropped.items() if count]
        if self.failed_rewards:
            counted.append(f"failed rewards {self.failed_rewards}")
        return ", ".join(counted) or "none"


class PlainView:
    """Writes one line per step, for log files, pipes and CI."""

    def __init__(self, stream: TextIO, tally: Tally) -> None:
        self._stream = stream
        self._tally = tally

    def show(self, row: Mapping[str, Any]) -> None:
        """Show one metrics row; called after its step is trained."""
        tally = self._tally
        tally.add(row)
        line = (
            f"step {tally.steps}/{tally.total_steps}"
            f"  reward {_number(row['reward_mean']):.3f}"
            f"  signal {_number(row['signal_share']):.0%}"
            f"  tokens/s generated {_number(row['generate_tokens_per_s']):.0f}"
            f" trained {_number(row['train_tokens_per_s']):.0f}"
            f"  trainer waits {_number(row['trainer_wait_share']):.0%}"
            f"  generator idle {_number(row['generator_idle_share']):.0%}"
            f"  age {tally.ages}"
            f"  interrupted {tally.interruptions}"
            f"  dropped {tally.drops}"
            f"  {clock(_number(row['wall_s']))}"
        )
        self.note(line)

    def note(self, text: str) -> None:
        """Show a line about an event, such as "a host joined", which stays on the screen."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class LiveView:
    """A panel in the terminal that a thread redraws REFRESH_PER_S times a second."""

    def __init__(self, stream: TextIO, tally: Tally) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tally = tally
        self._lock = threading.Lock()  # rich redraws from a thread of its own
        self._live = Live(
            console=Console(file=stream),
            get_renderable=self._panel,
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            self._tally.add(row)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Any:
        with self._lock:
            return panel(self._tally)


View = PlainView | LiveView
"""A display of a run's progress: `show` takes each metrics row, and `note` lines about events."""


def panel(tally: Tally) -> Any:
    """Returns the live view's panel for a tally, as a rich renderable."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    remaining = "" if tally.remaining_s is None else f", {clock(tally.remaining_s)} left"
    top = Table.grid(expand=True, padding=(0, 2))
    top.add_column()
    top.add_column(ratio=1)
    top.add_column(justify="right")
    top.add_row(
        Text(f"step {tally.steps}/{tally.total_steps}", style="bold"),
        ProgressBar(total=tally.total_steps, completed=tally.steps),
        Text(f"{clock(tally.elapsed_s)}{remaining}"),
    )
    body = Table.grid(padding=(0, 3))
    for column in range(4):
        body.add_column(style="dim" if column % 2 == 0 else "")
    reward = f"{tally.rewards[-1]:.3f}" if tally.rewards else "-"
    body.add_row(
        "reward", f"{reward}  {sparkline(tally.rewards)}", "signal share", tally.mean("signal_share", ".0%")
    )
    body.add_row(
        "generator",
        f"{tally.mean('generate_tokens_per_s', ',.0f')} tokens/s",
        "generator idle",
        tally.mean("generator_idle_share", ".0%"),
    )
    body.add_row(
        "trainer",
        f"{tally.mean('train_tokens_per_s', ',.0f')} tokens/s",
        "trainer waits",
        tally.mean("trainer_wait_share", ".0%"),
    )
    body.add_row("token age", f"{tally.ages} (min / median / max)", "interrupted", f"{tally.interruptions:,}")
    body.add_row("dropped", tally.drops, "version", f"{tally.last('version') or 0}")
    whole = Table.grid(expand=True)
    whole.add_row(top)
    whole.add_row(Text())
    whole.add_row(body)
    return Panel(whole, title="areal-jax", border_style="dim", padding=(0, 1))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Returns a bar chart of `values` in at most `width` characters.

    Each character stands for the mean of equally many successive values.
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def clock(seconds: float) -> str:
    """Formats seconds as 1:02:03, 2:03 or 0:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _number(value: Any) -> float:
    """Returns a value of a metrics row as a float; nan for None, which stands for a non-finite value."""
    return float("nan") if value is None else float(value)
