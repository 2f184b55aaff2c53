"""What the tests of this room share: one tiny model, engines made once, and dense forwards as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.logprobs import PackedTokens, packed_stats
from areal_jax.generation.engine import Engine
from areal_jax.models.attention import PackedAttention
from areal_jax.models.config import model_config
from areal_jax.models.kernels import paged_attention as paged_kernels
from areal_jax.models.kernels.packed_attention import KernelChoice
from areal_jax.models.kernels.paged_attention import softmax_over
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import CharTokenizer
from areal_jax.types import Trajectory, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore

LENGTH, SLOTS, STEPS, SUPPORT = 32, 5, 2, 6

DenseLogp = Callable[..., np.ndarray]


def make_model(**options: Any) -> Model:
    tokenizer = CharTokenizer("abcdefghijklmnopq")
    sizes = model_config(
        "tiny",
        tokenizer.vocab_size + 3,
        width=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=64,
        is_tied=False,
        **options,
    )  # three ids more than the tokenizer knows
    return Model(sizes, tokenizer)


def version_of(engine: Engine, version: int) -> VersionedParams:
    """Parameters far from those of other versions, under which tokens depend on all tokens before."""
    params = engine.model.init(100 + version)
    params = jax.tree.map(lambda leaf: leaf if leaf.ndim < 3 else 2 * leaf, params)
    return VersionedParams(version, jax.device_put(params, engine.param_shardings), digest(params))


@pytest.fixture(scope="session")
def model(few_optimizations: bool) -> Model:
    return make_model()


@pytest.fixture(scope="session")
def versions(engine: Engine) -> Callable[[int], VersionedParams]:
    """Version -> its parameters, see `version_of`."""
    return cache(lambda version: version_of(engine, version))


@pytest.fixture
def store(engine: Engine, versions: Callable[[int], VersionedParams]) -> MemoryStore:
    """It holds version 0."""
    store = MemoryStore(engine.canary)
    store.publish(versions(0))
    return store


@pytest.fixture(scope="session")
def engine(model: Model) -> Engine:
    return make_engine(model)


@pytest.fixture(scope="session")
def one_page_engine(model: Model) -> Engine:
    """A page a slot and a chunk a prompt, which are the defaults."""
    return make_engine(model, page_tokens=None, prefill_chunk=LENGTH)


@pytest.fixture(scope="session")
def support_engine(model: Model) -> Engine:
    return make_engine(model, support_size=SUPPORT)


def make_engine(model: Model, **changes: Any) -> Engine:
    sizes = {"slots": SLOTS, "length": LENGTH, "decode_steps": STEPS, "page_tokens": 8, "prefill_chunk": 4}
    return Engine(model, **{**sizes, **changes})


@pytest.fixture
def with_kernel(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines that found `pages` fit for use; it is another way to compute attention here."""
    calls = []

    def kernel(q: Any, cache: Any, layer: Any, table: Any, lengths: Any) -> Any:
        calls.append(q.shape)
        return softmax_over(q, cache, layer, table, lengths)

    def make(**sizes: Any) -> tuple[Engine, list[tuple[int, ...]]]:
        monkeypatch.setattr(paged_kernels, "KERNELS", {"pages": kernel})
        monkeypatch.setattr(paged_kernels, "choose", lambda *_, **__: KernelChoice("pages", {}))
        return make_engine(model, **sizes), calls

    return make


@pytest.fixture(scope="session")
def dense(model: Model) -> DenseLogp:
    return dense_of(model)


def dense_of(model: Model) -> DenseLogp:
    """(n,) log-probs of a trajectory under one version's parameters: one packed row, no KV pages."""

    def stats(params: Any, tokens: Any, temperature: Any, support: Any) -> Any:
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _ = model.hidden(params, tokens, positions, PackedAttention(jnp.ones_like(tokens)))
        asked = PackedTokens(tokens, positions - 1, positions > 0, temperature, support)
        return packed_stats(model.head, model.head_weight(params), hidden, asked, 64).logp

    jitted = jax.jit(stats)

    def logp(params: Any, t: Trajectory) -> np.ndarray:
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(t.tokens)] = t.tokens  # what stands behind a token never reaches it
        support = None
        if t.support is not None:
            support = np.full((1, LENGTH, t.support.shape[1]), -1, np.int32)
            support[0, : len(t.tokens)] = t.support
        temperature = np.full((1, LENGTH), t.sampling.temperature, np.float32)
        return np.asarray(jitted(params, tokens, temperature, support))[0, : len(t.tokens)]

    return logp
