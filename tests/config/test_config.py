"""How a config is composed from files and words."""

from __future__ import annotations

import re

import pytest

from areal_jax.config.loading import ConfigError, leaves, load_config, make_config, resolved
from areal_jax.models.config import SHAPES

RECIPE = {"algorithm": {"preset": "grpo", "group_size": 4, "loss_settings": {"low": 0.1, "high": 0.3}}}


def test_another_preset_starts_the_section_anew():
    a = load_config(RECIPE, "algorithm.preset=sft").algorithm
    assert (a.loss, a.loss_settings, a.group_size, a.samples) == ("policy_gradient", {}, 1, "reference")
    unnamed = {"algorithm": {"loss_settings": {"low": 0.1}}}  # the default preset's settings
    assert load_config(unnamed, {"algorithm": {"preset": "sft"}}).algorithm.loss_settings == {}


@pytest.mark.parametrize("order", [1, -1])
def test_words_beside_a_preset_hold_whatever_their_order(order):
    words = ["algorithm.preset=dr_grpo", "algorithm.group_size=6"][::order]
    a = load_config(RECIPE, *words).algorithm
    assert (a.group_size, a.reduction, a.loss_settings) == (6, "constant", {"low": 0.2, "high": 0.2})


def test_the_same_preset_keeps_what_was_said_before():
    a = load_config(RECIPE, "algorithm.preset=grpo").algorithm
    assert (a.group_size, a.loss_settings) == (4, {"low": 0.1, "high": 0.3})


def test_words_reach_into_a_tasks_nested_settings():
    words = ["tasks=reasoning_gym", "tasks.reasoning_gym.settings.min_digits=2"]
    assert load_config(*words).tasks == {"reasoning_gym": {"settings": {"min_digits": 2}}}
    own = ["tasks=[pkg.sums:Sums]", "tasks.pkg.sums:Sums.table.size=3", "tasks.pkg.sums:Sums.largest=9"]
    assert load_config(*own).tasks == {"pkg.sums:Sums": {"table": {"size": 3}, "largest": 9}}


def test_the_tasks_of_the_supervised_steps_are_named_and_set_like_those_of_the_run():
    words = [
        "trainer.supervised.tasks=[pkg.sums:Sums, countdown]",
        "trainer.supervised.tasks.countdown.letters=8",
    ]
    words.append("trainer.supervised.tasks.pkg.sums:Sums.table.size=3")
    expected = {"pkg.sums:Sums": {"table": {"size": 3}}, "countdown": {"letters": 8}}
    assert load_config(*words).trainer.supervised.tasks == expected


def test_a_word_that_is_no_yaml_is_named():
    with pytest.raises(ConfigError, match=r"tasks.gsm8k.data_dir=\[: the value is not YAML"):
        load_config("tasks.gsm8k.data_dir=[")


def test_unbounded_staleness_needs_a_bound_on_what_is_in_flight_and_survives_the_runs_own_config():
    words = ("control.max_staleness=unbounded", "control.max_concurrent=6")
    config = load_config(*words)
    assert config.max_staleness is None
    assert make_config(resolved(config)) == make_config(resolved(load_config(*words)))
    assert make_config(resolved(config)).max_staleness is None
    with pytest.raises(ConfigError, match=r"set control\.max_concurrent=6, or another"):
        load_config(words[0], "generation.slots=24")
    with pytest.raises(ConfigError, match=r"max_token_age=3 is below control\.max_staleness=unbounded"):
        load_config(*words, "control.max_token_age=3")


@pytest.mark.parametrize("over_age", ["hold", "mask"])
def test_what_happens_beyond_a_bound_on_age_needs_the_bound(over_age):
    with pytest.raises(ConfigError, match=rf"over_age={over_age} needs a bound .*control\.max_token_age=3"):
        load_config(f"control.over_age={over_age}")
    config = load_config(f"control.over_age={over_age}", "control.max_token_age=2")
    assert config.control.over_age == over_age
    assert load_config("control.max_token_age=2").control.over_age == "restart"


@pytest.mark.parametrize(
    ("length", "tokens"), [(1024, 64), (384, 64), (300, 60), (136, 34), (32, 32), (509, 509)]
)
def test_a_page_is_the_largest_divisor_of_the_length_that_attention_visits_at_once(length: int, tokens: int):
    words = (f"generation.length={length}", "generation.max_tokens=8", f"trainer.length={length}")
    assert resolved(load_config(*words))["generation"]["page_tokens"] == tokens
    assert load_config(*words, f"generation.page_tokens={length}").generation.tokens_per_page == length


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ((), "float32"),
        (("model.dtype=bfloat16",), "bfloat16"),
        (("model.dtype=bfloat16", "weights.wire_dtype=float32"), "float32"),
        (("weights.wire_dtype=bfloat16",), "bfloat16"),
    ],
    ids=str,
)
def test_parameters_are_published_in_the_models_dtype_unless_another_is_given(
    words: tuple[str, ...], dtype: str
):
    """The run's own config names it, so a later default changes no run that is resumed."""
    config = load_config(*words)
    assert config.wire_dtype == dtype and resolved(config)["weights"]["wire_dtype"] == dtype
    assert make_config(resolved(config)).wire_dtype == dtype


@pytest.mark.parametrize(
    ("words", "activations", "chunk"),
    [
        ((), "float32", 1024),
        (("trainer.mesh={data: 2, fsdp: 4}",), "float32", 1024),
        (("model.dtype=bfloat16",), "bfloat16", 2048),
        (("model.dtype=bfloat16", "trainer.mesh={data: 2, fsdp: 4}"), "bfloat16", 16384),
        (("model.dtype=bfloat16", "trainer.numerics=exact"), "float32", 1024),
        (("model.dtype=bfloat16", "model.activations=float32"), "float32", 1024),
        (("model.dtype=bfloat16", "trainer.logp_chunk=7"), "bfloat16", 7),
    ],
    ids=str,
)
def test_a_bfloat16_model_rounds_activations_and_has_larger_chunks_of_the_head(
    words: tuple[str, ...], activations: str, chunk: int
):
    """The run's own config names both, so a later default changes no run that is resumed."""
    config = load_config(*words)
    assert (config.activations, config.logp_chunk) == (activations, chunk)
    stored = resolved(config)
    assert (stored["model"]["activations"], stored["trainer"]["logp_chunk"]) == (activations, chunk)
    assert (make_config(stored).activations, make_config(stored).logp_chunk) == (activations, chunk)


def test_the_longest_completion_follows_from_the_length_unless_it_is_given():
    assert load_config("generation.length=48", "trainer.length=64").generation.max_tokens == 24
    assert load_config("generation.length=48", "generation.max_tokens=7").generation.max_tokens == 7
    defaults = {"generation": {"length": 1024}}
    assert load_config(defaults, "trainer.length=1024").generation.max_tokens == 512
    assert load_config(defaults, "generation.length=256", "trainer.length=256").generation.max_tokens == 128


def test_every_built_in_model_size_is_explained():
    (doc,) = (doc for key, _, _, doc in leaves() if key == "model.shape")
    assert set(re.split(r"[\s,]+|\.(?:\s|$)", doc)) >= SHAPES.keys()
