"""The named ablations. To add an ablation, add an entry to ABLATIONS and, if no recipe fits, a config file.

A recipe is a config file that the package contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, mean, median, variance

from areal_jax.lab.ablations.ablation import Ablation, RunRecord, Table
from areal_jax.lab.ablations.interleaved_ablation import INTERLEAVED
from areal_jax.lab.ablations.run_figures import WARM_UP, last_mean, mean_of, per_s, warm_mean
from areal_jax.lab.ablations.strategy_ablation import STRATEGIES, words_of
from areal_jax.plugin import did_you_mean
from areal_jax.types import ArealError

UNBOUNDED = "unbounded"
STALENESS = (0, 1, 2, 4, 8, 16, UNBOUNDED)

ORACLE_MARGIN = 0.03
"""Largest accepted difference in mean reward, in arm decoupled, between max_staleness 1, 2 or 4 and 0."""

INTERRUPTION_GAIN = 1.10
LAG_MARGIN = 0.05
"""Largest accepted difference in mean reward, in arm aipo, between a lag of 1 or 4 and none."""

QUANTIZED_LAGS = (0, 4)
QUANTIZED_SHARE = 0.95
"""Smallest accepted ratio of the mean reward with quantised hosts to that without."""

CONSTANT_GAIN = 1.05
"""Largest accepted ratio of trained tokens/s in arm recompute to those in arm drain, for equal lengths.

Equal lengths: all completions are equally long, so that interrupting them gains little.
"""


# --- staleness ----------------------------------------------------------------------------------------------


def _is_near(table: Table, arm: str, values: Sequence[int], margin: float) -> bool:
    """Whether the arm's mean reward at each of `values` is within `margin` of that at 0."""
    fresh = mean(table[0, arm]["reward"])
    return all(abs(mean(table[value, arm]["reward"]) - fresh) <= margin for value in values)


def _decoupled_holds(table: Table) -> bool:
    return _is_near(table, "decoupled", (1, 2, 4), ORACLE_MARGIN)


def _naive_earns_less(table: Table) -> bool:
    """Whether every run of arm naive has a lower reward than every run of arm decoupled.

    Runs of equal max_staleness are compared, for each max_staleness of at least 4.
    """
    return all(
        max(table[eta, "naive"]["reward"]) < min(table[eta, "decoupled"]["reward"]) for eta in STALENESS[3:]
    )


def _naive_clips_more(table: Table) -> bool:
    return all(
        mean(table[eta, "naive"]["clip_share"]) > mean(table[eta, "decoupled"]["clip_share"])
        for eta in STALENESS[1:]
    )


def _unbounded_costs(table: Table) -> bool:
    return mean(table[UNBOUNDED, "decoupled"]["reward"]) <= mean(table[4, "decoupled"]["reward"])


# --- interruption -------------------------------------------------------------------------------------------


