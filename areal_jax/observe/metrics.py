"""Writes metrics rows, one JSON object per training step, to a file, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from areal_jax.file_errors import writing
from areal_jax.plugin import needing
from areal_jax.types import ArealError

FILE = "metrics.jsonl"
WANDB_ID = "wandb.id"
"""File with the id under which Weights & Biases knows the run; resumes continue it."""

REQUIRED = (
    "step", "version", "wall_s",
    "reward_mean", "reward_std", "signal_share",
    "generated_tokens", "trained_tokens", "generate_tokens_per_s", "train_tokens_per_s",
    "trainer_wait_share", "generator_idle_share", "decode_gap_p99_s",
    "head_age_mean", "token_age_mean", "token_age_max",
    "interruptions", "dropped", "failed_rewards",
    "logp_gap_mean", "logp_gap_p999", "logp_gap_max", "mismatch_kl", "support_mass_outside",
    "off_policy_weight_mean", "off_policy_capped_share",
    "effective_token_share", "effective_sequence_share",
    "params_digest", "grad_norm", "entropy", "clip_share",
    "completion_tokens_mean", "completion_tokens_p50", "completion_tokens_p99",
)  # fmt: skip
"""Fields that every row must contain; counts cover that step alone. A row may contain more fields."""


class MetricsWriter:
    """Appends rows to metrics.jsonl, TensorBoard and Weights & Biases.

    If the folder already contains rows, the writer continues the file, and TensorBoard discards its data of
    steps after the last row. After a crash call `rewrite` before making a writer, because the file's last
    line may be incomplete. `wandb`: the arguments of `wandb.init`; None disables Weights & Biases.
    """

    def __init__(
        self, folder: Path, tensorboard: bool = True, wandb: Mapping[str, Any] | None = None
    ) -> None:
        first_step = max((int(row["step"]) for row in rows_so_far(folder)), default=-1) + 1
        self._path = folder / FILE
        self._wandb = None if wandb is None else _start_wandb(folder, wandb)
        self._board = _Board(folder / "tensorboard", first_step) if tensorboard else None
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row to the file and, if enabled, to TensorBoard and Weights & Biases.

        Raises ValueError if a field of REQUIRED is missing.
        """
        if missing := [name for name in REQUIRED if name not in row]:
            raise ValueError(
                f"the metrics row of step {row.get('step')} lacks {', '.join(missing)}; "
                "add every field of observe.metrics.REQUIRED where the row is made (runtime/rows.py)"
            )
        plain = as_json(row)
        with writing(self._path):
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
            self._file.flush()
        step, scalars = int(plain["step"]), dict(_scalars(plain))
        if self._board is not None:
            self._board.write(scalars, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        with ExitStack() as rest:
            if self._wandb is not None:
                rest.callback(self._wandb.finish)
            if self._board is not None:
                rest.callback(self._board.close)
            with writing(self._path):
                self._file.close()


REWRITTEN = "`areal-jax resume` on the run's folder rewrites the file from the journal"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns every complete row of the folder's metrics.jsonl, in order; empty if there is no such file.

    Ignores an incomplete last line that a crash left. Raises ArealError for any other line that is not a JSON
    object.
    """
    return read_objects(folder / FILE, REWRITTEN)


def rewrite(folder: Path, rows: Iterable[Mapping[str, Any]]) -> float:
    """Atomically replace the rows of metrics.jsonl by `rows`; return the last row's `wall_s`, 0 without rows.

    A resumed run does so, because its journal may end at an earlier step than the file.
    """
    path = folder / FILE
    aside = path.with_suffix(".jsonl.new")
    wall_s = 0.0
    with writing(path), aside.open("w", encoding="utf-8") as file:
        for row in rows:
            wall_s = row["wall_s"]
            file.write(json.dumps(as_json(row), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return wall_s


def read_objects(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Returns the objects of a file with one JSON object per line; empty if there is no file.

    Ignores text after the last line break: a line that a crash cut short. Raises ArealError for a line that
    is not a JSON object; the error's message ends with `remedy`.
    """
    return list(_objects(path, path.stat().st_size, remedy)) if path.exists() else []


def rows_so_far(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of `read_rows`, one at a time, as far as the file goes when this function is called."""
    path = folder / FILE
    return _objects(path, path.stat().st_size, REWRITTEN) if path.exists() else iter(())


def _objects(path: Path, size: int, remedy: str) -> Iterator[dict[str, Any]]:
    """Yields the objects in the first `size` bytes of the file."""
    with path.open("rb") as file:
        number = 0
        while file.tell() < size and (raw := file.readline()).endswith(b"\n"):
            number += 1
            if not (line := raw.decode(errors="replace")).strip():
                continue
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                raise ArealError(f"{path}, line {number}: not JSON ({error}); {remedy}") from None
            if not isinstance(found, dict):
                raise ArealError(f"{path}, line {number}: not a JSON object: {line[:40]!r}; {remedy}")
            yield found


def as_json(value: Any) -> Any:
    """Returns the value as JSON types: one-element arrays become numbers, non-finite numbers None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)


class _Board:
    """A file of TensorBoard, written in this thread: one that fails in tensorboardX's own blocks the run."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        self._folder = folder
        with writing(folder):
            folder.mkdir(exist_ok=True)
            # The suffix keeps a resume within the same second from overwriting the file before it.
            self._writer = EventsWriter(str(folder / "events"), f".{first_step}")
            self._add(first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step, summary=Summary(value=values))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        with writing(self._folder):
            self._writer.write_event(Event(step=step, wall_time=time.time(), **content))
            self._writer.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


def _start_wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    with needing("observe.wandb=true", "wandb", instead=", or set observe.wandb=false"):
        import wandb  # pyright: ignore[reportMissingImports]
    file = folder / WANDB_ID
    if not file.exists():
        with writing(file):
            file.write_text(secrets.token_hex(8))
    own = {"dir": str(folder), "id": file.read_text(), "resume": "allow", "allow_val_change": True}
    return wandb.init(**own, **settings)
