"""Exact numerics: what a host records and what the trainer computes again are the same bits.

A host is kept busy: groups that share a prompt's pages, more samples than slots, prompts that end around the
borders of tiles and of KV blocks, chunks of another size than tiles, a pool of pages too small for all, new
versions in mid-sample. Then the learner's packed pass scores every span under its own version's parameters.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from areal_jax.assembly.api import preset
from areal_jax.config.sections import ADAPTERS
from areal_jax.generation.engine import Engine
from areal_jax.lab.bench.parity import recomputed_logp
from areal_jax.models.config import Lora
from areal_jax.models.exact import KV_BLOCK, TILE
from areal_jax.models.model import Model
from areal_jax.trainer.learner import Learner
from areal_jax.types import ArealError, Group, Prompt, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import wire_copy
from tests.generation.conftest import SUPPORT
from tests.generation.decoding import Heard, make_host, start

LENGTH = 48
PROMPTS = (TILE - 1, TILE, TILE + 1, KV_BLOCK - 1, KV_BLOCK + 1)
MEMBERS, VERSIONS = 3, 5
SAMPLINGS = (
    Sampling(max_tokens=20),
    Sampling(max_tokens=11, temperature=0.7),
    Sampling(max_tokens=20, temperature=1.3, top_k=SUPPORT, top_p=0.8),
    Sampling(max_tokens=9, top_k=SUPPORT, min_p=0.05),
    Sampling(max_tokens=20, temperature=1.3),
)


@dataclasses.dataclass(frozen=True)
class Sides:
    """Of one run: the generator, the trainer, and the parameters that the trainer publishes."""

    engine: Engine
    learner: Learner
    wire_dtype: str

    @cache  # noqa: B019 - of a fixture
    def trained(self, version: int) -> Any:
        """Float32, each far from the others, every leaf of them random."""
        keys = iter(jax.random.split(jax.random.key(version), 100))
        model = self.learner.model

        def moved(leaf: Any) -> Any:
            if leaf.dtype != "float32":
                return leaf  # a quantised matrix's codes
            return (1 + (leaf.ndim > 2)) * leaf + 0.2 * jax.random.normal(next(keys), leaf.shape)

        return jax.tree.map(moved, model.init(version))

    def published(self, version: int) -> VersionedParams:
        params = self.trained(version)
        return wire_copy(VersionedParams(version, params, digest(params)), self.wire_dtype)


def sides(model: Model, numerics: str, dtype: str, wire_dtype: str, **changes: Any) -> Sides:
    config = dataclasses.replace(
        model.config, numerics=numerics, dtype=dtype, params_dtype=wire_dtype, **changes
    )
    model = Model(config, model.tokenizer)
    engine = Engine(
        model,
        slots=5,
        length=LENGTH,
        decode_steps=2,
        page_tokens=8,
        kv_tokens=2 * LENGTH,
        prefill_chunk=10,
        prefill_row=5,
        support_size=SUPPORT,
    )
    algorithm = preset("grpo", group_size=MEMBERS, kl={"coef": 0})
    learner = Learner(
        model,
        algorithm,
        optax.sgd(0.1),
        rows=3,
        length=2 * LENGTH,
        logp_chunk=40,
        trainable=ADAPTERS if model.config.lora else None,
    )
    return Sides(engine, learner, wire_dtype)


@pytest.fixture(scope="module")
def exact(model: Model) -> Sides:
    return sides(model, "exact", "float32", "float32")


def busy(of: Sides, seed: int = 0) -> tuple[list[Group], Any]:
    """The groups that a busy host sampled under several versions, and its statistics."""
    rng, heard, store = np.random.default_rng(seed), Heard(), MemoryStore(of.engine.canary, of.wire_dtype)
    store.publish(of.published(0))
    host = make_host(of.engine, store, heard)
    prompts = [tuple(rng.integers(2, 19, size).tolist()) for size in PROMPTS]
    for ordinal, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True)):
        host.inbox.put(dataclasses.replace(start(ordinal, MEMBERS, prompt), sampling=sampling))
    host.take_commands()
    step = 0
    while host.has_work:
        host.step()
        step += 1
        if step % 4 == 0 and (version := store.latest() + 1) < VERSIONS:
            store.publish(of.published(version))
    groups = []
    for ordinal, prompt in enumerate(prompts):
        members = [heard.done[SampleId(ordinal, member)] for member in range(MEMBERS)]
        rewarded = tuple(dataclasses.replace(one, reward=0.0) for one in members)
        groups.append(Group(ordinal, Prompt(tokens=prompt), rewarded))
    return groups, host.statistics()


def unequal(of: Sides, groups: list[Group]) -> tuple[int, int]:
    """Tokens whose recorded log-prob has other bits than the packed pass under their version; and tokens."""
    differ = count = 0
    for version in range(VERSIONS):
        again = recomputed_logp(of.learner, of.trained(version), groups)
        for one, logp in zip((t for group in groups for t in group.trajectories), again, strict=True):
            mine = one.versions[one.loss_mask] == version
            recorded = one.behavior_logp[one.loss_mask]
            differ += int((recorded.view(np.uint32) != logp.view(np.uint32))[mine].sum())
            count += int(mine.sum())
    return differ, count


def require_exact(of: Sides) -> None:
    groups, seen = busy(of)
    trajectories: list[Trajectory] = [one for group in groups for one in group.trajectories]
    assert seen.interruptions >= 3 and seen.evictions >= 1
    assert max(len(one.spans) for one in trajectories) >= 3
    assert any((one.support[one.loss_mask] >= 0).any() for one in trajectories)
    assert unequal(of, groups) == (0, sum(one.completion_tokens for one in trajectories))


@pytest.mark.slow
def test_a_busy_hosts_log_probs_are_the_trainers_to_the_bit(exact):
    require_exact(exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [("bfloat16", "bfloat16"), pytest.param("float32", "bfloat16", marks=pytest.mark.soak)],
)
def test_so_they_are_in_fewer_bits(model, dtype, wire_dtype):
    require_exact(sides(model, "exact", dtype, wire_dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"has_qkv_bias": True, "has_qk_norm": True, "is_tied": True, "layers": 1}, marks=pytest.mark.soak
        ),
        {"lora": Lora(2, 4.0), "quantize": "int8"},
    ],
    ids=["biases, norms, a tied head, one layer", "adapters over int8"],
)
def test_so_they_are_with_every_option_of_a_model(model, options):
    require_exact(sides(model, "exact", "bfloat16", "float32", **options))


@pytest.mark.slow
def test_bounded_numerics_fail_the_same_test(model):
    """The control: with the same work many bits differ, and no log-prob by more than rounding."""
    of = sides(model, "bounded", "float32", "float32")
    groups, _ = busy(of)
    differ, count = unequal(of, groups)
    assert differ > count / 4


def test_kv_that_would_lose_bits_is_refused(model):
    config = dataclasses.replace(model.config, numerics="exact")
    with pytest.raises(
        ArealError, match="numerics=exact with a KV cache in bfloat16: hosts would read rounded keys"
    ):
        Engine(Model(config, model.tokenizer), slots=8, length=16, kv_dtype="bfloat16").init_decode_state()
