"""Refuses combinations of config keys that are valid one by one, but together would train something else.

A combination is refused before anything starts, with the reason and the remedy. No combination is refused
because of a user's own loss or estimator (module:name), since it is unknown which keys such a function reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from areal_jax.config.presets import MINIBATCH_STATISTICS, NO_REWARD, OWN_RATIO
from areal_jax.config.sections import (
    AlgorithmConfig,
    ControlConfig,
    GenerationConfig,
    ModelSettings,
    RuntimeConfig,
    TrainerConfig,
)

WIDEST_SEQUENCE_CLIP = 0.1
"""Clip ranges of at least this value are refused for a loss that clips importance ratios of whole sequences.
Such a ratio is a geometric mean over tokens and changes only by thousandths, so that a range made for the
ratios of tokens, such as 0.2, would never clip.
"""


def refusals(a: AlgorithmConfig, max_tokens: int) -> Iterator[str]:
    """Yields a message for each contradiction among the settings `a`; `max_tokens`: generation.max_tokens."""
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
            f"algorithm.samples=reference with proximal={a.proximal}, off_policy={a.off_policy}: {why}, so "
            "it has no behaviour log-probs to weight; set algorithm.preset=sft"
        )
    if not (a.loss == "policy_gradient" or _is_own(a.loss)):
        yield (
            f"algorithm.samples=reference with loss={a.loss}: {why}, so there is no importance ratio; set "
            "algorithm.loss=policy_gradient, or algorithm.preset=sft"
        )
    if not (a.advantage == "ones" or _is_own(a.advantage)):
        yield (
            f"algorithm.samples=reference with advantage={a.advantage}: every answer of a group is the same "
            "reference; set algorithm.advantage=ones, or algorithm.preset=sft"
        )
    if a.kl.coef > 0:
        yield (
            f"algorithm.samples=reference with kl.coef={a.kl.coef}: {why}, but the KL estimate needs "
            "behaviour log-probs; set algorithm.kl.coef=0"
        )
    if a.group_filter == "signal":
        yield (
            "algorithm.samples=reference with group_filter=signal: the answers of a group are the same, so "
            "every group would be dropped; set algorithm.group_filter=none"
        )
    if a.routes == "replay":
        yield f"algorithm.samples=reference with routes=replay: {why}; set algorithm.routes=own"
    yield from _of_gates(a, "algorithm.samples=reference")
    yield from _of_reductions(a)


def _of_gates(a: AlgorithmConfig, reason: str) -> Iterator[str]:
    if a.gate.part is not None:
        yield (
            f"algorithm.gate.part={a.gate.part} with {reason}, which reads no rewards; leave "
            "algorithm.gate.part out"
        )


def _of_ratios(a: AlgorithmConfig) -> Iterator[str]:
    has_own_ratio = a.loss in OWN_RATIO
    if has_own_ratio and a.off_policy != "none":
        yield (
            f"algorithm.loss={a.loss} with algorithm.off_policy={a.off_policy}: this loss already contains "
            "the ratio to the behaviour policy, so each token would be corrected twice; set "
            "algorithm.off_policy=none"
        )
    if a.proximal_form == "none" and not (a.off_policy == "none" or _is_own(a.off_policy)):
        yield (
            f"algorithm.proximal=none with algorithm.off_policy={a.off_policy}: proximal and behaviour "
            "policy are then the same, so the off-policy weight corrects nothing; set "
            "algorithm.proximal=recompute (decoupled objective), or algorithm.off_policy=none (clip around "
            "the behaviour policy)"
        )
    if a.loss != "ppo_clip" or a.loss_settings.get("level", "token") == "token":
        return
    level = a.loss_settings["level"]
    if a.proximal_form == "none":
        yield (
            f"algorithm.loss_settings.level={level} with algorithm.proximal=none: the numerical difference "
            "between sampling and training alone exceeds GSPO's narrow clip around the behaviour policy; "
            "set algorithm.proximal=recompute"
        )
    low, high = (a.loss_settings.get(name, 0.2) for name in ("low", "high"))
    # The function's own annotations refuse what is no number, with a better message.
    are_numbers = isinstance(low, float | int) and isinstance(high, float | int)
    if are_numbers and max(low, high) >= WIDEST_SEQUENCE_CLIP:
        yield (
            f"algorithm.loss_settings.level={level} with low={low}, high={high}: the mean log-ratio of a "
            "sequence changes only by thousandths, so nothing would be clipped; set "
            "algorithm.loss_settings.low=3e-4 and .high=4e-4, as GSPO does"
        )


def _of_minibatches(a: AlgorithmConfig) -> Iterator[str]:
    if a.proximal == "reuse" and a.minibatches > 1:
        yield (
            f"algorithm.proximal=reuse with algorithm.minibatches={a.minibatches}: each minibatch would use "
            "its own log-probs as the proximal policy's, so no ratio would ever differ from 1; set "
            "algorithm.proximal=recompute or loglinear"
        )
    if a.off_policy in MINIBATCH_STATISTICS and a.proximal_form != "recompute":
        yield (
            f"algorithm.off_policy={a.off_policy} with algorithm.proximal={a.proximal}: this off-policy "
            "weight needs the proximal log-probs of a whole minibatch before the update on it; set "
            "algorithm.proximal=recompute"
        )
    if a.loss == "policy_gradient" and a.minibatches > 1:
        yield (
            f"algorithm.loss=policy_gradient with algorithm.minibatches={a.minibatches}: this loss has no "
            "importance ratio, which every minibatch after the first needs; set algorithm.loss=importance, "
            "which equals it in the first minibatch"
        )


def _of_groups(a: AlgorithmConfig) -> Iterator[str]:
    if a.group_size > 1:
        return
    alone = "algorithm.group_size=1"
    if a.group_filter == "signal":
        yield f"algorithm.group_filter=signal drops every group if {alone}; set algorithm.group_filter=none"
    if a.advantage == "leave_one_out":
        yield (
            f"algorithm.advantage=leave_one_out with {alone}: a group has no other sample as a baseline, so "
            "every advantage is 0; raise algorithm.group_size"
        )
    settings = a.advantage_settings
    if a.advantage == "group_normalized" and "group" in (
        settings.get("center", "group"),
        settings.get("scale", "group"),
    ):
        yield (
            f"algorithm.advantage=group_normalized with {alone}: each sample equals its group's mean, so "
            "every advantage is 0; raise algorithm.group_size, or set "
            "algorithm.advantage_settings.center=batch and .scale=batch"
        )


def _of_the_kl(a: AlgorithmConfig) -> Iterator[str]:
    kl = a.kl
    if kl.target is not None and kl.coef == 0:
        yield (
            f"algorithm.kl.target={kl.target} with kl.coef=0: kl.target multiplies the coefficient, so "
            "0 stays 0; give a positive one, such as algorithm.kl.coef=0.1"
        )
    if kl.coef == 0:
        return
    if a.reference == "none":
        yield (
            f"algorithm.kl.coef={kl.coef} with algorithm.reference=none: the KL needs a reference policy; "
            "set algorithm.reference=frozen, or algorithm.kl.coef=0"
        )
    is_exact = kl.estimator == "k1" if kl.place == "reward" else kl.estimator != "k1"
    if not is_exact:
        exact = "k1" if kl.place == "reward" else "k3 or k2"
        yield (
            f"algorithm.kl.estimator={kl.estimator} with algorithm.kl.place={kl.place}: the gradient of "
            f"this estimator is not that of the KL; set algorithm.kl.estimator={exact}"
        )
    if kl.place == "reward" and a.advantage == "ones":
        yield (
            "algorithm.kl.place=reward has no effect with algorithm.advantage=ones, which reads no reward; "
            "set algorithm.kl.place=loss and algorithm.kl.estimator=k3"
        )


def _of_models(a: AlgorithmConfig) -> Iterator[str]:
    if a.advantage == "gae" and a.critic.kind == "none":
        yield (
            "algorithm.advantage=gae with algorithm.critic.kind=none: GAE needs the values of a critic; set "
            "algorithm.critic.kind=separate or shared"
        )
    if a.critic.kind != "none" and not (a.advantage == "gae" or _is_own(a.advantage)):
        yield (
            f"algorithm.critic.kind={a.critic.kind} with algorithm.advantage={a.advantage}, which reads no "
            "values: the critic would cost time and memory without effect; set algorithm.advantage=gae, or "
            "algorithm.critic.kind=none"
        )
    if a.advantage == "teacher_gap" and a.teacher is None:
        yield (
            "algorithm.advantage=teacher_gap needs a teacher; set algorithm.teacher to a model, in any form "
            "that model.source accepts"
        )
    if a.teacher is not None and not (a.advantage == "teacher_gap" or _is_own(a.advantage)):
        yield (
            f"algorithm.teacher={a.teacher} with algorithm.advantage={a.advantage}, which uses no teacher; "
            "set algorithm.preset=distillation, or leave algorithm.teacher out"
        )


def _of_rewards(a: AlgorithmConfig, max_tokens: int) -> Iterator[str]:
    if a.whiten != "none" and a.advantage == "ones":
        yield (
            f"algorithm.whiten={a.whiten} with algorithm.advantage=ones: all advantages are equal, so "
            "whitening would make every one 0; set algorithm.whiten=none"
        )
    if a.preset == "dr_grpo" and a.advantage == "group_normalized":
        scale = a.advantage_settings.get("scale", "group")
        if scale != "none" or a.whiten != "none":
            yield (
                f"algorithm.preset=dr_grpo with algorithm.advantage_settings.scale={scale} and "
                f"algorithm.whiten={a.whiten}: Dr.GRPO divides by no standard deviation; set both to none, "
                "or algorithm.preset=grpo"
            )
    if a.advantage in NO_REWARD:
        for key, value in (("truncation", "soft_penalty"), ("group_filter", "signal")):
            if getattr(a, key) == value:
                yield (
                    f"algorithm.{key}={value} with algorithm.advantage={a.advantage}, which reads no "
                    f"rewards; leave algorithm.{key} out"
                )
        yield from _of_gates(a, f"algorithm.advantage={a.advantage}")
    if a.overlong_margin and a.truncation != "soft_penalty":
        yield (
            f"algorithm.overlong_margin={a.overlong_margin} has no effect with "
            f"algorithm.truncation={a.truncation}; set algorithm.truncation=soft_penalty, or leave "
            "algorithm.overlong_margin out"
        )
    if a.overlong_margin >= max_tokens:
        yield (
            f"algorithm.overlong_margin={a.overlong_margin} is not below "
            f"generation.max_tokens={max_tokens}: even the shortest answer would be penalised; lower "
            "algorithm.overlong_margin (DAPO sets a fifth of max_tokens)"
        )


def _of_reductions(a: AlgorithmConfig) -> Iterator[str]:
    if a.reduction_constant is not None and a.reduction != "constant":
        yield (
            f"algorithm.reduction_constant={a.reduction_constant} has no effect with "
            f"algorithm.reduction={a.reduction}; set algorithm.reduction=constant, or leave "
            "algorithm.reduction_constant out"
        )


# --- numerics -----------------------------------------------------------------------------------------------


def exact_refusals(mesh: Mapping[str, int], host_tensor: int, on_update: str) -> Iterator[str]:
    """Yields a message for each setting that trainer.numerics=exact does not support.

    `mesh`: axis of the trainer's mesh -> size; `host_tensor`: devices of a host; `on_update`:
    generation.on_update with its default filled in.
    """
    exact, bounded = "trainer.numerics=exact", "or trainer.numerics=bounded"
    wide = [f"trainer.mesh.{axis}={size}" for axis, size in mesh.items() if size > 1]
    wide += [f"runtime.host_tensor={host_tensor}"] if host_tensor > 1 else []
    if wide:
        yield (
            f"{exact} with {', '.join(wide)}: sums over several devices are added in another order; use one "
            f"device for the trainer and one for each host, {bounded}"
        )
    if on_update == "keep":
        yield (
            f"{exact} with generation.on_update=keep: tokens decoded from the KV of an older version have "
            f"log-probs that no single version gives; set control.strategy=interruptible, {bounded}"
        )


# --- quantised hosts ----------------------------------------------------------------------------------------


def quantized_refusals(
    c: GenerationConfig, model: ModelSettings, numerics: str, a: AlgorithmConfig
) -> Iterator[str]:
    """Yields a message for each setting that contradicts generation.quantize; `numerics`: the trainer's."""
    if c.quantize == "none":
        return
    setting, none = f"generation.quantize={c.quantize}", "generation.quantize=none"
    if numerics == "exact":
        yield (
            f"{setting} with trainer.numerics=exact: a quantised host computes other log-probs than the "
            f"trainer, so they cannot agree in every bit; set trainer.numerics=bounded, or {none}"
        )
    if model.quantize != "none":
        yield (
            f"{setting} with model.quantize={model.quantize}: hosts get the frozen matrices as codes "
            f"already; set {none}, or model.quantize=none"
        )
    if a.samples == "reference":
        yield f"{setting} with algorithm.samples=reference: hosts sample nothing; set {none}"
    elif not (is_corrected(a) or _is_own(a.loss) or _is_own(a.off_policy)):
        yield (
            f"{setting} with algorithm.loss={a.loss}, proximal={a.proximal}, off_policy={a.off_policy}: "
            "nothing corrects for the difference between the quantised policy that samples and the policy "
            "that is trained; set algorithm.preset=aipo, or algorithm.off_policy=truncate"
        )


