"""`update`: its twin, its invariances, its steps, and that it really donates."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.config.presets import preset_settings
from areal_jax.config.sections import AlgorithmConfig
from areal_jax.models.config import ModelConfig
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import TrainState
from areal_jax.trajectories.packing import pack
from areal_jax.types import Batch
from areal_jax.weights.digest import digest
from areal_jax.weights.errors import StagedError
from tests.models import reference
from tests.trainer.conftest import (
    LENGTH,
    VOCAB,
    MakeLearner,
    distance,
    make_groups,
    poisoned,
    random_params,
    same_bits,
)


def trained(of: Learner, params: Any, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    state = of.init(params)
    return of.update(state, of.prepare(state, batch))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return pack(make_groups(), 2, LENGTH)


@pytest.fixture(scope="module")
def oracle(params: Any, learner: MakeLearner, batch: Batch) -> TrainState:
    """What the batch makes of the parameters: micro-batches of 2 rows, one device."""
    state, _ = trained(learner(), params, batch)
    assert distance(state.params, params) > 1e-3
    return state


@pytest.mark.slow
def test_update_is_its_twin_bit_for_bit(params: Any, learner: MakeLearner):
    """`update` against the loop that a driver writes itself, over two minibatches."""
    of = learner(minibatches=2)
    batch = pack(make_groups(), 2, LENGTH, 2)
    updated, metrics = trained(of, params, batch)
    state = of.init(params)
    prepared = of.prepare(state, batch)
    minibatches = of.micro_batches(prepared)
    assert (len(minibatches), sum(map(len, minibatches))) == (2, len(batch.tokens) // 2)
    norms = []
    for index, micros in enumerate(minibatches):
        sums = of.programs.zero_sums()
        for micro in micros:
            if micro is not None:
                sums = of.programs.accumulate(state, sums, micro)
        state, sums_of_minibatch = of.programs.apply(state, sums, np.bool_(index == 1))
        norms.append(float(sums_of_minibatch["grad_norm"]))
    assert same_bits(updated, state)
    assert (int(state.step), int(state.version)) == (2, 1)
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms))


def test_each_minibatch_is_a_step_from_where_the_last_one_ended(params: Any, learner: MakeLearner):
    """Two minibatches are not one of twice the size, and leave the proximal log-probs where they were."""
    two, _ = trained(learner(minibatches=2), params, pack(make_groups(), 2, LENGTH, 2))
    one, _ = trained(learner(), params, pack(make_groups(), 2, LENGTH))
    assert (int(one.step), int(two.step), int(one.version), int(two.version)) == (1, 2, 1, 1)
    assert distance(one.params, two.params) > 1e-3


@pytest.mark.slow
def test_one_minibatch_needs_no_scoring_pass(
    params: Any, learner: MakeLearner, oracle: TrainState, batch: Batch
):
    """Its own forward stands where the proximal policy does: the same step, the same off-policy weights."""
    state, metrics = trained(learner(proximal="reuse"), params, batch)
    assert distance(state.params, oracle.params) <= 1e-6
    _, recomputed = trained(learner(), params, batch)
    assert metrics == {name: pytest.approx(value, rel=1e-5) for name, value in recomputed.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_the_number_of_micro_batches_does_not_matter(
    params: Any, learner: MakeLearner, oracle: TrainState, rows: int
):
    state, _ = trained(learner(rows=rows), params, pack(make_groups(), rows, LENGTH))
    assert distance(state.params, oracle.params) <= 1e-5


def test_where_sequences_lie_does_not_matter(
    params: Any, learner: MakeLearner, oracle: TrainState, batch: Batch
):
    """Rows shuffled across micro-batches, and wholly empty micro-batches added.

    The latter go through the loop of `accumulate`, whose program does not depend on their number.
    """
    of = learner()
    order = np.random.default_rng(0).permutation(len(batch.tokens))
    shuffled = Batch(*(x[order] if x is not None and x.ndim > 1 else x for x in batch))
    padded = Batch(*(np.pad(x, ((0, 4), (0, 0))) if x is not None and x.ndim > 1 else x for x in batch))
    for other, between in ((shuffled, None), (padded, lambda _: None)):
        state = of.init(params)
        state, metrics = of.update(state, of.prepare(state, other), between)
        assert metrics["trained_tokens"] == batch.loss_mask.sum()
        assert distance(state.params, oracle.params) <= 1e-5


def test_off_the_mask_nothing_counts(params: Any, learner: MakeLearner, oracle: TrainState, batch: Batch):
    """NaN and infinities in a raw batch's log-probs, through prepare and update: not one bit moves."""
    of = learner()
    for poison in (np.nan, np.inf):
        prepared = of.prepare(of.init(params), poisoned(batch, poison))
        assert all(np.isfinite(x).all() for x in prepared if x is not None)  # what own losses will see
        state, metrics = trained(of, params, poisoned(batch, poison))
        assert same_bits(state.params, oracle.params)
        assert all(np.isfinite(value) for value in metrics.values())


