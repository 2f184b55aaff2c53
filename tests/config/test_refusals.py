"""What would train something else than it says is refused; every preset, as it stands, is not."""

from __future__ import annotations

import re

import pytest

from areal_jax.config.loading import ConfigError, load_config
from areal_jax.config.presets import PRESETS

NEEDS = {"distillation": ["algorithm.teacher=tiny"]}
"""Presets that no default can complete."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_loaded_as_it_stands(name: str):
    """Every setting of the table reaches the config: nothing is dropped, nothing is added against it."""
    a = load_config(f"algorithm.preset={name}", *NEEDS.get(name, [])).algorithm
    for key, value in PRESETS[name].settings.items():
        got = getattr(a, key)
        if key in ("kl", "critic"):
            got = {part: getattr(got, part) for part in value}
        assert got == value, key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # Dr.GRPO is the absence of the standard deviation
        ("preset=dr_grpo advantage_settings.scale=group", "set both to none, or algorithm.preset=grpo"),
        ("preset=dr_grpo advantage_settings.scale=batch", "Dr.GRPO divides by no standard deviation"),
        ("preset=dr_grpo whiten=tokens", "scale=none and algorithm.whiten=tokens: Dr.GRPO divides"),
        # ratios
        (
            "preset=gspo proximal=none off_policy=none",
            "GSPO's narrow clip around the behaviour policy; set algorithm.proximal=recompute",
        ),
        ("preset=gspo_token proximal=none off_policy=none", "level=sequence_token with algorithm.proximal"),
        ("preset=grpo loss_settings.level=sequence", "low=0.2, high=0.2: the mean log-ratio of a sequence"),
        ("preset=gspo loss_settings.low=1 loss_settings.high=1", "low=1, high=1: the mean log-ratio of a"),
        ("preset=gspo loss_settings.high=1", "high=1: the mean log-ratio of a sequence changes only by"),
        ("preset=cispo off_policy=truncate", "algorithm.loss=cispo with algorithm.off_policy=truncate"),
        ("preset=aipo off_policy=mask", "would be corrected twice; set algorithm.off_policy=none"),
        ("preset=dppo off_policy=m2po proximal=recompute", "algorithm.loss=dppo"),
        ("preset=grpo loss=aipo", "algorithm.loss=aipo with algorithm.off_policy=truncate"),
        ("preset=decoupled_ppo proximal=none", "proximal=none with algorithm.off_policy=truncate"),
        ("preset=decoupled_ppo_loglinear proximal=none", "corrects nothing; set algorithm.proximal="),
        ("preset=icepop proximal=none", "algorithm.proximal=none with algorithm.off_policy=mask"),
        # minibatches
        ("preset=grpo minibatches=2 proximal=reuse", "proximal=reuse with algorithm.minibatches=2"),
        ("preset=m2po proximal=reuse", "off_policy=m2po with algorithm.proximal=reuse"),
        ("preset=m2po proximal=loglinear", "needs the proximal log-probs of a whole minibatch"),
        ("preset=m2po proximal=none", "set algorithm.proximal=recompute"),
        ("preset=reinforce minibatches=2", "set algorithm.loss=importance, which equals it"),
        # groups of one
        ("preset=rloo group_size=1", "advantage=leave_one_out with algorithm.group_size=1"),
        ("preset=grpo group_size=1", "each sample equals its group's mean, so every advantage is 0"),
        ("preset=dr_grpo group_size=1", "advantage=group_normalized with algorithm.group_size=1"),
        ("preset=reinforce group_size=1 group_filter=signal", "drops every group if algorithm.group_size=1"),
        # KL
        ("preset=grpo reference=none", "kl.coef=0.04 with algorithm.reference=none"),
        (
            "preset=grpo kl.estimator=k1",
            "estimator=k1 with algorithm.kl.place=loss: the gradient of this estimator is not",
        ),
        ("preset=rloo kl.estimator=k2", "estimator=k2 with algorithm.kl.place=reward"),
        (
            "preset=grpo kl.place=reward",
            "estimator=k3 with algorithm.kl.place=reward: the gradient of this estimator is not",
        ),
        (
            "preset=dr_grpo kl.target=0.1",
            "kl.target=0.1 with kl.coef=0: kl.target multiplies the coefficient, so 0 stays 0",
        ),
        ("preset=reinforce advantage=ones kl.coef=0.1 kl.place=reward kl.estimator=k1", "reads no reward"),
        # critic and teacher
        ("preset=grpo advantage=gae", "set algorithm.critic.kind=separate or shared"),
        ("preset=ppo critic.kind=none", "advantage=gae with algorithm.critic.kind=none"),
        ("preset=grpo critic.kind=shared", "the critic would cost time and memory without effect"),
        ("preset=distillation", "teacher_gap needs a teacher; set algorithm.teacher to a model"),
        ("preset=grpo teacher=tiny", "algorithm.teacher=tiny with algorithm.advantage=group_normalized"),
        ("preset=distillation teacher=tiny group_filter=signal", "group_filter=signal with algorithm"),
        (
            "preset=distillation teacher=tiny truncation=soft_penalty",
            "reads no rewards; leave algorithm.truncation out",
        ),
        # rewards and lengths
        ("preset=reinforce advantage=ones whiten=tokens", "whiten=tokens with algorithm.advantage=ones"),
        ("preset=grpo overlong_margin=8", "overlong_margin=8 has no effect with algorithm.truncation=keep"),
        ("preset=dapo overlong_margin=32", "overlong_margin=32 is not below generation.max_tokens=32"),
        (
            "preset=grpo reduction_constant=9",
            "has no effect with algorithm.reduction=sequence_mean; set algorithm.reduction=constant",
        ),
        # reference answers
        ("preset=sft proximal=recompute", "no policy sampled a reference answer"),
        ("preset=sft loss=ppo_clip", "samples=reference with loss=ppo_clip"),
        ("preset=sft advantage=group_normalized", "every answer of a group is the same reference"),
        ("preset=sft kl.coef=0.1", "samples=reference with kl.coef=0.1"),
        ("preset=sft group_filter=signal", "every group would be dropped"),
    ],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(words: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(*(f"algorithm.{word}" for word in words.split()))


@pytest.mark.parametrize(
    "words",
    [
        "preset=grpo proximal=none off_policy=none",
        "preset=grpo group_size=1 advantage_settings.center=batch advantage_settings.scale=batch",
        "preset=grpo loss=my.losses:clip advantage=my.advantages:mine critic.kind=shared teacher=tiny",
        "preset=decoupled_ppo off_policy=my.weights:mine proximal=none",
        "preset=gspo loss_settings.low=0.01 loss_settings.high=0.02",
        "preset=dapo overlong_margin=8",
        "preset=grpo advantage=gae critic.kind=shared",
        "preset=sft minibatches=4",
        "preset=grpo reference=none kl.coef=0",
    ],
)
def test_what_says_what_it_does_is_not_refused(words: str):
    load_config(*(f"algorithm.{word}" for word in words.split()))


def test_the_default_corrects_for_the_behaviour_policy():
    """No config that decouples by default forgets the behaviour weight."""
    a = load_config().algorithm
    assert (a.off_policy, a.proximal_form) == ("truncate", "reuse")
    for name in PRESETS:
        a = load_config(f"algorithm.preset={name}", *NEEDS.get(name, [])).algorithm
        is_corrected = a.off_policy != "none" or a.loss in ("cispo", "aipo", "dppo")
        assert is_corrected == (name != "sft")


def test_no_kl_is_taken_to_a_reference_that_is_not_there():
    """Unless asked for there is neither a KL term nor a reference, and never a term without one."""
    without = load_config("algorithm.preset=dr_grpo").algorithm
    assert without.kl.coef == 0 and not without.has_reference
    for name in ("grpo", "rloo", "reinforce_pp"):
        assert load_config(f"algorithm.preset={name}").algorithm.has_reference


# --- quantised hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trainer.numerics=exact", "so they cannot agree in every bit; set trainer.numerics=bounded, or"),
        (
            "model.lora.rank=2 model.quantize=nf4",
            "model.quantize=nf4: hosts get the frozen matrices as codes",
        ),
        (
            "algorithm.preset=sft",
            "algorithm.samples=reference: hosts sample nothing; set generation.quantize=none",
        ),
        (
            "algorithm.preset=reinforce algorithm.off_policy=none",
            "loss=policy_gradient, proximal=auto, off_policy=none",
        ),
        (
            "algorithm.proximal=recompute algorithm.off_policy=none",
            "loss=ppo_clip, proximal=recompute, off_policy=none",
        ),
    ],
)
def test_quantised_hosts_are_refused_where_a_promise_or_the_objective_would_break(words: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(*words.split(), "generation.quantize=int8")


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.preset=aipo",
        "algorithm.preset=decoupled_ppo",
        "algorithm.proximal=none algorithm.off_policy=none",  # PPO's clip around the policy that sampled
        "algorithm.loss=my.losses:clip algorithm.off_policy=none",
        "algorithm.preset=aipo model.lora.rank=2",
    ],
)
def test_quantised_hosts_are_taken_where_a_ratio_to_the_sampler_corrects_for_them(words: str):
    assert load_config(*words.split(), "generation.quantize=int8").generation.quantize == "int8"


# --- executors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "runtime.reference.mesh={fsdp: 2} algorithm.kl.coef=0",
            "runtime.reference.mesh with algorithm.kl.coef=0: no reference is there to compute",
        ),
        (
            "runtime.teacher.dtype=bfloat16",
            "runtime.teacher.dtype with algorithm.teacher unset: no teacher is",
        ),
        (
            "runtime.reference.dtype=bfloat16 trainer.compute=auto",
            "trainer.compute=auto: walks over prefix trees compute all models on the trainer's mesh",
        ),
        (
            "runtime.reference={mesh: {data: 2}, dtype: float32} runtime.trainer_processes=2",
            "runtime.reference.mesh and runtime.reference.dtype with runtime.trainer_processes=2: arrays",
        ),
        (
            "runtime.reference.mesh={data: 3}",
            "trainer.rows=8 does not divide evenly over runtime.reference.mesh",
        ),
        ("runtime.reference.dtype=bfloat16 algorithm.reference=ema", "set algorithm.reference=frozen"),
        ("runtime.reference.mesh={rows: 3}", "runtime.reference.mesh.rows: Extra inputs are not permitted"),
    ],
)
def test_an_executor_apart_is_refused_where_it_cannot_compute(words: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("algorithm.preset=grpo", *re.findall(r"\S+=(?:{.*?}(?:, \w+: \w+})?|\S+)", words))


# --- control ------------------------------------------------------------------------------------------------

PAIRS = {
    "sync": {"drain": None, "recompute": None, "keep": "generation.on_update out", "pinned": "on_update out"},
    "one_step": {
        "drain": None,
        "recompute": "control.strategy=interruptible control.max_staleness=1",
        "keep": "control.strategy=keep control.max_staleness=1",
        "pinned": "control.strategy=pinned control.max_staleness=1",
    },
    "interruptible": {
        "recompute": None,
        "drain": None,
        "keep": "control.strategy=keep",
        "pinned": "control.strategy=pinned",
    },
    "keep": {
        "keep": None,
        "recompute": "control.strategy=interruptible",
        "drain": "control.strategy=interruptible",
        "pinned": "control.strategy=pinned",
    },
    "pinned": {
        "pinned": None,
        "drain": None,
        "recompute": "C1); use control.strategy=interruptible",
        "keep": "C1); use control.strategy=keep",
    },
}
"""strategy -> on_update -> None where it keeps the promise, otherwise the end of the refusal's remedy."""


