"""JetStream's own Driver, and a bare loop of its API's calls, over the engine of a run's host.

Runs in a process of its own: the Driver kills its process when anything goes wrong in a thread of it, and its
assertion on free slots is a race that it loses whenever the last live slot ends; so one long request lives
through the whole comparison. Prints one JSON object: what the Driver streamed, what the bare loop decoded,
and what a host decodes for the same prompts.

The Driver is the stock one but for two names: `delete_pytree` calls `jax.tree_map`, which is gone from jax.
The product never imports it: it sets the root logger to DEBUG, with a handler that prints.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.generation import jetstream
from areal_jax.generation.engine import Engine
from areal_jax.generation.host import Host
from areal_jax.jobs.local import run
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.memory import MemoryStore
from tests.generation.decoding import Heard, make_host, start
from tests.small_run import small

LENGTH = 512  # a power of two, as the Driver's padding needs
TEXTS = ["ab", "dacb>"]
MAX_TOKENS = 12
"""A multiple of the steps a call: the Driver drops a call's tokens when the last of them is one too many."""
SEED, TEMPERATURE = 5, 0.05

protocol = jetstream.protocol()


def host_of_a_run(folder: Path) -> Any:
    """The host of a training run that has ended."""
    hosts: list[Any] = []
    host_run = Host.run

    def observed(host: Host, *args: Any) -> None:
        hosts.append(host)
        host_run(host, *args)

    Host.run = observed  # type: ignore[method-assign]
    try:
        sizes = (
            "tasks.countdown.letters=16",  # with this alphabet and seed all completions differ
            f"generation.length={LENGTH}",
            f"generation.max_tokens={LENGTH - 24}",
            "generation.decode_steps=2",
            "generation.page_tokens=64",
            f"generation.temperature={TEMPERATURE}",  # the long request draws no EOS
            f"trainer.length={LENGTH}",
        )
        run(
            small(folder, *sizes, "run.steps=1", "trainer.batch_size=1", f"run.seed={SEED}"),
            stream=io.StringIO(),
        )
    finally:
        Host.run = host_run  # type: ignore[method-assign]
    return hosts[0]


async def asked(served: Any, request: Any) -> tuple[list[int], str]:
    tokens: list[int] = []
    text = ""
    async for response in served.Decode(request):
        for sample in response.stream_content.samples:
            tokens += sample.token_ids
            text += sample.text
    return tokens, text


def by_tokens(tokens: list[int], max_tokens: int) -> Any:
    content = protocol.DecodeRequest.TokenContent(token_ids=tokens)
    return protocol.DecodeRequest(token_content=content, max_tokens=max_tokens)


def by_text(text: str) -> Any:
    content = protocol.DecodeRequest.TextContent(text=text)
    return protocol.DecodeRequest(text_content=content, max_tokens=MAX_TOKENS)


async def streamed(served: Any, prompts: list[list[int]]) -> dict[str, list]:
    long = asyncio.create_task(asked(served, by_tokens(prompts[0], LENGTH)))
    await asyncio.sleep(0)
    tokens = await asyncio.gather(*(asked(served, by_tokens(p, MAX_TOKENS)) for p in prompts[1:]))
    texts = await asyncio.gather(*(asked(served, by_text(text)) for text in TEXTS))
    assert not long.done(), "the long request ended first: make LENGTH larger"
    return {"tokens": [found for found, _ in tokens], "text": list(texts)}


def of_a_host(engine: Engine, store: MemoryStore, prompts: list[list[int]]) -> tuple[Any, list[list[int]]]:
    """The parameters in force, and the completions."""
    heard = Heard()
    stops = (engine.tokenizer.eos_id,)
    host = make_host(
        engine, store, heard, stops, seed=SEED, sampling=Sampling(TEMPERATURE, max_tokens=MAX_TOKENS)
    )
    for ordinal, prompt in enumerate(prompts):
        host.inbox.put(start(ordinal, 1, prompt))
    host.take_commands()
    while host.has_work:
        host.step()
    done = [heard.done[SampleId(ordinal, 0)] for ordinal in range(len(prompts))]
    return host._current, [trajectory.tokens[trajectory.loss_mask].tolist() for trajectory in done]


def of_the_members(engine: Any, params: VersionedParams, prompts: list[list[int]]) -> list[list[int]]:
    """As JetStream's documentation has it: a loop of the members with the arguments that they have there."""
    params, state = engine.load_params(params), engine.init_decode_state()
    found: list[list[int]] = []
    for prompt in prompts:
        prefix = engine.prefill(params=params, padded_tokens=np.array(prompt), true_length=len(prompt))
        state, tokens = engine.insert(prefix, state, slot=1), []
        while len(tokens) < MAX_TOKENS:
            state, results = engine.generate(params, state)
            data = results.convert_to_numpy().get_result_at_slot(1)
            valid = data.valid[0] == 1
            tokens += data.tokens[0][valid].tolist()
            assert data.lengths.tolist() == [len(tokens)]
            if not valid.all() or tokens[-1] == engine.tokenizer.eos_id:
                break
        found.append(tokens)
    return found


def stock_driver(engine: Engine, params: VersionedParams) -> Any:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with jetstream.without_seqio():
        from jetstream.core import orchestrator
    root.setLevel(level)
    root.handlers[:] = handlers

    def delete_pytree(tree: Any) -> None:
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                leaf.delete()

    orchestrator.delete_pytree = delete_pytree
    driver = orchestrator.Driver(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=True,
    )
    return orchestrator.LLMOrchestrator(driver)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        of_run = host_of_a_run(Path(folder) / "run")
    engine, store = of_run._engine, of_run._store
    tokenizer = engine.tokenizer
    encoded = [tokenizer.encode(text) for text in ["c", "ad", "bcp>", *TEXTS]]
    bos = getattr(tokenizer, "bos_id", tokenizer.eos_id)
    prompts = [[bos, *prompt] for prompt in encoded]  # the Driver puts one before every prompt
    value, completions = of_a_host(engine, store, prompts)
    found = {
        "host": completions[1:],
        "loop": of_the_members(engine, value, prompts)[1:],
        "decoded": [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)],
    }
    asyncio.run(report(stock_driver(engine, engine.load_params(value)), encoded[:3], found))


async def report(served: Any, prompts: list[list[int]], found: dict) -> None:
    found["driver"] = await streamed(served, prompts)
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # with the loop open: the long request is still being decoded, and its thread speaks to it


if __name__ == "__main__":
    main()
