"""Combinations of keys that type-check and would train something else than they say.

Each is refused before anything starts, with its reason and what to do. What a function of one's own reads is
not known here, so it is refused nothing. Those of `algorithm` come first, those of `control` after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from areal_jax.presets import MINIBATCH_STATISTICS, NO_REWARD, OWN_RATIO
from areal_jax.sections import AlgorithmConfig, ControlConfig

WIDEST_SEQUENCE_CLIP = 0.1
"""A sequence's geometric mean ratio moves by thousandths; the clip of single tokens (0.2) never binds."""


def refusals(a: AlgorithmConfig, max_tokens: int) -> Iterator[str]:
    """What is wrong with the section, a sentence each; `max_tokens` is the longest completion."""
    if a.samples == "reference":
        yield from _of_reference_answers(a)
        return
    yield from _of_ratios(a)
    yield from _of_minibatches(a)
    yield from _of_groups(a)
    yield from _of_the_kl(a)
    yield from _of_models(a)
    yield from _of_rewards(a, max_tokens)
    yield from _of_reductions(a)


def _is_own(piece: str) -> bool:
    return ":" in piece


def _of_reference_answers(a: AlgorithmConfig) -> Iterator[str]:
    why = "no policy sampled a reference answer"
    if (a.proximal_form, a.off_policy) != ("none", "none"):
        yield (
            f"algorithm.samples=reference with proximal={a.proximal}, off_policy={a.off_policy}: {why}, "
            "so it "
            "has no behaviour log-probs to weigh; use algorithm.preset=sft"
        )
    if not (a.loss == "policy_gradient" or _is_own(a.loss)):
        yield (
            f"algorithm.samples=reference with loss={a.loss}: {why}, so there is no ratio to it; use "
            "loss=policy_gradient (algorithm.preset=sft)"
        )
    if not (a.advantage == "ones" or _is_own(a.advantage)):
        yield (
            f"algorithm.samples=reference with advantage={a.advantage}: every answer of a group is the same "
            "reference; use advantage=ones (algorithm.preset=sft)"
        )
    if a.kl.coef > 0:
        yield (
            f"algorithm.samples=reference with kl.coef={a.kl.coef}: {why}, and the KL's estimate is weighted "
            "by its log-probs; set algorithm.kl.coef=0"
        )
    if a.group_filter == "signal":
        yield (
            "algorithm.samples=reference with group_filter=signal: the answers of a group are the same, so "
            "every group would be dropped; set algorithm.group_filter=none"
        )
    yield from _of_reductions(a)


def _of_ratios(a: AlgorithmConfig) -> Iterator[str]:
    has_own_ratio = a.loss in OWN_RATIO
    if has_own_ratio and a.off_policy != "none":
        yield (
            f"algorithm.loss={a.loss} with algorithm.off_policy={a.off_policy}: the loss holds its own "
            "ratio to "
            "the behaviour policy, and its tokens would be corrected twice; set algorithm.off_policy=none"
        )
    if a.proximal_form == "none" and not (a.off_policy == "none" or _is_own(a.off_policy)):
        yield (
            f"algorithm.proximal=none with algorithm.off_policy={a.off_policy}: proximal and behaviour "
            "policy "
            "are then the same and nothing is corrected; set algorithm.proximal=recompute for the decoupled "
            "objective, algorithm.off_policy=none for the one clipped around the behaviour policy"
        )
    if a.loss != "ppo_clip" or a.loss_settings.get("level", "token") == "token":
        return
    level = a.loss_settings["level"]
    if a.proximal_form == "none":
        yield (
            f"algorithm.loss_settings.level={level} with algorithm.proximal=none: around the behaviour "
            "policy "
            "the mismatch of sampling alone leaves GSPO's narrow clip; set algorithm.proximal=recompute"
        )
    low, high = (a.loss_settings.get(name, 0.2) for name in ("low", "high"))
    if isinstance(low, float) and isinstance(high, float) and max(low, high) >= WIDEST_SEQUENCE_CLIP:
        yield (
            f"algorithm.loss_settings.level={level} with low={low}, high={high}: a mean over a sequence "
            "moves "
            "by thousandths, so nothing would be clipped; GSPO takes low=3e-4, high=4e-4"
        )


def _of_minibatches(a: AlgorithmConfig) -> Iterator[str]:
    if a.proximal == "reuse" and a.minibatches > 1:
        yield (
            f"algorithm.proximal=reuse with algorithm.minibatches={a.minibatches}: after the first minibatch "
            "the update's own log-probs are no longer the proximal policy's, and no ratio would ever differ "
            "from 1; use proximal=recompute, or loglinear"
        )
    if a.off_policy in MINIBATCH_STATISTICS and a.proximal_form != "recompute":
        yield (
            f"algorithm.off_policy={a.off_policy} with algorithm.proximal={a.proximal}: its statistic over a "
            "minibatch needs the proximal log-probs before the update; set algorithm.proximal=recompute"
        )
    if a.loss == "policy_gradient" and a.minibatches > 1:
        yield (
            f"algorithm.loss=policy_gradient with algorithm.minibatches={a.minibatches}: it has no ratio for "
            "the steps after the first; use loss=importance, which equals it at the first"
        )


