"""The ablation of Interleaved Reasoning: templates and rewards on chained arithmetic, by three algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, mean

from areal_jax.lab.ablations.ablation import Ablation, Contrast, RunRecord, Table, paired
from areal_jax.lab.ablations.run_figures import mean_of
from areal_jax.observe.estimates import Estimate, paired_estimate

THINK_ANSWER, INTERLEAVE = "think_answer", "interleave"
REWARDED, UNGATED = "interleave_ir", "interleave_direct"

TTFT_DROP = 0.60
"""Least accepted relative drop of the TTFT share from think_answer to interleave."""

EQUAL = 0.03
"""Largest accepted difference of accuracies that count as equal."""

FORMAT = 0.95
"""Least accepted share of completions that follow the template."""

TRAINED, LONGER = "3 steps", ("4 steps", "5 steps", "6 steps")

ALGORITHMS = ("grpo", "reinforce_pp", "ppo")


OfRun = Callable[[RunRecord], float]
"""A figure of a run."""


def _part(evaluation: str, part: str) -> OfRun:
    """Return a figure: the mean of a reward part over an evaluation's sampled completions."""
    return lambda run: run.evaluations[evaluation]["sampled"]["parts"][part]["value"]


def _accuracy(*evaluations: str) -> OfRun:
    """Return a figure: the mean of pass@1 over the evaluations."""
    return lambda run: fmean(run.evaluations[name]["sampled"]["pass@1"]["value"] for name in evaluations)


def _paid(run: RunRecord) -> float:
    """Return the fraction of the samples to which the gated part was paid; 0 without a gate."""
    return fmean((row.get("paid_share") or {}).get("intermediate", 0.0) for row in run.rows)


def _gate_open(run: RunRecord) -> float:
    return fmean(float((row.get("gates") or {}).get("intermediate", True)) for row in run.rows)


