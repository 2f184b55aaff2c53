"""The metrics row: one JSON object a training step, and the sinks it goes to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_jax.types import ArealError

FILE = "metrics.jsonl"

REQUIRED = (
    "step", "version", "wall_s",
    "reward_mean", "reward_std", "signal_share",
    "generated_tokens", "trained_tokens", "generate_tokens_per_s", "train_tokens_per_s",
    "trainer_wait_share", "generator_idle_share", "decode_gap_p99_s",
    "head_age_mean", "token_age_mean", "token_age_max",
    "interruptions", "dropped", "failed_rewards",
    "logp_gap_mean", "logp_gap_p999", "logp_gap_max", "mismatch_kl", "support_mass_outside",
    "off_policy_weight_mean", "off_policy_capped_share",
    "params_digest", "grad_norm", "entropy", "clip_share",
    "completion_tokens_mean", "completion_tokens_p50", "completion_tokens_p99",
)  # fmt: skip
"""What every row holds; counts are of that step. A row may hold more."""


class MetricsWriter:
    """Appends rows to metrics.jsonl, TensorBoard and Weights & Biases.

    A folder that holds rows is gone on with: a last line cut short is removed, and TensorBoard is told to
    forget the steps after the last whole row. `wandb` holds the arguments of `wandb.init`; None logs nothing.
    """

    def __init__(
        self, folder: Path, tensorboard: bool = True, wandb: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        is_resumed = path.exists()
        if is_resumed:
            rewrite(folder, read_rows(folder))
        first_step = max((int(row["step"]) for row in read_rows(folder)), default=-1) + 1
        self._wandb = None if wandb is None else _start_wandb(folder, wandb)
        self._board = _open_board(folder, first_step, is_resumed) if tensorboard else None
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError for a row without one of REQUIRED: whoever fills rows forgot it."""
        if missing := [name for name in REQUIRED if name not in row]:
            raise ValueError(f"a metrics row lacks {', '.join(missing)}")
        plain = _plain(row)
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        step, scalars = int(plain["step"]), dict(_scalars(plain))
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Every whole row, in order; none where there is no file. A last line cut short by a crash is left out.

    Raises ArealError for any other line that is no JSON object.
    """
    path = folder / FILE
    if not path.exists():
        return []
    *lines, _cut_short = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_parse(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]


def rewrite(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these rows in one step: the journal is the truth, a resume may know fewer rows."""
    path = folder / FILE
    aside = path.with_suffix(".jsonl.new")
    with aside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_plain(row), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


_REMEDY = "`areal-jax resume` writes the file anew from the journal"


def _parse(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArealError(f"{path}, line {number}: not JSON ({error}); {_REMEDY}") from None
    if not isinstance(row, dict):
        raise ArealError(f"{path}, line {number}: not a row but {line[:40]!r}; {_REMEDY}")
    return row


def _plain(value: Any) -> Any:
    """JSON's types: arrays of one element become numbers, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
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


def _open_board(folder: Path, first_step: int, is_resumed: bool) -> Any:
    from tensorboardX import SummaryWriter

    # The suffix keeps a resume within the same second from overwriting the file before it.
    return SummaryWriter(
        str(folder / "tensorboard"),
        purge_step=first_step if is_resumed else None,
        filename_suffix=f".{first_step}",
    )


def _start_wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ArealError(
            "observe.wandb=true needs wandb, which is missing; install areal-jax[wandb], or set it to false"
        ) from None
    return wandb.init(**{"dir": str(folder), **settings})