def is_corrected(a: AlgorithmConfig) -> bool:
    """Whether the objective weighs each token by a ratio to the policy that sampled it.

    That is an off-policy weight, a loss with its own ratio, or a trust region around the behaviour policy.
    """
    is_around_behavior = a.proximal_form == "none" and a.loss != "policy_gradient"
    return a.off_policy != "none" or a.loss in OWN_RATIO or is_around_behavior


# --- executors ----------------------------------------------------------------------------------------------


def executor_refusals(r: RuntimeConfig, a: AlgorithmConfig, t: TrainerConfig) -> Iterator[str]:
    """Yields a message for each setting that contradicts a reference policy or teacher apart."""
    used = {"reference": a.has_reference, "teacher": a.teacher is not None}
    lacks = {"reference": "algorithm.kl.coef=0", "teacher": "algorithm.teacher unset"}
    for name, executor in (("reference", r.reference), ("teacher", r.teacher)):
        if not executor.is_apart:
            continue
        keys = [key for key in ("mesh", "dtype") if getattr(executor, key) not in (None, "auto")]
        setting = " and ".join(f"runtime.{name}.{key}" for key in keys)
        if not used[name]:
            yield f"{setting} with {lacks[name]}: no {name} is there to compute; leave {setting} out"
        if t.compute != "packed":
            yield (
                f"{setting} with trainer.compute={t.compute}: walks over prefix trees compute all models on "
                f"the trainer's mesh; set trainer.compute=packed, or leave {setting} out"
            )
        if r.trainer_processes > 1:
            yield (
                f"{setting} with runtime.trainer_processes={r.trainer_processes}: arrays move between meshes "
                f"of one process only; set runtime.trainer_processes=1, or leave {setting} out"
            )
        shards = executor.mesh.row_parts if executor.mesh else 1
        if t.rows % shards:
            yield (
                f"trainer.rows={t.rows} does not divide evenly over runtime.{name}.mesh's data x fsdp x "
                f"expert = {shards} shards; set trainer.rows to a multiple of {shards}"
            )
    if r.reference.is_apart and a.reference == "ema":
        yield (
            "algorithm.reference=ema with runtime.reference: the moving average is taken by the trainer's "
            "update, in float32; leave runtime.reference out, or set algorithm.reference=frozen"
        )