def test_a_batch_without_signal_still_makes_a_version(params: Any, learner: MakeLearner):
    of = learner()
    batch = pack(make_groups(rewards=[0.5] * 4), 2, LENGTH)
    state, metrics = trained(of, params, batch)
    assert (int(state.step), int(state.version)) == (1, 1)
    assert same_bits(state.params, params)
    assert metrics["grad_norm"] == 0


def test_the_state_is_donated_and_the_published_copy_lives(params: Any, learner: MakeLearner, batch: Batch):
    of = learner()
    state = of.init(params)
    published = of.publish(state)
    prepared = of.prepare(state, batch)
    new, _ = of.update(state, prepared)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.optimizer)))
    assert same_bits(published.params, params)
    assert (published.version, published.digest) == (0, digest(params))
    assert of.versioned(new).version == 1
    assert of.versioned(new).digest != published.digest


@pytest.mark.parametrize("way", ["joined", "packed", pytest.param("trees", marks=pytest.mark.slow)])
def test_before_each_step_others_may_finish_reading_the_state(params: Any, learner: MakeLearner, way: str):
    """As a checkpoint's copy does: all of a minibatch's gradient comes before, and what donates after."""
    of, layout = learner(minibatches=2), "apart" if way == "trees" else "shared"
    learns: Any = of.over_trees() if way == "trees" else of
    batch, state = pack(make_groups(), 2, LENGTH, 2, layout), of.init(params)
    prepared = learns.prepare(state, batch)
    calls: list[str] = []
    between = None if way == "joined" else lambda _: calls.append("gradient")
    right, _ = learns.update(of.init(params), prepared, between)
    gradients = calls.copy()
    if way == "trees":
        count = len(prepared.walks[0].training.kinds)
    else:
        count = sum(micro is not None for micro in of.micro_batches(prepared)[0])
    first, second = gradients[:count], gradients[count:]
    assert way == "joined" or second

    def fail(_: Any) -> None:
        raise StagedError("the copy is not complete")

    calls.clear()
    with pytest.raises(StagedError, match="not complete"):
        learns.update(state, prepared, between, fail)
    assert calls == first
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    calls.clear()
    is_there: list[bool] = []

    def before_apply(array: jax.Array) -> None:
        array.block_until_ready()
        calls.append("step")
        is_there.append(not state.params["norm"].is_deleted())

    new, _ = learns.update(state, prepared, between, before_apply)
    assert calls == [*first, "step", *second, "step"]
    assert is_there == [True, False]
    assert same_bits(new, right)


