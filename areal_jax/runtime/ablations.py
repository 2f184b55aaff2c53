"""The named ablations. A new one is an entry here, and a recipe in `configs` if it needs one of its own."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Callable, Mapping, Sequence

from areal_jax.runtime.ablation import Ablation, Row, Table
from areal_jax.types import ArealError

UNBOUNDED = "unbounded"
STALENESS = (0, 1, 2, 4, 8, 16, UNBOUNDED)

ORACLE_MARGIN = 0.03
"""Reward that decoupled may lose to staleness 0."""

LATE = 4
"""Final figures are means over the last 1 / LATE of the steps."""

WARM_UP = 5
"""Speeds are those after the first 1 / WARM_UP of the steps, which compile."""

INTERRUPTION_GAIN = 1.10
CONSTANT_GAIN = 1.05
"""What is gained without skew is at most this."""


def _mean(figure: str) -> Callable[[Sequence[Row]], float]:
    return lambda rows: statistics.fmean(row[figure] for row in rows)


def _last(figure: str) -> Callable[[Sequence[Row]], float]:
    return lambda rows: _mean(figure)(rows[-max(1, len(rows) // LATE) :])


def _warm(figure: str) -> Callable[[Sequence[Row]], float]:
    return lambda rows: _mean(figure)(rows[len(rows) // WARM_UP :])


def _per_s(figure: str) -> Callable[[Sequence[Row]], float]:
    """Counts a second of wall time."""

    def rate(rows: Sequence[Row]) -> float:
        first = max(1, len(rows) // WARM_UP)
        counted = sum(row[figure] for row in rows[first:])
        return counted / (rows[-1]["wall_s"] - rows[first - 1]["wall_s"])

    return rate


# --- staleness ----------------------------------------------------------------------------------------------


def _decoupled_holds(table: Table) -> bool:
    oracle = table.mean(0, "decoupled", "reward")
    return all(abs(table.mean(eta, "decoupled", "reward") - oracle) <= ORACLE_MARGIN for eta in (1, 2, 4))


def _naive_earns_less(table: Table) -> bool:
    """No naive seed reaches the worst decoupled one."""
    return all(
        max(table.by_seed(eta, "naive", "reward")) < min(table.by_seed(eta, "decoupled", "reward"))
        for eta in STALENESS[3:]
    )


def _naive_clips_more(table: Table) -> bool:
    return all(
        table.mean(eta, "naive", "clip_share") > table.mean(eta, "decoupled", "clip_share")
        for eta in STALENESS[1:]
    )


def _unbounded_costs(table: Table) -> bool:
    return table.mean(UNBOUNDED, "decoupled", "reward") <= table.mean(4, "decoupled", "reward")


# --- interruption -------------------------------------------------------------------------------------------


def _swap_ms(rows: Sequence[Row]) -> float:
    """Of one swap on one host, loading and rebuilding; 0 where none was."""
    late = rows[len(rows) // WARM_UP :]
    return 1e3 * sum(row["swap_s"] for row in late) / max(1, sum(row["swaps"] for row in late))


def _recomputed_share(rows: Sequence[Row]) -> float:
    """Tokens whose KV was rebuilt, for each one that was generated."""
    late = rows[len(rows) // WARM_UP :]
    return sum(row["recomputed_tokens"] for row in late) / sum(row["generated_tokens"] for row in late)


def _gain(table: Table, sigma: float) -> float:
    """Trained tokens a second of recompute over drain: the median of the seeds, which ran in turn."""
    pairs = (table.by_seed(sigma, arm, "trained_tokens_per_s") for arm in ("recompute", "drain"))
    return statistics.median(ours / theirs for ours, theirs in zip(*pairs, strict=True))


def _interrupting_gains(table: Table) -> bool:
    return _gain(table, 1.0) >= INTERRUPTION_GAIN


def _skew_makes_the_gain(table: Table) -> bool:
    return _gain(table, 0.0) <= CONSTANT_GAIN


ABLATIONS: Mapping[str, Ablation] = {
    "staleness": Ablation(
        doc="how much staleness costs with the trust region around the behaviour policy (naive) and around "
        "the proximal one (decoupled); AReaL's table 2 in small (arXiv:2505.24298)",
        recipe="configs/staleness.yaml",
        key="control.max_staleness",
        values=STALENESS,
        arms={
            "naive": ("algorithm.proximal=none", "algorithm.off_policy=none"),
            "decoupled": ("algorithm.proximal=recompute",),
        },
        seeds=3,
        speed=0.6,
        figures={
            "reward": _last("reward_mean"),
            "clip_share": _mean("clip_share"),
            "off_policy_weight": _mean("off_policy_weight_mean"),
            "head_age": _last("head_age_mean"),
            "token_age": _last("token_age_mean"),
        },
        claims={
            f"decoupled at staleness 1, 2, 4 is within {ORACLE_MARGIN} of staleness 0": _decoupled_holds,
            "from staleness 4 on every naive seed earns less than every decoupled one": _naive_earns_less,
            "from staleness 1 on naive clips more than decoupled": _naive_clips_more,
            "decoupled earns no more unbounded than at staleness 4": _unbounded_costs,
        },
    ),
    "interruption": Ablation(
        doc="what hosts gain that change weights in mid-sample (recompute, keep, pinned) over those that "
        "wait for their longest one (drain), with answers of skewed and of constant lengths, by the wall "
        "clock; AReaL's interruptible generation in small (arXiv:2505.24298)",
        recipe="configs/interruption.yaml",
        key="tasks.countdown.sigma",
        values=(1.0, 0.0),
        arms={
            "recompute": ("control.strategy=interruptible", "generation.on_update=recompute"),
            "keep": ("control.strategy=keep", "generation.on_update=keep"),
            "pinned": ("control.strategy=pinned", "generation.on_update=pinned"),
            "drain": ("control.strategy=interruptible", "generation.on_update=drain"),
        },
        seeds=3,
        speed=None,
        figures={
            "trained_tokens_per_s": _per_s("trained_tokens"),
            "generated_tokens_per_s": _per_s("generated_tokens"),
            "swap_ms": _swap_ms,
            "recomputed_share": _recomputed_share,
            "interruptions": _warm("interruptions"),
            "generator_idle_share": _warm("generator_idle_share"),
            "trainer_wait_share": _warm("trainer_wait_share"),
            "token_age": _warm("token_age_mean"),
            "completion_tokens": _warm("completion_tokens_mean"),
            "reward": _last("reward_mean"),
        },
        claims={
            f"skewed: recompute trains >= {INTERRUPTION_GAIN:.2f} x drain's tokens": _interrupting_gains,
            f"constant: it trains <= {CONSTANT_GAIN:.2f} x as many": _skew_makes_the_gain,
        },
    ),
}


def find(name: str) -> Ablation:
    """Raises ArealError for a name that is none."""
    if name not in ABLATIONS:
        near = difflib.get_close_matches(name, ABLATIONS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(ABLATIONS)}"
        raise ArealError(f"no ablation {name}; {hint}")
    return ABLATIONS[name]