def _of_groups(a: AlgorithmConfig) -> Iterator[str]:
    if a.group_size > 1:
        return
    alone = "algorithm.group_size=1"
    if a.group_filter == "signal":
        yield f"algorithm.group_filter=signal drops every group of {alone}; use none"
    if a.advantage == "leave_one_out":
        yield (
            f"algorithm.advantage=leave_one_out with {alone}: nothing is left, every advantage is 0; raise it"
        )
    settings = a.advantage_settings
    if a.advantage == "group_normalized" and "group" in (
        settings.get("center", "group"),
        settings.get("scale", "group"),
    ):
        yield (
            f"algorithm.advantage=group_normalized with {alone}: a sample is its group's mean, every "
            "advantage "
            "is 0; raise group_size, or set advantage_settings.center=batch and scale=batch"
        )


def _of_the_kl(a: AlgorithmConfig) -> Iterator[str]:
    kl = a.kl
    if kl.target is not None and kl.coef == 0:
        yield (
            f"algorithm.kl.target={kl.target} with kl.coef=0: a coefficient of 0 stays 0; give the first "
            "one, "
            "such as algorithm.kl.coef=0.1"
        )
    if kl.coef == 0:
        return
    if a.reference == "none":
        yield (
            f"algorithm.kl.coef={kl.coef} with algorithm.reference=none: there is no policy to measure "
            "the KL "
            "to; set algorithm.reference=frozen, or kl.coef=0"
        )
    is_exact = kl.estimator == "k1" if kl.place == "reward" else kl.estimator != "k1"
    if not (is_exact or kl.allow_biased):
        exact = "k1" if kl.place == "reward" else "k3 or k2"
        yield (
            f"algorithm.kl.estimator={kl.estimator} with kl.place={kl.place}: its gradient is not the "
            "KL's; use "
            f"{exact}, or algorithm.kl.allow_biased=true"
        )
    if kl.place == "reward" and a.advantage == "ones":
        yield (
            "algorithm.kl.place=reward with algorithm.advantage=ones, which reads no reward; use "
            "kl.place=loss with kl.estimator=k3"
        )


def _of_models(a: AlgorithmConfig) -> Iterator[str]:
    if a.advantage == "gae" and a.critic.kind == "none":
        yield (
            "algorithm.advantage=gae with algorithm.critic.kind=none: there are no values; set "
            "algorithm.critic.kind=separate or shared"
        )
    if a.critic.kind != "none" and not (a.advantage == "gae" or _is_own(a.advantage)):
        yield (
            f"algorithm.critic.kind={a.critic.kind} with algorithm.advantage={a.advantage}, which reads no "
            "values: the critic would cost and never count; set algorithm.advantage=gae, or critic.kind=none"
        )
    if a.advantage == "teacher_gap" and a.teacher is None:
        yield (
            "algorithm.advantage=teacher_gap without a teacher; set algorithm.teacher to a model source, as "
            "model.source takes them"
        )
    if a.teacher is not None and not (a.advantage == "teacher_gap" or _is_own(a.advantage)):
        yield (
            f"algorithm.teacher={a.teacher} with algorithm.advantage={a.advantage}, which reads no teacher; "
            "use algorithm.preset=distillation, or leave the teacher out"
        )


def _of_rewards(a: AlgorithmConfig, max_tokens: int) -> Iterator[str]:
    if a.whiten != "none" and a.advantage == "ones":
        yield (
            f"algorithm.whiten={a.whiten} with algorithm.advantage=ones: all are equal, so every advantage "
            "would be 0; set algorithm.whiten=none"
        )
    if a.preset == "dr_grpo" and a.advantage == "group_normalized":
        scale = a.advantage_settings.get("scale", "group")
        if scale != "none" or a.whiten != "none":
            yield (
                f"algorithm.preset=dr_grpo with advantage_settings.scale={scale}, whiten={a.whiten}: "
                "dividing "
                "by a standard deviation undoes Dr.GRPO; use preset grpo, or scale none and whiten none"
            )
    if a.advantage in NO_REWARD:
        for key, value in (("truncation", "soft_penalty"), ("group_filter", "signal")):
            if getattr(a, key) == value:
                yield (
                    f"algorithm.{key}={value} with algorithm.advantage={a.advantage}, which reads no "
                    "reward of "
                    f"a sample; leave algorithm.{key} out"
                )
    if a.overlong_margin and a.truncation != "soft_penalty":
        yield (
            f"algorithm.overlong_margin={a.overlong_margin} with truncation={a.truncation}: nothing reads "
            "it; "
            "set algorithm.truncation=soft_penalty, or leave the margin out"
        )
    if a.overlong_margin >= max_tokens:
        yield (
            f"algorithm.overlong_margin={a.overlong_margin} is not below generation.max_tokens={max_tokens}: "
            "the shortest answer would be penalised; lower the margin (DAPO takes a fifth of max_tokens)"
        )


