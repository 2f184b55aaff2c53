"""What a run shows while it trains: a live view in a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, TextIO

BARS = "▁▂▃▄▅▆▇█"
REFRESH_PER_S = 4
RECENT = 20
"""Steps that throughputs, shares and the remaining time are averaged over."""


class View(Protocol):
    """Where a run's progress goes."""

    def show(self, row: Mapping[str, Any]) -> None:
        """One metrics row, once its step is trained."""
        ...

    def note(self, text: str) -> None:
        """A line that stays: a host joined, a checkpoint is whole."""
        ...

    def close(self) -> None: ...


def make_view(
    stream: TextIO, is_live: bool, total_steps: int, earlier: Sequence[Mapping[str, Any]] = ()
) -> View:
    """A live view where asked for and the stream is a terminal. `earlier` rows are those before a resume."""
    tally = Tally(total_steps)
    for row in earlier:
        tally.add(row)
    if is_live and stream.isatty():
        return LiveView(stream, tally)
    return PlainView(stream, tally)


class Tally:
    """The rows so far, as the figures that a view shows."""

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
        dropped = row["dropped"]
        self.dropped.update(dropped if isinstance(dropped, Mapping) else {"dropped": int(dropped)})
        self._seen_s = self._now_s()

    def mean(self, name: str) -> float:
        """Over the recent steps, of those that have it."""
        values = [row[name] for row in self.recent if row.get(name) is not None]
        return statistics.fmean(values) if values else 0.0

    def last(self, name: str) -> Any:
        return self.recent[-1].get(name) if self.recent else None

    @property
    def elapsed_s(self) -> float:
        """The run's own clock at its last row, and what has passed since."""
        return float(self.last("wall_s") or 0.0) + self._now_s() - self._seen_s

    @property
    def remaining_s(self) -> float | None:
        """At the recent pace; None before there is one."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        pace = (last["wall_s"] - first["wall_s"]) / max(last["step"] - first["step"], 1)
        return max(pace * (self.total_steps - self.steps) - (self._now_s() - self._seen_s), 0.0)

    @property
    def ages(self) -> str:
        """min/median/max of the last batch's token ages; the mean stands in where a row has no median."""
        low, mid, high = (self.last(f"token_age_{name}") for name in ("min", "median", "max"))
        if low is None or mid is None:
            return f"{_number(self.last('token_age_mean')):.1f} mean / {_number(high):.0f} max"
        return f"{low:.0f} / {mid:.0f} / {_number(high):.0f}"

    @property
    def drops(self) -> str:
        counted = [f"{reason} {count}" for reason, count in self.dropped.items() if count]
        if self.failed_rewards:
            counted.append(f"failed rewards {self.failed_rewards}")
        return ", ".join(counted) or "none"


class PlainView:
    """One line a step: what a log file, a pipe or CI gets."""

    def __init__(self, stream: TextIO, tally: Tally) -> None:
        self._stream = stream
        self._tally = tally

    def show(self, row: Mapping[str, Any]) -> None:
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
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class LiveView:
    """A panel that redraws itself a few times a second, apart from the training thread."""

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


def panel(tally: Tally) -> Any:
    """The live view's picture of a tally, a rich renderable."""
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
        "reward", f"{reward}  {sparkline(tally.rewards)}", "signal share", f"{tally.mean('signal_share'):.0%}"
    )
    body.add_row(
        "generator",
        f"{tally.mean('generate_tokens_per_s'):,.0f} tokens/s",
        "generator idle",
        f"{tally.mean('generator_idle_share'):.0%}",
    )
    body.add_row(
        "trainer",
        f"{tally.mean('train_tokens_per_s'):,.0f} tokens/s",
        "trainer waits",
        f"{tally.mean('trainer_wait_share'):.0%}",
    )
    body.add_row("token age", f"{tally.ages} (min / median / max)", "interrupted", f"{tally.interruptions:,}")
    body.add_row("dropped", tally.drops, "version", f"{tally.last('version') or 0}")
    whole = Table.grid(expand=True)
    whole.add_row(top)
    whole.add_row(Text())
    whole.add_row(body)
    return Panel(whole, title="areal-jax", border_style="dim", padding=(0, 1))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The whole course in `width` characters, each the mean of its share of the steps."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def clock(seconds: float) -> str:
    """1:02:03, 2:03 or 0:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _number(value: Any) -> float:
    """A row's null (what was not finite) shows as nan."""
    return float("nan") if value is None else float(value)