def test_metrics_are_means_over_loss_tokens(params: Any, learner: MakeLearner, batch: Batch):
    of = learner()
    prepared = of.prepare(of.init(params), batch)
    _, metrics = trained(of, params, batch)
    mask = batch.loss_mask
    gap = (np.asarray(prepared.proximal_logp, np.float64) - batch.behavior_logp)[mask]
    ids = batch.segment_ids[mask]
    sequences = np.exp([gap[ids == number].sum() for number in np.unique(ids)])
    gaps = {
        "logp_gap_mean": np.abs(gap).mean(),
        "logp_gap_max": np.abs(gap).max(),
        "mismatch_kl": (np.exp(gap) - 1 - gap).mean(),
        "logp_unequal": (np.asarray(prepared.proximal_logp) != batch.behavior_logp)[mask].sum(),
    }
    of_token = np.minimum(np.exp(gap), 5) * np.asarray(prepared.advantages, np.float64)[mask]
    want = {
        **gaps,
        # The ratio is 1, so nothing is clipped.
        "loss": -(np.asarray(prepared.loss_weights, np.float64)[mask] * of_token).sum(),
        **{f"{name}/age_0": value for name, value in gaps.items()},
        "trained_tokens": mask.sum(),
        "off_policy_weight_mean": np.minimum(np.exp(gap), 5).mean(),
        "off_policy_capped_share": (np.exp(gap) > 5).mean(),
        "effective_token_share": np.exp(gap).sum() ** 2 / (len(gap) * np.exp(2 * gap).sum()),
        "effective_sequence_share": sequences.sum() ** 2 / (len(sequences) * (sequences**2).sum()),
        "support_mass_outside": 0,
        "ratio": 1,
        "clip_share": 0,
    }
    assert metrics == {
        name: pytest.approx(want.get(name, value), rel=1e-4) for name, value in metrics.items()
    }
    assert 0.9 * np.abs(gap).max() < metrics["logp_gap_p999"] <= metrics["logp_gap_max"]
    own = {"entropy", "grad_norm", "logp_gap_p999", "logp_gap_p999/age_0"}
    assert want.keys() | own == metrics.keys()


@pytest.mark.slow
def test_kl_starts_at_zero_and_holds_the_policy_to_its_reference(
    params: Any, learner: MakeLearner, oracle: TrainState, batch: Batch
):
    """On fresh weights current = reference: the same first step as without; then the reference pulls back."""
    of = learner(kl={"coef": 0.1})
    state, metrics = trained(of, params, batch)
    assert metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert distance(state.params, oracle.params) <= 1e-5
    flat = pack(make_groups(rewards=[1.0] * 4), 2, LENGTH)
    before = distance(state.params, params)
    for _ in range(3):
        state, metrics = of.update(state, of.prepare(state, flat))
    assert metrics["kl"] > 0
    assert distance(state.params, params) != before
    assert same_bits(state.reference, params)


@pytest.mark.slow
def test_an_entropy_bonus_raises_entropy(params: Any, learner: MakeLearner):
    of = learner(entropy_coef=0.05)
    batch = pack(make_groups(rewards=[1.0] * 4), 2, LENGTH)
    state = of.init(params)
    entropies = []
    for _ in range(4):
        state, metrics = of.update(state, of.prepare(state, batch))
        entropies.append(metrics["entropy"])
    assert np.all(np.diff(entropies) > 0)


def test_no_array_of_all_tokens_by_vocabulary_exists(params: Any, learner: MakeLearner, batch: Batch):
    """The compiled gradient and scores hold the logits of one chunk (8 tokens), of a micro-batch's 32."""
    of = learner()
    state = of.init(params)
    micro = of.micro_batches(of.prepare(state, batch))[0][0]
    programs = (
        of.programs.accumulate.lower(state, of.programs.zero_sums(), micro),
        of.programs.score.lower(state.params, micro),
    )
    for program in programs:
        text = program.compile().as_text()
        shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\[([\d,]+)\]", text)}
        logits = {shape for shape in shapes if VOCAB in shape and 16 not in shape}
        assert (8, VOCAB) in logits
        assert max(int(np.prod(shape)) for shape in logits) < 32 * VOCAB
        assert all(int(np.prod(shape)) != 32 * VOCAB for shape in shapes)


def learner_of_mixture(**settings: Any) -> Learner:
    sizes = dict(layers=2, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=8)
    experts = dict(experts=6, experts_per_token=2, expert_width=4)
    config = ModelConfig(vocab_size=VOCAB, **sizes, **experts)
    model = Model(config, CharTokenizer("".join(map(chr, range(97, 132)))))
    chosen = {"preset": "grpo", "kl": {"coef": 0.0}, "group_size": 4, "minibatches": 2, **settings}
    algorithm = AlgorithmConfig.model_validate(preset_settings(chosen))
    return Learner(model, algorithm, optax.sgd(0.0), rows=2, length=LENGTH, logp_chunk=8, remat="none")