@pytest.mark.parametrize("strategy", PAIRS)
@pytest.mark.parametrize("on_update", ["recompute", "keep", "pinned", "drain"])
def test_every_pair_of_strategy_and_on_update_is_taken_or_refused_with_its_remedy(strategy, on_update):
    words = (f"control.strategy={strategy}", f"generation.on_update={on_update}")
    remedy = PAIRS[strategy][on_update]
    if remedy is None:
        assert load_config(*words).on_update == on_update
        return
    with pytest.raises(ConfigError, match=re.escape(remedy)) as refused:
        load_config(*words)
    said = f"generation.on_update={on_update} with control.strategy={strategy}: "
    assert str(refused.value).startswith(said)
    load_config(*words[:1], *re.findall(r"control\.\w+=\w+", remedy))  # what it advises is taken


def test_the_default_follows_the_strategy():
    defaults = {strategy: load_config(f"control.strategy={strategy}").on_update for strategy in PAIRS}
    assert defaults == {
        "sync": "drain",
        "one_step": "drain",
        "interruptible": "recompute",
        "keep": "keep",
        "pinned": "pinned",
    }
    staleness = {strategy: load_config(f"control.strategy={strategy}").max_staleness for strategy in PAIRS}
    assert staleness == {"sync": 0, "one_step": 1, "interruptible": 2, "keep": 2, "pinned": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("strategy=sync max_staleness=1", "control.max_staleness=1 contradicts control.strategy=sync"),
        (
            "strategy=one_step max_staleness=2",
            "whose staleness is always 1; leave control.max_staleness out, or set control.strategy=pinned",
        ),
        (
            "strategy=one_step max_staleness=0",
            "control.max_staleness=0 contradicts control.strategy=one_step",
        ),
        (
            "strategy=pinned max_staleness=unbounded max_concurrent=9",
            "parameters of any number of versions; set control.max_staleness to a number K",
        ),
    ],
)
def test_a_staleness_that_breaks_the_strategy_is_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(*(f"control.{word}" for word in words.split()))


