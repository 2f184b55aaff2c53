"""Evaluations as people see them: the table, the progress, and evals.jsonl in a run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from areal_jax.types import ArealError

FILE = "evals.jsonl"


def append_eval(folder: Path, figures: Mapping[str, Any]) -> None:
    """One more line; a last line cut short by a crash is removed first."""
    line = json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n"
    with (folder / FILE).open("ab+") as file:
        file.seek(0)
        whole = file.read()
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(line.encode())


def read_evals(folder: Path) -> list[dict[str, Any]]:
    """Every evaluation, oldest first; none where there is no file. Raises ArealError for a damaged line."""
    path = folder / FILE
    if not path.exists():
        return []
    *lines, _cut_short = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ArealError(f"{path}, line {number}: not JSON ({error}); remove that line") from None
    return found


# --- table --------------------------------------------------------------------------------------------------


def print_eval(figures: Mapping[str, Any], stream: TextIO) -> None:
    """What was evaluated, then the figures task by task; over all prompts where there are several tasks."""
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    console.print(headline(figures), markup=False, soft_wrap=True)
    console.print(table(figures))
    for name, task in figures["tasks"].items():
        for note in _notes(name, task):
            console.print(note, markup=False, soft_wrap=True)


def headline(figures: Mapping[str, Any]) -> str:
    what = figures["run"] or figures["model"]
    return f"{what}: version {figures['version']}, digest {figures['digest']}, seed {figures['seed']}"


def table(figures: Mapping[str, Any]) -> Any:
    """A rich table: a block of rows a task."""
    from rich import box
    from rich.table import Table

    shown = Table("task", "figure", "value", "95 % interval", box=box.SIMPLE)
    blocks = dict(figures["tasks"])
    if len(blocks) > 1:
        blocks["all tasks"] = figures["overall"]
    for name, task in blocks.items():
        split = f" ({task['split']})" if task.get("split") else ""
        for row, (label, value, interval) in enumerate(_lines(task)):
            shown.add_row("" if row else f"{name}{split}", label, value, interval)
        shown.add_section()
    return shown


def _lines(task: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(label, value, interval) of a task's figures."""
    greedy, sampled = task["greedy"], task.get("sampled")
    yield "prompts scored", f"{greedy['scored']} of {task['prompts']}", ""
    yield "greedy accuracy", *_estimate(greedy["accuracy"])
    shown = sampled or greedy
    for name in (name for name in shown if name.startswith("pass@")):
        yield f"{name}, {shown['samples']} samples", *_estimate(shown[name])
    yield "reward", *_estimate(shown["reward_mean"])
    yield "completion tokens", _number(shown["completion_tokens_mean"], ".0f"), ""
    yield "cut off by length", _number(shown["truncated_share"], ".0%"), ""


def _estimate(estimate: Mapping[str, float | None]) -> tuple[str, str]:
    low, high = estimate["low"], estimate["high"]
    return _number(estimate["value"], ".3f"), "" if low is None else f"{low:.3f} to {high:.3f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _notes(name: str, task: Mapping[str, Any]) -> list[str]:
    """What the figures leave out."""
    notes = []
    if task["too_long"]:
        first = ", ".join(task["too_long_prompts"][:3])
        notes.append(f"{name}: {task['too_long']} prompts leave generation.length no room, such as {first}")
    if task["cramped"]:
        notes.append(
            f"{name}: {task['cramped']} prompts leave less than generation.max_tokens of generation.length"
        )
    for way in ("greedy", "sampled"):
        one = task.get(way)
        if one and one["failures"]:
            lost, first = one["failed"] + one["timed_out"], one["failures"][0]
            notes.append(
                f"{name}: {lost} prompts could not be scored ({way}), such as {first['prompt']}: "
                f"{first['message']}"
            )
    return notes


# --- progress -----------------------------------------------------------------------------------------------


class EvalProgress:
    """A bar a pass in a terminal; anywhere else a line when a pass begins."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._stream = stream
        self._bars: dict[tuple[str, str], Any] = {}
        self._live = None
        if stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=Console(file=stream))

    def __enter__(self) -> EvalProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, task: str, way: str, count: int, done: int) -> None:
        key = (task, way)
        is_new = key not in self._bars
        if self._live is None:
            self._bars[key] = None
            if is_new:
                self._stream.write(f"{task}: {count} prompts, {way}\n")
                self._stream.flush()
            return
        if is_new:
            self._bars[key] = self._live.add_task(f"{task}, {way}", total=count)
        self._live.update(self._bars[key], completed=done)
