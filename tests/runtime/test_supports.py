"""Log-probs that a generator records and a trainer recomputes, at every temperature and truncation."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from areal_jax.assembly.api import preset
from areal_jax.config.loading import load_config
from areal_jax.generation.engine import Engine
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.trainer.learner import Learner
from areal_jax.trainer.state import make_optimizer
from areal_jax.trajectories.packing import pack
from areal_jax.types import Group, Prompt, SampleId, Sampling, VersionedParams
from tests.generation.decoding import Asked, decode

LENGTH, SUPPORT = 24, 256
GRID = [
    Sampling(temperature=t, top_k=SUPPORT, top_p=p, min_p=m, max_tokens=LENGTH)
    for t, p, m in itertools.product((0.7, 1.0, 1.3), (1.0, 0.8), (0.0, 0.05))
]


@pytest.fixture(scope="module")
def scored():
    """`scored(trajectories)`: log-probs of one packed batch by the trainer's pass, where there is a token."""
    tokenizer = ByteTokenizer()
    config = model_config("tiny", 400, width=32, head_dim=8, mlp_width=64)
    tokenizer.vocab_size = 400  # more than the support has room for
    model = Model(config, tokenizer)
    params = jax.tree.map(lambda leaf: leaf if leaf.ndim < 3 else 2 * leaf, model.init(3))
    engine = Engine(model, slots=len(GRID), length=LENGTH, decode_steps=4, support_size=SUPPORT)
    asked = {i: Asked((5, 9, 2 + i), SampleId(0, i), sampling) for i, sampling in enumerate(GRID)}
    done = decode(engine, VersionedParams(0, params, ""), asked)
    learner = Learner(
        model,
        preset("grpo", group_size=len(GRID), kl={"coef": 0}, proximal="recompute"),
        make_optimizer(load_config("trainer.learning_rate=1e-5").trainer, 10),
        rows=4,
        length=3 * LENGTH,
    )
    state = learner.init(params)

    def gaps(has_support: bool) -> dict[int, np.ndarray]:
        """Of each sample: ratios of its tokens, recomputed over recorded."""
        members = tuple(
            dataclasses.replace(t, reward=float(i % 2), support=t.support if has_support else None)
            for i, t in done.items()
        )
        batch = pack([Group(0, Prompt(tokens=[0]), members)], 4, 3 * LENGTH)
        prepared = learner.prepare(state, batch)
        ratio = np.exp(np.asarray(prepared.proximal_logp) - np.asarray(prepared.behavior_logp))
        segments, mask = np.asarray(prepared.segment_ids), np.asarray(prepared.loss_mask)
        return {int(s): ratio[(segments == s) & mask] for s in np.unique(segments[mask])}

    return done, gaps


@pytest.mark.slow
def test_on_fresh_weights_every_ratio_is_1(scored):
    done, gaps = scored
    ratios = gaps(True)
    assert len(ratios) == len(GRID) and sum(map(len, ratios.values())) == len(GRID) * (LENGTH - 3)
    assert max(np.abs(ratio - 1).max() for ratio in ratios.values()) < 1e-5
    sizes = [(t.support[t.loss_mask] >= 0).sum(1).mean() for t in done.values()]
    assert max(sizes) == SUPPORT and min(sizes) < SUPPORT / 2  # both full and truncated supports took part


@pytest.mark.slow
def test_without_the_support_half_of_all_tokens_are_off(scored):
    """The control: the trainer's log-prob over all ids is that of another distribution."""
    _, gaps = scored
    ratios = np.concatenate(list(gaps(False).values()))
    assert np.median(np.abs(ratios - 1)) > 0.1