def _early(figure: OfRun) -> OfRun:
    """Return the figure of the first third of a run's rows, at least of one row."""
    return lambda run: figure(run._replace(rows=run.rows[: max(1, len(run.rows) // 3)]))


def _late(figure: OfRun) -> OfRun:
    """Return the figure of the last third of a run's rows, at least of one row."""
    return lambda run: figure(run._replace(rows=run.rows[-max(1, len(run.rows) // 3) :]))


def _right(run: RunRecord) -> float:
    return fmean(row["reward_parts"]["correct"] for row in run.rows)


# --- claims -------------------------------------------------------------------------------------------------


def _pooled(table: Table, contrast: Contrast) -> Estimate:
    """Return the contrast over all algorithms and seeds. Raises KeyError if a run of it is missing."""
    for value in ALGORITHMS:
        _ = table[value, contrast.arm], table[value, contrast.baseline]
    return paired_estimate([one for value in ALGORITHMS for one in paired(table, value, contrast)])


def _ttft_falls(table: Table) -> bool:
    def drop(value: str) -> float:
        return 1 - mean(table[value, INTERLEAVE]["ttft_share"]) / mean(
            table[value, THINK_ANSWER]["ttft_share"]
        )

    return min([drop(value) for value in ALGORITHMS]) >= TTFT_DROP


def _accuracies_are_equal(table: Table) -> bool:
    found = _pooled(table, Contrast("accuracy", INTERLEAVE, THINK_ANSWER))
    return found.low is not None and found.high is not None and found.low >= -EQUAL and found.high <= EQUAL


def _at_least(arm: str, baseline: str) -> Callable[[Table], bool]:
    """Return a claim: arm `arm` has at least the accuracy of `baseline`, the mean over all evaluations."""

    def holds(table: Table) -> bool:
        figure = "accuracy_all"
        means = [[mean(table[value, one][figure]) for one in (arm, baseline)] for value in ALGORITHMS]
        return all(ours >= theirs for ours, theirs in means)

    return holds


def _paid_less(table: Table) -> bool:
    """Whether the gate opens less often in the last third of the steps than in the first, over all runs."""
    first = [one for value in ALGORITHMS for one in table[value, REWARDED]["gate_open_first"]]
    last = [one for value in ALGORITHMS for one in table[value, REWARDED]["gate_open_last"]]
    return mean(last) < mean(first)


def _format_is_learned(table: Table) -> bool:
    arms = (THINK_ANSWER, INTERLEAVE, REWARDED)
    parts = [mean(table[value, arm]["format"]) for value in ALGORITHMS for arm in arms]
    return (min(parts) + 1) / 2 >= FORMAT  # the part is 1 or -1


def _gap_holds(table: Table) -> bool:
    """Whether interleave_ir leads think_answer by at least as much on longer problems as on trained ones."""
    near = _pooled(table, Contrast("accuracy", REWARDED, THINK_ANSWER))
    far = _pooled(table, Contrast("accuracy_longer", REWARDED, THINK_ANSWER))
    return far.value is not None and near.value is not None and far.value >= near.value


def _arm(template: str, *words: str) -> tuple[str, ...]:
    tasks = ("tasks.chained", "trainer.supervised.tasks.chained")
    return (*(f"{task}.template={template}" for task in tasks), *words)


def _contrasts() -> tuple[Contrast, ...]:
    pairs = (
        (INTERLEAVE, THINK_ANSWER),
        (REWARDED, INTERLEAVE),
        (REWARDED, UNGATED),
        (REWARDED, THINK_ANSWER),
    )
    figures = ("accuracy", "accuracy_all", "accuracy_longer")
    shares = (Contrast("ttft_share", INTERLEAVE, THINK_ANSWER),)
    return (*shares, *(Contrast(figure, *pair) for figure in figures for pair in pairs))


def _evaluation(steps: int) -> tuple[str, ...]:
    return (f"tasks.chained.steps={steps}",)


FIGURES: Mapping[str, OfRun] = {
    "accuracy": _accuracy(TRAINED),
    "accuracy_all": _accuracy(TRAINED, *LONGER),
    "ttft_share": _part(TRAINED, "ttft_share"),
    "first_correct": _part(TRAINED, "first_correct"),
    "sub_correct": _part(TRAINED, "sub_correct"),
    "format": _part(TRAINED, "format"),
    "accuracy_longer": _accuracy(*LONGER),
    **{f"accuracy_{name[0]}": _accuracy(name) for name in LONGER},
    "correct_mean": _right,
    "right_first": _early(_right),
    "right_last": _late(_right),
    "gate_open_first": _early(_gate_open),
    "gate_open_last": _late(_gate_open),
    "paid_first": _early(_paid),
    "paid_last": _late(_paid),
    "tokens": _late(mean_of("completion_tokens_mean")),
}

INTERLEAVED = Ablation(
    doc="sub-answers between the thoughts (interleave) against one answer after them (think_answer), with a "
    "gated (interleave_ir) and an ungated reward (interleave_direct) of right sub-answers, for three "
    "algorithms; a small version of Interleaved Reasoning (arXiv:2505.19640)",
    recipe="configs/interleaved.yaml",
    key="algorithm.preset",
    values=ALGORITHMS,
    arms={
        THINK_ANSWER: _arm("think_answer", "tasks.chained.reward.intermediate=none"),
        INTERLEAVE: _arm("interleave", "tasks.chained.reward.intermediate=none"),
        REWARDED: _arm(
            "interleave",
            "tasks.chained.reward.intermediate=time_discounted",
            "algorithm.gate.part=intermediate",
        ),
        UNGATED: _arm(
            "interleave",
            "tasks.chained.reward.intermediate=time_discounted",
            "tasks.chained.reward.pay=direct",
        ),
    },
    seeds={"grpo": 3, "reinforce_pp": 3, "ppo": 6},
    speed=0.6,
    figures=FIGURES,
    evaluations={TRAINED: _evaluation(3), **{name: _evaluation(int(name[0])) for name in LONGER}},
    of_value={"ppo": ("algorithm.minibatches=1",)},
    shares_start=True,
    contrasts=_contrasts(),
    claims={
        f"the TTFT share falls by >= {TTFT_DROP:.0%} from think_answer to interleave": _ttft_falls,
        f"their accuracies are equal: the difference's interval is within {EQUAL}": _accuracies_are_equal,
        "interleave_ir has at least the mean accuracy of interleave, for each algorithm": _at_least(
            REWARDED, INTERLEAVE
        ),
        "interleave_ir has at least the mean accuracy of interleave_direct, for each algorithm": _at_least(
            REWARDED, UNGATED
        ),
        "the gate is open less often in the last third of the steps than in the first": _paid_less,
        f"every algorithm learns the format: >= {FORMAT:.0%} of the completions": _format_is_learned,
        "on longer problems, interleave_ir's lead over think_answer is not smaller": _gap_holds,
    },
    smoke=(
        "values=[grpo]",
        f"arms=[{THINK_ANSWER},{INTERLEAVE}]",
        "seeds=1",
        "run.steps=3",
        "trainer.supervised.steps=120",
        "trainer.supervised.learning_rate=3.0e-3",
    ),
    curves=("reward_mean", "reward_parts/correct", "reward_parts/ttft_share", "gates/intermediate"),
)