# --- control ------------------------------------------------------------------------------------------------

ON_UPDATE: Mapping[str, tuple[str, ...]] = {
    "sync": ("drain", "recompute"),
    "one_step": ("drain",),
    "interruptible": ("recompute", "drain"),
    "keep": ("keep",),
    "pinned": ("pinned", "drain"),
}
"""control.strategy -> the values of generation.on_update that it allows; the first is the default."""

FIXED_STALENESS: Mapping[str, int] = {"sync": 0, "one_step": 1}
"""control.strategy -> staleness in versions, for strategies with a fixed staleness."""

_TWO_VERSIONS = "a sample that is live when a version commits would have tokens of two versions, but"
_BROKEN: Mapping[tuple[str, str], str] = {
    ("sync", "keep"): "no sample is live when a version commits, so no KV would be kept, yet every sample "
    "would be marked as not exactly reproducible",
    ("sync", "pinned"): "no sample is live when a version commits, so a host would hold parameters that no "
    "sample uses",
    ("one_step", "recompute"): f"{_TWO_VERSIONS} one_step promises samples of one version",
    ("one_step", "keep"): f"{_TWO_VERSIONS} one_step promises samples of one version",
    ("one_step", "pinned"): "one_step promises that all samples of a batch have one version, but samples "
    "that wait on a host when a version commits would start under the new version",
    ("interruptible", "keep"): "interruptible promises that a token's log-prob comes from its own version, "
    "but old KV comes from another",
    ("interruptible", "pinned"): "interruptible does not bound the age of each sample, so a host could hold "
    "any number of versions; with control.strategy=pinned, max_staleness bounds every age",
    ("keep", "recompute"): "no KV would be kept; control.strategy=interruptible admits the same groups",
    ("keep", "pinned"): "no sample would continue on KV of an older version",
    ("keep", "drain"): "no sample is live when weights change, so no KV would be kept; "
    "control.strategy=interruptible admits the same groups",
    ("pinned", "recompute"): f"{_TWO_VERSIONS} pinned promises samples of one version (DORA's C1)",
    ("pinned", "keep"): f"{_TWO_VERSIONS} pinned promises samples of one version (DORA's C1)",
}
"""(control.strategy, generation.on_update) -> why this strategy does not allow this value."""


