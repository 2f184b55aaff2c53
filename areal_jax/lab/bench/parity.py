"""`areal-jax parity`: measures how far log-probs of generation host and trainer differ on the same tokens.

An engine samples completions and records their log-probs; the trainer's forward pass over packed rows
computes them again under the same parameters. A measurement is made for each trainer.numerics (bounded,
exact) and dtype (float32, bfloat16). Both sides use the same model and log-prob function, so only rounding
can differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from areal_jax.assembly.api import preset
from areal_jax.assembly.devices import use_compilation_cache
from areal_jax.assembly.run_folder import JOURNAL
from areal_jax.assembly.sources import open_source
from areal_jax.config.loading import load_config
from areal_jax.config.tree import Config
from areal_jax.evaluation.command import model_section
from areal_jax.generation.engine import Engine
from areal_jax.generation.rollout import sampled
from areal_jax.lab.bench.measure import packed_for
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.trainer.learner import Learner
from areal_jax.types import Group, Prompt, Sampling, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.store import wire_copy

NUMERICS, DTYPES = ("bounded", "exact"), ("float32", "bfloat16")
"""The settings compared: values of trainer.numerics, and dtypes for both model.dtype and
weights.wire_dtype.
"""

TEXTS = (
    "What is 17 + 25?",
    "Name three rivers of Europe and the seas that they flow into.",
    "A train leaves at 9:40 and arrives at 11:05. How long does it take?",
    "Write a function that reverses a list.",
)
"""Prompts for a model that is not a run's folder; a run's model gets prompts of the run's tasks."""

SLOTS, CHUNK, ROWS = 16, 16, 8


def parity(
    name: str,
    *,
    prompts: int = 8,
    members: int = 4,
    max_tokens: int = 64,
    seed: int = 0,
    dtypes: Sequence[str] = DTYPES,
    numerics: Sequence[str] = NUMERICS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Returns the settings and `rows`: figures of `compared` for each of `numerics` with each of `dtypes`.

    `name` is a run's folder, a model's folder or GGUF file, a built-in model size, random, or smollm2. For
    each row, each of `prompts` prompts gets `members` completions of at most `max_tokens` tokens. Before each
    row, `progress` is called with the row's name. Raises ArealError if `name` is unknown, or if no completion
    can be sampled for a prompt.
    """
    config, asked = _open(name, prompts, seed)
    use_compilation_cache()
    source = open_source(config, load_tasks(config.tasks) if config.tasks else {})
    model = source.model.base
    tokens = {ordinal: model.tokenizer.render(prompt) for ordinal, prompt in enumerate(asked)}
    length = max(map(len, tokens.values())) + max_tokens
    mesh = make_mesh({"tensor": 1}, jax.devices(), "parity")
    params = source.load(param_shardings(model.logical_axes, model.abstract_params, mesh))
    algorithm, rows = preset("grpo", group_size=2, kl={"coef": 0}), []
    for dtype in dtypes:
        for kind in numerics:
            progress(f"{dtype}, {kind}")
            sizes = dataclasses.replace(model.config, dtype=dtype, numerics=kind, params_dtype=dtype)
            own = Model(sizes, model.tokenizer)
            value = wire_copy(VersionedParams(0, params, digest(params)), dtype)
            engine = Engine(own, slots=SLOTS, length=length, prefill_chunk=CHUNK)
            sampling = Sampling(max_tokens=max_tokens)
            groups = [
                Group(ordinal, asked[ordinal], tuple(dataclasses.replace(one, reward=0.0) for one in found))
                for ordinal, found in sampled(engine, value, tokens, members, sampling, seed).items()
            ]
            learner = Learner(own, algorithm, optax.identity(), rows=ROWS, length=length)  # it never trains
            again = recomputed_logp(learner, params, groups)
            recorded = [one.behavior_logp[one.loss_mask] for group in groups for one in group.trajectories]
            figures = compared(np.concatenate(recorded), np.concatenate(again))
            rows.append({"numerics": kind, "dtype": dtype, **figures})
    return {
        "model": name,
        "prompts": len(asked),
        "members": members,
        "max_tokens": max_tokens,
        "seed": seed,
        "parameters": model.parameter_count,
        "device": jax.devices()[0].device_kind,
        "rows": rows,
    }


def compared(recorded: np.ndarray, again: np.ndarray) -> dict[str, Any]:
    """Returns figures of how far the generator's log-probs, `recorded`, and the trainer's, `again`, differ.

    `mean`, `p999` (0.999 quantile) and `max` are of |generator - trainer| in nats. `mismatch_kl` estimates
    KL(generator | trainer). `unequal` is the number of log-probs that differ in at least one bit.
    """
    gap = again.astype(np.float64) - recorded.astype(np.float64)
    unequal = int((recorded.view(np.uint32) != again.view(np.uint32)).sum())
    return {
        "tokens": gap.size,
        "mean": float(np.abs(gap).mean()),
        "p999": float(np.quantile(np.abs(gap), 0.999, method="inverted_cdf")),
        "max": float(np.abs(gap).max()),
        "mismatch_kl": float((np.expm1(gap) - gap).mean()),
        "unequal": unequal,
        "equal_share": 1 - unequal / gap.size,
    }


def recomputed_logp(learner: Learner, params: Params, groups: Sequence[Group]) -> list[np.ndarray]:
    """Returns for each trajectory the log-probs of its sampled tokens, by a packed forward pass of `learner`.

    Trajectories are in order of (group, member). `params`: the parameters of the forward pass.
    """
    batch = packed_for(learner, groups)
    logp = np.asarray(learner.logp(params, batch))
    segments = range(1, len(batch.reward) + 1)
    return [logp[batch.loss_mask & (batch.segment_ids == segment)] for segment in segments]


def _open(name: str, prompts: int, seed: int) -> tuple[Config, list[Prompt]]:
    """Returns a config that loads the model `name`, and `prompts` prompts to sample from.

    If `name` is a run's folder, `seed` selects the prompts from the run's tasks; otherwise the prompts are
    TEXTS, repeated as often as needed.
    """
    if (Path(name) / JOURNAL).exists():
        config = load_config(
            {"tasks": load_config(Path(name) / "config.yaml").tasks, "model": {"source": name}}
        )
        stream = PromptStream(load_tasks(config.tasks), seed)
        return config, [stream.prompt(ordinal) for ordinal in range(prompts)]
    config = load_config({"run": {"seed": seed}, "model": model_section(name)})
    return config, [Prompt(text=TEXTS[number % len(TEXTS)]) for number in range(prompts)]