@pytest.mark.slow
def test_routers_are_counted_over_all_tokens_of_the_batch():
    """Each once, whatever the micro-batches and minibatches; without a gradient for a balanced load."""
    of = learner_of_mixture()
    config, params = of.model.config, random_params(of.model, 0)
    groups = make_groups()
    packed = pack(groups, 2, LENGTH, 2, "repeated")
    _, metrics = trained(of, params, packed)
    tokens = [one.tokens for group in groups for one in group.trajectories]
    routed: list[list[np.ndarray]] = [[] for _ in tokens]
    for ids, into in zip(tokens, routed, strict=True):
        reference.hidden(config, params, ids, into)
    layers = [np.concatenate(each) for each in zip(*routed, strict=True)]
    load = [np.bincount(np.argsort(-each, axis=1)[:, :2].ravel(), minlength=6) for each in layers]
    mean = sum(map(len, tokens)) / 3
    assert metrics["router_load_max"] == pytest.approx(np.mean([each.max() for each in load]) / mean)
    assert metrics["router_load_min"] == pytest.approx(np.mean([each.min() for each in load]) / mean)
    every = np.concatenate(layers)
    entropy = -(every * np.log(every)).sum() / len(every)
    assert metrics["router_entropy"] == pytest.approx(entropy, rel=1e-4)
    of_expert = sum(load) @ every.sum(0) / len(every) ** 2
    assert metrics["router_balance_loss"] == pytest.approx(6 * of_expert, rel=1e-4)


@pytest.mark.slow
def test_tokens_pass_through_the_experts_that_their_samples_name():
    """Proximal log-probs, against the float64 reference; the share of tokens whose experts are others."""
    of = learner_of_mixture(routes="replay", proximal="recompute")
    config, params, rng = of.model.config, random_params(of.model, 0), np.random.default_rng(5)
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(one, experts=drawn_experts(rng, len(one.tokens))) for one in group.trajectories
            ),
        )
        for group in make_groups()
    ]
    batch = pack(groups, 2, LENGTH, 2, "repeated")
    assert batch.experts.dtype == np.uint8 and batch.experts.shape == (*batch.tokens.shape, 4)
    assert (batch.experts[batch.segment_ids == 0] == 255).all()
    state = of.init(params)
    prepared = of.prepare(state, batch)
    found = np.asarray(prepared.proximal_logp)
    differing, layers = 0, []
    flat = [one for group in groups for one in group.trajectories]
    for number, one in enumerate(flat, 1):
        given = one.experts.reshape(-1, 2, 2).transpose(1, 0, 2)
        routed: list[np.ndarray] = []
        hidden = reference.hidden(config, params, one.tokens, routed, given)
        logits = hidden @ np.float64(params["embedding"]).T[:, : of.model.tokenizer.vocab_size]
        logits = logits / one.sampling.temperature
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        at = np.flatnonzero(one.loss_mask)
        want = logp[at - 1, one.tokens[at]]
        np.testing.assert_allclose(found[(batch.segment_ids == number) & batch.loss_mask], want, atol=2e-4)
        own = np.sort([np.argsort(-each, axis=1)[:, :2] for each in routed], axis=-1)
        differing += int(((own != np.sort(given, axis=-1)).any(-1) & (given[..., 0] != 255)).sum())
        layers.append(2 * len(one.tokens))
    _, metrics = of.update(state, prepared)
    assert metrics["routes_differ"] == pytest.approx(differing / sum(layers)) and differing


def drawn_experts(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """(tokens, 4) of two layers; the last token has none."""
    found = np.stack([rng.permutation(6)[:2] for _ in range(2 * tokens)]).astype(np.uint8).reshape(tokens, 4)
    found[-1] = 255
    return found