def _remedy(strategy: str, on_update: str) -> str:
    if strategy == "sync":
        return "leave generation.on_update out"
    another = on_update if on_update in ("keep", "pinned") else "interruptible"
    return f"use control.strategy={another}" + " control.max_staleness=1" * (strategy == "one_step")


def control_refusals(control: ControlConfig, max_staleness: int | None, on_update: str) -> Iterator[str]:
    """Yields a message for each setting that contradicts control.strategy.

    `max_staleness` (None: unbounded), `on_update`: the config's values with defaults filled in.
    """
    strategy, eta = control.strategy, "unbounded" if max_staleness is None else max_staleness
    fixed = FIXED_STALENESS.get(strategy)
    if fixed is not None and max_staleness != fixed:
        another = "interruptible" if strategy == "sync" else "pinned, or interruptible"
        yield (
            f"control.max_staleness={eta} contradicts control.strategy={strategy}, whose staleness is "
            f"always {fixed}; leave control.max_staleness out, or set control.strategy={another}"
        )
    if strategy == "pinned" and max_staleness is None:
        yield (
            "control.max_staleness=unbounded with control.strategy=pinned: a host would hold the parameters "
            "of any number of versions; set control.max_staleness to a number K, and a host holds at most K "
            "+ 1 versions"
        )
    if on_update not in ON_UPDATE[strategy]:
        why, remedy = _BROKEN[strategy, on_update], _remedy(strategy, on_update)
        yield f"generation.on_update={on_update} with control.strategy={strategy}: {why}; {remedy}"