def test_a_pinned_host_may_hold_the_bound_and_one_more():
    def sets(*words: str) -> int:
        return load_config(*words).parameter_sets

    assert [sets("control.strategy=pinned", f"control.max_staleness={k}") for k in (0, 1, 2, 5)] == [
        2,
        2,
        3,
        6,
    ]
    assert sets("control.strategy=pinned", "generation.on_update=drain", "control.max_staleness=5") == 2
    assert sets("control.max_staleness=8") == sets("control.strategy=keep") == 2


# --- numerics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "trainer.mesh.fsdp=2",
            "with trainer.mesh.fsdp=2: sums over several devices are added in another order",
        ),
        ("trainer.mesh.data=2 runtime.host_tensor=2", "trainer.mesh.data=2, runtime.host_tensor=2: sums"),
        (
            "control.strategy=keep",
            "generation.on_update=keep: tokens decoded from the KV of an older version",
        ),
        (
            "generation.weight_layout=split",
            "generation.weight_layout=split with trainer.numerics=exact: hosts must run the trainer's matrix",
        ),
        ("trainer.compute=tree", "trainer.compute=tree with trainer.numerics=exact: hosts compute in other"),
        ("trainer.compute=auto", "trainer.compute=auto with trainer.numerics=exact: hosts compute in other"),
    ],
)
def test_what_cannot_be_exact_is_refused(words: str, message: str):
    load_config(*words.split())
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(*words.split(), "trainer.numerics=exact")


