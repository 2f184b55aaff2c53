"""Prints evaluations as a table, shows their progress, and reads and writes the file evals.jsonl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from areal_jax.file_errors import writing
from areal_jax.observe.metrics import read_objects

FILE = "evals.jsonl"


def append_eval(folder: Path, figures: Mapping[str, Any]) -> None:
    """Append an evaluation's figures as a line to the run folder's evals.jsonl.

    First removes an incomplete last line, which a crash may have left.
    """
    line = json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n"
    with writing(folder / FILE), (folder / FILE).open("ab+") as file:
        file.seek(0)
        whole = file.read()
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(line.encode())


def read_evals(folder: Path) -> list[dict[str, Any]]:
    """Returns the evaluations in a run folder's evals.jsonl, oldest first; empty if there is no such file.

    Raises ArealError for a line that is not a JSON object.
    """
    return read_objects(folder / FILE, "remove that line")


# --- table --------------------------------------------------------------------------------------------------


def print_eval(figures: Mapping[str, Any], stream: TextIO) -> None:
    """Print an evaluation: the model, a table of each task's figures, and notes on prompts left out.

    With several tasks, the table also has the figures over the prompts of all tasks.
    """
    console = Console(file=stream, highlight=False)
    console.print(headline(figures), markup=False, soft_wrap=True)
    console.print(table(figures))
    for name, task in figures["tasks"].items():
        for note in _notes(name, task):
            console.print(note, markup=False, soft_wrap=True)


def headline(figures: Mapping[str, Any]) -> str:
    what = figures["run"] or figures["model"]
    return f"{what}: version {figures['version']}, digest {figures['digest']}, seed {figures['seed']}"


def table(figures: Mapping[str, Any]) -> Table:
    """Returns an evaluation's figures as a rich table with a block of rows for each task.

    If there are several tasks, a last block has the figures over the prompts of all tasks.
    """
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
    """Yields (label, value, 95 % interval) as texts for each figure of a task; the interval may be empty."""
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
    """Returns notes on prompts that were not evaluated or scored, or that leave too few tokens for an answer.

    `name`: the task's name, `task`: its figures.
    """
    notes = []
    if task["too_long"]:
        first = ", ".join(task["too_long_prompts"][:3])
        notes.append(
            f"task {name}: {task['too_long']} prompts fill generation.length and were not evaluated, such "
            f"as {first}; raise generation.length"
        )
    if task["cramped"]:
        notes.append(
            f"task {name}: {task['cramped']} prompts leave fewer than generation.max_tokens tokens for an "
            "answer within generation.length; raise generation.length"
        )
    for way in ("greedy", "sampled"):
        one = task.get(way)
        if one and one["failures"]:
            lost, first = one["failed"] + one["timed_out"], one["failures"][0]
            notes.append(
                f"task {name}: the {way} completions of {lost} prompts could not be scored and are left "
                f"out; correct the task's score (first: {first['prompt']}: {first['message']})"
            )
    return notes


# --- progress -----------------------------------------------------------------------------------------------


@contextmanager
def eval_progress(stream: TextIO) -> Iterator[Callable[[str, str, int, int], None]]:
    """Context manager: yields a function that shows the progress of an evaluation's passes on `stream`.

    A pass decodes all prompts of one task, either greedily or by sampling. The function's arguments are the
    task's name, `greedy` or `sampled`, the number of prompts, and the number of prompts done. In a terminal
    each pass has a progress bar; elsewhere one line is written when a pass begins.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bars: dict[tuple[str, str], TaskID] = {}

    def show(task: str, way: str, count: int, done: int) -> None:
        if (task, way) not in bars:
            bars[task, way] = live.add_task(f"{task}, {way}", total=count)
            if not stream.isatty():
                stream.write(f"{task}: {count} prompts, {way}\n")
                stream.flush()
        live.update(bars[task, way], completed=done)

    with Progress(*columns, console=Console(file=stream), disable=not stream.isatty()) as live:
        yield show
