"""`areal-jax parity`: how far a generation host's log-probs and the trainer's of the same tokens differ.

Completions are sampled by an engine and scored again by the trainer's packed forward under the same
parameters, in each numerics and dtype. What differs is rounding alone: one model, one log-prob function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from areal_jax.config import Config, load_config
from areal_jax.control.events import Event, SampleFailed
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host, Start
from areal_jax.models.model import Model, Params
from areal_jax.parallel.mesh import make_mesh, param_shardings
from areal_jax.runtime.api import preset
from areal_jax.runtime.eval_jobs import model_section
from areal_jax.runtime.jobs import JOURNAL, use_compilation_cache
from areal_jax.runtime.sources import open_source
from areal_jax.tasks.source import PromptStream, load_tasks
from areal_jax.trainer.learner import Learner
from areal_jax.trajectories.packing import pack, unpack
from areal_jax.types import ArealError, Group, Prompt, SampleId, Sampling, Trajectory, VersionedParams
from areal_jax.weights.digest import digest
from areal_jax.weights.memory import MemoryStore
from areal_jax.weights.store import wire_copy

NUMERICS, DTYPES = ("bounded", "exact"), ("float32", "bfloat16")
"""Those compared: model.dtype and weights.wire_dtype are the same."""

TEXTS = (
    "What is 17 + 25?",
    "Name three rivers of Europe and the seas that they flow into.",
    "A train leaves at 9:40 and arrives at 11:05. How long does it take?",
    "Write a function that reverses a list.",
)
"""Asked of what is no run; a run is asked its own tasks' prompts."""

SLOTS, CHUNK, ROWS = 16, 16, 8


def parity(
    name: str,
    *,
    prompts: int = 8,
    members: int = 4,
    max_tokens: int = 64,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The figures of MODEL, a row for each numerics and dtype; `members` completions of each prompt.

    A model is what `eval` takes. Raises ArealError for a name of nothing, or a prompt that does not fit.
    """
    config, asked = _open(name, prompts, seed)
    use_compilation_cache()
    source = open_source(config, load_tasks(config.tasks) if config.tasks else {})
    model = source.model.base
    tokens = [tuple(model.tokenizer.render(prompt)) for prompt in asked]
    length = max(map(len, tokens)) + max_tokens
    mesh = make_mesh({"tensor": 1}, jax.devices(), "parity")
    params = source.load(param_shardings(model.logical_axes, model.abstract_params, mesh))
    rows = []
    for dtype in DTYPES:
        for numerics in NUMERICS:
            progress(f"{dtype}, {numerics}")
            sizes = dataclasses.replace(model.config, dtype=dtype, numerics=numerics, params_dtype=dtype)
            own = Model(sizes, model.tokenizer)
            value = wire_copy(VersionedParams(0, params, digest(params)), dtype)
            groups = sample_groups(own, value, tokens, members, length, max_tokens, seed)
            again = recomputed_logp(scorer(own, length), params, groups)
            recorded = [one.behavior_logp[one.loss_mask] for group in groups for one in group.trajectories]
            figures = compared(np.concatenate(recorded), np.concatenate(again))
            rows.append({"numerics": numerics, "dtype": dtype, **figures})
    return {
        "model": name,
        "prompts": len(tokens),
        "members": members,
        "max_tokens": max_tokens,
        "seed": seed,
        "parameters": model.parameter_count,
        "device": jax.devices()[0].device_kind,
        "rows": rows,
    }


def compared(recorded: np.ndarray, again: np.ndarray) -> dict[str, Any]:
    """Figures of |generator - trainer| in nats, of the estimate of KL(generator | trainer), and of bits."""
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


def sample_groups(
    model: Model,
    value: VersionedParams,
    prompts: Sequence[tuple[int, ...]],
    members: int,
    length: int,
    max_tokens: int,
    seed: int,
) -> list[Group]:
    """`members` completions of each prompt, sampled by a host of SLOTS slots; rewards are 0.

    Raises ArealError for a prompt that leaves no room.
    """
    done: dict[SampleId, Trajectory] = {}

    def collect(event: Event, trajectory: Trajectory | None) -> None:
        if isinstance(event, SampleFailed):
            raise ArealError(f"prompt {event.sample.ordinal} cannot be sampled from: {event.reason}")
        if trajectory is not None:
            done[trajectory.sample] = dataclasses.replace(trajectory, reward=0.0)

    engine = Engine(model, slots=SLOTS, length=length, prefill_chunk=CHUNK)
    store = MemoryStore(engine.canary)
    store.publish(value)
    host = Host("parity", engine, store, collect, seed=seed, sampling=Sampling(max_tokens=max_tokens))
    for ordinal, tokens in enumerate(prompts):
        samples = tuple(SampleId(ordinal, member) for member in range(members))
        host.inbox.put(Start(samples, tokens, value.version))
    host.take_commands()
    while host.has_work:
        host.step()
    return [
        Group(ordinal, Prompt(tokens=tokens), tuple(done[SampleId(ordinal, m)] for m in range(members)))
        for ordinal, tokens in enumerate(prompts)
    ]


def scorer(model: Model, length: int) -> Learner:
    """A learner that is asked for log-probs alone."""
    algorithm = preset("grpo", group_size=2, kl={"coef": 0})
    return Learner(model, algorithm, optax.identity(), rows=ROWS, length=length)


def recomputed_logp(learner: Learner, params: Params, groups: Sequence[Group]) -> list[np.ndarray]:
    """Of each trajectory's sampled tokens, by the learner's packed forward; in the order (group, member)."""
    batch = pack(groups, learner.rows, learner.length)
    scored = unpack(batch._replace(proximal_logp=np.asarray(learner.logp(params, batch))))
    return [segment["proximal_logp"][segment["loss_mask"]] for segment in scored]


def _open(name: str, prompts: int, seed: int) -> tuple[Config, list[Prompt]]:
    """A config whose source is the model, and what to ask it."""
    if (Path(name) / JOURNAL).exists():
        config = load_config(
            {"tasks": load_config(Path(name) / "config.yaml").tasks, "model": {"source": name}}
        )
        stream = PromptStream(load_tasks(config.tasks), seed)
        return config, [stream.prompt(ordinal) for ordinal in range(prompts)]
    config = load_config({"run": {"seed": seed}, "model": model_section(name)})
    return config, [Prompt(text=TEXTS[number % len(TEXTS)]) for number in range(prompts)]