def _swap_ms(run: RunRecord) -> float:
    """Return the mean milliseconds that a host needs to adopt a version, recomputing of KV included.

    The first fifth (1 / WARM_UP) of the rows is left out. Returns 0 if no version was adopted in the others.
    """
    late = run.rows[len(run.rows) // WARM_UP :]
    return 1e3 * sum(row["swap_s"] for row in late) / max(1, sum(row["swaps"] for row in late))


def _recomputed_share(run: RunRecord) -> float:
    """Return recomputed tokens per generated token, without the first fifth (1 / WARM_UP) of the rows."""
    late = run.rows[len(run.rows) // WARM_UP :]
    return sum(row["recomputed_tokens"] for row in late) / sum(row["generated_tokens"] for row in late)


def _gain(table: Table, sigma: float) -> float:
    """Return the trained tokens/s in arm recompute divided by those in arm drain, as the median over seeds.

    `sigma`: standard deviation of the logarithm of answer lengths; 0 = all answers are equally long.
    """
    pairs = (table[sigma, arm]["trained_tokens_per_s"] for arm in ("recompute", "drain"))
    return median(ours / theirs for ours, theirs in zip(*pairs, strict=True))


def _interrupting_gains(table: Table) -> bool:
    return _gain(table, 1.0) >= INTERRUPTION_GAIN


def _skew_makes_the_gain(table: Table) -> bool:
    return _gain(table, 0.0) <= CONSTANT_GAIN


# --- lag and quantised hosts --------------------------------------------------------------------------------


def _aipo_bears_lag(table: Table) -> bool:
    return _is_near(table, "aipo", (1, 4), LAG_MARGIN)


def _aipo_leads_at_8(table: Table) -> bool:
    return mean(table[8, "aipo"]["reward"]) >= mean(table[8, "uncorrected"]["reward"])


def _int8_earns_as_much(table: Table) -> bool:
    """Whether the reward with int8 is at least QUANTIZED_SHARE of that without, at each lag."""
    pairs = [[mean(table[lag, arm]["reward"]) for arm in ("int8", "none")] for lag in QUANTIZED_LAGS]
    return all(ours >= QUANTIZED_SHARE * theirs for ours, theirs in pairs)


def _int8_differs(table: Table) -> bool:
    """Whether, without lag, every run's gap with int8 is above 10 times that of every run without."""
    gaps = {arm: table[0, arm]["logp_gap"] for arm in ("int8", "none")}
    return min(gaps["int8"]) > 10 * max(gaps["none"])


# --- DORA's window ------------------------------------------------------------------------------------------


def _strategy_of(window: int) -> tuple[str, ...]:
    """Return the config overrides for a window of K versions; without one, training is synchronous."""
    strategy = "pinned" if window else "sync"
    own = [word for word in words_of(strategy) if not word.startswith("control.max_staleness")]
    return (f"control.strategy={strategy}", *own)


def _spread(table: Table, figure: str, windows: Sequence[int]) -> float:
    """Return the standard deviation of a figure over seeds, pooled over the runs of these values."""
    numbers = [table[window, "grpo"][figure] for window in windows]
    if min(map(len, numbers)) < 2:
        raise KeyError("a second seed")
    return fmean(map(variance, numbers)) ** 0.5


def _windows_learn_as_sync(table: Table) -> bool:
    return all(_is_near(table, "grpo", (window,), _spread(table, "reward", (0, window))) for window in (1, 3))


def _wider_learns_no_faster(table: Table) -> bool:
    narrow, wide = (mean(table[window, "grpo"]["reward_of_all_steps"]) for window in (1, 3))
    return wide - narrow <= _spread(table, "reward_of_all_steps", (1, 3))


ABLATIONS: Mapping[str, Ablation] = {
    "staleness": Ablation(
        doc="the cost of staleness with the trust region around the behavior policy (naive) or around "
        "the proximal one (decoupled); a small version of AReaL's table 2 (arXiv:2505.24298)",
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
            "reward": last_mean("reward_mean"),
            "clip_share": mean_of("clip_share"),
            "off_policy_weight": mean_of("off_policy_weight_mean"),
            "head_age": last_mean("head_age_mean"),
            "token_age": last_mean("token_age_mean"),
        },
        claims={
            f"at staleness 1, 2 and 4 the reward of decoupled is within {ORACLE_MARGIN} of that at "
            "staleness 0": _decoupled_holds,
            "from staleness 4 on, every naive seed has less reward than every decoupled": _naive_earns_less,
            "from staleness 1 on, naive clips more tokens than decoupled": _naive_clips_more,
            "decoupled has no higher reward with unbounded staleness than at staleness 4": _unbounded_costs,
        },
        smoke=("values=[0,4]", "arms=[decoupled]", "seeds=1", "run.steps=4"),
    ),
    "interruption": Ablation(
        doc="the gain of hosts that change weights in mid-sample (recompute, keep, pinned) over hosts that "
        "wait for their longest sample (drain), with answers of skewed and of constant lengths, under the "
        "wall clock; a small version of AReaL's interruptible generation (arXiv:2505.24298)",
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
            "trained_tokens_per_s": per_s("trained_tokens"),
            "generated_tokens_per_s": per_s("generated_tokens"),
            "swap_ms": _swap_ms,
            "recomputed_share": _recomputed_share,
            "interruptions": warm_mean("interruptions"),
            "generator_idle_share": warm_mean("generator_idle_share"),
            "trainer_wait_share": warm_mean("trainer_wait_share"),
            "token_age": warm_mean("token_age_mean"),
            "completion_tokens": warm_mean("completion_tokens_mean"),
            "reward": last_mean("reward_mean"),
        },
        claims={
            f"skewed: recompute trains >= {INTERRUPTION_GAIN:.2f} x drain's tokens": _interrupting_gains,
            f"constant: recompute trains <= {CONSTANT_GAIN:.2f} x drain's tokens": _skew_makes_the_gain,
        },
        smoke=("values=[1.0]", "arms=[recompute,drain]", "seeds=1", "run.steps=6"),
    ),
    "lag": Ablation(
        doc="a lag of k versions between sampling and training, with no correction, with AIPO's capped "
        "weight and with PPO's clip around the behaviour policy; a small version of LlamaRL's ablation of "
        "off-policy corrections (arXiv:2505.24034)",
        recipe="configs/lag.yaml",
        key="control.max_staleness",
        values=(0, 1, 4, 8),
        arms={
            "uncorrected": ("algorithm.loss=policy_gradient", "algorithm.loss_settings={}"),
            "aipo": (),
            "ppo_clip": (
                "algorithm.loss=ppo_clip",
                "algorithm.loss_settings={low: 0.2, high: 0.2}",
                "algorithm.proximal=none",
            ),
        },
        seeds=3,
        speed=0.6,
        figures={
            "reward": last_mean("reward_mean"),
            "head_age": last_mean("head_age_mean"),
            "logp_gap_max": mean_of("logp_gap_max"),
            "clip_share": lambda run: fmean(row.get("clip_share", 0.0) for row in run.rows),
            "grad_norm": last_mean("grad_norm"),
        },
        claims={
            f"at lag 1 and 4 the reward of aipo is within {LAG_MARGIN} of that without lag": _aipo_bears_lag,
            "at lag 8 aipo earns at least as much as uncorrected": _aipo_leads_at_8,
        },
        smoke=("values=[0,4]", "arms=[aipo]", "seeds=1", "run.steps=4"),
    ),
    "quantized": Ablation(
        doc="hosts that decode with int8 weights, quantised anew from each version, beside a trainer in full "
        "precision, with AIPO; a small version of LlamaRL's quantised generator (arXiv:2505.24034)",
        recipe="configs/lag.yaml",
        key="control.max_staleness",
        values=QUANTIZED_LAGS,
        arms={"none": (), "int8": ("generation.quantize=int8",)},
        seeds=3,
        speed=0.6,
        figures={
            "reward": last_mean("reward_mean"),
            "logp_gap": mean_of("logp_gap_mean"),
            "mismatch_kl": mean_of("mismatch_kl"),
            "head_age": last_mean("head_age_mean"),
        },
        claims={
            f"with int8 the reward is >= {QUANTIZED_SHARE:.0%} of that without": _int8_earns_as_much,
            "without lag the log-prob gap with int8 is above 10 times that without": _int8_differs,
        },
        smoke=("values=[0]", "seeds=1", "run.steps=4"),
    ),
    "window": Ablation(
        doc="DORA's window: the unmodified loss of GRPO on samples of one version each, with up to K "
        "versions live at once, beside synchronous training (K = 0); a small version of the parity of "
        "learning that DORA reports",
        recipe="configs/window.yaml",
        key="control.max_staleness",
        values=(0, 1, 3),
        arms={"grpo": ("algorithm.proximal=none", "algorithm.off_policy=none")},
        of_value={window: _strategy_of(window) for window in (0, 1, 3)},
        seeds=5,
        speed=0.6,
        figures={
            "reward": last_mean("reward_mean"),
            "reward_of_all_steps": mean_of("reward_mean"),
            "clip_share": mean_of("clip_share"),
            "token_age": mean_of("token_age_mean"),
            "completion_tokens": mean_of("completion_tokens_mean"),
        },
        claims={
            "at K = 1 and 3 the reward is within one standard deviation over seeds of that at K = "
            "0": _windows_learn_as_sync,
            "over all steps, K = 3 earns at most one standard deviation more than K = "
            "1": _wider_learns_no_faster,
        },
        smoke=("values=[0,3]", "seeds=1", "run.steps=4"),
    ),
    "interleaved": INTERLEAVED,
    "strategies": STRATEGIES,
}


def find(name: str) -> Ablation:
    """Return the ablation `name`. Raises ArealError if there is no such ablation."""
    if name not in ABLATIONS:
        hint = did_you_mean(name, ABLATIONS, f"choose from: {', '.join(ABLATIONS)}")
        raise ArealError(f"there is no ablation {name}; {hint}")
    return ABLATIONS[name]