def _of_reductions(a: AlgorithmConfig) -> Iterator[str]:
    if a.reduction_constant is not None and a.reduction != "constant":
        yield f"algorithm.reduction_constant={a.reduction_constant} needs algorithm.reduction=constant"


# --- numerics -----------------------------------------------------------------------------------------------


def exact_refusals(mesh: Mapping[str, int], host_tensor: int, on_update: str) -> Iterator[str]:
    """What trainer.numerics=exact cannot keep its word with; `mesh`: the trainer's, by axis."""
    exact, bounded = "trainer.numerics=exact", "or trainer.numerics=bounded"
    wide = [f"trainer.mesh.{axis}={size}" for axis, size in mesh.items() if size > 1]
    wide += [f"runtime.host_tensor={host_tensor}"] if host_tensor > 1 else []
    if wide:
        yield (
            f"{exact} with {', '.join(wide)}: sums over devices are taken in an order of their own; use one "
            f"device a side, {bounded}"
        )
    if on_update == "keep":
        yield (
            f"{exact} with generation.on_update=keep: KV of an older version gives log-probs of no version "
            f"at all; use control.strategy=interruptible, {bounded}"
        )


# --- control ------------------------------------------------------------------------------------------------

ON_UPDATE: Mapping[str, tuple[str, ...]] = {
    "sync": ("drain", "recompute"),
    "one_step": ("drain",),
    "interruptible": ("recompute", "drain"),
    "keep": ("keep",),
    "pinned": ("pinned", "drain"),
}
"""control.strategy -> each generation.on_update that keeps its promise; the first is the default."""

FIXED_STALENESS: Mapping[str, int] = {"sync": 0, "one_step": 1}
"""Strategies that have but one."""

_TWO_VERSIONS = "a sample that is live when a version commits would have tokens of two, and of one only is"
_BROKEN: Mapping[tuple[str, str], tuple[str, str]] = {
    ("sync", "keep"): (
        "no sample is live when a version commits, so nothing would be kept and yet every sample marked as "
        "not exactly reproducible",
        "leave generation.on_update out",
    ),
    ("sync", "pinned"): (
        "no sample is live when a version commits, so a host would hold parameters that nobody decodes with",
        "leave generation.on_update out",
    ),
    ("one_step", "recompute"): (
        f"{_TWO_VERSIONS} what one_step promises",
        "use control.strategy=interruptible control.max_staleness=1",
    ),
    ("one_step", "keep"): (
        f"{_TWO_VERSIONS} what one_step promises",
        "use control.strategy=keep control.max_staleness=1",
    ),
    ("one_step", "pinned"): (
        "one_step promises batches of one version, and samples that wait on a host when a version commits "
        "would start under it",
        "use control.strategy=pinned control.max_staleness=1",
    ),
    ("interruptible", "keep"): (
        "interruptible promises that a token's log-prob is that of its version, and old KV is of another",
        "use control.strategy=keep",
    ),
    ("interruptible", "pinned"): (
        "interruptible bounds the mean age, so nothing would bound how many versions a host holds",
        "use control.strategy=pinned, whose max_staleness bounds every age",
    ),
    ("keep", "recompute"): (
        "no KV would be kept",
        "use control.strategy=interruptible, which admits alike",
    ),
    ("keep", "pinned"): (
        "no KV of an older version would be decoded on",
        "use control.strategy=pinned",
    ),
    ("keep", "drain"): (
        "no sample is live when weights change, so no KV would be kept",
        "use control.strategy=interruptible, which admits alike",
    ),
    ("pinned", "recompute"): (
        f"{_TWO_VERSIONS} what pinned promises (DORA's C1)",
        "use control.strategy=interruptible",
    ),
    ("pinned", "keep"): (
        f"{_TWO_VERSIONS} what pinned promises (DORA's C1)",
        "use control.strategy=keep",
    ),
}
"""(control.strategy, generation.on_update) -> why the promise is broken, and the remedy."""


def control_refusals(control: ControlConfig, max_staleness: int | None, on_update: str) -> Iterator[str]:
    """What is wrong with the strategy, given the staleness (None = unbounded) and what hosts do."""
    strategy, eta = control.strategy, "unbounded" if max_staleness is None else max_staleness
    fixed = FIXED_STALENESS.get(strategy)
    if fixed is not None and max_staleness != fixed:
        another = "interruptible" if strategy == "sync" else "pinned, or interruptible"
        yield (
            f"control.max_staleness={eta} contradicts control.strategy={strategy}, whose staleness is "
            f"{fixed}; use {another}"
        )
    if strategy == "pinned" and max_staleness is None:
        yield (
            "control.max_staleness=unbounded with control.strategy=pinned: a host would hold the parameters "
            "of any number of versions; give a number K, and it holds at most K + 1"
        )
    if on_update not in ON_UPDATE[strategy]:
        why, remedy = _BROKEN[strategy, on_update]
        yield f"generation.on_update={on_update} with control.strategy={strategy}: {why}; {remedy}"