@pytest.mark.parametrize("word", ["trainer.numerics=exact", "trainer.compute=tree", "trainer.compute=auto"])
def test_routes_are_not_replayed_where_they_agree_or_are_several(word: str):
    load_config(word)
    message = f"algorithm.routes=replay with .*{word}.*set algorithm.routes=own, or trainer.numerics=bounded"
    with pytest.raises(ConfigError, match=message):
        load_config(word, "algorithm.routes=replay")


def test_feature_major_weights_need_one_device_per_host():
    load_config("runtime.host_tensor=2", "generation.weight_layout=split")
    with pytest.raises(ConfigError, match="weight_layout=feature_major with runtime"):
        load_config("runtime.host_tensor=2", "generation.weight_layout=feature_major")


@pytest.mark.parametrize("other", ["model.dtype=float32", "trainer.numerics=exact"])
def test_only_a_bfloat16_model_with_bounded_numerics_rounds_activations(other: str):
    with pytest.raises(
        ConfigError, match=r"model\.activations=bfloat16 with model\.dtype=.*; set model\.activations=float32"
    ):
        load_config("model.dtype=bfloat16", "model.activations=bfloat16", other)


def test_exact_numerics_need_nothing_else():
    assert load_config("trainer.numerics=exact", "generation.slots=3").trainer.numerics == "exact"
